"""Recipes: what transformers and sentence-transformers made of a checkpoint's configuration files. With one,
the next start need not import them.

A recipe is made of a model that the libraries have loaded, if it is an encoder or classifier of the families
in `maxsimd.engine.models.bert`. It is proven when it is made: the model that it builds must have the same
settings, the same weights and, for some texts, the same token ids and results as the libraries' model.
Anything that a recipe cannot hold leaves the libraries' model in use.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import nn

from maxsimd.engine.checkpoint.heads import (
    ClassifierHead,
    Dense,
    FirstColumns,
    LayerNorm,
    ModuleHead,
    Normalize,
    linear_of,
)
from maxsimd.engine.checkpoint.model import (
    TOKEN_CLASSIFY,
    Expansion,
    LoadedModel,
    PairRules,
    RoleRules,
    Task,
    position_offset,
    token_rows,
    uncounted_id,
)
from maxsimd.engine.checkpoint.reference import (
    ClassifierReference,
    StatesReference,
    takes_type_ids,
)
from maxsimd.engine.checkpoint.weights import refuse_not_finite
from maxsimd.engine.config import ScoreType
from maxsimd.engine.models import bert
from maxsimd.scheduler import ResultSlot, Tokens, TokenSequence


class TokenizerFacts(msgspec.Struct, frozen=True):
    """Facts that transformers knows and tokenizer.json lacks."""

    model_input_names: tuple[str, ...]
    model_max_length: int
    all_special_ids: tuple[int, ...]


class PlainTokenizer:
    """Has the attributes of transformers' fast tokenizers that serving reads."""

    def __init__(self, backend: Tokenizer, facts: TokenizerFacts) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend_tokenizer = backend
        self.model_input_names = list(facts.model_input_names)
        self.model_max_length = facts.model_max_length
        self.all_special_ids = list(facts.all_special_ids)

    def __call__(self, text: str, pair: str | None = None) -> Mapping[str, list[int]]:
        """The token ids of a text or pair with its special tokens, and token types where the model reads
        them."""
        encoded = self.backend_tokenizer.encode(text, pair)
        made: dict[str, list[int]] = {"input_ids": encoded.ids}
        if "token_type_ids" in self.model_input_names:
            made["token_type_ids"] = encoded.type_ids
        return made

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend_tokenizer.decode(list(ids), skip_special_tokens=False))

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return str(self.backend_tokenizer.id_to_token(token_id))


# Largest difference from the libraries' results, as a share of the largest number: float32 rounding.
_TOLERANCE = 1e-5

# Modules without weights that a recipe can name: activations, and what turns logits into scores.
_PLAIN = {each.__name__: each for each in (nn.Identity, nn.Sigmoid, nn.Tanh, nn.GELU, nn.ReLU, nn.SiLU)}

# Modules of heads, and those of them that have weights.
_WITH_WEIGHTS = ("Dense", "LayerNorm")
_MODULES = (*_WITH_WEIGHTS, "Normalize", "Identity")

# Texts for the proof. Each is read alone, and classifiers read each pair of neighbors.
PROBES = (
    "how is a file opened",
    "Paris is the capital of France; it lies on the Seine, and some 2,100,000 people live there.",
    "",
    "  Straße, naïve café — Zu\u0308rich 👩‍💻 ",
    "שלום עולם 東京 [MASK] </s> [SEP] 12.5",
    "one two three four five six seven eight nine ten " * 6,
)


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
    """A tensor's file, relative to the checkpoint's folder, and its name there."""

    file: str
    name: str


class ModuleRecipe(msgspec.Struct, frozen=True, omit_defaults=True):
    """A module of a head: Dense, Normalize, LayerNorm or Identity, and where its tensors are."""

    kind: str
    activation: str = ""
    use_residual: bool = False
    eps: float = 0.0
    tensors: dict[str, TensorPlace] = {}


class TaskRecipe(msgspec.Struct, frozen=True):
    """A task; without `modules` its head is the classifier. With `columns` only the first of the
    modules' columns are kept."""

    pooling: str
    dim: int
    normalized: bool = msgspec.field(name="normalised")  # as earlier versions wrote it
    modules: tuple[ModuleRecipe, ...] | None
    columns: int | None = None


