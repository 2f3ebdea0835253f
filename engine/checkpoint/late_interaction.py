"""Loads late-interaction checkpoints: MultiVectorEncoder, PyLate and Stanford ColBERT saves."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask

from maxsimd.engine.checkpoint.activations import set_activations
from maxsimd.engine.checkpoint.bi_encoder import ends_normalised
from maxsimd.engine.checkpoint.files import CheckpointFiles, module_settings
from maxsimd.engine.checkpoint.fit import refuse_modules_not_finite
from maxsimd.engine.checkpoint.heads import ModuleHead
from maxsimd.engine.checkpoint.model import Expansion, RoleRules, Task
from maxsimd.engine.checkpoint.reading import LibraryReader
from maxsimd.engine.checkpoint.reference import ModulesReference
from maxsimd.engine.checkpoint.text_settings import TextSettings, read_text_settings, with_limit
from maxsimd.engine.checkpoint.visual.vision_language import with_pictures
from maxsimd.engine.errors import ModelLoadError
from maxsimd.pooling.dispatch import TokenPooling
from maxsimd.scheduler import Role


def load_late_interaction(path: str, files: CheckpointFiles, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the checkpoint with sentence-transformers, which reads all three formats.

    Returns the parts of a `LoadedModel` that depend on the kind of checkpoint."""
    model = MultiVectorEncoder(path, **options).eval()
    modules = list(model)
    set_activations(
        path, modules, module_settings(path, files, options["revision"]), options["trust_remote_code"]
    )
    transformer, rest = modules[0], modules[1:]
    settings = read_text_settings(path, transformer)
    refuse_modules_not_finite(path, rest)
    masks = [module for module in rest if isinstance(module, MultiVectorMask)]
    projection = [module for module in rest if isinstance(module, Dense | Normalize)]
    poolings = [module for module in rest if isinstance(module, HierarchicalTokenPooling)]
    supported = [*masks, *projection, *poolings]
    other = [type(module).__name__ for module in rest if module not in supported]
    if len(masks) > 1:
        other += [type(module).__name__ for module in masks]
    if poolings and (len(poolings) > 1 or rest[-1] is not poolings[0]):
        other = [type(module).__name__ for module in poolings]
    if other:
        raise ModelLoadError(f"{path!r} has modules that are not supported: {', '.join(other)}")
    dense = [module for module in projection if isinstance(module, Dense)]
    dim = dense[-1].out_features if dense else transformer.get_embedding_dimension()
    normalised = ends_normalised(projection)
    mask = masks[-1] if masks else MultiVectorMask()
    tokenizer = transformer.tokenizer
    head = ModuleHead(projection, "token_embeddings")
    reference = ModulesReference([transformer, *projection], tokenizer, "token_embeddings")
    document_prompt = next(
        (model.prompts[name] for name in ("document", "passage", "corpus") if name in model.prompts), ""
    )
    query = _query_rules(
        transformer, settings, model.prompts.get("query") or "", _skipped(mask, "query", len(tokenizer))
    )
    document_length = settings.length(transformer.document_length)
    expanded = None if query.expansion is None else query.expansion.length
    own_limit = with_limit(tokenizer, query.max_tokens, document_length, expanded)
    parts = {
        "backbone": transformer.auto_model,
        "tokenizer": tokenizer,
        "tasks": {"token_embed": Task("all", head, dim, normalised, reference)},
        "score_task": "token_embed",
        "query": query,
        "document": RoleRules(
            prompt=document_prompt or "",
            max_tokens=document_length,
            skipped_ids=_skipped(mask, "document", len(tokenizer)),
        ),
        # sentence-transformers takes the skip list of documents for texts without a role.
        "text": RoleRules(
            model.prompts.get(model.default_prompt_name or "") or "",
            max_tokens=own_limit,
            skipped_ids=_skipped(mask, "document", len(tokenizer)),
        ),
        "activation": torch.nn.Identity(),
        "similarity": model.similarity_fn_name,
        "prompts": {name: text for name, text in model.prompts.items() if text},
        "token_pooling": TokenPooling(poolings[0], _roles(poolings[0])) if poolings else None,
        "reader": LibraryReader(model, mask),
    }
    return with_pictures(path, transformer, parts)


def _roles(pooling: HierarchicalTokenPooling) -> frozenset[Role]:
    """The roles whose tokens are merged; a text without a role counts as a document."""
    roles = {Role.QUERY} if pooling.applies_to("query") else set()
    return frozenset(roles | ({Role.DOCUMENT, Role.TEXT} if pooling.applies_to("document") else set()))


def _skipped(mask: MultiVectorMask, role: str, vocabulary: int) -> NDArray[np.int64] | None:
    """The token ids of a role that take no part in scoring: those on the skip list and, if documents are
    scored by certain tokens alone, all others."""
    skipped = np.empty(0, dtype=np.int64)
    if mask._skiplist_ids is not None and role in mask.skiplist_tasks:
        skipped = mask._skiplist_ids.numpy()
    if role == "document" and mask.keep_only_token_ids:
        others = np.setdiff1d(np.arange(vocabulary), mask.keep_only_token_ids)
        skipped = np.concatenate([skipped, others])
    return np.unique(skipped) if len(skipped) else None


def _query_rules(transformer: Any, settings: TextSettings, prompt: str, skipped: Any) -> RoleRules:
    expansion = transformer.query_expansion
    if expansion is None:
        length = settings.length(transformer.query_length)
        return RoleRules(prompt=prompt, max_tokens=length, skipped_ids=skipped)
    tokenizer = transformer.tokenizer
    if expansion["token"] is not None:
        token_id = tokenizer.convert_tokens_to_ids(expansion["token"])
    else:
        # As PyLate has it: [MASK] for encoders, the end-of-text token for decoders.
        token_id = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.eos_token_id
    length = expansion["length"]
    # Where nothing is cut, neither is a query to the length that shorter ones are filled up to.
    fixed = expansion["strategy"] == "fixed" and settings.truncation is not None
    at_least = transformer.query_length and max(transformer.query_length, length)
    longest = length if fixed else settings.length(at_least)
    return RoleRules(
        prompt=prompt,
        max_tokens=longest,
        expansion=Expansion(length, token_id, expansion["attend"], fixed),
        skipped_ids=skipped,
    )
