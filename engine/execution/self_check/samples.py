"""Samples: sequences like those of requests with the items that a model's own library gives, the comparison
with other items, and the model in float32 with some of its layers, which makes samples cheap."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from maxsimd.engine.checkpoint import LoadedModel, Task
from maxsimd.engine.checkpoint.heads import after_reference
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution.self_check.rules import LONGEST_WINDOW, window_of
from maxsimd.engine.media import Picture
from maxsimd.scheduler import ResultSlot, Tokens, TokenSequence

# The difference of an item from the library's, as a share of the largest number expected.
TOLERANCE = 1e-5
# A difference may be this many times what rounding alone explains.
_ROUNDING_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Items against those expected: the number of sequences, the largest difference (NaN does not agree), the
    largest number expected, and the tolerated difference."""

    sequences: int
    difference: float
    largest: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance < math.inf

    def __str__(self) -> str:
        return f"{self.sequences} sequences, largest difference {self.difference:.1e} of {self.largest:.3g}"


def compare_items(
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    rounding: float,
    share: float = TOLERANCE,
    scale: Sequence[torch.Tensor] = (),
) -> Comparison:
    """Compares items. They may differ by `share` of the largest number expected, also by others of this
    `scale`, and by a few times `rounding`, the difference that rounding alone explains."""
    size = largest([*expected, *scale])
    if any(item.shape != wanted.shape for item, wanted in zip(found, expected, strict=True)):
        return Comparison(len(found), float("inf"), size, 0.0)
    difference = largest(item - wanted for item, wanted in zip(found, expected, strict=True))
    return Comparison(len(found), difference, size, share * size + _ROUNDING_FACTOR * rounding)


def largest(tensors: Iterable[torch.Tensor]) -> float:
    """The largest absolute number in some tensors, or NaN, which Python's `max` would drop."""
    numbers = [tensor.abs().max().float().cpu() for tensor in tensors if tensor.numel()]
    return float(torch.stack(numbers).max()) if numbers else 0.0


# Tokens of the longest random document without a window.
_SHORT = 23


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A sequence and its item [n, dim], float32, from the reference of its task."""

    sequence: TokenSequence
    expected: torch.Tensor


@torch.inference_mode()
def make_samples(model: LoadedModel, probes: Sequence[TokenSequence] = ()) -> tuple[Sample, ...]:
    """Samples for every task of a model in float32: of the `probes`, which preprocessing made of texts, and
    of random sequences. Leaves out sequences on which the model's own library fails. Raises ModelLoadError if
    it fails on all of a task, or gives numbers that are not finite."""
    samples: list[Sample] = []
    for name, task in model.tasks.items():
        failure = "it makes numbers that are not finite"
        before = len(samples)
        for sequence in [*_probes_for(model, name, probes), *random_sequences(model, name, len(probes))]:
            try:
                expected = _expected(task, sequence).clone()
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if bool(expected.isfinite().all()):
                number = len(samples)
                tokens = model.for_classifier(sequence.tokens) if name == "classify" else sequence.tokens
                numbered = TokenSequence.text(number, ResultSlot(0, number), name, tokens)
                samples.append(Sample(numbered, expected))
        if len(samples) == before:
            raise ModelLoadError(f"{model.name!r} cannot be run on any of some random texts: {failure}")
        first = samples[before]
        again = _expected(task, first.sequence)
        if not compare_items([again], [first.expected], rounding=0.0).agrees:
            raise ModelLoadError(f"{model.name!r} gives another result for a text that it was given before")
    return tuple(samples)


def _expected(task: Task, sequence: TokenSequence) -> torch.Tensor:
    """The item [n, dim] of a sequence by the task's reference, without the rows that are not pooled."""
    assert task.reference is not None
    item = task.reference(sequence)
    pooled = sequence.tokens.pooled_positions
    if pooled is not None and task.pooling == "all":
        item = item[torch.from_numpy(pooled).to(item.device)]
    finished: torch.Tensor = after_reference(task.head)(item)
    return finished