class RoleRecipe(msgspec.Struct, frozen=True):
    prompt: str
    max_tokens: int | None
    expansion: Expansion | None
    skipped_ids: tuple[int, ...] | None
    pool_prompt: bool


class Recipe(msgspec.Struct, frozen=True):
    """All that it takes to build a model from a checkpoint's weights. `proof` says how it was compared."""

    encoder: dict[str, Any]
    dtype: str
    is_classifier: bool
    has_pooler: bool
    tensors: dict[str, TensorPlace]
    tasks: dict[str, TaskRecipe]
    tokenizer: TokenizerFacts
    tokenizer_file: str | None
    tokenizer_json: str | None
    score_type: str
    score_task: str
    similarity: str
    max_tokens: int
    architecture: str
    labels: tuple[str, ...]
    activation: str
    probabilities: str
    prompts: dict[str, str]
    query: RoleRecipe
    document: RoleRecipe
    text: RoleRecipe
    truncation: str
    proof: str = ""
    truncation_side: str = "right"


class UnfitError(Exception):
    """A model, or a checkpoint, that a recipe cannot describe; the message says why."""


# Fields that a recipe has as a model has them, and those that are rules of roles.
_ALIKE = ("score_task", "similarity", "max_tokens", "architecture", "labels", "prompts", "truncation_side")
_ROLES = ("query", "document", "text")


def make_recipe(
    model: LoadedModel, folder: Path, module_folders: Sequence[tuple[str, str]]
) -> tuple[Recipe, LoadedModel]:
    """The proven recipe of a model that the libraries have loaded from a folder, and what it builds with the
    weights of that model.

    `module_folders` are sentence-transformers' modules in their order: the kind and the folder of each.
    Raises UnfitError for a model that a recipe cannot describe, or that differs in any way from what the
    recipe builds."""
    recipe, tensors = _described(model, folder, module_folders)
    made = _assembled(recipe, folder, tensors, model.name)
    _refuse_difference(made, model)
    return msgspec.structs.replace(recipe, proof=_proof(made, model)), made


# Keys of tensors: "model.<name>" for the model's own, and "<task>.<module>.<name>" for those of heads.
_BACKBONE = "model."


def build(recipe: Recipe, folder: Path, device: torch.device, name: str) -> LoadedModel:
    """The model of a recipe, with weights from the checkpoint's folder. Raises ModelLoadError for weights
    that are not finite, and other errors for files that are not what they were."""
    dtype = getattr(torch, recipe.dtype)
    places = {_BACKBONE + name: place for name, place in recipe.tensors.items()}
    for task, each in recipe.tasks.items():
        for i, module in enumerate(each.modules or ()):
            places |= {f"{task}.{i}.{name}": place for name, place in module.tensors.items()}
    tensors = {}
    for file in sorted({place.file for place in places.values()}):
        with safe_open(folder / file, framework="pt") as stored:
            for key, place in places.items():
                if place.file == file:
                    wanted = dtype if key.startswith(_BACKBONE) else torch.float32
                    # A clone, because the tensor may be mapped from its file, which others may change.
                    tensors[key] = stored.get_tensor(place.name).clone().to(device, wanted)
    refuse_not_finite(str(folder), tensors.items())
    return _assembled(recipe, folder, tensors, name)


# From the libraries' model to a recipe.


