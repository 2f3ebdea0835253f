"""Runs all layers of a BERT-like encoder, or all layers with rotary positions, in one call of our library, on
a CPU. Going from layer to layer in Python takes as long as the products of a small step; in a large one,
results between products go to memory.

Used if it gives the same bits and is faster, which is tried at load."""

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from maxsimd.engine.execution.attention.cpu import CompiledBackend, CompiledMetadata
from maxsimd.engine.execution.fused_layers.parts import ROWS, random_like, record_attention
from maxsimd.engine.execution.fused_layers.rotary_layers import FusedRotaryLayer, LayersTogether
from maxsimd.engine.execution.linear import CompiledGated, CompiledLinear, CompiledOutput, children_of
from maxsimd.engine.execution.runner import (
    FIRSTS,
    ClsOnlyLastLayer,
    FasterRunner,
    PackedRunner,
    is_whole_text,
)
from maxsimd.engine.ops.cpu.linear import Layer, Layers, product_peak
from maxsimd.engine.ops.cpu.rotary_layers import RotaryLayers
from maxsimd.pooling.methods import PoolingCursor
from maxsimd.scheduler import Chunk, Step, TokenSequence

log = logging.getLogger(__name__)
# Steps of more rows run layer by layer: the memory that is kept between layers would be too large.
MOST_ROWS = 4096
# So do steps of more rows than this if one of as many is not faster in one call. With more threads that step
# has more rows.
FEW_ROWS, _ROWS_A_THREAD = 512, 32
# Rows of the small step that is tried at load.
_TRIED_ROWS = 64
# Further timings of a small and of a large step: the fewest, and the most while one call is not faster. On a
# busy machine the best of a few times says little.
_ROUNDS, _ROUNDS_OF_MANY = (5, 40), (0, 4)
# One call that takes less than this share of the time needs no further timings: a large model takes seconds.
_CLEARLY = 0.8
# Seconds of the further timings of a step; and of a step of many rows and its plain run, as estimated, above
# which they are not tried: of such a model's steps, Python takes a small share.
_MOST_SECONDS, _MOST_SECONDS_OF_MANY = 1.0, 5.0
# Seconds of a call.
Timer = Callable[[Callable[[], object]], float]


