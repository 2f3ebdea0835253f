"""Steps as CUDA graphs: for most, launching kernels one by one takes longer than running them.

A graph is captured for each of a few sizes, and replayed with a step's tokens in its inputs. Rows beyond the
step's belong to no sequence, and sequences beyond the step's have no rows.

All graphs share the memory of the largest: with the hidden states that all write to, as much as one eager
step of its size takes. That is 30 KiB a row, or 480 MiB for 16,384 rows of 1,024 hidden units in 16 bits. For
the 19 sizes of such a model seven passes each are run at load, 460,000 rows in all: about a second.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from maxsimd.engine.execution.attention.base import AttentionBackend, CapturableBackend, CaptureSize
from maxsimd.engine.execution.graph_recorder import CudaRecorder, Recorder
from maxsimd.engine.execution.graph_sizes import is_worth_capturing, least_tokens, sizes_for
from maxsimd.engine.execution.graph_steps import filling_steps
from maxsimd.engine.execution.host_waits import waits_in
from maxsimd.engine.execution.packed_runner import PackedRunner
from maxsimd.engine.execution.static_graph import StaticGraph
from maxsimd.pooling.methods import PoolingCursor
from maxsimd.scheduler import Chunk, ImageJob, Step, TokenSequence

log = logging.getLogger(__name__)

# Of hidden states, relative to the largest: graphs run the same kernels, at most with other tiles.
TOLERANCE = 0.02
# Of the device's free memory, that a graph may hold for good.
_MEMORY = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """A graph, and the fewest tokens of a step that gains from it."""

    static: StaticGraph
    least_tokens: int


class GraphedRunner:
    """A `PackedRunner` whose steps of whole sequences are replayed where a graph holds them."""

    def __init__(self, inner: PackedRunner, device: torch.device) -> None:
        self.chunked = inner.chunked
        self._inner = inner
        self._device = device
        self._graphs: dict[CaptureSize, _Graph] = {}  # the smallest first
        # Tokens that a replay computes in the time that the host needs to launch a step kernel by kernel.
        self.launch_tokens = 0
        self._hidden: torch.Tensor | None = None  # [rows of the largest, hidden], to which all of them write

    @torch.inference_mode()
    def forward(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        """As any `ModelRunner`."""
        graph = self._graph_for(step)
        if graph is not None:
            batch = self._inner.lay_out(step)
            hidden = graph.replay(batch)
            if hidden is not None:
                # A copy: the next replay overwrites the graph's memory.
                return hidden[: len(batch.input_ids)].clone(), batch.cursor
        return self._inner.forward(step)

    def encode(self, images: Sequence[ImageJob]) -> None:
        self._inner.encode(images)

    def free(self, sequence_id: int) -> None:
        self._inner.free(sequence_id)

    @property
    def num_features(self) -> int:
        return self._inner.num_features

    @property
    def num_prefill_kv(self) -> int:
        return self._inner.num_prefill_kv

    @property
    def sizes(self) -> tuple[CaptureSize, ...]:
        """What it has graphs for, the smallest first."""
        return tuple(self._graphs)

    @torch.inference_mode()
    def capture_all(
        self,
        backend: CapturableBackend,
        sizes: Sequence[CaptureSize],
        samples: Sequence[TokenSequence],
        recorder: Recorder,
    ) -> Mapping[CaptureSize, str]:
        """Captures a graph for each of the sizes, the largest first, with steps of the samples' tokens, and
        drops those that give something else than the steps give without them. Returns why, by
        size. Captures none for a model that waits for the device within a step."""
        if not self._may_be_captured(filling_steps(sizes[-1], samples)[0]):
            return {}
        mismatches = {}
        for size in sizes:
            try:
                mismatch = self._capture(backend, size, filling_steps(size, samples), recorder)
            except Exception as error:
                mismatch = f"they failed: {error}"
            if mismatch is not None:
                mismatches[size] = mismatch
        self._graphs = {size: self._graphs[size] for size in sorted(self._graphs)}
        return mismatches

    def _may_be_captured(self, step: Step) -> bool:
        """Whether the model does not wait for the device in a step; if it does, the log says where."""
        try:
            self._inner.forward(step)  # what is made once may wait
            waits = waits_in(lambda: self._inner.forward(step), self._device)
        except Exception as error:
            log.warning("no CUDA graphs: a step cannot be watched: %s", error)
            return False
        if waits:
            log.debug("no CUDA graphs: the model waits for the device (%s)", ", ".join(waits))
        return not waits

    def _capture(
        self, backend: CapturableBackend, size: CaptureSize, steps: Sequence[Step], recorder: Recorder
    ) -> str | None:
        """Captures and compares the graph of a size; says how it differs if it does. Does nothing where it
        would be no help."""
        runner, full = self._inner, steps[0]
        exact = [runner.forward(step)[0] for step in steps]
        eager = recorder.cost(lambda: runner.forward(full))
        if eager.memory > _MEMORY:
            log.debug("no CUDA graph of %s: it would take %.0f%% of the memory", size, 100 * eager.memory)
            return None
        if not is_worth_capturing(eager.times.host, eager.times.device):
            log.debug("no CUDA graph of %s: its steps are bound by the device", size)
            return None
        batch = runner.lay_out(full)
        inputs = runner.inputs_of(batch)
        tried = runner.prepare(batch)
        runner.run({name: ids.to(self._device) for name, ids in inputs.items()}, tried)
        static = backend.prepare_for_capture(tried, size)
        if static is None:
            log.debug("no CUDA graph of %s: its attention would cost more than it saves", size)
            return None
        if self._hidden is None:
            self._hidden = exact[0].new_empty(size.rows, exact[0].shape[-1])
        graph = StaticGraph(runner, static, batch, self._hidden[: size.rows], recorder)
        replay = recorder.cost(graph.again).times.device
        least = least_tokens(size.rows, eager.times.host, replay)
        self._graphs[size] = _Graph(graph, least)
        mismatch = self._mismatch(graph, steps, exact)
        if mismatch is not None:
            del self._graphs[size]
            return mismatch
        self.launch_tokens = max(self.launch_tokens, int(size.rows * eager.times.host / max(replay, 1e-3)))
        return None

    def _mismatch(
        self, graph: StaticGraph, steps: Sequence[Step], exact: Sequence[torch.Tensor]
    ) -> str | None:
        """None if a graph gives for steps what they give without it, else a description of the mismatch."""
        for step, expected in zip(steps, exact, strict=True):
            batch = self._inner.lay_out(step)
            hidden = graph.replay(batch)
            if hidden is None:
                continue  # nor will it be replayed for such steps
            ours, plain = hidden[: len(expected)].float(), expected.float()
            worst = float((ours - plain).abs().max() / plain.abs().max().clamp(min=1e-6))
            if not worst <= TOLERANCE:
                return f"their hidden states differ by {worst:.2g} of the largest"
        return None

    def _graph_for(self, step: Step) -> StaticGraph | None:
        """The smallest graph that holds a step and helps with it."""
        if not step.chunks or not all(is_replayable(chunk) for chunk in step.chunks):
            return None
        for size, graph in self._graphs.items():
            if size.rows >= step.num_tokens and size.sequences >= len(step.chunks):
                return graph.static if step.num_tokens >= graph.least_tokens else None
        return None


def is_replayable(chunk: Chunk) -> bool:
    """Whether a graph may hold a chunk: a whole text, whose positions are those of text."""
    tokens = chunk.sequence.tokens
    return chunk.is_whole and not chunk.is_prefix and not tokens.images and tokens.position_ids is None


def with_graphs(
    runner: PackedRunner,
    backend: AttentionBackend[Any],
    device: torch.device,
    samples: Sequence[TokenSequence],
    most: CaptureSize,
) -> PackedRunner | GraphedRunner:
    """The runner with graphs for steps of up to the size `most`, as far as they can be captured and give the
    same hidden states for steps of the samples' tokens; a warning says for which sizes they do not. The
    runner itself where there are none."""
    texts = [each for each in samples if is_replayable(Chunk(each, 0, len(each)))]
    if device.type != "cuda" or not isinstance(backend, CapturableBackend) or not texts:
        return runner
    graphed = GraphedRunner(runner, device)
    began = time.perf_counter()
    mismatches = graphed.capture_all(
        backend, sizes_for(most.rows, most.sequences, most.longest), texts, CudaRecorder()
    )
    for reason, sizes in _by_reason(mismatches).items():
        log.warning("steps are not replayed as CUDA graphs of %s: %s", ", ".join(map(str, sizes)), reason)
    if not graphed.sizes:
        return runner
    seconds = time.perf_counter() - began
    log.debug("%d CUDA graphs, up to %s, took %.1f s", len(graphed.sizes), graphed.sizes[-1], seconds)
    return graphed


def _by_reason(mismatches: Mapping[CaptureSize, str]) -> Mapping[str, list[CaptureSize]]:
    found = defaultdict(list)
    for size, reason in mismatches.items():
        found[reason].append(size)
    return found
