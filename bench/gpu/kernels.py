"""`maxsimd bench kernels`: MaxSim, attention and projection beside plain torch and other packages, each
called in the way that is fastest for it, and the limits of the device."""

import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch

from maxsimd.bench.report import Figures
from maxsimd.engine.execution.attention.backend import AttentionBackend, OneByOneBackend
from maxsimd.engine.execution.attention.gpu import TritonBackend
from maxsimd.engine.execution.layout import Group, Layout
from maxsimd.engine.ops import triton as triton_ops
from maxsimd.engine.ops.qkv import QKV
from maxsimd.engine.ops.triton.launch import is_nvidia
from maxsimd.engine.scoring.maxsim import maxsim_reference
from maxsimd.pooling.ragged import Ragged

OURS = "maxsimd"
Copy = TypeVar("Copy")
Run = Callable[[], object]

# Calls that follow each other on a GPU without a gap: the host launches one while others run.
_LAUNCHES = 10
_WARM_UP = 3
# Cycles that a GPU waits before such calls, some 3 ms: the launch of the first would count as its time.
_LEAD = 6_000_000


@dataclass(frozen=True, slots=True)
class Timing:
    """Median seconds of a call: `streamed`, without a gap after the one before, as in a step; and `alone`,
    with its launch."""

    streamed: float
    alone: float


def timings(contenders: Mapping[str, Run], device: torch.device, rounds: int) -> dict[str, Timing]:
    """Both medians of each contender, run in turns."""
    streamed, alone = (medians(contenders, device, rounds, launches) for launches in (_LAUNCHES, 1))
    return {name: Timing(streamed[name], alone[name]) for name in contenders}


def one_after_another(runs: Sequence[Run]) -> Run:
    """Calls the next of `runs` each time: with data of its own, none finds its data in the device's cache."""
    turns = itertools.cycle(runs)
    return lambda: next(turns)()


def medians(
    contenders: Mapping[str, Run], device: torch.device, rounds: int, launches: int = _LAUNCHES
) -> dict[str, float]:
    """Median seconds of each on the device, run in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + _WARM_UP):
        for name, run in contenders.items():
            taken = _seconds(run, device, launches)
            if number >= _WARM_UP:
                seconds[name].append(taken)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def _seconds(run: Run, device: torch.device, launches: int) -> float:
    """Seconds of one of `launches` calls; on a CPU, of a single call."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    stream = torch.cuda.current_stream(device)
    if launches > 1:
        torch.cuda._sleep(_LEAD)
    start.record(stream)
    for _ in range(launches):
        run()
    stop.record(stream)
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / launches


# A product of 4096^3 has 512 tiles for 132 multiprocessors, the last of which leave most of them idle.
_SIDE = 8192
_BYTES = 1 << 31
_SMALL = 256  # the size of all where there is no GPU and the figures mean nothing
_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Limits:
    """A device's FLOP/s of a large product in bfloat16, bytes/s that a copy reads and writes, and bytes/s
    that a sum reads."""

    product: float
    copy: float
    read: float

    def figures(self) -> dict[str, float]:
        """In TFLOP/s and TB/s."""
        names = ("product_tflops", "copy_tbytes_per_s", "read_tbytes_per_s")
        values = (self.product, self.copy, self.read)
        return {name: _digits(value / 1e12) for name, value in zip(names, values, strict=True)}


def measure_limits(device: torch.device) -> Limits:
    """Measures all three, in a few seconds."""
    on_gpu = device.type == "cuda"
    side = _SIDE if on_gpu else _SMALL
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    size = _BYTES if on_gpu else _SMALL * 1024
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    runs: dict[str, Run] = {"product": lambda: a @ b, "copy": lambda: target.copy_(source), "sum": source.sum}
    seconds = {name: medians({name: run}, device, _ROUNDS)[name] for name, run in runs.items()}
    nbytes = source.nbytes
    return Limits(2.0 * side**3 / seconds["product"], 2.0 * nbytes / seconds["copy"], nbytes / seconds["sum"])


@dataclass(frozen=True, slots=True)
class MaxSimShape:
    """One query of `query` tokens, and `documents` of so many `tokens`; if `rounded`, also in int8."""

    name: str
    query: int
    documents: int
    tokens: tuple[int, int]
    dim: int = 128
    rounded: bool = False


MAXSIM_SHAPES = (
    MaxSimShape("ColBERT, 10,000 documents of 180 tokens", 32, 10_000, (180, 180), rounded=True),
    MaxSimShape("ColPali, 500 pages of 1,024 tokens", 1024, 500, (1024, 1024), rounded=True),
    MaxSimShape("a query of 64 tokens, 10,000 documents of 180", 64, 10_000, (180, 180)),
    MaxSimShape("ragged, 1,000 documents of 20 to 340 tokens", 32, 1000, (20, 340)),
    MaxSimShape("one document of 8,192 tokens", 32, 1, (8192, 8192)),
)