def _described(
    model: LoadedModel, folder: Path, module_folders: Sequence[tuple[str, str]]
) -> tuple[Recipe, dict[str, torch.Tensor]]:
    """The recipe, not proven yet, and the tensors of the libraries' model by the recipe's keys."""
    backbone: Any = model.backbone
    if type(backbone).__module__.split(".")[:2] != ["transformers", "models"]:
        raise UnfitError(f"{type(backbone).__name__} is not transformers' own class")
    family = str(backbone.config.model_type)
    if bert.ENCODERS.get(family, nn.Module).__name__ != type(backbone).__name__:
        raise UnfitError(f"{type(backbone).__name__} is of another family")
    if model.vision is not None or model.token_pooling is not None or model.stored_as or model.unread:
        raise UnfitError("it has parts of other kinds")
    classifier = _classifier_of(model)
    config = _encoder_config(backbone.config)
    whole = backbone if classifier is None else classifier
    # A pooler belongs to the head, which is float32.
    layers = [each for name, each in backbone.named_parameters() if not name.startswith("pooler.")]
    if {each.dtype for each in layers} != {model.file_dtype}:
        raise UnfitError("its weights have several precisions")
    stored = _StoredTensors(folder)
    has_pooler = classifier is None and backbone.pooler is not None and stored.has("pooler.dense.weight")
    wanted = dict(whole.named_parameters())
    if classifier is None and not has_pooler:
        wanted = {name: tensor for name, tensor in wanted.items() if not name.startswith("pooler.")}
    tensors = {_BACKBONE + name: tensor for name, tensor in wanted.items()}
    tasks = {name: _task(name, task, stored, module_folders, tensors) for name, task in model.tasks.items()}
    text, text_file = _tokenizer_json(model.tokenizer, folder)
    alike: dict[str, Any] = {name: getattr(model, name) for name in _ALIKE}
    alike |= {role: _role(getattr(model, role)) for role in _ROLES}
    recipe = Recipe(
        encoder=config,
        dtype=str(model.file_dtype).removeprefix("torch."),
        is_classifier=classifier is not None,
        has_pooler=has_pooler,
        tensors={name: stored.place_of(name, tensor) for name, tensor in wanted.items()},
        tasks=tasks,
        tokenizer=TokenizerFacts(
            tuple(model.tokenizer.model_input_names),
            int(model.tokenizer.model_max_length),
            tuple(map(int, model.tokenizer.all_special_ids)),
        ),
        tokenizer_file=text_file,
        tokenizer_json=None if text_file is not None else text,
        score_type=model.score_type.value,
        activation=_plain_name(model.activation),
        probabilities="sigmoid" if model.probabilities is torch.sigmoid else "softmax",
        truncation=model.pairs.truncation,
        **alike,
    )
    return recipe, tensors


def _classifier_of(model: LoadedModel) -> Any:
    """transformers' classifier, whose backbone is the model's; None for an encoder."""
    if model.score_task == TOKEN_CLASSIFY:
        raise UnfitError("it classifies tokens")
    if model.score_task != "classify":
        return None
    reference = model.tasks["classify"].reference
    classifier = reference.model if isinstance(reference, ClassifierReference) else None
    if classifier is None or classifier.base_model is not model.backbone:
        raise UnfitError("its classifier is of another kind")
    if type(classifier).__name__ not in {each.__name__ for each in bert.CLASSIFIERS.values()}:
        raise UnfitError(f"{type(classifier).__name__} is of another family")
    return classifier


def _encoder_config(config: Any) -> dict[str, Any]:
    names = {each.name for each in dataclasses.fields(bert.EncoderConfig)} - {"settings"}
    usual = {"is_decoder": False, "add_cross_attention": False, "chunk_size_feed_forward": 0}
    for name, plain in usual.items():
        if getattr(config, name, plain) != plain:
            raise UnfitError(f"its {name} is {getattr(config, name)!r}")
    if config.hidden_act not in bert.ACTIVATIONS:
        raise UnfitError(f"its activation is {config.hidden_act!r}")
    if config._attn_implementation not in bert.ATTENTION_FUNCTIONS:
        raise UnfitError(f"its attention is {config._attn_implementation!r}")
    settings = json.loads(json.dumps(config.to_dict()))
    settings.pop("_name_or_path", None)
    return {name: getattr(config, name) for name in sorted(names)} | {"settings": settings}


