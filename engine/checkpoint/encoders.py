"""Loads encoders whose texts have embeddings: bi-encoders, late interaction and sparse encoders."""

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Router
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

from maxsimd.engine.checkpoint.detect import STANFORD
from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.checkpoint.heads import FirstColumns, GivenRows, ModuleHead
from maxsimd.engine.checkpoint.model import SPARSE_EMBED, Expansion, RoleRules, Task
from maxsimd.engine.checkpoint.reading import LibraryReader, prompt_of_documents
from maxsimd.engine.checkpoint.reference import ModulesReference
from maxsimd.engine.checkpoint.settings import (
    TextSettings,
    read_text_settings,
    set_activations,
    with_limit,
)
from maxsimd.engine.checkpoint.visual_loaders import with_pictures
from maxsimd.engine.checkpoint.weights import refuse_modules_not_finite
from maxsimd.engine.errors import ModelLoadError
from maxsimd.pooling.dispatch import TokenPooling
from maxsimd.pooling.methods import CONCATENATED, MODES, Head
from maxsimd.pooling.sparse import COLUMNS, WordsHead
from maxsimd.scheduler import Role

# The names of pooled vectors, and of a CrossEncoder's output, in sentence-transformers.
_POOLED, SCORES = "sentence_embedding", "scores"
_TOKENS = "token_embeddings"
_AFTER_POOLING = (Dense, Normalize, LayerNorm, Dropout)