# Shapes for which both packages publish figures.
PUBLISHED_SHAPES = (
    MaxSimShape("published, 10,000 documents of 300 tokens", 32, 10_000, (300, 300)),
    MaxSimShape("published, 1,000 pages of 1,024 tokens", 1024, 1000, (1024, 1024)),
    MaxSimShape("published, 1,000 documents of 1,024 tokens", 32, 1000, (1024, 1024)),
)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """`sequences` of `tokens` tokens give or take a half, with `heads` heads of queries and `kv_heads` of
    keys and values."""

    name: str
    sequences: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool


ATTENTION_SHAPES = (
    AttentionShape("XLM-RoBERTa large, 8 x 2,048 tokens", 8, 2048, 16, 16, 64, False),
    AttentionShape("XLM-RoBERTa large, 16 x 1,024 tokens", 16, 1024, 16, 16, 64, False),
    AttentionShape("XLM-RoBERTa large, 128 x 128 tokens", 128, 128, 16, 16, 64, False),
    AttentionShape("Qwen3 0.6B, 16 x 1,024 tokens", 16, 1024, 16, 8, 128, True),
)


_EMPTY_SCORE = -1e9


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """A query, bfloat16 [tokens, dim], and documents of `lengths` tokens end to end: unit vectors `rows`
    bfloat16 [tokens, dim]; or int8, each row with a scale, float32 [tokens]. All are on the device."""

    query: torch.Tensor
    rows: torch.Tensor
    scales: torch.Tensor | None
    lengths: tuple[int, ...]
    offsets: torch.Tensor  # int32 [documents + 1]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes to read of the documents."""
        return self.rows.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def dense(self, values: torch.Tensor) -> torch.Tensor:
        """`values` [tokens, ...] of documents that are equally long, as [documents, length, ...]."""
        return values.view(len(self.lengths), self.longest, *values.shape[1:])

    def rounded(self) -> "Scored":
        """The same with documents in int8."""
        scales = self.rows.float().abs().amax(dim=1) / 127
        rows = (self.rows.float() / scales[:, None]).round().to(torch.int8)
        return Scored(self.query, rows, scales, self.lengths, self.offsets)

    def exact(self, documents: int) -> torch.Tensor:
        """The scores of the first documents by definition, in float32."""
        count = min(documents, len(self.lengths))
        rows = self.rows[: sum(self.lengths[:count])].float()
        if self.scales is not None:
            rows = rows * self.scales[: len(rows), None]
        queries = Ragged(self.query.float(), (0, len(self.query)))
        pairs = np.array([(0, document) for document in range(count)])
        return maxsim_reference(queries, Ragged.from_lengths(rows, self.lengths[:count]), pairs)


# Prepares a call that returns the scores [documents] or [1, documents].
Contender = Callable[[Scored], Run]


def draw(shape: MaxSimShape, device: torch.device, seed: int) -> Scored:
    """Random data of a shape."""
    low, high = shape.tokens
    lengths = np.random.default_rng(0).integers(low, high + 1, shape.documents).tolist()
    random = torch.Generator(device).manual_seed(seed)
    query, rows = (
        torch.nn.functional.normalize(
            torch.randn(count, shape.dim, device=device, generator=random), dim=-1
        ).bfloat16()
        for count in (shape.query, sum(lengths))
    )
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return Scored(query, rows, None, tuple(lengths), offsets)


def contenders(shape: MaxSimShape, device: torch.device, in_int8: bool = False) -> dict[str, Contender]:
    """The contenders that run here for documents in 16 bits or int8. Queries have 16 bits, unless a name says
    otherwise."""
    found: dict[str, Contender] = {"padded torch": _padded}
    if triton_ops.runs_on(device):
        found[OURS] = _ours
    is_dense = shape.tokens[0] == shape.tokens[1]
    if device.type != "cuda" or (in_int8 and not is_dense):
        return found
    if (flash := package("flash_maxsim")) is not None:
        found |= _flash_int8(flash) if in_int8 else {"flash-maxsim": _flash(flash, is_dense)}
    if not in_int8 and (late := package("late_interaction_kernels")) is not None:
        found["late-interaction-kernels"] = _late(late, is_dense)
    return found