def _probes_for(model: LoadedModel, task: str, probes: Sequence[TokenSequence]) -> Iterator[TokenSequence]:
    """The probes for a task, with pooled positions if its reference needs them."""
    all_pooled = model.document.pool_first and model.document.pool_specials and model.query.pool_specials
    for probe in probes:
        tokens = probe.tokens
        assert isinstance(tokens, Tokens)
        by_prompt = task == "embed" and not model.document.pool_prompt
        if not (all_pooled and (by_prompt or model.tasks[task].pooling == "all")):
            tokens = replace(tokens, pooled_positions=None)
        yield _of_task(task, tokens)


def random_sequences(model: LoadedModel, task: str, num_probes: int = 0) -> list[TokenSequence]:
    """Random sequences for a task: texts or pairs as the tokenizer joins them, or token ids if a template
    joins them. Some are longer than the model's window. Fewer are needed beside probes."""
    random = np.random.default_rng(0)
    plain = model.listwise is not None or model.pairs.template is not None
    lengths = [(5, 8), (1, 1), (3, 14), (9, _SHORT)]
    if num_probes:
        lengths = [(1, 1), (2, 3)] if plain else lengths[num_probes:]
    backbone: Any = model.backbone
    window = window_of(backbone.config.get_text_config())
    if window is not None and window <= LONGEST_WINDOW:
        lengths[-1] = (9, 2 * window + 3)
    sequences = []
    for first, second in lengths:
        if plain:
            ids = _random_ids(model, first + second, random)
            types, template = np.zeros_like(ids), model.pairs.template
            if template is not None and template.marks_document:
                types[first:-1] = 1
            sequences.append(_of_task(task, Tokens(ids[: model.max_tokens], types[: model.max_tokens])))
        elif model.score_task == "classify":
            sequences.append(_encoded(model, task, _text(model, first, random), _text(model, second, random)))
        else:
            sequences.append(_encoded(model, task, _text(model, second, random)))
    if task == "classify" and not plain and not num_probes:
        sequences.append(_encoded(model, task, _text(model, 6, random)))
    return [*sequences, *_special_sequences(model, task, sequences), *random_pages(model, task)]


def _special_sequences(
    model: LoadedModel, task: str, sequences: list[TokenSequence]
) -> Iterator[TokenSequence]:
    """Sequences for special rules of a checkpoint: masked tokens at the end (query expansion), and a prompt
    that is not pooled."""
    expansion = model.query.expansion
    longest = sequences[-1].tokens
    assert isinstance(longest, Tokens)
    if task == "token_embed" and expansion is not None and not expansion.attended:
        for attended in (3, len(longest) - 4):
            # With a window, tokens far behind the attended ones see no token at all.
            yield _of_task(task, replace(longest, attended_len=max(1, attended)))
    if task == "embed" and not model.document.pool_prompt and len(longest) > 4:
        yield _of_task(task, replace(longest, pooled_positions=np.arange(4, len(longest))))


def _random_ids(model: LoadedModel, count: int, random: np.random.Generator) -> NDArray[np.int32]:
    """Token ids from the vocabulary, without special tokens and those without an embedding."""
    size = int(model.tokenizer.backend_tokenizer.get_vocab_size())
    size = size if model.token_rows is None else min(size, model.token_rows)
    usable = np.setdiff1d(
        np.arange(size, dtype=np.int32), np.array(model.tokenizer.all_special_ids, dtype=np.int32)
    )
    if len(usable) == 0:
        raise ModelLoadError(f"the tokenizer of {model.name!r} knows no words, only special tokens")
    return random.choice(usable, count)


def _text(model: LoadedModel, tokens: int, random: np.random.Generator) -> str:
    return str(model.tokenizer.decode(_random_ids(model, tokens, random).tolist()))


def _encoded(model: LoadedModel, task: str, *texts: str) -> TokenSequence:
    encoded, most = model.tokenizer(*texts), model.max_tokens
    ids = np.array(encoded["input_ids"], dtype=np.int32)
    types = np.array(encoded.get("token_type_ids", np.zeros_like(ids)), dtype=np.int32)
    return _of_task(task, Tokens(ids[:most], types[:most]))


def _of_task(task: str, tokens: Tokens) -> TokenSequence:
    return TokenSequence.text(0, ResultSlot(0, 0), task, tokens)


# Widths and heights: landscape, portrait, and a line.
_SIZES = ((90, 60), (70, 130), (200, 9))


