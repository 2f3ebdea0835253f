"""Checks of every Triton kernel on random ragged input: interpreted on a CPU, or compiled on a GPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine.execution.attention.backend import AttentionBackend, OneByOneBackend
from maxsimd.engine.execution.layout import Layout, PrefillChunk, PrefillKV, SharedGroup, lay_out
from maxsimd.engine.ops import elementwise, triton
from maxsimd.engine.ops.qkv import KV, QKV
from maxsimd.engine.ops.triton.launch import Limits
from maxsimd.engine.scoring.maxsim import maxsim_reference
from maxsimd.pooling.ragged import Ragged, Spans
from tests.unit.engine.execution.test_packed import RAGGED, attention_problems, make_step
from tests.unit.pairs import Pairs, pairs_of

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SOME_DTYPE = st.sampled_from(DTYPES)
Items = TypeVar("Items", Ragged, Spans)
Problem = tuple[Ragged, Ragged, Pairs]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random_ragged(lengths: list[int], dim: int, seed: int) -> Ragged:
    values = torch.randn(sum(lengths), dim, generator=torch.Generator().manual_seed(seed))
    return Ragged.from_lengths(torch.nn.functional.normalize(values, dim=-1), lengths)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    dim = draw(st.sampled_from([1, 3, 16, 48]))
    queries = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    documents = draw(st.lists(st.integers(0, 70), min_size=1, max_size=8))
    index = st.tuples(st.integers(0, len(queries) - 1), st.integers(0, len(documents) - 1))
    pairs = draw(st.lists(index, max_size=10))
    return random_ragged(queries, dim, 1), random_ragged(documents, dim, 2), pairs_of(pairs)


def for_examples(count: int, device: str, *drawn: st.SearchStrategy[Any]) -> Callable[[Any], None]:
    """Runs a comparison with what is drawn, as soon as it is defined. There are many examples on a GPU;
    interpreting takes long, so that there a run has an eighth of them, others each time."""
    wanted = settings(max_examples=count if device != "cpu" else count // 8, deadline=None)
    return lambda compare: wanted(given(*drawn)(compare))()


def close(ours: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(ours.float().cpu(), exact.float(), atol=tolerance, rtol=tolerance)


def on(items: Items, device: str) -> Items:
    scales = None if items.scales is None else items.scales.to(device)
    return replace(items, values=items.values.to(device), scales=scales)


def scored(queries: Ragged, documents: Ragged, pairs: Any, device: str, split_k: int | None = None) -> Any:
    from maxsimd.engine.scoring.maxsim_triton import maxsim_triton

    return maxsim_triton(on(queries, device), on(documents, device), pairs, split_k).cpu()


def check_maxsim(device: str) -> None:
    @for_examples(40, device, problems(), st.sampled_from([None, 1, 2, 7]), SOME_DTYPE, st.booleans())
    def compare(problem: Problem, split_k: int | None, dtype: torch.dtype, int8: bool) -> None:
        queries, documents, pairs = problem
        queries = queries.decoded(dtype)
        documents = quantised(documents) if int8 else documents.decoded(dtype)
        exact = maxsim_reference(queries, documents.decoded(torch.float32), pairs)
        # Products of rounded numbers are exact in float32, so precision makes no difference.
        tolerance = 1e-4 if int8 else 1e-5
        ours = scored(queries, documents, pairs, device, split_k)
        torch.testing.assert_close(ours, exact, atol=tolerance, rtol=tolerance)

    queries, documents = random_ragged([5, 33], 200, 1), random_ragged([70, 0, 1], 200, 2)
    assert scored(queries, documents, [], device).shape == (0,)


def quantised(items: Ragged) -> Ragged:
    scales = items.values.abs().amax(dim=1).clamp(min=1e-12) / 127
    return Ragged((items.values / scales[:, None]).round().to(torch.int8), items.offsets, scales)


AMPERE, HOPPER, BLACKWELL = (Limits(major, kib * 1024, 1) for major, kib in ((8, 163), (9, 227), (10, 227)))
SIZES = [
    (128, torch.bfloat16, HOPPER), (128, torch.float16, BLACKWELL), (96, torch.bfloat16, HOPPER),
    (200, torch.float32, AMPERE), (1024, torch.bfloat16, HOPPER),
    (42, torch.bfloat16, Limits(8, 99 * 1024, 1)),
]  # fmt: skip


def check_maxsim_of_one_size(device: str) -> None:
    """Dimensions in chunks; the other checks have them in a tile."""
    check_maxsim_of_all_sizes(device, SIZES[3:4], 5)


def check_maxsim_of_all_sizes(device: str, sizes: Sequence[Any] = SIZES, count: int = 10) -> None:
    """Queries of every class with a tile of its own, in one batch; documents around the sizes of tiles; all
    dimensions in a tile, and in chunks; every device's table of tiles, where the kernel is interpreted."""
    from maxsimd.engine.ops.triton import maxsim

    query_lengths, document_lengths = [129, 5, 64, 33, 150, 32], [64, 0, 1, 65, 130, 80]
    pairs = [(0, 1), (5, 0), (1, 2), (2, 5), (3, 3), (4, 4), (5, 5), (1, 1), (0, 3), (2, 0)][:count]
    for dim, dtype, limits in sizes:
        queries = random_ragged(query_lengths, dim, 1).decoded(dtype)
        documents = random_ragged(document_lengths, dim, 2).decoded(dtype)
        for ours in (documents, quantised(documents.decoded(torch.float32))):
            exact = maxsim_reference(queries.decoded(torch.float32), ours.decoded(torch.float32), pairs)
            with pytest.MonkeyPatch.context() as patch:
                if device == "cpu":
                    patch.setattr(maxsim, "limits", lambda device, limits=limits: limits)
                found = scored(queries, ours, pairs, device)
            torch.testing.assert_close(found, exact, atol=1e-3, rtol=1e-4)


