"""MaxSim, attention and projection by themselves: ours, plain torch, and what packages offer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch

from maxsimd.bench.gpu.limits import Limits, copies_beyond_cache, measure_limits
from maxsimd.bench.gpu.maxsim_contenders import (
    OURS,
    contenders,
    draw,
    rounded_contenders,
)
from maxsimd.bench.gpu.shapes import ATTENTION_SHAPES, MAXSIM_SHAPES, AttentionShape, MaxSimShape
from maxsimd.bench.timing import Run, Timing, one_after_another, timings
from maxsimd.engine.execution.attention.backend import AttentionBackend, OneByOneBackend
from maxsimd.engine.execution.layout import Group, Layout
from maxsimd.engine.ops import triton as triton_ops
from maxsimd.engine.ops.qkv import QKV

Figures = dict[str, Any]
Copy = TypeVar("Copy")

# By how much of the largest number results may differ from exact ones.
TOLERANCE = 0.02
# Documents whose scores are compared with the definition.
_COMPARED = 50
# As many copies of small data as fill any cache.
_MOST_COPIES = 128


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how long to measure: `rounds` turns on a device with these limits."""

    device: torch.device
    rounds: int
    limits: Limits

    def copies(self, nbytes: int) -> int:
        """How many copies of data of `nbytes` to use in turns."""
        return min(_MOST_COPIES, copies_beyond_cache(nbytes, self.device))


@dataclass(frozen=True, slots=True)
class Work:
    """What a call has to do at least: operations, and bytes to read."""

    operations: float
    nbytes: float

    def seconds(self, limits: Limits) -> float:
        """The least time that a device with these limits takes."""
        return max(self.operations / limits.product, self.nbytes / limits.fastest_read)


@torch.inference_mode()
def measure_kernels(
    device: torch.device,
    rounds: int,
    maxsim_shapes: tuple[MaxSimShape, ...] = MAXSIM_SHAPES,
    attention_shapes: tuple[AttentionShape, ...] = ATTENTION_SHAPES,
    rows: int = 16_384,
) -> Figures:
    """Milliseconds of all contenders that are installed and right, on data that is not in the device's cache,
    and our rate as a share of the device's limit."""
    limits = measure_limits(device)
    setting = Setting(device, rounds, limits)
    figures: Figures = {"limits": limits.figures()}
    for shape in maxsim_shapes:
        figures |= measure_maxsim(shape, setting)
    for case in attention_shapes:
        figures |= measure_attention(case, setting)
    return figures | measure_projection(rows, 1024, 128, setting)


