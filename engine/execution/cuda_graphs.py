"""Small steps as CUDA graphs: for these, launching kernels one by one takes longer than running them.

A graph is captured for each of a few numbers of rows, and replayed with a step's tokens in its inputs. Rows
beyond the step's belong to no sequence, and sequences beyond the step's have no rows.
"""

import bisect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from maxsimd.engine.execution.attention.base import AttentionBackend, CapturableBackend, CaptureMetadata
from maxsimd.engine.execution.layout import Group, Layout
from maxsimd.engine.execution.packed_runner import PackedRunner
from maxsimd.pooling.cursor import PoolingCursor
from maxsimd.pooling.transfer import to_device
from maxsimd.scheduler import ImageJob, Step

log = logging.getLogger(__name__)

# A step runs in the graph with the fewest rows that holds it.
ROWS = (32, 64, 128, 256, 512)
SEQUENCES = 32

# Of hidden states, relative to their size: graphs run the same kernels, at most with other tiles.
TOLERANCE = 0.02

# Captures what a function launches and returns what launches it again.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


class GraphedRunner:
    """A `PackedRunner` whose small steps of whole sequences are replayed."""

    def __init__(self, inner: PackedRunner, device: torch.device) -> None:
        self.chunked = inner.chunked
        self._inner = inner
        self._device = device
        self._graphs: dict[int, _Graph] = {}

    @torch.inference_mode()
    def forward(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        """As any `ModelRunner`."""
        rows = rows_for(step)
        if rows not in self._graphs:
            return self._inner.forward(step)
        batch = self._inner.lay_out(step)
        hidden = self._graphs[rows].replay(self._inner.inputs_of(batch), batch.layout)
        # A copy: the next replay overwrites the graph's memory.
        return hidden[: len(batch.input_ids)].clone(), batch.cursor

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

    @torch.inference_mode()
    def capture_all(self, backend: CapturableBackend, step: Step, capture: Capture) -> None:
        """Captures a graph for each number of rows; `step` shows which inputs the model takes."""
        batch = self._inner.lay_out(step)
        for rows in ROWS:
            inputs = {
                name: torch.zeros(rows, dtype=torch.int64, device=self._device)
                for name in self._inner.inputs_of(batch)
            }
            layout = Layout(batch.layout.causal, (Group(0, 1, rows, (rows,)),))
            metadata = backend.prepare_for_capture(layout, SEQUENCES, self._device)
            self._graphs[rows] = _Graph(self._inner, inputs, metadata, capture)


class _Graph:
    """The graph for one number of rows: static memory for the inputs and the metadata, and the hidden states
    that a replay computes from them."""

    def __init__(
        self,
        runner: PackedRunner,
        inputs: dict[str, torch.Tensor],
        metadata: CaptureMetadata,
        capture: Capture,
    ) -> None:
        self._inputs = inputs
        self._metadata = metadata
        self._hidden = runner.run(inputs, metadata.metadata)

        def run() -> None:
            self._hidden = runner.run(inputs, metadata.metadata)

        self._replay = capture(run)

    def replay(self, inputs: dict[str, torch.Tensor], layout: Layout) -> torch.Tensor:
        """The hidden states of the graph's rows, of which the first are those of the inputs."""
        for name, static in self._inputs.items():
            given = inputs[name]
            static[: len(given)].copy_(to_device(given, static.device))
        self._metadata.load(layout)
        self._replay()
        return self._hidden


def rows_for(step: Step) -> int | None:
    """The rows of the graph that a step may run in, or None."""
    if len(step.chunks) > SEQUENCES or not all(
        chunk.is_whole and not chunk.is_prefix and not chunk.sequence.tokens.images for chunk in step.chunks
    ):
        return None
    index = bisect.bisect_left(ROWS, step.num_tokens)
    return ROWS[index] if index < len(ROWS) else None


def with_graphs(
    runner: PackedRunner, backend: AttentionBackend[Any], device: torch.device, steps: list[Step]
) -> PackedRunner | GraphedRunner:
    """The runner with graphs, if they can be captured and give the same hidden states for sample steps; else
    the runner itself, with a warning where graphs were to be expected."""
    if device.type != "cuda" or not isinstance(backend, CapturableBackend):
        return runner
    graphed = GraphedRunner(runner, device)
    try:
        graphed.capture_all(backend, steps[0], capture_on_cuda())
        mismatch = find_mismatch(graphed, runner, steps)
    except Exception as error:
        mismatch = f"they failed: {error}"
    if mismatch is None:
        return graphed
    log.warning("small steps are not replayed as CUDA graphs: %s", mismatch)
    return runner


def find_mismatch(graphed: GraphedRunner, runner: PackedRunner, steps: list[Step]) -> str | None:
    """None if replayed steps give what they give without graphs, else a description of the mismatch."""
    for step in steps:
        ours, exact = (each.forward(step)[0].float() for each in (graphed, runner))
        worst = float((ours - exact).abs().max() / exact.abs().max().clamp(min=1e-6))
        if not worst <= TOLERANCE:
            return f"their hidden states differ by {worst:.2g} of the largest"
    return None


def capture_on_cuda() -> Capture:
    """Graphs that share their memory, because only one runs at a time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
        return graph.replay

    return capture