def check_maxsim_of_a_long_document(device: str) -> None:
    """In so many splits that their maxima are summed in several turns, the last less than a tile."""
    queries, documents = random_ragged([5, 70], 32, 1), random_ragged([900, 3], 32, 2)
    for split_k, pairs in ((None, [(1, 0), (1, 1)]), (70, [(0, 0), (0, 1)])):
        exact = maxsim_reference(queries, documents, pairs)
        found = scored(queries, documents, pairs, device, split_k)
        torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-4)


def check_maxsim_of_nan(device: str) -> None:
    """A NaN among a document's rows makes its scores NaN, and no other's."""
    queries, documents = random_ragged([5, 40], 128, 1), random_ragged([70, 130, 9], 128, 2)
    for row in (70, 199):
        broken = documents.values.clone()
        broken[row, 3] = torch.nan
        items = Ragged(broken.bfloat16(), documents.offsets)
        pairs = [(1, d) for d in range(3)]
        for split_k in (1, 3):
            found = scored(queries.decoded(torch.bfloat16), items, pairs, device, split_k)
            assert found.isnan().tolist() == [d == 1 for _, d in pairs]


@st.composite
def tiled_problems(draw: st.DrawFn, dims: st.SearchStrategy[int]) -> tuple[Ragged, Spans, Pairs]:
    """Queries, documents anywhere in a tensor with rows of other texts, and pairs.

    Documents may be empty, of one row, or have a NaN; those in int8 have rows whose scale is 0."""
    dim = draw(dims)
    random = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    queries = random_ragged(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)), dim, 1)
    lengths = np.array(draw(st.lists(st.sampled_from([0, 1, 2, 16, 17, 32, 50]), min_size=1, max_size=5)))
    gaps = np.array(draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths))))
    starts = np.cumsum(lengths + gaps) - lengths
    rows = int(starts[-1] + lengths[-1]) + 2
    if draw(st.booleans()):
        values = torch.randint(-128, 128, (rows, dim), generator=random, dtype=torch.int8)
        scales = torch.rand(rows, generator=random) * (torch.rand(rows, generator=random) > 0.3) / 128
        documents = Spans(values, starts, starts + lengths, scales)
    else:
        values = torch.randn(rows, dim, generator=random).bfloat16()
        values[draw(st.integers(0, rows - 1)), dim - 1] = draw(st.sampled_from([0.0, torch.nan]))
        documents = Spans(values, starts, starts + lengths)
    index = st.tuples(st.integers(0, len(queries) - 1), st.integers(0, len(lengths) - 1))
    return queries.decoded(torch.bfloat16), documents, pairs_of(draw(st.lists(index, min_size=1, max_size=5)))