class _StoredTensors:
    """The tensors in a checkpoint's safetensors files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[str, set[str]] = {}
        for path in sorted(folder.rglob("*.safetensors")):
            with safe_open(path, framework="pt") as stored:
                self._names[path.relative_to(folder).as_posix()] = set(stored.keys())

    def has(self, name: str) -> bool:
        return any(self._named(name))

    def place_of(self, name: str, tensor: torch.Tensor, within: str | None = None) -> TensorPlace:
        """The source of a tensor of the model: the one place, in the folder `within` if it is given, where
        a tensor of that name has its values. Raises UnfitError where there is none, or several."""
        places = [
            place
            for place in self._named(name)
            if within is None or Path(place.file).parent.as_posix() == (within or ".")
        ]
        if len(places) != 1:
            raise UnfitError(f"{len(places)} tensors in its files could be {name}")
        with safe_open(self._folder / places[0].file, framework="pt") as stored:
            found = stored.get_tensor(places[0].name)
        if found.shape != tensor.shape or not torch.equal(found.to(tensor.dtype), tensor.cpu()):
            raise UnfitError(f"{name} is not what its files say")
        return places[0]

    def _named(self, name: str) -> Iterator[TensorPlace]:
        """Files name tensors behind the prefix of a model, and norms as TensorFlow did in old ones."""
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        for file, names in self._names.items():
            for each in names:
                if each in (name, old) or each.endswith((f".{name}", f".{old}")):
                    yield TensorPlace(file, each)


def _task(
    key: str,
    task: Task,
    stored: _StoredTensors,
    module_folders: Sequence[tuple[str, str]],
    tensors: dict[str, torch.Tensor],
) -> TaskRecipe:
    """The recipe of a task; adds the tensors of its head."""
    if isinstance(task.head, ClassifierHead):
        return TaskRecipe(task.pooling, task.dim, task.normalized, None)
    head: Any = task.head
    columns = head.dimensions if isinstance(head, FirstColumns) and not head.normalized else None
    head = head if columns is None else head.inner
    if type(head) is not ModuleHead or task.words is not None:
        raise UnfitError("its head is of another kind")
    folders = {kind: iter([path for each, path in module_folders if each == kind]) for kind in _WITH_WEIGHTS}
    modules = []
    for i, module in enumerate(head.modules):
        if type(module).__name__ not in _MODULES:
            raise UnfitError(f"{type(module).__name__} is of another kind")
        own = dict(module.named_parameters())
        tensors |= {f"{key}.{i}.{name}": tensor for name, tensor in own.items()}
        # Stanford's ColBERT has its projection among the weights of the encoder, and names no modules.
        within = next(folders[type(module).__name__], None) if own else None
        modules.append(
            ModuleRecipe(
                kind=type(module).__name__,
                activation=_plain_name(module.activation_function) if isinstance(module, Dense) else "",
                use_residual=isinstance(module, Dense) and module.use_residual,
                eps=module.norm.eps if isinstance(module, LayerNorm) else 0.0,
                tensors={name: stored.place_of(name, tensor, within) for name, tensor in own.items()},
            )
        )
    return TaskRecipe(task.pooling, task.dim, task.normalized, tuple(modules), columns)


def _plain_name(module: Any) -> str:
    name = type(module).__name__
    if name not in _PLAIN or repr(_PLAIN[name]()) != repr(module) or list(module.parameters()):
        raise UnfitError(f"{module!r} is not plain")
    return name


def _role(rules: RoleRules) -> RoleRecipe:
    skipped = None if rules.skipped_ids is None else tuple(map(int, rules.skipped_ids))
    return RoleRecipe(rules.prompt, rules.max_tokens, rules.expansion, skipped, rules.pool_prompt)


def _tokenizer_json(tokenizer: Any, folder: Path) -> tuple[str, str | None]:
    """A tokenizer as the tokenizers library states it, and the file of the checkpoint that says the same, if
    there is one."""
    stated = _stated(tokenizer.backend_tokenizer)
    # The root first: `recipe_store` does not notice changes in folders of exports.
    for path in sorted(folder.rglob("tokenizer.json"), key=lambda path: (len(path.parts), path)):
        if _stated(Tokenizer.from_file(str(path))) == stated:
            return stated, path.relative_to(folder).as_posix()
    return stated, None


def _stated(backend: Tokenizer) -> str:
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_padding()
    copy.no_truncation()
    return str(copy.to_str())


# From a recipe to a model.


def _assembled(recipe: Recipe, folder: Path, tensors: Mapping[str, torch.Tensor], name: str) -> LoadedModel:
    config = bert.EncoderConfig(**recipe.encoder)
    with torch.device("meta"):
        whole: Any = (
            bert.CLASSIFIERS[config.model_type](config)
            if recipe.is_classifier
            else bert.ENCODERS[config.model_type](config, recipe.has_pooler)
        )
    whole.load_state_dict(_under(tensors, _BACKBONE), assign=True)
    whole.eval().requires_grad_(False)
    backbone = whole.base_model
    alike: dict[str, Any] = {name: getattr(recipe, name) for name in _ALIKE}
    alike |= {role: _rules(getattr(recipe, role)) for role in _ROLES}
    file, text = recipe.tokenizer_file, recipe.tokenizer_json or ""
    backend = Tokenizer.from_file(str(folder / file)) if file else Tokenizer.from_str(text)
    tokenizer = PlainTokenizer(backend, recipe.tokenizer)
    tasks = {key: _assembled_task(key, task, whole, tokenizer, tensors) for key, task in recipe.tasks.items()}
    return LoadedModel(
        name=name,
        score_type=ScoreType(recipe.score_type),
        backbone=backbone,
        tokenizer=tokenizer,
        tasks=tasks,
        causal=False,
        position_offset=position_offset(backbone),
        uncounted_id=uncounted_id(backbone),
        takes_type_ids=takes_type_ids(backbone, tokenizer),
        activation=_PLAIN[recipe.activation](),
        file_dtype=getattr(torch, recipe.dtype),
        probabilities=torch.sigmoid if recipe.probabilities == "sigmoid" else nn.Softmax(dim=-1),
        pairs=PairRules(recipe.truncation),  # type: ignore[arg-type]
        **alike,
    )


def _under(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The entries whose keys begin with a prefix, by the rest of their keys."""
    return {key.removeprefix(prefix): each for key, each in tensors.items() if key.startswith(prefix)}


