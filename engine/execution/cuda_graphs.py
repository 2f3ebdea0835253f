"""Replays steps as CUDA graphs: most steps take longer to launch kernel by kernel than to run.

A graph is captured for each of a few sizes and replayed with a step's tokens in its inputs. Rows beyond the
step's belong to no sequence, and sequences beyond the step's have no rows.

All graphs share the memory of the largest: with 1,024 hidden units in 16 bits 30 KiB per row, 480 MiB for
16,384 rows. The 19 sizes of such a model run seven passes each at load, about a second."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from maxsimd.engine.execution.attention.backend import CaptureSize
from maxsimd.engine.execution.attention.gpu import StaticBlocks, TritonBackend
from maxsimd.engine.execution.devices import Times, times_on_cuda
from maxsimd.engine.execution.layout import PackedBatch
from maxsimd.engine.execution.runner import FIRSTS, FasterRunner, PackedRunner, is_whole_text
from maxsimd.pooling.methods import PoolingCursor
from maxsimd.scheduler import Chunk, ResultSlot, Step, Tokens, TokenSequence
from maxsimd.scheduler.sequence import AnyTokens

log = logging.getLogger(__name__)
Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Cost:
    """The times of a run, and the share of the device's free memory that it needs."""

    times: Times
    memory: float


class CudaRecorder:
    """Measures what a model launches, and captures it as CUDA graphs of the thread's current device. They
    share their memory: one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream()

    def cost(self, run: Run) -> Cost:
        """The cost of a function that has run before."""
        torch.cuda.synchronize()
        before, (free, _) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
        # Memory that torch holds unused is free as well.
        free += torch.cuda.memory_reserved() - before
        torch.cuda.reset_peak_memory_stats()
        times = times_on_cuda(run)
        return Cost(times, (torch.cuda.max_memory_allocated() - before) / max(free, 1))

    def capture(self, run: Run) -> Callable[[], None]:
        """Captures what a function launches; returns a function that launches it again."""
        # On a side stream first, as torch asks for: libraries set up what a graph may not.
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            run()
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay


ROWS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Enough for most steps; empty sequences make the attention of a graph a little slower.
_FEW_SEQUENCES = 32
# The share of a graph's rows that a step may leave empty if its replay takes longer than launching would.
_EMPTY = 0.125
# If the device takes this many times as long as the host, graphs would only take memory.
_DEVICE_BOUND = 8.0


def sizes_for(rows: int, sequences: int, longest: int) -> tuple[CaptureSize, ...]:
    """The sizes for steps of up to `rows` tokens and `sequences` sequences of up to `longest` tokens, each
    with few sequences and with the most. The largest comes first: the others need no more memory."""
    found = {
        CaptureSize(size, min(size, most, sequences), min(size, longest))
        for size in {*(size for size in ROWS if size < rows), min(rows, ROWS[-1])}
        for most in (_FEW_SEQUENCES, sequences)
    }
    return tuple(sorted(found, reverse=True))


def filling_steps(size: CaptureSize, samples: Sequence[TokenSequence]) -> tuple[Step, ...]:
    """Two steps of the samples' tokens: one with as many sequences and rows as the graph holds, the samples
    among them; and one of few long sequences, with empty rows."""
    rows = max(1, size.rows - size.rows // 10)
    starts = range(0, rows, size.longest)[: size.sequences]
    lengths = [min(size.longest, rows - start) for start in starts]
    return _step(samples, [*_many(size, [sample.tokens for sample in samples])]), _step(samples, lengths)


def _many(size: CaptureSize, samples: Sequence[AnyTokens]) -> Iterator[AnyTokens | int]:
    """Samples for up to half of the sequences, then random lengths for the others, which take the other
    rows."""
    rows, sequences = size.rows, size.sequences
    for number in range(size.sequences // 2):
        tokens = samples[number % len(samples)]
        if len(tokens) <= rows - (sequences - 1):
            yield tokens
            rows, sequences = rows - len(tokens), sequences - 1
    yield from _random_lengths(rows, size.longest, sequences)


def _random_lengths(rows: int, longest: int, count: int) -> Iterator[int]:
    """`count` lengths from 1 to `longest`, `rows` in all if possible, else fewer."""
    random = np.random.default_rng(rows)
    for others in range(count - 1, -1, -1):
        least = max(1, min(longest, rows - others * longest))
        most = max(least, min(longest, rows - others, 2 * rows // (others + 1)))
        length = int(random.integers(least, most + 1)) if others else min(longest, rows)
        yield length
        rows -= length


def _step(samples: Sequence[TokenSequence], parts: Sequence[AnyTokens | int]) -> Step:
    """A step of sequences with these tokens, or with the samples' tokens one after the other in these
    lengths."""
    ids = np.concatenate([sample.tokens.ids for sample in samples])
    types = [given for sample in samples if (given := sample.tokens.type_ids) is not None]
    of_type = np.concatenate(types) if len(types) == len(samples) else None
    chunks = []
    for key, part in enumerate(parts):
        tokens: AnyTokens
        if isinstance(part, int):
            tokens = Tokens(np.resize(ids, part), None if of_type is None else np.resize(of_type, part))
        else:
            tokens = part
        sequence = TokenSequence.text(key, ResultSlot(0, key), samples[0].payload.task, tokens)
        chunks.append(Chunk(sequence, 0, len(sequence)))
    return Step(0, tuple(chunks))


# torch's tags of functions whose result, or its size, depends on numbers in their arguments.
_DEPENDS_ON_NUMBERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_AS_NUMBERS = (torch.bool, torch.uint8)
_aten = torch.ops.aten
# Functions with positions to write to, which may be a mask.
_WRITES = (_aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index_put)
_COPIES = (_aten._to_copy, _aten.to, _aten.copy_)


def waits_in(run: Callable[[], object], device: torch.device) -> list[str]:
    """Runs a function; returns the sorted names of torch's functions in it that wait for the device. Such a
    function cannot be captured, and an attempt breaks later ones too."""
    with _Watch(device) as watch:
        run()
    return sorted(watch.waits)


class _Watch(TorchDispatchMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: set[str] = set()
        self._device = device

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func.namespace == "aten" and "device" not in given:
            with self:  # in inference mode composite functions come here
                result = func.decompose(*args, **given)
            if result is not NotImplemented:
                return result
        result = func(*args, **given)
        kind = self._device.type
        if any(isinstance(each, torch.Tensor) and each.device.type == kind for each in args):
            comes_back = func.overloadpacket in _COPIES and result.device.type != kind
            if comes_back or _reads_numbers(func, args, given):
                self.waits.add(str(func))
        return result


def _reads_numbers(func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    if func.overloadpacket in _WRITES:
        return _has_mask(args[1]) and args[2].numel() > 1  # a single number needs no look
    if not _DEPENDS_ON_NUMBERS & set(func.tags):
        return False
    if func is _aten.index.Tensor:
        return _has_mask(args[1])
    if func is _aten.repeat_interleave.Tensor:
        return given.get("output_size") is None
    return True


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in _AS_NUMBERS for index in indices)


# torch's alignment of allocations: kernels are compiled for addresses that are multiples of 16.
_ALIGNMENT = 512


class StaticInputs:
    """Owns one buffer on the device, filled by one copy per step; `tensors` are views of it by name."""

    def __init__(
        self, fields: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device
    ) -> None:
        """`fields` are the shapes and dtypes of the tensors."""
        self._fields: dict[str, tuple[slice, torch.dtype, tuple[int, ...]]] = {}
        size = 0
        for name, (shape, dtype) in fields.items():
            nbytes = math.prod(shape) * dtype.itemsize
            self._fields[name] = slice(size, size + nbytes), dtype, shape
            size += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        self.tensors = self._views(self._buffer)

    def load(self, contents: Mapping[str, NDArray[np.generic]]) -> None:
        """Replaces the contents of all tensors by arrays, followed by zeros where these are shorter. The copy
        is not waited for. Raises KeyError for a missing array."""
        # Pinned memory that is freed here is not used again before the copy is done.
        host = torch.zeros(self._buffer.shape, dtype=torch.uint8, pin_memory=self._buffer.is_cuda)
        for name, tensor in self._views(host).items():
            array = contents[name]
            tensor[: len(array)] = torch.from_numpy(array)
        self._buffer.copy_(host, non_blocking=True)

    def _views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: buffer[part].view(dtype).view(shape) for name, (part, dtype, shape) in self._fields.items()
        }


class StaticGraph:
    """The graph for one size of steps. Replays write to `hidden`, as other graphs do: [rows, hidden], or
    [sequences, hidden] if the last layer gives first rows alone."""

    def __init__(
        self,
        runner: PackedRunner,
        static: StaticBlocks,
        size: CaptureSize,
        batch: PackedBatch,
        hidden: torch.Tensor,
        recorder: CudaRecorder,
    ) -> None:
        """Captures it with a step."""
        self.least_tokens = 0  # of a step that gains from it
        self._runner = runner
        self._static = static
        self._hidden = hidden
        names = tuple(runner.inputs_of(batch))
        fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: ((size.sequences if name == FIRSTS else size.rows,), torch.int64) for name in names
        }
        fields |= {name: (shape, torch.int32) for name, shape in static.shapes.items()}
        self._inputs = StaticInputs(fields, hidden.device)
        tensors = self._inputs.tensors
        metadata = static.over(tensors)
        self._load(batch)

        def run() -> None:
            hidden.copy_(runner.run({name: tensors[name] for name in names}, metadata))

        self.launch = recorder.capture(run)

    def replay(self, batch: PackedBatch) -> torch.Tensor:
        """The hidden states of the graph, those of the step first, until the next replay of any graph."""
        self._load(batch)
        self.launch()
        return self._hidden

    def _load(self, batch: PackedBatch) -> None:
        ids = {name: ids.numpy() for name, ids in self._runner.inputs_of(batch).items()}
        self._inputs.load({**ids, **self._static.contents(batch.layout)})


# The share of the largest hidden state by which a graph's may differ: kernels may have other tiles.
TOLERANCE = 0.02
# The share of the device's free memory that a graph may hold for good.
_MEMORY = 0.25


class GraphedRunner(FasterRunner):
    """Replays steps of whole sequences that fit a graph."""

    def __init__(self, inner: PackedRunner, device: torch.device) -> None:
        super().__init__(inner)
        self._device = device
        self._graphs: dict[CaptureSize, StaticGraph] = {}  # the smallest first
        # Tokens that a replay computes while the host would launch a step kernel by kernel.
        self.launch_tokens = 0
        self._hidden: torch.Tensor | None = None  # hidden states of the largest; all graphs write to it

    @torch.inference_mode()
    def forward(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        if (graph := self._graph_for(step)) is not None:
            batch = self.inner.lay_out(step)
            count = len(batch.input_ids if self.inner.cls_only is None else batch.cursor.chunks)
            # A copy: the next replay overwrites the graph's memory.
            return graph.replay(batch)[:count].clone(), self.inner.cursor_of(batch)
        return self.inner.forward(step)

    @property
    def sizes(self) -> tuple[CaptureSize, ...]:
        """The sizes of the graphs, the smallest first."""
        return tuple(self._graphs)

    @torch.inference_mode()
    def capture_all(
        self, sizes: Sequence[CaptureSize], samples: Sequence[TokenSequence], recorder: CudaRecorder
    ) -> Mapping[CaptureSize, str]:
        """Captures a graph for each of the sizes, the largest first, with steps of the samples' tokens. Drops
        those whose results differ, and returns the mismatches by size. Captures none for a model that waits
        for the device within a step."""
        if not self._may_be_captured(filling_steps(sizes[-1], samples)[0]):
            return {}
        mismatches = {}
        for size in sizes:
            try:
                mismatch = self._capture(size, filling_steps(size, samples), recorder)
            except Exception as error:
                mismatch = f"they failed: {error}"
            if mismatch is not None:
                mismatches[size] = mismatch
        self._graphs = {size: self._graphs[size] for size in sorted(self._graphs)}
        return mismatches

    def _may_be_captured(self, step: Step) -> bool:
        """Whether a step does not wait for the device; logs where it does."""
        try:
            self.inner.forward(step)  # the first step may wait
            waits = waits_in(lambda: self.inner.forward(step), self._device)
        except Exception as error:
            log.warning("no CUDA graphs: a step cannot be watched: %s", error)
            return False
        if waits:
            log.debug("no CUDA graphs: the model waits for the device (%s)", ", ".join(waits))
        return not waits

    def _capture(self, size: CaptureSize, steps: Sequence[Step], recorder: CudaRecorder) -> str | None:
        """Captures and compares the graph of a size, if it helps; returns a description of a mismatch."""
        runner, full = self.inner, steps[0]
        exact = [runner.forward(step)[0] for step in steps]
        eager = recorder.cost(lambda: runner.forward(full))
        if eager.memory > _MEMORY:
            log.debug("no CUDA graph of %s: it would take %.0f%% of the memory", size, 100 * eager.memory)
            return None
        if eager.times.device > eager.times.host * _DEVICE_BOUND:
            log.debug("no CUDA graph of %s: its steps are bound by the device", size)
            return None
        batch = runner.lay_out(full)
        tried: Any = runner.prepare(batch)
        runner.run({name: ids.to(self._device) for name, ids in runner.inputs_of(batch).items()}, tried)
        rows = size.rows if runner.cls_only is None else size.sequences
        if self._hidden is None or len(self._hidden) < rows:
            self._hidden = exact[0].new_empty(rows, exact[0].shape[-1])
        graph = StaticGraph(runner, StaticBlocks(tried, size), size, batch, self._hidden[:rows], recorder)
        replay = recorder.cost(graph.launch).times.device
        # A graph computes all of its rows, whatever a step has.
        graph.least_tokens = 0 if replay <= eager.times.host else int(size.rows * (1 - _EMPTY))
        mismatch = self._mismatch(graph, steps, exact)
        if mismatch is None:
            self._graphs[size] = graph
            tokens = int(size.rows * eager.times.host / max(replay, 1e-3))
            self.launch_tokens = max(self.launch_tokens, tokens)
        return mismatch

    def _mismatch(
        self, graph: StaticGraph, steps: Sequence[Step], exact: Sequence[torch.Tensor]
    ) -> str | None:
        """None if a graph gives the steps' results, else a description of the mismatch."""
        for step, expected in zip(steps, exact, strict=True):
            hidden = graph.replay(self.inner.lay_out(step))
            ours, plain = hidden[: len(expected)].float(), expected.float()
            worst = float((ours - plain).abs().max() / plain.abs().max().clamp(min=1e-6))
            if not worst <= TOLERANCE:
                return f"their hidden states differ by {worst:.2g} of the largest"
        return None

    def _graph_for(self, step: Step) -> StaticGraph | None:
        """The smallest graph that holds a step, if it helps."""
        if not step.chunks or not all(is_whole_text(chunk) for chunk in step.chunks):
            return None
        for size, graph in self._graphs.items():
            if size.rows >= step.num_tokens and size.sequences >= len(step.chunks):
                return graph if step.num_tokens >= graph.least_tokens else None
        return None


def with_graphs(
    runner: PackedRunner, device: torch.device, samples: Sequence[TokenSequence], most: CaptureSize
) -> PackedRunner | GraphedRunner:
    """The runner with graphs for steps of up to the size `most` that can be captured and give the same hidden
    states, with a warning for sizes that do not. The runner itself if there are none."""
    texts = [each for each in samples if is_whole_text(Chunk(each, 0, len(each)))]
    if device.type != "cuda" or not isinstance(runner.backend, TritonBackend) or not texts:
        return runner
    graphed = GraphedRunner(runner, device)
    began = time.perf_counter()
    sizes = sizes_for(most.rows, most.sequences, most.longest)
    mismatches = graphed.capture_all(sizes, texts, CudaRecorder())
    for reason in dict.fromkeys(mismatches.values()):
        affected = ", ".join(str(size) for size in mismatches if mismatches[size] == reason)
        log.warning("steps are not replayed as CUDA graphs of %s: %s", affected, reason)
    if not graphed.sizes:
        return runner
    seconds = time.perf_counter() - began
    log.debug("%d CUDA graphs, up to %s, took %.1f s", len(graphed.sizes), graphed.sizes[-1], seconds)
    return graphed