def random_pages(model: LoadedModel, task: str) -> Iterator[TokenSequence]:
    """Sequences of a random picture each, with negative ids, unlike sequences; none for a model of texts."""
    if model.vision is None:
        return
    random = np.random.default_rng(0)
    for i, (width, height) in enumerate(_SIZES):
        picture = Picture(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        inputs = model.vision.reader.read(picture)
        page = model.vision.reader.page(inputs)
        yield TokenSequence.text(0, ResultSlot(0, 0), task, model.vision.tokens_of(page, -1 - i, inputs))


# Tables with fewer numbers are converted like everything else.
_LARGE = 4_000_000


@contextmanager
def in_float32(backbone: nn.Module) -> Iterator[None]:
    """Converts the present layers of a backbone to float32, for good. Large embedding tables keep their
    precision, and their rows are converted after look-up: converting a vocabulary takes longer than the
    proof."""
    tables = []
    for module in backbone.modules():
        is_large = type(module) is nn.Embedding and module.weight.numel() >= _LARGE
        if is_large and module.weight.dtype is not torch.float32:
            tables.append(module)
        else:
            module._apply(lambda x: x.float() if x.is_floating_point() else x, recurse=False)
    hooks = [table.register_forward_hook(lambda table, ids, rows: rows.float()) for table in tables]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# A tower's attribute with the layers whose outputs it returns beside the last one's (DeepStack).
_DEEP = "deepstack_visual_indexes"
# The field of configs with the kinds of layers, by which models look up masks.
_KINDS = "layer_types"
# The types of plain settings.
_PLAIN = (bool, int, float, str, type(None))
# Attributes with a module's index among the layers, which says nothing about its kind.
_INDEX_NAMES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index"})


@contextmanager
def sample_layers(backbone: Any) -> Iterator[None]:
    """Leaves a backbone with its first layers of each kind and its last; with all if its list of layers is
    not found. Layers differ in weights and perhaps in kind, so these prove it for all."""
    found = _layer_list(backbone)
    if found is None:
        yield
        return
    parent, name, layers = found
    indices = _one_of_each_kind(layers, backbone.config)
    sample = nn.ModuleList(layers[i] for i in indices)
    setattr(parent, name, sample)
    named = _kinds_named(backbone.config, len(layers))
    if named:
        setattr(backbone.config, _KINDS, [named[i] for i in indices])
    deep = getattr(backbone, _DEEP, None)
    if deep is not None:
        setattr(backbone, _DEEP, list(range(min(len(deep), len(sample)))))
    try:
        yield
    finally:
        setattr(parent, name, layers)
        if named:
            setattr(backbone.config, _KINDS, named)
        if deep is not None:
            setattr(backbone, _DEEP, deep)


def _layer_list(backbone: Any) -> tuple[nn.Module, str, nn.ModuleList] | None:
    """The only list with as many modules as the model has layers, with its parent and name."""
    config = getattr(backbone, "config", None)
    # Towers that encode pictures call it depth.
    count = getattr(config, "num_hidden_layers", None) or getattr(config, "depth", None)
    if count is None:
        return None
    lists = [
        (parent, name, child)
        for parent in backbone.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    return lists[0] if len(lists) == 1 and len(lists[0][2]) > 2 else None


def _kinds_named(config: Any, count: int) -> list[Any] | None:
    """The kinds of the `count` layers, if a config has them in a field of its own."""
    named = vars(config).get(_KINDS)
    return named if isinstance(named, list) and len(named) == count else None


def _one_of_each_kind(layers: nn.ModuleList, config: Any) -> list[int]:
    """The indices of the shortest run of first layers with all kinds, and of the last layer."""
    others = list(layers)[:-1]
    named = _kinds_named(config, len(layers)) or [None] * len(layers)
    kinds = [(_kind(layer), name) for layer, name in zip(others, named, strict=False)]
    enough = max(kinds.index(kind) for kind in set(kinds)) + 1
    return [*range(enough), len(layers) - 1]


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """The types, shapes and plain settings of all modules of a layer."""
    kind: list[object] = [(name, tuple(tensor.shape)) for name, tensor in layer.named_parameters()]
    for name, module in layer.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, _PLAIN)}
        settings = {key: value for key, value in plain.items() if key not in _INDEX_NAMES}
        kind.append((name, type(module), tuple(sorted(settings.items(), key=repr))))
    return tuple(kind)