def measure_maxsim(shape: MaxSimShape, setting: Setting) -> Figures:
    """The figures of a shape; with documents in int8 too where it says so."""
    first = draw(shape, setting.device, 0)
    scored = [first]
    scored += [draw(shape, setting.device, seed) for seed in range(1, setting.copies(first.nbytes))]
    operations = 2.0 * shape.query * len(first.rows) * shape.dim
    name, in_int8 = f"MaxSim: {shape.name}", f"MaxSim: {shape.name}, in int8"
    ready = prepared(contenders(shape, setting.device), scored, first.exact(_COMPARED))
    figures = _measured(name, ready, Work(operations, first.nbytes), setting)
    if not shape.rounded:
        return figures
    del ready
    scored = [each.rounded() for each in scored]
    first = scored[0]
    ready = prepared(rounded_contenders(shape, setting.device), scored, first.exact(_COMPARED))
    figures |= _measured(in_int8, ready, Work(operations, first.nbytes), setting)
    if f"{OURS}_ms" in figures[in_int8]:
        in_16_bits = min(value for key, value in figures[name].items() if key.endswith("_ms"))
        ratio = _digits(in_16_bits / figures[in_int8][f"{OURS}_ms"])
        figures[in_int8]["times_as_fast_as_the_best_in_16_bits"] = ratio
    return figures


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Random `qkvs` in one `layout`, what attention over the first is exactly, and the number of pairs of a
    query and a key that see each other."""

    layout: Layout
    qkvs: list[QKV]
    exact: torch.Tensor
    pairs: int

    def by(self, backend: AttentionBackend[Any]) -> Callable[[QKV], Run]:
        """Attention by a backend."""
        metadata = backend.prepare(self.layout, self.exact.device)
        return lambda qkv: partial(backend.full, qkv, metadata)


def drawn_attention(shape: AttentionShape, device: torch.device, copies: int | None = None) -> Drawn:
    """`copies` times the data of a shape, by default as many as no cache holds."""
    lengths = (
        np.random.default_rng(0)
        .integers(shape.tokens // 2, shape.tokens * 3 // 2 + 1, shape.sequences)
        .tolist()
    )
    starts = [0, *accumulate(lengths)]
    groups = tuple(Group(start, 1, n, (n,)) for start, n in zip(starts, lengths, strict=False))
    layout = Layout(shape.causal, groups)
    first = _draw_qkv(shape, sum(lengths), device)
    if copies is None:
        copies = min(_MOST_COPIES, copies_beyond_cache(_nbytes(first), device))
    qkvs = [first, *(_draw_qkv(shape, sum(lengths), device) for _ in range(copies - 1))]
    wide = QKV(first.query.float(), first.key.float(), first.value.float(), first.scaling)
    exact = OneByOneBackend().full(wide, OneByOneBackend().prepare(layout, device))
    pairs = sum(n * (n + 1) // 2 if shape.causal else n * n for n in lengths)
    return Drawn(layout, qkvs, exact, pairs)


def measure_attention(shape: AttentionShape, setting: Setting) -> Figures:
    """The figures of the backends that run on the device, beside a product a sequence."""
    from maxsimd.engine.execution.attention.select import candidates

    drawn = drawn_attention(shape, setting.device)
    found = candidates(setting.device, torch.bfloat16)
    makers = {"one by one": drawn.by(OneByOneBackend())}
    makers |= {OURS if name == "triton" else name: drawn.by(make()) for name, make in found.items()}
    work = Work(4.0 * drawn.pairs * shape.heads * shape.head_dim, _nbytes(drawn.qkvs[0]))
    return _measured(f"attention: {shape.name}", prepared(makers, drawn.qkvs, drawn.exact), work, setting)


def _nbytes(qkv: QKV) -> int:
    return sum(x.nbytes for x in (qkv.query, qkv.key, qkv.value))


def measure_projection(rows: int, width: int, dim: int, setting: Setting) -> Figures:
    """The figures of a ColBERT head on `rows` hidden states of `width` numbers."""
    device = setting.device
    weight = (torch.randn(dim, width, device=device) * width**-0.5).bfloat16()
    pooled = torch.arange(0, rows, 1, device=device)
    count = setting.copies(rows * width * 2)
    states = [torch.randn(rows, width, device=device).bfloat16() for _ in range(count)]

    def plain(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize((hidden[pooled] @ weight.T).float(), dim=-1).bfloat16()

    makers: dict[str, Callable[[torch.Tensor], Run]] = {
        "torch": lambda hidden: partial(plain, hidden, weight)
    }
    if triton_ops.runs_on(device):
        from maxsimd.engine.ops.triton.projection import Projection, project

        projection = Projection(weight, None, 1e-12)
        makers[OURS] = lambda hidden: partial(project, hidden, pooled, projection, torch.bfloat16)
    ready = prepared(makers, states, plain(states[0].float(), weight.float()))
    work = Work(2.0 * rows * width * dim, rows * width * 2.0)
    return _measured(f"projection: {rows:,} rows, {width:,} to {dim}", ready, work, setting)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The contenders that are right, each of which uses one copy of the data after the other; and why others
    are not."""

    runs: Mapping[str, Run]
    failures: Mapping[str, str]


def prepared(
    makers: Mapping[str, Callable[[Copy], Run]], copies: Sequence[Copy], exact: torch.Tensor
) -> Prepared:
    """Makes each contender's calls, and compares what the first gives with its first numbers in `exact`."""
    runs, failures = {}, {}
    for name, make in makers.items():
        try:
            calls = [make(copy) for copy in copies]
            found: Any = calls[0]()
            first = found.flatten()[: exact.numel()].float()
            difference = float((first - exact.flatten()).abs().max() / exact.abs().max())
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
            continue
        if difference <= TOLERANCE:
            runs[name] = one_after_another(calls)
        else:
            failures[name] = f"its results differ by {difference:.2g} of the largest"
    return Prepared(runs, failures)


def _measured(name: str, ready: Prepared, work: Work, setting: Setting) -> Figures:
    """Two tables: calls without a gap, with rates; and calls that are waited for, one by one."""
    taken = timings(ready.runs, setting.device, setting.rounds)
    streamed = _compared(taken, work, setting.limits)
    streamed |= {f"{contender}_failed": why for contender, why in ready.failures.items()}
    alone = {f"{contender}_ms": _digits(each.alone * 1e3) for contender, each in taken.items()}
    return {name: streamed, f"{name}, each call alone": alone}


def _compared(taken: Mapping[str, Timing], work: Work, limits: Limits) -> Figures:
    figures: Figures = {f"{name}_ms": _digits(each.streamed * 1e3) for name, each in taken.items()}
    if OURS not in taken:
        return figures
    ours = taken[OURS].streamed
    figures["share_of_what_the_device_can"] = _digits(work.seconds(limits) / ours)
    others = [each.streamed for name, each in taken.items() if name != OURS]
    if others:
        figures["times_as_fast_as_the_best_other"] = _digits(min(others) / ours)
    figures["tflops"] = _digits(work.operations / ours / 1e12)
    figures["tbytes_per_s"] = _digits(work.nbytes / ours / 1e12)
    return figures


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _draw_qkv(shape: AttentionShape, rows: int, device: torch.device) -> QKV:
    q, k, v = (
        torch.randn(rows, heads, shape.head_dim, device=device).bfloat16().transpose(0, 1)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    return QKV(q, k, v, shape.head_dim**-0.5)