def _assembled_task(
    key: str, task: TaskRecipe, whole: Any, tokenizer: PlainTokenizer, tensors: Mapping[str, torch.Tensor]
) -> Task:
    facts = task.dim, task.normalized
    if task.modules is None:
        return Task(task.pooling, ClassifierHead(whole), *facts, ClassifierReference(whole, tokenizer))
    modules = [_module(module, _under(tensors, f"{key}.{i}.")) for i, module in enumerate(task.modules)]
    head = ModuleHead(modules, "token_embeddings" if task.pooling == "all" else "sentence_embedding")
    made = head if task.columns is None else FirstColumns(head, task.columns, normalized=False)
    return Task(task.pooling, made, *facts, StatesReference(whole, tokenizer, head, task.pooling))


def _module(recipe: ModuleRecipe, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    match recipe.kind:
        case "Dense":
            residual = tensors.get("residual.weight")
            return Dense(
                linear_of(tensors["linear.weight"], tensors.get("linear.bias")),
                _PLAIN[recipe.activation](),
                recipe.use_residual,
                None if residual is None else linear_of(residual, tensors.get("residual.bias")),
            )
        case "LayerNorm":
            norm = nn.LayerNorm(tensors["norm.weight"].shape, eps=recipe.eps)
            norm.load_state_dict(_under(tensors, "norm."), assign=True)
            return LayerNorm(norm.requires_grad_(False))
        case kind:
            return {"Normalize": Normalize, "Identity": nn.Identity}[kind]()


def _rules(recipe: RoleRecipe) -> RoleRules:
    skipped = None if recipe.skipped_ids is None else np.array(recipe.skipped_ids, dtype=np.int64)
    return RoleRules(**msgspec.structs.asdict(recipe) | {"skipped_ids": skipped})


# The proof.


def _refuse_difference(made: LoadedModel, model: LoadedModel) -> None:
    """Raises UnfitError for a field in which two models differ; their modules, tokenizers and tasks are
    compared by what they compute."""
    apart = {"backbone", "tokenizer", "tasks", "reader"}
    for name in {field.name for field in dataclasses.fields(LoadedModel)} - apart:
        if not _same(getattr(made, name), getattr(model, name)):
            raise UnfitError(f"{name} would differ")
    for name, task in model.tasks.items():
        for attribute in ("pooling", "dim", "normalized", "words"):
            if getattr(made.tasks[name], attribute) != getattr(task, attribute):
                raise UnfitError(f"{attribute} of {name} would differ")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return type(one) is type(other) and np.array_equal(one, other)
    if isinstance(one, nn.Module):
        return type(one) is type(other) and repr(one) == repr(other)
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return type(one) is type(other) and all(
            _same(getattr(one, name), getattr(other, name)) for name in names
        )
    return bool(one == other)


def _proof(made: LoadedModel, model: LoadedModel) -> str:
    """A comparison of two models that share their weights, in words. Raises UnfitError if results differ."""
    sequences = list(_probe_sequences(made, model))
    worst = 0.0
    # Conversions come first: tensors that are made in inference mode cannot be changed outside of it.
    with in_float32([made.backbone, model.backbone]), torch.inference_mode():
        for name, task in made.tasks.items():
            theirs = model.tasks[name].reference
            assert task.reference is not None
            assert theirs is not None
            for sequence in sequences:
                payload = dataclasses.replace(sequence.payload, task=name)
                asked = dataclasses.replace(sequence, payload=payload)
                found, expected = task.reference(asked), theirs(asked)
                if found.shape != expected.shape:
                    raise UnfitError(f"{name} gives {tuple(found.shape)}, not {tuple(expected.shape)}")
                off = float((found - expected).abs().max()) / (float(expected.abs().max()) or 1.0)
                if not off <= _TOLERANCE:
                    raise UnfitError(f"{name} differs by {off:.1e} of the largest number")
                worst = max(worst, off)
    return f"{len(sequences)} texts, largest difference {worst:.1e} of the largest number"


@contextmanager
def in_float32(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Has the parameters of modules in float32 inside this context, and as they were after it."""
    before = {parameter: parameter.dtype for module in modules for parameter in module.parameters()}
    for parameter in before:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, dtype in before.items():
            parameter.data = parameter.data.to(dtype)


def _probe_sequences(made: LoadedModel, model: LoadedModel) -> Iterator[TokenSequence]:
    """The probes as the libraries' tokenizer reads them. Raises UnfitError where the plain one does not read
    them alike."""
    pairs, rows = pairwise(PROBES), token_rows(model.backbone)
    for texts in [*((text,) for text in PROBES), *(pairs if model.score_task == "classify" else ())]:
        # Lists keep an empty second text, as in sentence-transformers; a plain one is taken for none.
        batch = model.tokenizer(*([text] for text in texts))
        expected = {name: rows[0] for name, rows in batch.items() if name != "attention_mask"}
        if made.tokenizer(*texts) != expected:
            raise UnfitError(f"the tokenizer reads {texts!r} in another way")
        ids = np.array(expected["input_ids"], dtype=np.int32)[: model.max_tokens]
        types = expected.get("token_type_ids")
        type_ids = np.zeros_like(ids) if types is None else np.array(types, dtype=np.int32)[: len(ids)]
        if len(ids) == 0 or (rows is not None and ids.max() >= rows):  # requests with such tokens are refused
            continue
        attended = None
        if model.query.expansion is not None and len(ids) > 4:
            attended = len(ids) - 2  # as a query that is filled up
        tokens = Tokens(ids, type_ids, attended_len=attended)
        yield TokenSequence.text(0, ResultSlot(0, 0), model.score_task, tokens)
        if not model.document.pool_prompt and len(ids) > 4:
            pooled = dataclasses.replace(tokens, pooled_positions=np.arange(3, len(ids)))
            yield TokenSequence.text(0, ResultSlot(0, 0), model.score_task, pooled)