def check_maxsim_by_small_tiles(device: str) -> None:
    from maxsimd.engine.ops.triton import maxsim
    from maxsimd.engine.scoring.maxsim_triton import maxsim_spans_triton

    table = maxsim.tiles_for
    # On a GPU, each is a compilation.
    dims, folds = ([3, 33, 42, 48, 64, 96, 130], [1, 2]) if device == "cpu" else ([42, 96], [2])

    @for_examples(
        80, device, tiled_problems(st.sampled_from(dims)), st.sampled_from([None, 1, 3]),
        st.sampled_from(folds),
    )  # fmt: skip
    def compare(problem: tuple[Ragged, Spans, Pairs], split_k: int | None, fold: int) -> None:
        queries, documents, pairs = problem
        gathered = documents.gathered().decoded(torch.float32)
        exact = maxsim_reference(queries.decoded(torch.float32), gathered, pairs)
        small = {"query": 32, "document": 64 if device != "cpu" else 16, "fold": fold}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(maxsim, "tiles_for", lambda *asked: replace(table(*asked), **small))
            found = maxsim_spans_triton(on(queries, device), on(documents, device), pairs, split_k)
        torch.testing.assert_close(found.cpu(), exact, atol=1e-3, rtol=1e-4, equal_nan=True)


def check_maxsim_of_slices(device: str) -> None:
    """Rows that begin at any address: after others of an odd size, or within another tensor's row."""
    queries, documents = random_ragged([5, 33], 44, 1), random_ragged([70, 0, 1], 44, 2)
    for items in (documents.decoded(torch.bfloat16), quantised(documents)):
        rounded = queries.decoded(torch.bfloat16).decoded(torch.float32)
        exact = maxsim_reference(rounded, items.decoded(torch.float32), [(1, 0)])
        for before in (1, 2, 44):
            numbers = torch.zeros(before + items.values.numel(), dtype=items.values.dtype, device=device)
            values = numbers[before:].view(items.values.shape)
            values.copy_(items.values)
            apart = Ragged(values, items.offsets, items.scales)
            found = scored(queries.decoded(torch.bfloat16), apart, pairs_of([(1, 0)]), device)
            torch.testing.assert_close(found, exact, atol=1e-3, rtol=1e-3)


def check_maxsim_beyond_32_bits(device: str) -> None:
    """Documents among more rows than 32 bits count are copied; a query there is refused."""
    from maxsimd.engine.scoring.maxsim_triton import maxsim_spans_triton

    far = 1 << 31
    # All rows of the tensor are one, which takes no memory.
    row = random_ragged([1], 16, 1).values.to(device)
    documents = Spans(row.expand(far + 8, 16), np.array([0, far]), np.array([3, far + 8]))
    query = on(random_ragged([4], 16, 2), device)
    exact = maxsim_reference(on(query, "cpu"), Ragged(row.cpu(), (0, 1)), pairs_of([(0, 0)]))
    found = maxsim_spans_triton(query, documents, pairs_of([(0, 1), (0, 0)]))
    torch.testing.assert_close(found.cpu(), exact.expand(2), atol=1e-5, rtol=1e-5)
    queries = Ragged(row.expand(far + 8, 16), (0, far + 8))
    with pytest.raises(ValueError, match="reads at most"):
        maxsim_spans_triton(queries, Spans.of(query), pairs_of([(0, 0)]))


DIMS = st.sampled_from([32, 64, 80, 128, 256, 24])

# Queries, keys, warps and stages of tiles that are small, so that short sequences have blocks whose keys all
# queries see, blocks at either edge, and blocks that are cut; None for the kernel's own.
SMALL_TILES = st.sampled_from([None, (16, 16, 4, 1), (32, 16, 4, 2), (16, 32, 4, 2)])


@contextmanager
def tiled(tiles: tuple[int, int, int, int] | None) -> Iterator[None]:
    from maxsimd.engine.ops.triton import attention

    with pytest.MonkeyPatch.context() as patch:
        if tiles is not None:
            patch.setattr(attention, "tiles_for", lambda *arguments: attention.Tiles(*tiles))
        yield


