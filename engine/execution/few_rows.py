"""Steps of few rows on a CPU, with all layers of an encoder in one call of our library: for these, going from
layer to layer in Python takes as long as the layers' products.

Used where it gives the same to the last bit and takes less time, which is found out at load.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from maxsimd.engine.execution.attention.cpu_kernel import CompiledBackend, CompiledMetadata
from maxsimd.engine.execution.cuda_graphs import is_replayable
from maxsimd.engine.execution.fused_layers.embeddings import Embeddings, short_embeddings
from maxsimd.engine.execution.fused_layers.few_rows import packed_layers
from maxsimd.engine.execution.packed_runner import PackedRunner
from maxsimd.engine.ops.cpu.layers import Layers
from maxsimd.pooling.cursor import PoolingCursor
from maxsimd.scheduler import Chunk, ImageJob, Step
from maxsimd.scheduler import Sequence as TokenSequence

log = logging.getLogger(__name__)

# Of larger steps the products take nearly all of the time, and there threads take work as they are free.
MOST_ROWS = 512
# The rows of the step that is tried at load.
_TRIED_ROWS = 64
# How often both ways are timed: at least, and at most while one call is not the faster. Where others load models
# meanwhile, the best of a few times says little.
_ROUNDS, _MOST_ROUNDS = 5, 40

# Seconds of a call.
Timer = Callable[[Callable[[], object]], float]


class FewRowsRunner:
    """A `PackedRunner` whose steps of few rows run all layers in one call. `embeddings` gives the backbone's;
    with `firsts_only` the last layer gives the first row of each sequence alone."""

    def __init__(
        self, inner: PackedRunner, embeddings: Embeddings, layers: Layers, *, firsts_only: bool
    ) -> None:
        self.chunked = inner.chunked
        self.inner = inner
        self._embeddings = embeddings
        self._layers = layers
        self._firsts_only = firsts_only

    @torch.inference_mode()
    def forward(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        """As any `ModelRunner`."""
        if not self.takes(step):
            return self.inner.forward(step)
        batch = self.inner.lay_out(step)
        metadata = self.inner.prepare(batch)
        assert isinstance(metadata, CompiledMetadata)
        hidden = self._embeddings(self.inner.inputs_of(batch))
        hidden = self._layers.run(hidden, metadata.sequences, firsts_only=self._firsts_only)
        cursor = batch.cursor
        if self._firsts_only:
            cursor = PoolingCursor(cursor.chunks, tuple(range(len(cursor.chunks))))
        return hidden, cursor

    def takes(self, step: Step) -> bool:
        """Whether a step is run in one call: it has few rows, and whole texts alone."""
        if not 0 < step.num_tokens <= self._layers.most_rows:
            return False
        return all(is_replayable(chunk) for chunk in step.chunks)

    def encode(self, images: Sequence[ImageJob]) -> None:
        self.inner.encode(images)

    def free(self, sequence_id: int) -> None:
        self.inner.free(sequence_id)

    @property
    def num_features(self) -> int:
        return self.inner.num_features

    @property
    def num_prefill_kv(self) -> int:
        return self.inner.num_prefill_kv


def seconds_of(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def with_few_rows(
    runner: PackedRunner, backbone: Any, sequences: Sequence[TokenSequence], timer: Timer | None = None
) -> PackedRunner | FewRowsRunner:
    """The runner with a way of its own for steps of few rows, if the backbone's layers can be run in one
    call, give the same bits for the sequences, and take less time so; else the runner itself. The log says
    which, and why."""
    if not isinstance(runner.backend, CompiledBackend):
        return runner
    try:
        layers = packed_layers(backbone, MOST_ROWS)
        if isinstance(layers, Layers):
            firsts_only = runner.cls_only is not None
            embeddings = short_embeddings(backbone.embeddings, runner.input_names)
            fast = FewRowsRunner(runner, embeddings, layers, firsts_only=firsts_only)
            reason = _why_not(fast, sequences, timer or seconds_of)
            if reason is None:
                return fast
        else:
            reason = layers
    except Exception as error:
        log.warning("steps of few rows run layer by layer, which is slower: %s", error)
        return runner
    log.info("steps of few rows run layer by layer: %s", reason)
    return runner


def _why_not(fast: FewRowsRunner, sequences: Sequence[TokenSequence], timer: Timer) -> str | None:
    """None if steps of few rows are the same and faster in one call, else the reason why they are not run so.

    Tries a step of some sequences, and the shortest and the longest alone."""
    texts = sorted((each for each in sequences if fast.takes(_step([each]))), key=len)
    if not texts:
        return "there is no sequence to try"
    some = [texts[0]]
    for text in texts[1:]:
        if sum(map(len, some)) + len(text) <= _TRIED_ROWS:
            some.append(text)
    for step in (_step(some), _step(texts[:1]), _step(texts[-1:])):
        (found, cursor), (expected, its_cursor) = fast.forward(step), fast.inner.forward(step)
        if not torch.equal(found, expected) or cursor.starts != its_cursor.starts:
            return "in one call they give something else"
    step = _step(some)
    ours = plain = float("inf")
    for number in range(1, _MOST_ROUNDS + 1):
        ours = min(ours, timer(lambda: fast.forward(step)))
        plain = min(plain, timer(lambda: fast.inner.forward(step)))
        if number >= _ROUNDS and ours < plain:
            break
    measured = f"{1e3 * ours:.2f} ms for {step.num_tokens} rows, {1e3 * plain:.2f} ms layer by layer"
    if not ours < plain:
        return f"one call takes {measured}"
    log.info("steps of up to %d rows run all layers in one call: %s", MOST_ROWS, measured)
    return None


def _step(sequences: Sequence[TokenSequence]) -> Step:
    return Step(0, tuple(Chunk(each, 0, len(each)) for each in sequences))
