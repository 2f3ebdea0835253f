"""Loads bi-encoders, and encoders that are to score by late interaction over their token states."""

from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling

from maxsimd.engine.checkpoint.fit import refuse_modules_not_finite
from maxsimd.engine.checkpoint.heads import ModuleHead
from maxsimd.engine.checkpoint.model import RoleRules, Task
from maxsimd.engine.checkpoint.reading import LibraryReader, prompt_of_documents
from maxsimd.engine.checkpoint.reference import ModulesReference
from maxsimd.engine.checkpoint.visual.vision_language import with_pictures
from maxsimd.engine.errors import ModelLoadError

_POOLING = {"cls": "cls", "mean": "mean", "lasttoken": "last", "weightedmean": "weighted-mean"}
_AFTER_POOLING = (Dense, Normalize, LayerNorm, Dropout)


def load_bi_encoder(path: str, late: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Reads a `SentenceTransformer` save or a plain transformers encoder, to be scored `late` or not.

    Returns the parts of a `LoadedModel` that depend on the kind of checkpoint."""
    model = SentenceTransformer(path, **options)
    transformer, pooling, after = _taken_apart(path, list(model))
    if not late and model.similarity_fn_name not in ("cosine", "dot"):
        raise ModelLoadError(f"{path!r} compares by {model.similarity_fn_name}; supported are cosine and dot")

    refuse_modules_not_finite(path, list(model)[1:])
    normalised = any(isinstance(module, Normalize) for module in after)
    dense = [module for module in after if isinstance(module, Dense)]
    dim = dense[-1].out_features if dense else transformer.get_embedding_dimension()
    embed = Task(
        _POOLING[pooling.pooling_mode],
        ModuleHead(after, "sentence_embedding"),
        dim,
        normalised,
        ModulesReference([transformer, pooling, *after], transformer.tokenizer, "sentence_embedding"),
    )
    # A projection of sentence embeddings is applied to tokens as well, as sentence-transformers converts it.
    token_modules = [_at_token_level(module) for module in dense] + [Normalize("token_embeddings")]
    token_reference = ModulesReference(
        [transformer, *token_modules], transformer.tokenizer, "token_embeddings"
    )
    token_head = ModuleHead(token_modules, "token_embeddings")
    token_embed = Task("all", token_head, dim, True, token_reference)
    prompts = {name: prompt for name, prompt in model.prompts.items() if prompt}
    document = prompt_of_documents(path, model.prompts)
    parts = {
        "backbone": transformer.auto_model,
        "tokenizer": transformer.tokenizer,
        "tasks": {"embed": embed, "token_embed": token_embed},
        "score_task": "token_embed" if late else "embed",
        "query": RoleRules(prompts.get("query", ""), pool_prompt=pooling.include_prompt),
        "document": RoleRules(document, pool_prompt=pooling.include_prompt),
        "text": RoleRules(
            prompts.get(model.default_prompt_name or "", ""), pool_prompt=pooling.include_prompt
        ),
        "activation": torch.nn.Identity(),
        "similarity": "maxsim" if late else model.similarity_fn_name,
        "prompts": prompts,
        "reader": LibraryReader(model, leaves_prompt_out=not pooling.include_prompt, can_score=not late),
    }
    return with_pictures(path, transformer, parts)


def _taken_apart(path: str, modules: list[Any]) -> tuple[Any, Pooling, list[Any]]:
    """The transformer, the pooling and what follows it. Raises ModelLoadError for anything else."""
    if not hasattr(modules[0], "auto_model"):
        raise ModelLoadError(f"{path!r} is not a transformer encoder but {type(modules[0]).__name__}")
    poolings = [module for module in modules if isinstance(module, Pooling)]
    if len(poolings) != 1:
        raise ModelLoadError(f"{path!r} has {len(poolings)} pooling modules; one is supported")
    pooling = poolings[0]
    if pooling.pooling_mode not in _POOLING:
        supported = ", ".join(_POOLING)
        raise ModelLoadError(f"{path!r} pools by {pooling.pooling_mode}; supported are {supported}")
    if not pooling.include_prompt and pooling.pooling_mode == "cls":
        raise ModelLoadError(f"{path!r} pools by its first token but leaves the prompt, its start, out")
    after = modules[modules.index(pooling) + 1 :]
    other = [module for module in modules[1:] if module is not pooling and module not in after]
    other += [module for module in after if not isinstance(module, _AFTER_POOLING)]
    if other:
        names = ", ".join(type(module).__name__ for module in other)
        raise ModelLoadError(f"{path!r} has modules that are not supported: {names}")
    return modules[0], pooling, after


def _at_token_level(dense: Dense) -> Dense:
    copy = Dense(
        dense.in_features,
        dense.out_features,
        bias=dense.linear.bias is not None,
        activation_function=dense.activation_function,
        module_input_name="token_embeddings",
    )
    copy.load_state_dict(dense.state_dict())
    return copy.to(dense.linear.weight.device)