def random_heads(count: int, rows: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """As models hand them on: a view [heads, rows, dim] of rows in which heads stand side by side."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, count, dim, generator=random).to(dtype).transpose(0, 1)


def qkv_on(qkv: QKV, device: str) -> QKV:
    query, key, value = (x.to(device) for x in (qkv.query, qkv.key, qkv.value))
    return QKV(query, key, value, qkv.scaling, qkv.window)


def in_float32(qkv: QKV) -> QKV:
    return QKV(qkv.query.float(), qkv.key.float(), qkv.value.float(), qkv.scaling, qkv.window)


@dataclass(frozen=True)
class Attention:
    """Attention of one step, which any backend can run."""

    layout: Layout
    qkv: QKV
    contexts: Sequence[KV] = ()

    def by(self, backend: AttentionBackend, device: str = "cpu") -> torch.Tensor:
        qkv, metadata = qkv_on(self.qkv, device), backend.prepare(self.layout, torch.device(device))
        if self.layout.groups:
            return backend.full(qkv, metadata)
        run = backend.shared_prefix if self.layout.shared_groups else backend.with_prefill_kv
        out = qkv.new_output().fill_(9.0)
        run(qkv, [KV(*(x.to(device) for x in each)) for each in self.contexts], metadata, out)
        return out

    def exactly(self) -> torch.Tensor:
        contexts = [KV(*(x.float() for x in each)) for each in self.contexts]
        return Attention(self.layout, in_float32(self.qkv), contexts).by(OneByOneBackend())


Dims, Dtypes = st.SearchStrategy[int], st.SearchStrategy[torch.dtype]


def random_qkv(draw: st.DrawFn, rows: int, heads: Any, window: int | None, dims: Dims, dtypes: Dtypes) -> QKV:
    """`heads` is how many of keys there are, and how many of queries share each."""
    (kv_heads, repeats), dim, dtype = heads, draw(dims), draw(dtypes)
    query = random_heads(kv_heads * repeats, rows, dim, dtype, 0)
    key, value = (random_heads(kv_heads, rows, dim, dtype, seed) for seed in (1, 2))
    return QKV(query, key, value, dim**-0.5, window)


def keys_like(qkv: QKV, rows: int, seed: int) -> KV:
    kind = qkv.key.shape[2], qkv.key.dtype
    return KV(*(random_heads(len(qkv.key), rows, *kind, each) for each in (seed, seed + 2)))


@st.composite
def whole_sequences(draw: st.DrawFn, dims: Dims, dtypes: Dtypes, causal_ends: bool = False) -> Attention:
    lengths, attended, kv_heads, repeats, causal, window = draw(attention_problems(causal_ends))
    step = make_step(lengths, attended)
    layout = lay_out(step, {}, causal=causal, arrangement=RAGGED, position_offset=0).layout
    return Attention(layout, random_qkv(draw, sum(lengths), (kv_heads, repeats), window, dims, dtypes))


HEADS = st.sampled_from([(2, 1), (1, 3), (2, 2)])
WINDOWS = st.none() | st.integers(2, 60)


@st.composite
def chunks(draw: st.DrawFn, dims: Dims, dtypes: Dtypes) -> Attention:
    """Each chunk is given as its tokens and those before it."""
    lengths = draw(st.lists(st.tuples(st.integers(1, 70), st.integers(0, 90)), min_size=1, max_size=3))
    qkv = random_qkv(draw, sum(count for count, _ in lengths), draw(HEADS), draw(WINDOWS), dims, dtypes)
    parts, contexts, row = [], [], 0
    for count, before in lengths:
        parts.append(PrefillChunk(row, before, before + count, PrefillKV(), is_stored=True))
        own = qkv.of_rows(slice(row, row + count))
        both = zip(keys_like(qkv, before, row + 3), (own.key, own.value), strict=True)
        contexts.append(KV(*(torch.cat(each, dim=1) for each in both)))
        row += count
    return Attention(Layout(True, prefill_chunks=tuple(parts)), qkv, contexts)


@st.composite
def behind_prefixes(draw: st.DrawFn, dims: Dims, dtypes: Dtypes) -> Attention:
    """Sequences behind one of two beginnings."""
    sequences = draw(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 40)), min_size=1, max_size=6))
    qkv = random_qkv(draw, sum(count for _, count in sequences), draw(HEADS), draw(WINDOWS), dims, dtypes)
    shared, states = draw(st.integers(1, 80)), [PrefillKV(), PrefillKV()]
    prefixes = [keys_like(qkv, shared + n, 3 + n) for n in range(2)]
    groups, contexts, row = [], [], 0
    for which, count in sorted(sequences, key=lambda sequence: sequence[0]):
        groups.append(SharedGroup(row, 1, count, states[which]))
        contexts.append(prefixes[which])
        row += count
    return Attention(Layout(True, shared_groups=tuple(groups)), qkv, contexts)


def check_attention(device: str) -> None:
    """Attention of whole sequences, of chunks, and behind prefixes."""
    from maxsimd.engine.execution.attention.gpu import TritonBackend

    for problems in (whole_sequences, chunks, behind_prefixes):

        @for_examples(24, device, problems(DIMS, SOME_DTYPE), SMALL_TILES)
        def compare(problem: Attention, tiles: tuple[int, int, int, int] | None) -> None:
            with tiled(tiles):
                found = problem.by(TritonBackend(), device)
            close(found, problem.exactly().nan_to_num(), problem.qkv.query.dtype)


def check_projection(device: str) -> None:
    from maxsimd.engine.ops.triton.projection import Projection, project

    @for_examples(
        40, device, st.integers(1, 90), st.integers(0, 80),
        st.tuples(st.sampled_from([16, 48, 100]), st.sampled_from([16, 96, 128, 200, 1024])),
        SOME_DTYPE, st.booleans(), st.booleans(),
    )  # fmt: skip
    def compare(tokens: int, pooled: int, shape: Any, dtype: Any, biased: bool, normalized: bool) -> None:
        width, dim = shape
        random = torch.Generator().manual_seed(tokens)
        hidden = torch.randn(tokens, width, generator=random).to(dtype)
        rows = torch.randint(tokens, (pooled,), generator=random)
        weight = (torch.randn(dim, width, generator=random) * width**-0.5).to(dtype)
        bias = torch.randn(dim, generator=random) if biased else None
        there = None if bias is None else bias.to(device)
        projection = Projection(weight.to(device), there, 1e-12 if normalized else None)
        ours = project(hidden.to(device), rows.to(device), projection, torch.float32)
        exact = torch.nn.functional.linear(hidden[rows].float(), weight.float(), bias)
        if normalized:
            exact = torch.nn.functional.normalize(exact, dim=-1)
        torch.testing.assert_close(ours.cpu(), exact, atol=1e-5, rtol=1e-5)
        rounded = project(hidden.to(device), rows.to(device), projection, torch.bfloat16)
        assert rounded.dtype is torch.bfloat16
        torch.testing.assert_close(rounded.float().cpu(), exact, atol=2e-2, rtol=1e-2)

    nothing, rows = torch.zeros(16, 16, device=device), torch.arange(2, device=device)
    assert (project(nothing, rows, Projection(nothing, None, 1e-12), torch.float32) == 0).all()


# Both sides are float32 until they round once; they may round to neighbours.
LAYER_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
WIDTHS = st.sampled_from([1, 16, 100, 384, 1000, 1024])
ROWS = st.integers(0, 5)


def same(ours: torch.Tensor, exact: torch.Tensor) -> None:
    assert ours.dtype is exact.dtype
    tolerance = LAYER_TOLERANCE[exact.dtype]
    torch.testing.assert_close(ours.float().cpu(), exact.float(), atol=tolerance, rtol=tolerance)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, apart: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape[:-1], shape[-1] + apart, generator=random).to(dtype)[..., : shape[-1]]


def layer_dtypes(device: str) -> list[torch.dtype]:
    """Those of the kernels that run there; the compiled ones have no float16."""
    return DTYPES if triton.runs_on(torch.device(device)) else [torch.float32, torch.bfloat16]


def as_read(weight: torch.Tensor, device: str) -> torch.Tensor:
    """A norm's weight as the kernels that run there read it."""
    return weight.to(device) if triton.runs_on(torch.device(device)) else weight.float()


def check_norm(device: str) -> None:
    @for_examples(
        80, device, ROWS, WIDTHS, st.sampled_from(layer_dtypes(device)), st.sampled_from([0, 16]),
        st.sampled_from([0.0, 30.0]), st.sampled_from(["layer", "biased", "RMS", "Gemma"]),
    )  # fmt: skip
    def compare(rows: int, width: int, dtype: torch.dtype, apart: int, mean: float, kind: str) -> None:
        is_centered = kind in ("layer", "biased")
        x = numbers(rows, width, dtype=dtype, seed=1, apart=apart) + mean * is_centered
        residual = numbers(rows, width, dtype=dtype, seed=2, apart=2 * apart)
        weight, some_bias = (numbers(width, dtype=dtype, seed=seed) for seed in (3, 4))
        weight = weight.float() + 1 if kind == "Gemma" else weight
        bias = some_bias if kind == "biased" else None
        there = x.to(device), residual.to(device)
        used = [None if each is None else as_read(each, device) for each in (weight, bias)]

        def exact(*rows: torch.Tensor) -> torch.Tensor:
            return elementwise.norm_reference(rows[0], weight, bias, 1e-5, *rows[1:], is_centered=is_centered)

        same(elementwise.norm(there[0], *used, 1e-5, is_centered=is_centered), exact(x))
        same(elementwise.norm(there[0], *used, 1e-5, there[1], is_centered=is_centered), exact(x, residual))
        total, normed = elementwise.sum_and_norm(*there, *used, 1e-5, is_centered=is_centered)
        same(total, x + residual)
        # Computed from the rounded sum; the interpreter rounds bfloat16 differently.
        same(normed, exact(total.cpu()))


def plainly_turned(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: Any, norms: Any) -> Any:
    together = sum(heads)
    values = qkv[:, :together].float()
    if norms is not None:
        weights = [norms.query.float()] * heads[0] + [norms.key.float()] * heads[1]
        values = torch.nn.functional.rms_norm(values, values.shape[-1:], None, norms.epsilon)
        values = values * torch.stack(weights)
    first, second = values.chunk(2, dim=-1)
    turned = values * cos.float()[:, None] + torch.cat([-second, first], dim=-1) * sin.float()[:, None]
    return torch.cat([turned.to(qkv.dtype), qkv[:, together:]], dim=1)


def check_norm_rotary(device: str) -> None:
    @for_examples(
        40, device, st.integers(0, 4), st.tuples(st.integers(1, 9), st.integers(1, 5)),
        st.sampled_from([16, 32, 64, 80, 128, 256]), st.sampled_from(layer_dtypes(device)), st.booleans(),
    )  # fmt: skip
    def compare(rows: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, normed: bool) -> None:
        qkv = numbers(rows, heads[0] + 2 * heads[1], head_dim, dtype=dtype, seed=1)
        # The halves differ, which they do not in models, so that each must be read.
        cos, sin = (numbers(rows, head_dim, dtype=dtype, seed=seed) for seed in (2, 3))
        norms = None
        if normed:
            norms = elementwise.HeadNorms(*(numbers(head_dim, dtype=dtype, seed=n) for n in (4, 5)), 1e-6)
        exact = plainly_turned(qkv, cos, sin, heads, norms)
        there = qkv.to(device, copy=True)
        if norms is not None:
            norms = elementwise.HeadNorms(as_read(norms.query, device), as_read(norms.key, device), 1e-6)
        elementwise.norm_rotary_(there, cos.to(device), sin.to(device), heads, norms)
        same(there, exact)
        values = slice(sum(heads), None)
        assert torch.equal(there[:, values].cpu(), qkv[:, values])


def check_gated(device: str) -> None:
    @for_examples(
        30, device, ROWS, st.sampled_from([1, 48, 1024, 1500]), st.sampled_from(layer_dtypes(device)),
        st.sampled_from([1.0, 60.0]),
    )  # fmt: skip
    def compare(rows: int, width: int, dtype: torch.dtype, scale: float) -> None:
        gate_up = numbers(rows, 2 * width, dtype=dtype, seed=rows, apart=16) * scale
        gate, up = gate_up.float().chunk(2, dim=-1)
        # 1 + erf(x) and the like are rounded to float32 where they are small, beside 1.
        lost = 4 * torch.finfo(torch.float32).eps * (gate * up).abs()
        for activation in elementwise.ACTIVATIONS:
            exact = elementwise.gated_reference(gate_up, activation)
            found = elementwise.gated(gate_up.to(device), activation)
            assert found.dtype is exact.dtype
            apart = (found.float().cpu() - exact.float()).abs()
            allowed = lost + LAYER_TOLERANCE[dtype] * exact.float().abs() + torch.finfo(dtype).smallest_normal
            assert (apart <= allowed).all(), f"{activation}: {float((apart - allowed).max())} too far apart"

    broken = torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]], device=device)
    for activation in elementwise.ACTIVATIONS:
        assert elementwise.gated(broken, activation).isnan().all()


CHECKS = [
    check_maxsim, check_maxsim_of_one_size, check_maxsim_of_all_sizes, check_maxsim_of_a_long_document,
    check_maxsim_of_nan, check_maxsim_by_small_tiles, check_maxsim_of_slices, check_maxsim_beyond_32_bits,
    check_attention, check_projection, check_norm, check_norm_rotary, check_gated,
]  # fmt: skip
