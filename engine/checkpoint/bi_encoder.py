"""Loads bi-encoders, and encoders that are to score by late interaction over their token states."""

import copy
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling

from maxsimd.engine.checkpoint.activations import set_activations
from maxsimd.engine.checkpoint.files import CheckpointFiles, module_settings
from maxsimd.engine.checkpoint.fit import refuse_modules_not_finite
from maxsimd.engine.checkpoint.heads import FirstColumns, ModuleHead
from maxsimd.engine.checkpoint.model import RoleRules, Task
from maxsimd.engine.checkpoint.reading import LibraryReader, prompt_of_documents
from maxsimd.engine.checkpoint.reference import ModulesReference
from maxsimd.engine.checkpoint.text_settings import read_text_settings, with_limit
from maxsimd.engine.checkpoint.visual.vision_language import with_pictures
from maxsimd.engine.errors import ModelLoadError
from maxsimd.pooling.methods import CONCATENATED, MODES, Head

# The names of pooled vectors, and of a CrossEncoder's output, in sentence-transformers.
_POOLED, SCORES = "sentence_embedding", "scores"
_AFTER_POOLING = (Dense, Normalize, LayerNorm, Dropout)


def load_bi_encoder(path: str, files: CheckpointFiles, late: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Reads a `SentenceTransformer` save or a plain transformers encoder, to be scored `late` or not.

    Returns the parts of a `LoadedModel` that depend on the kind of checkpoint."""
    model = SentenceTransformer(path, **options).eval()
    set_activations(
        path, list(model), module_settings(path, files, options["revision"]), options["trust_remote_code"]
    )
    transformer, pooling, after = taken_apart(path, list(model))
    if after and getattr(after[-1], "module_output_name", _POOLED) != _POOLED:
        made = after[-1].module_output_name
        raise ModelLoadError(
            f"the last module of {path!r} sets module_output_name to {made!r}; for embeddings "
            f'"{_POOLED}" is supported'
        )
    if transformer.query_expansion is not None:
        raise ModelLoadError(
            f"sentence_bert_config.json of {path!r} sets query_expansion, which is for late interaction; "
            "remove it"
        )
    settings = read_text_settings(path, transformer)
    refuse_modules_not_finite(path, list(model)[1:])
    dense = [module for module in after if isinstance(module, Dense)]
    dim = dense[-1].out_features if dense else pooling.get_embedding_dimension()
    head: Head = ModuleHead(after, "sentence_embedding")
    normalised = ends_normalised(after)
    if model.truncate_dim is not None and model.truncate_dim < dim:
        dim, normalised = model.truncate_dim, False
        head = FirstColumns(head, dim, normalised)
    reference = ModulesReference([transformer, pooling, *after], transformer.tokenizer, "sentence_embedding")
    tasks = {"embed": Task(pooling_of(pooling), head, dim, normalised, reference)}
    obstacle = _obstacle_at_token_level(transformer, after)
    if obstacle is None:
        tasks["token_embed"] = _of_tokens(transformer, dense)
    elif late:
        raise ModelLoadError(f"{path!r} cannot use late interaction: {obstacle}; use score_type bi-encoder")
    prompts = {name: prompt for name, prompt in model.prompts.items() if prompt}
    document = prompt_of_documents(path, model.prompts)
    lengths = [settings.length(each) for each in (transformer.query_length, transformer.document_length)]
    rules: dict[str, Any] = {"pool_prompt": pooling.include_prompt}
    own_limit = with_limit(transformer.tokenizer, *lengths)
    parts = {
        "backbone": transformer.auto_model,
        "tokenizer": transformer.tokenizer,
        "tasks": tasks,
        "score_task": "token_embed" if late else "embed",
        "query": RoleRules(prompts.get("query", ""), max_tokens=lengths[0], **rules),
        "document": RoleRules(document, max_tokens=lengths[1], **rules),
        "text": RoleRules(prompts.get(model.default_prompt_name or "", ""), max_tokens=own_limit, **rules),
        "activation": torch.nn.Identity(),
        "similarity": "maxsim" if late else model.similarity_fn_name,
        "prompts": prompts,
        "reader": LibraryReader(model, leaves_prompt_out=not pooling.include_prompt, can_score=not late),
    }
    return with_pictures(path, transformer, parts)


def taken_apart(path: str, modules: list[Any]) -> tuple[Any, Pooling, list[Any]]:
    """The transformer, the pooling and what follows it. Raises ModelLoadError for anything else."""
    if not hasattr(modules[0], "auto_model"):
        raise ModelLoadError(f"{path!r} is not a transformer encoder but {type(modules[0]).__name__}")
    poolings = [module for module in modules if isinstance(module, Pooling)]
    if len(poolings) != 1:
        raise ModelLoadError(f"{path!r} has {len(poolings)} pooling modules; one is supported")
    pooling = poolings[0]
    after = modules[modules.index(pooling) + 1 :]
    other = [module for module in modules[1:] if module is not pooling and module not in after]
    other += [module for module in after if not isinstance(module, _AFTER_POOLING)]
    if other:
        names = ", ".join(type(module).__name__ for module in other)
        raise ModelLoadError(f"{path!r} has modules that are not supported: {names}")
    for module in after:
        named = {key: getattr(module, key, _POOLED) for key in ("module_input_name", "module_output_name")}
        if module is after[-1]:  # callers check its output
            named.pop("module_output_name")
        for key, value in named.items():
            if value != _POOLED:
                raise ModelLoadError(
                    f"config.json of the {type(module).__name__} in {path!r} sets {key} to {value!r}; behind "
                    f'its pooling "{_POOLED}" is supported'
                )
    return modules[0], pooling, after


def pooling_of(pooling: Pooling) -> str:
    """The name of the method, or of several whose vectors stand one behind the other."""
    modes = (pooling.pooling_mode,) if isinstance(pooling.pooling_mode, str) else pooling.pooling_mode
    names = MODES if pooling.include_prompt else MODES | {"cls": "cls-after-prompt"}
    return CONCATENATED.join(names[mode] for mode in modes)


def ends_normalised(modules: list[Any]) -> bool:
    """Whether nothing but Dropout, which does nothing here, follows the last Normalize."""
    that_count = [module for module in modules if not isinstance(module, Dropout)]
    return bool(that_count) and isinstance(that_count[-1], Normalize)


def _obstacle_at_token_level(transformer: Any, after: list[Any]) -> str | None:
    """Why what follows the pooling cannot be applied to single tokens, or None."""
    if any(isinstance(module, LayerNorm) for module in after):
        return "it has a LayerNorm for pooled vectors"
    hidden = transformer.get_embedding_dimension()
    first = next((module for module in after if isinstance(module, Dense)), None)
    if first is not None and first.in_features != hidden:
        return f"its Dense module takes {first.in_features} numbers, and its tokens have {hidden}"
    return None


def _of_tokens(transformer: Any, dense: list[Dense]) -> Task:
    """A vector a token. A projection of sentence embeddings is applied to tokens as well, as
    sentence-transformers converts it."""
    modules = [*map(_at_token_level, dense), Normalize("token_embeddings")]
    dim = dense[-1].out_features if dense else transformer.get_embedding_dimension()
    reference = ModulesReference([transformer, *modules], transformer.tokenizer, "token_embeddings")
    return Task("all", ModuleHead(modules, "token_embeddings"), dim, True, reference)


def _at_token_level(dense: Dense) -> Dense:
    made = copy.deepcopy(dense)
    made.module_input_name = made.module_output_name = "token_embeddings"
    return made
