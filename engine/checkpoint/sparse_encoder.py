"""Loads sparse encoders: `SparseEncoder` saves with SPLADE's pooling, and plain `*ForMaskedLM` models."""

from typing import Any

import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

from maxsimd.engine.checkpoint.fit import refuse_modules_not_finite
from maxsimd.engine.checkpoint.model import SPARSE_EMBED, RoleRules, Task
from maxsimd.engine.checkpoint.reading import LibraryReader, prompt_of_documents
from maxsimd.engine.checkpoint.reference import ModulesReference
from maxsimd.engine.checkpoint.text_settings import read_text_settings, with_limit
from maxsimd.engine.checkpoint.words_head import MaskedWordsHead
from maxsimd.engine.errors import ModelLoadError
from maxsimd.pooling.sparse import COLUMNS
from maxsimd.scheduler import Role

_SIMILARITIES = {
    "dot": "sparse",
    "cosine": "sparse-cosine",
    "euclidean": "sparse-euclidean",
    "manhattan": "sparse-manhattan",
}
_ROLES = {"query": Role.QUERY, "document": Role.DOCUMENT}


def load_sparse_encoder(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the checkpoint with sentence-transformers, which takes a plain `*ForMaskedLM` for a SPLADE model
    of the greatest weights.

    Returns the parts of a `LoadedModel` that depend on the kind of checkpoint."""
    model = SparseEncoder(path, **options).eval()
    (transformer, pooling), static, roles = _taken_apart(path, list(model))
    if transformer.query_expansion is not None:
        raise ModelLoadError(
            f"sentence_bert_config.json of {path!r} sets query_expansion, which is for late interaction; "
            "remove it"
        )
    if "message" in transformer.modality_config:
        raise ModelLoadError(
            f"sentence_bert_config.json of {path!r} names a chat template, which is not supported "
            'for sparse encoders; remove "message" from its modality_config'
        )
    settings = read_text_settings(path, transformer)
    lengths = [
        None if role in roles else settings.length(length)
        for role, length in (
            (Role.QUERY, transformer.query_length),
            (Role.DOCUMENT, transformer.document_length),
        )
    ]
    own_limit = with_limit(transformer.tokenizer, *lengths)
    head = MaskedWordsHead(
        transformer.auto_model,
        twice=pooling.activation_function == "log1p_relu",
        most=model.max_active_dims,
    )
    if static is not None:
        refuse_modules_not_finite(path, [static])
        _check_static(path, static, transformer, head)
        head.look_up(static.weight, roles)
    reference = ModulesReference([transformer, pooling], transformer.tokenizer, "sentence_embedding")
    method = f"{pooling.pooling_strategy}-words"
    task = Task(method, head, COLUMNS, normalised=False, reference=reference, words=head.num_words)
    prompts = {name: prompt for name, prompt in model.prompts.items() if prompt}
    document = prompt_of_documents(path, model.prompts)
    of_text = prompts.get(model.default_prompt_name or "", "")
    return {
        "backbone": transformer.auto_model.base_model,
        "tokenizer": transformer.tokenizer,
        "tasks": {SPARSE_EMBED: task},
        "score_task": SPARSE_EMBED,
        "query": RoleRules(
            prompts.get("query", ""), max_tokens=lengths[0], pool_specials=Role.QUERY not in roles
        ),
        "document": RoleRules(document, max_tokens=lengths[1], pool_specials=Role.DOCUMENT not in roles),
        "text": RoleRules(of_text, max_tokens=own_limit, pool_specials=Role.TEXT not in roles),
        "activation": torch.nn.Identity(),
        "similarity": _SIMILARITIES[model.similarity_fn_name],
        "prompts": prompts,
        "reader": LibraryReader(model),
    }


_Parts = tuple[tuple[Any, SpladePooling], SparseStaticEmbedding | None, frozenset[Role]]


def _taken_apart(path: str, modules: list[Any]) -> _Parts:
    """The masked language model and its pooling, and what looks up the tokens of texts in some roles, if
    anything does. Raises ModelLoadError for anything else."""
    if len(modules) != 1 or not isinstance(modules[0], Router):
        return _splade(path, modules), None, frozenset()
    router = modules[0]
    routes = {name: list(route) for name, route in router.sub_modules.items()}
    if router.route_mappings or routes.keys() != _ROLES.keys():
        names = ", ".join(routes)
        raise ModelLoadError(f"{path!r} has the routes {names}; supported are query and document, unmapped")
    looked_up = {name: route for name, route in routes.items() if isinstance(route[0], SparseStaticEmbedding)}
    if len(looked_up) != 1 or any(len(route) != 1 for route in looked_up.values()):
        raise ModelLoadError(
            f"{path!r} reads queries and documents by two models; one is supported, with a "
            "SparseStaticEmbedding for the other"
        )
    name, (static,) = next(iter(looked_up.items()))
    other = next(other for other in routes if other != name)
    roles = {_ROLES[name]}
    # Texts that are said to be neither take the router's default.
    if router.default_route == name:
        roles.add(Role.TEXT)
    return _splade(path, routes[other]), static, frozenset(roles)


def _splade(path: str, modules: list[Any]) -> tuple[Any, SpladePooling]:
    names = ", ".join(type(module).__name__ for module in modules)
    if (
        len(modules) != 2
        or not hasattr(modules[0], "auto_model")
        or not isinstance(modules[1], SpladePooling)
    ):
        raise ModelLoadError(
            f"{path!r} has the modules {names}; of sparse encoders a masked language model with "
            "SpladePooling is supported"
        )
    if not type(modules[0].auto_model).__name__.endswith("ForMaskedLM"):
        kind = type(modules[0].auto_model).__name__
        raise ModelLoadError(f"{path!r} is a {kind}; SpladePooling needs a *ForMaskedLM")
    return modules[0], modules[1]


def _check_static(path: str, static: Any, transformer: Any, head: MaskedWordsHead) -> None:
    """Raises ModelLoadError where tokens would be looked up by other ids than those that are read."""
    if static.tokenizer.get_vocab() != transformer.tokenizer.get_vocab():
        raise ModelLoadError(f"{path!r} has another tokeniser for queries than for documents")
    if len(static.weight) < len(transformer.tokenizer):
        raise ModelLoadError(
            f"{path!r} has {len(static.weight)} static weights for {len(transformer.tokenizer)} tokens; some "
            "would have none"
        )
