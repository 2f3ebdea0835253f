"""Small steps as CUDA graphs: for these, launching kernels one by one takes longer than running them.

A graph is captured for each of a few numbers of rows and replayed with a step's tokens in its inputs. Rows
and sequences that the step does not have are there without meaning: no sequence covers these rows, and these
sequences have none.
"""

import bisect
import logging
from collections.abc import Callable

import torch

from maxsimd.engine.execution.attention.base import PackedAttention, Tables
from maxsimd.engine.execution.layout import Group, Layout
from maxsimd.engine.execution.packed_runner import PackedRunner
from maxsimd.pooling.cursor import PoolingCursor
from maxsimd.pooling.transfer import to_device
from maxsimd.scheduler import Step

log = logging.getLogger(__name__)

# A step runs in the first of these that holds it.
ROWS = (32, 64, 128, 256, 512)
SEQUENCES = 32

# Of hidden states, relative to their size: graphs run the same kernels, at most in another tiling.
TOLERANCE = 0.02

# Captures what a function launches and returns what launches it again.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


class GraphedRunner:
    """A `PackedRunner` whose small steps of whole sequences are replayed."""

    def __init__(
        self, inner: PackedRunner, tables: Tables, causal: bool, device: torch.device, capture: Capture
    ) -> None:
        self.chunked = inner.chunked
        self._inner = inner
        self._tables = tables
        self._causal = causal
        self._device = device
        self._capture = capture
        self._graphs: dict[int, _Graph] = {}

    @torch.inference_mode()
    def forward(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        """As any `ModelRunner`."""
        rows = rows_for(step)
        if rows not in self._graphs:
            return self._inner.forward(step)
        batch = self._inner.lay_out(step)
        hidden = self._graphs[rows].replay(
            self._inner.inputs_of(batch), self._tables(batch.layout, SEQUENCES)
        )
        # A copy: what comes next is written to the same place.
        return hidden[: len(batch.input_ids)].clone(), batch.cursor

    def free(self, sequence_id: int) -> None:
        self._inner.free(sequence_id)

    @property
    def num_prefill_kv(self) -> int:
        return self._inner.num_prefill_kv

    @torch.inference_mode()
    def capture_all(self, step: Step) -> None:
        """Captures a graph for each number of rows; `step` shows the names of the inputs."""
        names = self._inner.inputs_of(self._inner.lay_out(step))
        for rows in ROWS:
            layout = Layout((Group(0, 1, rows, (rows,)),), (), self._causal)
            self._graphs[rows] = _Graph(
                self._inner, list(names), layout, self._tables, self._device, self._capture
            )


class _Graph:
    """What is captured for one number of rows: places for the inputs, and the hidden states that come of
    them."""

    def __init__(
        self,
        runner: PackedRunner,
        names: list[str],
        layout: Layout,
        tables: Tables,
        device: torch.device,
        capture: Capture,
    ) -> None:
        rows = layout.groups[0].length
        self._inputs = {name: torch.zeros(rows, dtype=torch.int64, device=device) for name in names}
        self._tables = {
            key: to_device(table, device).clone() for key, table in tables(layout, SEQUENCES).items()
        }
        layout.masks.update(self._tables)
        self._hidden = runner.run(self._inputs, layout)

        def run() -> None:
            self._hidden = runner.run(self._inputs, layout)

        self._replay = capture(run)

    def replay(self, inputs: dict[str, torch.Tensor], tables: dict[object, torch.Tensor]) -> torch.Tensor:
        """The hidden states of the graph's rows, of which the first are the inputs'."""
        for name, place in self._inputs.items():
            given = inputs[name]
            place[: len(given)].copy_(to_device(given, place.device))
        for key, table in self._tables.items():
            table.copy_(to_device(tables[key], table.device))
        self._replay()
        return self._hidden


def rows_for(step: Step) -> int | None:
    """The rows of the graph that a step may run in, if there is one for it."""
    if len(step.chunks) > SEQUENCES or not all(
        chunk.is_whole and not chunk.is_prefix for chunk in step.chunks
    ):
        return None
    place = bisect.bisect_left(ROWS, step.num_tokens)
    return ROWS[place] if place < len(ROWS) else None


def with_graphs(
    runner: PackedRunner, attention: PackedAttention, causal: bool, device: torch.device, steps: list[Step]
) -> PackedRunner | GraphedRunner:
    """The runner with graphs, where these can be captured and give the same for sample steps; else itself,
    with a warning if they were to be had."""
    if device.type != "cuda" or attention.tables is None:
        return runner
    graphed = GraphedRunner(runner, attention.tables, causal, device, capture_on_cuda())
    try:
        graphed.capture_all(steps[0])
        trouble = why_different(graphed, runner, steps)
    except Exception as error:
        trouble = f"they failed: {error}"
    if trouble is None:
        return graphed
    log.warning("small steps are not replayed as CUDA graphs: %s", trouble)
    return runner


def why_different(graphed: GraphedRunner, runner: PackedRunner, steps: list[Step]) -> str | None:
    """None where replayed steps give what they give without graphs."""
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