def package(name: str) -> Any:
    """A package, or None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _ours(scored: Scored) -> Run:
    from maxsimd.engine.ops.triton.maxsim import Pairs, maxsim
    from maxsimd.engine.ops.triton.maxsim_tiles import PairGroup

    of_query = torch.tensor([0, len(scored.query)], dtype=torch.int32, device=scored.rows.device)
    of_documents = torch.stack([scored.offsets[:-1], scored.offsets[1:]], dim=1)
    bounds = torch.cat([of_query.expand_as(of_documents), of_documents], dim=1)
    pairs = Pairs(bounds, (PairGroup(len(bounds), len(scored.query)),), scored.longest)
    return lambda: maxsim(scored.query, scored.rows, pairs, _EMPTY_SCORE, scales=scored.scales)


def _padded(scored: Scored) -> Run:
    query = scored.query
    lengths = torch.tensor(scored.lengths, device=query.device)
    hidden = torch.arange(scored.longest, device=query.device)[None] >= lengths[:, None]
    padded = _pad(scored.rows, scored.lengths)  # [documents, longest, dim]
    scales = None if scored.scales is None else _pad(scored.scales[:, None], scored.lengths)

    def run() -> torch.Tensor:
        similarity = padded.to(query.dtype) @ query.T  # [documents, longest, query]
        if scales is not None:
            similarity = similarity * scales
        return similarity.masked_fill_(hidden[:, :, None], -torch.inf).amax(dim=1).float().sum(dim=1)

    return run


def _pad(values: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(values.split(list(lengths))), batch_first=True)


def _flash(flash: Any, is_dense: bool) -> Contender:
    # It would convert documents of another precision at each call.
    if is_dense:
        return lambda x: partial(flash.flash_maxsim, x.query.half(), x.dense(x.rows.half()))
    return lambda x: partial(flash.flash_maxsim_packed, x.query.half(), x.rows.half(), x.offsets, x.longest)


def _flash_int8(flash: Any) -> dict[str, Contender]:
    def rounded(scored: Scored) -> tuple[torch.Tensor, torch.Tensor]:
        assert scored.scales is not None
        return scored.dense(scored.rows), scored.dense(scored.scales.half())

    def by_int8(x: Scored) -> Run:
        return partial(flash.flash_maxsim_int8x8, x.query, *rounded(x), *flash.quantize_query_int8(x.query))

    return {
        "flash-maxsim": lambda x: partial(flash.flash_maxsim_int8_symmetric, x.query.half(), *rounded(x)),
        "flash-maxsim, query in int8": by_int8,
    }


def _late(late: Any, is_dense: bool) -> Contender:
    if is_dense:
        return lambda x: partial(late.maxsim, x.query[None], x.dense(x.rows))

    def packed(x: Scored) -> Run:
        of_query = torch.tensor([0, len(x.query)], dtype=torch.int32, device=x.rows.device)
        return partial(late.maxsim_varlen, x.query, x.rows, of_query, x.offsets, len(x.query), x.longest)

    return packed


# Tolerance of results, as a share of the largest exact number.
TOLERANCE = 0.02
# Documents whose scores are compared with the definition.
_COMPARED = 50
# Copies of small data that fill any cache.
_MOST_COPIES = 128


@dataclass(frozen=True, slots=True)
class Setting:
    """A device with its limits, and the `rounds` of turns."""

    device: torch.device
    rounds: int
    limits: Limits

    def copies(self, nbytes: int) -> int:
        """The number of copies of `nbytes` to use in turns. All but one are at least twice as large as the
        GPU's cache: no call finds its data there."""
        if self.device.type != "cuda":
            return 2
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return min(_MOST_COPIES, 1 + -(-2 * cache // nbytes))


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of a call: operations, and bytes to read."""

    operations: float
    nbytes: float

    def seconds(self, limits: Limits) -> float:
        """The least time of a device with these limits."""
        return max(self.operations / limits.product, self.nbytes / max(limits.copy, limits.read))


@torch.inference_mode()
def measure_kernels(device: torch.device, rounds: int) -> Figures:
    """Milliseconds of all contenders that are installed and right, on data outside the device's cache, and
    our rate as a share of the device's limit."""
    limits = measure_limits(device)
    setting = Setting(device, rounds, limits)
    figures: Figures = {"limits": limits.figures()}
    for shape in MAXSIM_SHAPES:
        figures |= measure_maxsim(shape, setting)
    for case in ATTENTION_SHAPES:
        figures |= measure_attention(case, setting)
    return figures | measure_projection(16_384, 1024, 128, setting)


def measure_maxsim(shape: MaxSimShape, setting: Setting) -> Figures:
    """The figures of a shape; with documents in int8 too where it says so."""
    first = draw(shape, setting.device, 0)
    scored = [first]
    scored += [draw(shape, setting.device, seed) for seed in range(1, setting.copies(first.nbytes))]
    operations = 2.0 * shape.query * len(first.rows) * shape.dim
    name, in_int8 = f"MaxSim: {shape.name}", f"MaxSim: {shape.name}, in int8"
    figures: Figures = {}
    for title in (name, in_int8) if shape.rounded else (name,):
        if title == in_int8:
            scored = [each.rounded() for each in scored]
        makers = contenders(shape, setting.device, in_int8=title == in_int8)
        ready = prepared(makers, scored, scored[0].exact(_COMPARED))
        figures |= _measured(title, ready, Work(operations, scored[0].nbytes), setting)
        del ready
    if f"{OURS}_ms" in figures.get(in_int8, {}):
        in_16_bits = min(value for key, value in figures[name].items() if key.endswith("_ms"))
        ratio = _digits(in_16_bits / figures[in_int8][f"{OURS}_ms"])
        figures[in_int8]["times_as_fast_as_the_best_in_16_bits"] = ratio
    return figures


def measure_attention(shape: AttentionShape, setting: Setting) -> Figures:
    """The figures of our kernel, of torch's variable-length attention, and of a product a sequence."""
    device = setting.device
    low, high = shape.tokens // 2, shape.tokens * 3 // 2 + 1
    lengths = np.random.default_rng(0).integers(low, high, shape.sequences).tolist()
    starts = [0, *accumulate(lengths)]
    groups = tuple(Group(start, 1, n, (n,)) for start, n in zip(starts, lengths, strict=False))
    layout = Layout(shape.causal, groups)

    def by(backend: AttentionBackend) -> Callable[[QKV], Run]:
        metadata = backend.prepare(layout, device)
        return lambda qkv: partial(backend.full, qkv, metadata)

    first = _draw_qkv(shape, sum(lengths), device)
    nbytes = sum(x.nbytes for x in (first.query, first.key, first.value))
    qkvs = [first, *(_draw_qkv(shape, sum(lengths), device) for _ in range(1, setting.copies(nbytes)))]
    wide = QKV(first.query.float(), first.key.float(), first.value.float(), first.scaling)
    exact = OneByOneBackend().full(wide, OneByOneBackend().prepare(layout, device))
    makers = {"one by one": by(OneByOneBackend())}
    if triton_ops.runs_on(device):
        makers[OURS] = by(TritonBackend())
    if is_nvidia(device):
        from torch.nn.attention.varlen import varlen_attn

        offsets, most = torch.tensor(starts, dtype=torch.int32, device=device), max(lengths)
        options: dict[str, Any] = {"window_size": (-1, 0)} if shape.causal else {}
        options |= {"enable_gqa": True} if shape.heads != shape.kv_heads else {}

        def in_torch(qkv: QKV) -> Run:
            query, key, value = (x.transpose(0, 1) for x in (qkv.query, qkv.key, qkv.value))
            return partial(varlen_attn, query, key, value, offsets, offsets, most, most, **options)

        makers["torch"] = in_torch
    pairs = sum(n * (n + 1) // 2 if shape.causal else n * n for n in lengths)
    work = Work(4.0 * pairs * shape.heads * shape.head_dim, nbytes)
    return _measured(f"attention: {shape.name}", prepared(makers, qkvs, exact), work, setting)


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
    """The contenders that are right, which use one copy of the data after the other; and why others fail."""

    runs: Mapping[str, Run]
    failures: Mapping[str, str]


def prepared(
    makers: Mapping[str, Callable[[Copy], Run]], copies: Sequence[Copy], exact: torch.Tensor
) -> Prepared:
    """Makes each contender's calls, and compares the first numbers of the first call with `exact`."""
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
    streamed: Figures = {f"{each}_ms": _digits(found.streamed * 1e3) for each, found in taken.items()}
    if OURS in taken:
        ours = taken[OURS].streamed
        streamed["share_of_what_the_device_can"] = _digits(work.seconds(setting.limits) / ours)
        if others := [found.streamed for each, found in taken.items() if each != OURS]:
            streamed["times_as_fast_as_the_best_other"] = _digits(min(others) / ours)
        streamed["tflops"] = _digits(work.operations / ours / 1e12)
        streamed["tbytes_per_s"] = _digits(work.nbytes / ours / 1e12)
    streamed |= {f"{each}_failed": why for each, why in ready.failures.items()}
    alone = {f"{each}_ms": _digits(found.alone * 1e3) for each, found in taken.items()}
    return {name: streamed, f"{name}, each call alone": alone}


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _draw_qkv(shape: AttentionShape, rows: int, device: torch.device) -> QKV:
    q, k, v = (
        torch.randn(rows, heads, shape.head_dim, device=device).bfloat16().transpose(0, 1)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    return QKV(q, k, v, shape.head_dim**-0.5)
