"""Loads bi-encoders, and encoders that are asked to score by late interaction over their token states."""

from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling

from maxsimd.engine.checkpoint.heads import ModuleHead
from maxsimd.engine.checkpoint.model import RoleRules, Task
from maxsimd.engine.config import ScoreType
from maxsimd.engine.errors import ModelLoadError

_POOLING = {"cls": "cls", "mean": "mean", "lasttoken": "last"}


def load_bi_encoder(path: str, score_type: ScoreType, options: dict[str, Any]) -> dict[str, Any]:
    """Reads a `SentenceTransformer` save or a plain transformers encoder.

    Returns the parts of a `LoadedModel` that depend on the kind of checkpoint."""
    model = SentenceTransformer(path, **options)
    modules = list(model)
    transformer, rest = modules[0], modules[1:]
    if not hasattr(transformer, "auto_model"):
        raise ModelLoadError(f"{path!r} is not a transformer encoder but {type(transformer).__name__}")
    poolings = [module for module in rest if isinstance(module, Pooling)]
    if len(poolings) != 1:
        raise ModelLoadError(f"{path!r} has {len(poolings)} pooling modules; one is supported")
    pooling = poolings[0]
    if not pooling.include_prompt:
        raise ModelLoadError(f"{path!r} leaves its prompt out of pooling, which is not supported yet")
    if pooling.pooling_mode not in _POOLING:
        supported = ", ".join(_POOLING)
        raise ModelLoadError(f"{path!r} pools by {pooling.pooling_mode}; supported are {supported}")

    if model.similarity_fn_name not in ("cosine", "dot"):
        raise ModelLoadError(f"{path!r} compares by {model.similarity_fn_name}; supported are cosine and dot")

    after = rest[rest.index(pooling) + 1 :]
    normalised = any(isinstance(module, Normalize) for module in after)
    hidden = transformer.get_embedding_dimension()
    dense = [module for module in after if isinstance(module, Dense)]
    dim = dense[-1].out_features if dense else hidden
    embed = Task(_POOLING[pooling.pooling_mode], ModuleHead(after, "sentence_embedding"), dim, normalised)
    # A sentence-level projection serves token level as well, as sentence-transformers converts it.
    token_modules = [_at_token_level(module) for module in dense] + [Normalize("token_embeddings")]
    token_embed = Task("all", ModuleHead(token_modules, "token_embeddings"), dim, True)
    prompts = model.prompts
    document = next((prompts[name] for name in ("document", "passage", "corpus") if prompts.get(name)), "")
    late = score_type is ScoreType.LATE_INTERACTION
    return {
        "backbone": transformer.auto_model,
        "tokenizer": transformer.tokenizer,
        "tasks": {"embed": embed, "token_embed": token_embed},
        "score_task": "token_embed" if late else "embed",
        "query": RoleRules(prompt=prompts.get("query") or ""),
        "document": RoleRules(prompt=document),
        "activation": torch.nn.Identity(),
        "similarity": "maxsim" if late else model.similarity_fn_name,
    }


def _at_token_level(dense: Dense) -> Dense:
    copy = Dense(
        dense.in_features,
        dense.out_features,
        bias=dense.linear.bias is not None,
        activation_function=dense.activation_function,
        module_input_name="token_embeddings",
    )
    copy.load_state_dict(dense.state_dict())
    return copy