def load_bi_encoder(path: str, files: CheckpointFiles, late: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Reads a `SentenceTransformer` save or a plain transformers encoder, to be scored `late` or not."""
    model = SentenceTransformer(path, **options).eval()
    set_activations(path, files, list(model), options)
    transformer, pooling, after = split_modules(path, list(model))
    if after and getattr(after[-1], "module_output_name", _POOLED) != _POOLED:
        made = after[-1].module_output_name
        raise ModelLoadError(
            f"the last module of {path!r} sets module_output_name to {made!r}; for embeddings "
            f'"{_POOLED}" is supported'
        )
    rules = _rules(path, model, transformer, pool_prompt=pooling.include_prompt)
    refuse_modules_not_finite(path, list(model)[1:])
    dense = [module for module in after if isinstance(module, Dense)]
    dim = dense[-1].out_features if dense else pooling.get_embedding_dimension()
    head: Head = ModuleHead(after, _POOLED)
    normalized = ends_normalized(after)
    if model.truncate_dim is not None and model.truncate_dim < dim:
        dim, normalized = model.truncate_dim, False
        head = FirstColumns(head, dim, normalized)
    reference = ModulesReference([transformer, pooling, *after], transformer.tokenizer, _POOLED)
    tasks = {"embed": Task(pooling_of(pooling), head, dim, normalized, reference)}
    obstacle = _obstacle_at_token_level(transformer, after)
    if obstacle is None:
        # A projection of sentence embeddings is for tokens, too, as sentence-transformers converts it.
        projection = [copy.deepcopy(each) for each in dense]
        for each in projection:
            each.module_input_name = each.module_output_name = _TOKENS
        tasks["token_embed"] = _of_tokens(transformer, [*projection, Normalize(_TOKENS)])
    elif late:
        raise ModelLoadError(f"{path!r} cannot use late interaction: {obstacle}; use score_type bi-encoder")
    parts = rules | {
        "backbone": transformer.auto_model,
        "tokenizer": transformer.tokenizer,
        "tasks": tasks,
        "score_task": "token_embed" if late else "embed",
        "similarity": "maxsim" if late else model.similarity_fn_name,
        "reader": LibraryReader(model, leaves_prompt_out=not pooling.include_prompt, can_score=not late),
    }
    return with_pictures(path, transformer, parts)


def _rules(
    path: str,
    model: Any,
    transformer: Any,
    mask: MultiVectorMask | None = None,
    looked_up: frozenset[Role] = frozenset(),
    pool_prompt: bool = True,
) -> dict[str, Any]:
    """The prompts, and the rules for texts in all roles, for late interaction with a `mask`. Texts that are
    `looked_up` have no length of their own. Raises ModelLoadError for settings that are not supported."""
    tokenizer = transformer.tokenizer
    if transformer.query_expansion is not None and mask is None:
        raise ModelLoadError(
            f"sentence_bert_config.json of {path!r} sets query_expansion, which is for late interaction; "
            "remove it"
        )
    settings = read_text_settings(path, transformer)
    expansion, of_query = _expansion(transformer, settings)
    own = {Role.QUERY: of_query, Role.DOCUMENT: settings.length(transformer.document_length)}
    lengths: dict[Role, int | None] = {role: own[role] for role in own.keys() - looked_up}
    expanded = None if expansion is None else expansion.length
    lengths[Role.TEXT] = with_limit(tokenizer, *lengths.values(), expanded)
    prompts = {name: prompt for name, prompt in model.prompts.items() if prompt}
    of_roles = {
        Role.QUERY: prompts.get("query", ""),
        Role.DOCUMENT: prompt_of_documents(path, model.prompts),
        Role.TEXT: prompts.get(model.default_prompt_name or "", ""),
    }
    rules = {
        role.value: RoleRules(
            prompt,
            max_tokens=lengths.get(role),
            expansion=expansion if role is Role.QUERY else None,
            skipped_ids=None if mask is None else _skipped(mask, role, len(tokenizer)),
            pool_prompt=pool_prompt,
            pool_specials=role not in looked_up,
        )
        for role, prompt in of_roles.items()
    }
    return {"prompts": prompts, **rules}


def split_modules(path: str, modules: list[Any]) -> tuple[Any, Pooling, list[Any]]:
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
        raise ModelLoadError(
            f"modules.json of {path!r} has modules that are not supported: {names}; use "
            "sentence-transformers for it"
        )
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


def ends_normalized(modules: list[Any]) -> bool:
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


def _of_tokens(transformer: Any, modules: list[Any]) -> Task:
    """A vector a token, made by modules that read and write token embeddings."""
    dense = [module for module in modules if isinstance(module, Dense)]
    dim = dense[-1].out_features if dense else transformer.get_embedding_dimension()
    head = ModuleHead(modules, _TOKENS)
    reference = ModulesReference([transformer, *modules], transformer.tokenizer, _TOKENS)
    return Task("all", head, dim, ends_normalized(modules), reference)


def load_late_interaction(path: str, files: CheckpointFiles, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the checkpoint with sentence-transformers, which reads all three formats."""
    model = MultiVectorEncoder(path, **options).eval()
    modules = list(model)
    set_activations(path, files, modules, options)
    transformer, rest = modules[0], modules[1:]
    named = sum(str(module.get("type", "")).endswith("Dense") for module in files.modules)
    made = sum(isinstance(module, Dense) for module in rest)
    if made > named and (files.modules or files.architecture != STANFORD):
        where = "modules.json" if files.modules else "config_sentence_transformers.json"
        raise ModelLoadError(
            f"{where} of {path!r} is for late interaction without a projection, and sentence-transformers "
            "would add a random one; download the whole checkpoint with its 1_Dense folder"
        )
    refuse_modules_not_finite(path, rest)
    masks = [module for module in rest if isinstance(module, MultiVectorMask)]
    projection = [module for module in rest if isinstance(module, Dense | Normalize)]
    poolings = [module for module in rest if isinstance(module, HierarchicalTokenPooling)]
    other = [module for module in rest if module not in [*masks[:1], *projection, *poolings]]
    if poolings and rest[-1] is not poolings[0]:  # several, or one that others follow
        other = poolings
    if other:
        names = ", ".join(type(module).__name__ for module in other)
        raise ModelLoadError(f"{path!r} has modules that are not supported: {names}")
    mask = masks[-1] if masks else MultiVectorMask()
    parts = _rules(path, model, transformer, mask) | {
        "backbone": transformer.auto_model,
        "tokenizer": transformer.tokenizer,
        "tasks": {"token_embed": _of_tokens(transformer, projection)},
        "score_task": "token_embed",
        "similarity": model.similarity_fn_name,
        "token_pooling": _token_pooling(poolings[0]) if poolings else None,
        "reader": LibraryReader(model, mask),
    }
    return with_pictures(path, transformer, parts)


def _token_pooling(pooling: HierarchicalTokenPooling) -> TokenPooling:
    # A text without a role counts as a document.
    named = {Role.QUERY: "query", Role.DOCUMENT: "document", Role.TEXT: "document"}
    return TokenPooling(pooling, frozenset(role for role, name in named.items() if pooling.applies_to(name)))


def _skipped(mask: MultiVectorMask, role: Role, vocabulary: int) -> NDArray[np.int64] | None:
    """The token ids of a role that take no part in scoring: those on the skip list and, if documents are
    scored by certain tokens alone, all others. A text without a role counts as a document."""
    task = "query" if role is Role.QUERY else "document"
    skipped = np.empty(0, dtype=np.int64)
    if mask._skiplist_ids is not None and task in mask.skiplist_tasks:
        skipped = mask._skiplist_ids.numpy()
    if task == "document" and mask.keep_only_token_ids:
        others = np.setdiff1d(np.arange(vocabulary), mask.keep_only_token_ids)
        skipped = np.concatenate([skipped, others])
    return np.unique(skipped) if len(skipped) else None


def _expansion(transformer: Any, settings: TextSettings) -> tuple[Expansion | None, int | None]:
    """How queries are expanded, and the most tokens of one."""
    said = transformer.query_expansion
    if said is None:
        return None, settings.length(transformer.query_length)
    # PyLate pads with [MASK] for encoders and with the end-of-text token for decoders.
    tokenizer = transformer.tokenizer
    token_id = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.eos_token_id
    if said["token"] is not None:
        token_id = tokenizer.convert_tokens_to_ids(said["token"])
    # Without truncation, a query may be longer than the length that shorter ones are filled up to.
    fixed = said["strategy"] == "fixed" and settings.truncation is not None
    at_least = transformer.query_length and max(transformer.query_length, said["length"])
    longest = said["length"] if fixed else settings.length(at_least)
    return Expansion(said["length"], token_id, said["attend"], fixed), longest


class MaskedWordsHead(torch.nn.Module, WordsHead):
    """The code of a transformers `*ForMaskedLM` behind its backbone: rows [n, hidden] to logits [n, words],
    float32. A logit weighs log(1 + relu(logit)); with `twice`, log(1 + weight) of that.

    Sources: SPLADE, Formal et al. 2021 (arXiv 2107.05720), eq. 1; Geng et al. 2024 (arXiv 2411.04403) for the
    second logarithm."""

    def __init__(self, model: Any, *, twice: bool, most: int | None) -> None:
        super().__init__()
        backbone = model.base_model
        _untie(model, backbone)
        self._rows = GivenRows(None)
        self.words = self._rows.in_place_of_backbone(model)
        self.most = most
        self._twice = twice
        device = next(backbone.parameters()).device
        with torch.inference_mode():
            hidden = model.config.get_text_config().hidden_size
            self.num_words = self.forward(torch.zeros(1, hidden, device=device, dtype=torch.float32)).shape[1]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        input_ids = torch.ones(len(rows), 1, dtype=torch.long, device=rows.device)
        return self._rows.logits(self.words, input_ids, rows[:, None, :])[:, 0]  # [n, words]

    def weights(self, numbers: torch.Tensor) -> torch.Tensor:
        weights = numbers.relu().log1p()
        return weights.log1p() if self._twice else weights

    def __str__(self) -> str:
        logarithm = "log(1 + log(1 + relu))" if self._twice else "log(1 + relu)"
        most = "" if self.most is None else f", at most {self.most}"
        return f"the head of {type(self.words).__name__} and {logarithm}{most}"


def _untie(model: Any, backbone: torch.nn.Module) -> None:
    """Gives modules behind a backbone their own copies of weights that they share with it, because these may
    come to be in another precision."""
    shared = {id(parameter) for parameter in backbone.parameters()}
    inside = {id(module) for module in backbone.modules()}
    for module in model.modules():
        if id(module) in inside:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in shared:
                module._parameters[name] = torch.nn.Parameter(parameter.detach().clone(), requires_grad=False)


def load_sparse_encoder(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the checkpoint with sentence-transformers, which takes a plain `*ForMaskedLM` for a SPLADE model
    of the greatest weights."""
    model = SparseEncoder(path, **options).eval()
    (transformer, pooling), static, roles = _taken_apart(path, list(model))
    if "message" in transformer.modality_config:
        raise ModelLoadError(
            f"sentence_bert_config.json of {path!r} names a chat template, which is not supported "
            'for sparse encoders; remove "message" from its modality_config'
        )
    rules = _rules(path, model, transformer, looked_up=roles)
    tokenizer, twice = transformer.tokenizer, pooling.activation_function == "log1p_relu"
    head = MaskedWordsHead(transformer.auto_model, twice=twice, most=model.max_active_dims)
    if static is not None:
        refuse_modules_not_finite(path, [static])
        if static.tokenizer.get_vocab() != tokenizer.get_vocab():
            raise ModelLoadError(f"{path!r} has another tokenizer for queries than for documents")
        if len(static.weight) < len(tokenizer):
            raise ModelLoadError(
                f"{path!r} has {len(static.weight)} static weights for {len(tokenizer)} tokens; some would "
                "have none"
            )
        head.static_weights, head.static_roles = static.weight.detach().float().clone(), roles
    reference = ModulesReference([transformer, pooling], tokenizer, _POOLED)
    method, similarity = f"{pooling.pooling_strategy}-words", model.similarity_fn_name
    task = Task(method, head, COLUMNS, normalized=False, reference=reference, words=head.num_words)
    return rules | {
        "backbone": transformer.auto_model.base_model,
        "tokenizer": tokenizer,
        "tasks": {SPARSE_EMBED: task},
        "score_task": SPARSE_EMBED,
        "similarity": "sparse" if similarity == "dot" else f"sparse-{similarity}",
        "reader": LibraryReader(model),
    }


_Parts = tuple[tuple[Any, SpladePooling], SparseStaticEmbedding | None, frozenset[Role]]


def _taken_apart(path: str, modules: list[Any]) -> _Parts:
    """The masked language model, its pooling, and the static embedding of texts in some roles, if there is
    one. Raises ModelLoadError for anything else."""
    if len(modules) != 1 or not isinstance(modules[0], Router):
        return _splade(path, modules), None, frozenset()
    router = modules[0]
    routes = {name: list(route) for name, route in router.sub_modules.items()}
    if router.route_mappings or routes.keys() != {"query", "document"}:
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
    roles = {Role(name)}
    # Texts that are said to be neither take the router's default.
    if router.default_route == name:
        roles.add(Role.TEXT)
    return _splade(path, routes[other]), static, frozenset(roles)


def _splade(path: str, modules: list[Any]) -> tuple[Any, SpladePooling]:
    names = ", ".join(type(module).__name__ for module in modules)
    pools = len(modules) == 2 and isinstance(modules[1], SpladePooling)
    if not pools or not hasattr(modules[0], "auto_model"):
        raise ModelLoadError(
            f"{path!r} has the modules {names}; of sparse encoders a masked language model with "
            "SpladePooling is supported"
        )
    kind = type(modules[0].auto_model).__name__
    if not kind.endswith("ForMaskedLM"):
        raise ModelLoadError(f"{path!r} is a {kind}; SpladePooling needs a *ForMaskedLM")
    return modules[0], modules[1]