class OneCallRunner(FasterRunner):
    """Runs all layers of steps with at most `most_rows` rows in one call, if they have whole texts alone."""

    def __init__(self, inner: PackedRunner, most_rows: int) -> None:
        super().__init__(inner)
        self.most_rows = most_rows

    @torch.inference_mode()
    def forward(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        return self._run(step) if self.takes(step) else self.inner.forward(step)

    def takes(self, step: Step) -> bool:
        """Whether a step has whole texts alone, and not too many rows."""
        return 0 < step.num_tokens <= self.most_rows and all(map(is_whole_text, step.chunks))

    @abstractmethod
    def _run(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        """`forward` of a step that it takes."""


class BertRunner(OneCallRunner):
    """Runs the layers in one call after the backbone's `embeddings`. The last layer gives first rows alone if
    that of the packed runner does."""

    def __init__(self, inner: PackedRunner, embeddings: nn.Module, layers: Layers) -> None:
        super().__init__(inner, layers.most_rows)
        self._embeddings, self._layers = embeddings, layers

    def _run(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        batch = self.inner.lay_out(step)
        metadata = self.inner.prepare(batch)
        assert isinstance(metadata, CompiledMetadata)
        inputs = self.inner.inputs_of(batch)
        firsts_only = inputs.pop(FIRSTS, None) is not None
        hidden = self._embeddings(**{name: ids[None] for name, ids in inputs.items()})
        hidden = self._layers.run(hidden[0], metadata.sequences, firsts_only=firsts_only)
        return hidden, self.inner.cursor_of(batch)


class RotaryRunner(OneCallRunner):
    """Runs the backbone as usual: each of its layers notes what it is called with, and the last runs all of
    them in one call."""

    def __init__(self, inner: PackedRunner, fused: Sequence[FusedRotaryLayer]) -> None:
        """Raises ValueError for layers that cannot run in one call."""
        super().__init__(inner, MOST_ROWS)
        layers = RotaryLayers([layer.compiled() for layer in fused], MOST_ROWS)
        self._together = LayersTogether(layers, len(fused))
        for layer in fused:
            layer.together = self._together

    def _run(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        with self._together:
            return self.inner.forward(step)


def _seconds_of(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def with_one_call(
    runner: PackedRunner, backbone: Any, sequences: Sequence[TokenSequence], timer: Timer = _seconds_of
) -> PackedRunner | OneCallRunner:
    """The runner with all layers in one call, if that gives the same bits for the sequences in less time;
    else the runner itself. Logs the reason."""
    if not isinstance(runner.backend, CompiledBackend):
        return runner
    try:
        fast = _one_call(runner, backbone)
        reason = fast if isinstance(fast, str) else _reason_against(fast, sequences, timer)
        if isinstance(fast, OneCallRunner) and reason is None:
            _log_roofline(fast, backbone, sequences, timer)
            return fast
    except Exception as error:
        log.warning("steps run layer by layer, which is slower: %s", error)
        return runner
    log.debug("steps run layer by layer: %s", reason)
    return runner


def _one_call(runner: PackedRunner, backbone: Any) -> OneCallRunner | str:
    """The runner with all layers in one call, not tried yet; or the reason why there is none."""
    fused = [module for module in backbone.modules() if isinstance(module, FusedRotaryLayer)]
    if not fused:
        layers = packed_layers(backbone, MOST_ROWS)
        return layers if isinstance(layers, str) else BertRunner(runner, backbone.embeddings, layers)
    if not any(isinstance(module, nn.ModuleList) and [*module] == fused for module in backbone.modules()):
        return "not all of its layers have rotary positions"
    try:
        return RotaryRunner(runner, fused)
    except ValueError as error:
        return str(error)


def _reason_against(fast: OneCallRunner, sequences: Sequence[TokenSequence], timer: Timer) -> str | None:
    """None if steps give the same in one call, and small ones faster, else the reason. If large steps are not
    faster, the runner takes small ones alone. Tries steps of some sequences and of many, and the shortest and
    the longest alone."""
    texts = sorted((each for each in sequences if fast.takes(_step([each]))), key=len)
    if not texts:
        return "there is no sequence to try"
    some = [texts[0]]
    for text in texts[1:]:
        if sum(map(len, some)) + len(text) <= _TRIED_ROWS:
            some.append(text)
    rows_of_many = max(FEW_ROWS, _ROWS_A_THREAD * torch.get_num_threads())
    few, many = _step(some), _step(texts * -(-rows_of_many // sum(map(len, texts))))
    of_few, *alone = (_tried(fast, step, timer) for step in (few, _step(texts[:1]), _step(texts[-1:])))
    if of_few is None or None in alone:
        return "in one call they give something else"
    is_faster, measured = _is_faster(fast, few, timer, of_few, *_ROUNDS)
    if not is_faster:
        return f"one call takes {measured}"
    if sum(of_few) * many.num_tokens <= _MOST_SECONDS_OF_MANY * few.num_tokens:
        of_many = _tried(fast, many, timer)
        if of_many is None:
            return "in one call they give something else"
        is_faster, more_measured = _is_faster(fast, many, timer, of_many, *_ROUNDS_OF_MANY)
        measured += f"; {more_measured}"
    else:
        is_faster = False
    if not is_faster:
        fast.most_rows = FEW_ROWS
    log.debug("steps of up to %d rows run all layers in one call: %s", fast.most_rows, measured)
    return None


def _log_roofline(
    fast: OneCallRunner, backbone: Any, sequences: Sequence[TokenSequence], timer: Timer
) -> None:
    """Logs how near a step of the sequences comes to what the processor can multiply."""
    products = [
        each.product
        for each in backbone.modules()
        if isinstance(each, CompiledLinear | CompiledOutput | CompiledGated)
    ]
    if not products or not log.isEnabledFor(logging.DEBUG):
        return
    step = _step([each for each in sequences if fast.takes(_step([each]))])
    seconds = min(timer(lambda: fast.forward(step)) for _ in range(_ROUNDS[0]))
    operations = 2 * step.num_tokens * sum(each.weights.inputs * each.weights.columns for each in products)
    size = sum(each.weights.packed.nbytes for each in products)
    peak = product_peak(products[0].weights.kind)
    log.debug(
        "%d rows: products of %.1f GFLOP with %.0f MiB of weights, at %.0f%% of the peak of %.0f GFLOP/s",
        step.num_tokens,
        operations / 1e9,
        size / 2**20,
        100 * operations / seconds / peak,
        peak / 1e9,
    )


def _tried(fast: OneCallRunner, step: Step, timer: Timer) -> tuple[float, float] | None:
    """The seconds of a step in one call and layer by layer; None if the results differ."""
    results: list[tuple[torch.Tensor, PoolingCursor]] = []
    ours = timer(lambda: results.append(fast.forward(step)))
    plain = timer(lambda: results.append(fast.inner.forward(step)))
    (found, cursor), (expected, its_cursor) = results
    return (ours, plain) if torch.equal(found, expected) and cursor.starts == its_cursor.starts else None


def _is_faster(
    fast: OneCallRunner, step: Step, timer: Timer, tried: tuple[float, float], fewest: int, most: int
) -> tuple[bool, str]:
    """Whether a step is faster in one call than layer by layer, by the least seconds `tried` and of further
    tries; and what was measured."""
    ours, plain = tried
    spent = 0.0
    for number in range(most):
        if spent > _MOST_SECONDS or (ours < plain and (number >= fewest or ours < _CLEARLY * plain)):
            break
        once, plainly = timer(lambda: fast.forward(step)), timer(lambda: fast.inner.forward(step))
        spent += once + plainly
        ours, plain = min(ours, once), min(plain, plainly)
    measured = f"{1e3 * ours:.2f} ms for {step.num_tokens} rows, {1e3 * plain:.2f} ms layer by layer"
    return ours < plain, measured


def _step(sequences: Sequence[TokenSequence]) -> Step:
    return Step(0, tuple(Chunk(each, 0, len(each)) for each in sequences))


def packed_layers(backbone: Any, most_rows: int) -> Layers | str:
    """The layers of a backbone that is built as BERT and whose products are packed, for steps of at most
    `most_rows` rows; or the reason why they cannot run in one call."""
    if children_of(backbone) != {"embeddings", "encoder"} or children_of(backbone.encoder) != {"layer"}:
        return "it does not consist of embeddings and layers alone"
    if any(module._forward_hooks or module._forward_pre_hooks for module in backbone.modules()):
        return "its modules have hooks"
    layers, asked = [], set()
    for number, module in enumerate(backbone.encoder.layer):
        layer = _layer(module)
        if layer is None:
            return f"layer {number} is not built as BERT's, or its products are not packed"
        attention = _attention(module.attention.self, layer)
        if attention is None:
            return f"layer {number} attends in another way"
        layers.append(layer)
        asked.add(attention)
    if len(asked) != 1:
        return "its layers attend in different ways"
    heads, scaling = asked.pop()
    try:
        return Layers(layers, heads, scaling, most_rows)
    except ValueError as error:
        return str(error)


def _layer(module: Any) -> Layer | None:
    """The products and norms of a layer; None if it is not built as BERT's."""
    if children_of(module) != {"attention", "intermediate", "output"}:
        return None
    if children_of(module.attention) != {"self", "output"}:
        return None
    attention, wide = module.attention.self, module.intermediate
    after = module.attention.output
    if isinstance(after, ClsOnlyLastLayer):
        after = after.inner
    if children_of(attention) != {"query", "key", "value", "dropout"}:
        return None
    if children_of(wide) != {"dense", "intermediate_act_fn"}:
        return None
    is_gelu = isinstance(wide.dense, CompiledLinear) and wide.dense.gelu
    if not is_gelu or type(wide.intermediate_act_fn) is not nn.Identity:
        return None
    inputs = [attention.query, attention.key, attention.value]
    if not all(isinstance(each, CompiledLinear) and not each.gelu for each in inputs):
        return None
    if not isinstance(after, CompiledOutput) or not isinstance(module.output, CompiledOutput):
        return None
    narrow, (query, key, value) = module.output, (each.product for each in inputs)
    last = (wide.dense.product, narrow.product, narrow.norm)
    return Layer(query, key, value, after.product, after.norm, *last)


def _attention(module: Any, layer: Layer) -> tuple[int, float] | None:
    """The heads and the scaling of a self-attention; None if, on random rows, it does anything else with the
    products of queries, keys and values than attend."""
    weights = layer.query.weights
    x = random_like((1, ROWS, weights.inputs), torch.empty(0, dtype=weights.dtype))
    found = record_attention(lambda attention: module(x, step_attention=attention)[0])
    if found is None:
        return None
    qkv, _ = found
    if qkv.window is not None or qkv.relative is not None:
        return None
    with torch.inference_mode():
        for name in ("query", "key", "value"):
            # [heads, rows, head_dim] beside [1, rows, heads * head_dim]
            asked, made = getattr(qkv, name), getattr(module, name)(x)
            if not torch.equal(asked.transpose(0, 1).reshape(made.shape), made):
                return None
    return len(qkv.query), qkv.scaling
