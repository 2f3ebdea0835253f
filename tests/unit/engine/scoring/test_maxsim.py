"""MaxSim backends against the definition, on what is ragged, empty, scaled or not a number."""

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine.ops import cpu as kernels
from maxsimd.engine.ops import triton as triton_ops
from maxsimd.engine.scoring.maxsim import (
    MaxSim,
    Rows,
    avx512,
    choose_maxsim,
    maxsim_apart_avx512,
    maxsim_avx512,
    maxsim_reference,
    maxsim_tiled,
    tiled,
)
from maxsimd.engine.scoring.maxsim.reference import EMPTY_DOCUMENT_SCORE
from maxsimd.pooling.ragged import Ragged, offsets_of
from maxsimd.pooling.spans import Spans
from tests.unit.pairs import Pairs, pairs_of

pytestmark = pytest.mark.fast

needs_the_kernel = pytest.mark.skipif(
    not kernels.is_available(), reason="this processor cannot run the kernel"
)
BACKENDS = [
    pytest.param(maxsim_reference, id="reference"),
    pytest.param(maxsim_tiled, id="tiled"),
    pytest.param(maxsim_avx512, id="avx512", marks=needs_the_kernel),
]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
Problem = tuple[Ragged, Ragged, Pairs]


def ragged(lengths: list[int], dim: int, seed: int) -> Ragged:
    random = torch.Generator().manual_seed(seed)
    return Ragged.from_lengths(torch.randn(sum(lengths), dim, generator=random), lengths)


def plain(queries: Ragged, documents: Ragged, pairs: Pairs) -> list[float]:
    """The definition, number by number, in double precision."""
    found = []
    for q, d in pairs:
        query, document = queries[q].double().numpy(), documents[d].double().numpy()
        if len(document):
            found.append(float(sum(max(np.dot(a, b) for b in document) for a in query)))
        else:
            found.append(-1e9)
    return found


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    dim = draw(st.sampled_from([1, 2, 7, 16]))
    queries = draw(st.lists(st.integers(0, 18), min_size=1, max_size=4))
    documents = draw(st.lists(st.integers(0, 70), min_size=1, max_size=6))
    pair = st.tuples(st.integers(0, len(queries) - 1), st.integers(0, len(documents) - 1))
    pairs = draw(st.lists(pair, max_size=10) | st.just([(0, i) for i in range(len(documents))]))
    return ragged(queries, dim, 1), ragged(documents, dim, 2), pairs_of(pairs)


@pytest.mark.parametrize("maxsim", BACKENDS)
@settings(max_examples=60)
@given(problems(), st.sampled_from(["float32", "bfloat16", "int8"]))
def test_every_backend_follows_the_definition(maxsim: MaxSim, problem: Problem, precision: str) -> None:
    """bfloat16 embeddings score as their exact values, int8 ones as their decoded values."""
    queries, documents, pairs = problem
    exact = documents
    if precision == "bfloat16":
        queries, documents = (items.decoded(torch.bfloat16) for items in (queries, documents))
        exact = documents
    elif precision == "int8":
        scales = documents.values.abs().amax(dim=1).clamp(min=1e-12) / 127
        rounded = (documents.values / scales[:, None]).round().to(torch.int8)
        documents = Ragged(rounded, documents.offsets, scales).decoded(torch.float32)
        exact = Ragged(rounded.double() * scales.double()[:, None], documents.offsets)
    scores = maxsim(queries, documents, pairs)
    assert (scores.dtype, scores.shape) == (torch.float32, (len(pairs),))
    tolerance = {"abs": 0.5, "rel": 0.02} if precision == "bfloat16" else {"abs": 2e-3, "rel": 1e-5}
    assert scores.tolist() == pytest.approx(plain(queries, exact, pairs), **tolerance)


@pytest.mark.parametrize("maxsim", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_number_makes_the_scores_of_its_own_text_none(maxsim: MaxSim, dtype: torch.dtype) -> None:
    pairs = pairs_of([(0, 0), (0, 1), (0, 2), (1, 0), (1, 2)])
    # The maxima of the compiled kernel may leave out a single row that is no number.
    for rows in (slice(None),) if maxsim is maxsim_avx512 else (slice(None), 0, 17, 39):
        queries, documents = ragged([3, 2], 4, 1), ragged([5, 40, 33], 4, 2)
        documents[1][rows] = torch.nan
        queries[1][0] = torch.nan
        scores = maxsim(queries.decoded(dtype), documents.decoded(dtype), pairs)
        assert scores.isnan().tolist() == [False, True, False, True, True], rows


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 12))
def test_tiles_are_documents_that_fit_or_one_that_does_not(lengths: list[int], rows: int) -> None:
    offsets = offsets_of(np.array(lengths))
    assert offsets.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    tiles = list(tiled._tiles(offsets, rows))
    assert [first for first, _ in tiles] == [0, *(last for _, last in tiles[:-1])]
    assert tiles[-1][1] == len(lengths)
    for first, last in tiles:
        assert last > first
        assert sum(lengths[first:last]) <= rows or last == first + 1
        if last < len(lengths):
            assert sum(lengths[first : last + 1]) > rows, "no tile is smaller than it must be"


@pytest.mark.parametrize("tile_bytes", [1, 4 * 3 * 40, 4 * 3 * 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_do_not_depend_on_the_size_of_a_tile(
    monkeypatch: pytest.MonkeyPatch, tile_bytes: int, dtype: torch.dtype
) -> None:
    queries = ragged([3, 16], 8, 1).decoded(dtype)
    documents = ragged([40, 1, 64, 33, 32, 90, 2, 5], 8, 2).decoded(dtype)
    pairs = pairs_of([(q, d) for q in range(2) for d in range(8)])
    monkeypatch.setattr(tiled, "TILE_BYTES", tile_bytes)
    sizes: list[int] = []
    product = tiled._product
    monkeypatch.setattr(tiled, "_product", lambda rows, q: sizes.append(len(rows)) or product(rows, q))
    scores = maxsim_tiled(queries, documents, pairs)
    tolerance = 1e-4 if dtype is torch.float32 else 0.5
    assert scores.tolist() == pytest.approx(plain(queries, documents, pairs), abs=tolerance)
    rows = [tile_bytes // (length * documents.values.itemsize) for length in (3, 16)]
    lengths = documents.lengths
    expected = []
    for most in rows:
        tiles = tiled._tiles(offsets_of(np.array(lengths)), most)
        expected += [sum(lengths[first:last]) for first, last in tiles]
    assert sizes == expected


@settings(max_examples=60)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.data())
def test_the_tokens_of_the_wanted_documents_stand_end_to_end(lengths: list[int], data: st.DataObject) -> None:
    documents = ragged(lengths, 3, 1)
    wanted = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=8))
    found = tiled._tokens_of(np.array(wanted), documents, np.array(lengths))
    assert torch.equal(found, torch.cat([documents[i] for i in wanted]))
    if len(found) and wanted == list(range(wanted[0], wanted[-1] + 1)):
        start = documents.offsets[wanted[0]]
        assert found.data_ptr() == documents.values[start:].data_ptr(), "nothing is copied"


@settings(max_examples=60)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 3))
def test_maxima_by_torch_are_those_of_consecutive_rows(counts: list[int], columns: int) -> None:
    rows = torch.randn(sum(counts), columns, generator=torch.Generator().manual_seed(0)) - 3
    found = tiled.maxima_by_torch(rows, np.array(counts))
    assert torch.equal(found, torch.stack([part.amax(dim=0) for part in rows.split(counts)]))
    assert tiled.maxima_by_torch(rows.to("meta"), np.array(counts)).device.type == "meta"


def test_rows_by_index_are_those_rows() -> None:
    index = torch.tensor([8, 0, 0, 3])
    for dtype in (torch.float32, torch.bfloat16):
        for columns in (1, 2, 3, 4, 8):
            rows = ragged([9], 2 * columns, 1).values.to(dtype)
            for some in (rows[:, :columns].contiguous(), rows[:, columns:]):
                taken = tiled._take(some, index)
                assert taken.dtype is dtype
                assert torch.equal(taken, some[index])


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 127, 128, 129, 200, 4096, 4097, 6500])
def test_products_are_made_in_pieces_of_few_shapes(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    shapes: set[tuple[int, int]] = set()
    mm = torch.mm

    def noted(first: torch.Tensor, second: torch.Tensor, *, out: torch.Tensor) -> None:
        shapes.add((len(first), second.shape[1]))
        mm(first, second, out=out)

    monkeypatch.setattr(torch, "mm", noted)
    random = torch.Generator().manual_seed(rows)
    values = torch.randn(rows, 4, generator=random).bfloat16()
    for columns in (1, 15, 16, 17, 32):
        shapes.clear()
        transposed = torch.randn(4, columns, generator=random).bfloat16()
        found = tiled._product(values, transposed)
        assert found.shape == (rows, columns)
        exact = values.float() @ transposed.float()
        torch.testing.assert_close(found.float(), exact, atol=0.05, rtol=0.02)
        assert {size for size, _ in shapes} <= set(tiled.PIECES)
        assert {width for _, width in shapes} == {-(-columns // tiled.COLUMNS) * tiled.COLUMNS}
        assert max(size for size, _ in shapes) == max([s for s in tiled.PIECES if s <= rows] or [64])
    monkeypatch.setattr(torch, "mm", None)
    # In float32 it is one piece.
    assert torch.equal(
        tiled._product(values.float(), transposed.float()), values.float() @ transposed.float()
    )


def test_scores_are_made_on_the_documents_device() -> None:
    queries, documents = ragged([3], 4, 1), ragged([2, 5], 4, 2)
    elsewhere = [Ragged(items.values.to("meta"), items.offsets) for items in (queries, documents)]
    for maxsim in (maxsim_reference, maxsim_tiled):
        scores = maxsim(elsewhere[0], elsewhere[1], pairs_of([(0, 1), (0, 0)]))
        assert (scores.device.type, scores.shape) == ("meta", (2,))


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the compiled kernel is given; it answers by the definition."""
    calls: list[tuple[Any, ...]] = []

    def kernel(q: Any, q_offsets: Any, d: Any, d_offsets: Any, pairs: Any, empty: float) -> torch.Tensor:
        calls.append((q.dtype, d.dtype, [*map(tuple, pairs.tolist())], empty))
        return maxsim_reference(Ragged(q, q_offsets), Ragged(d, d_offsets), pairs)

    monkeypatch.setattr(avx512, "maxsim", kernel)
    return calls


def test_the_kernel_is_given_pairs_of_one_query_together(kernel_calls: list[tuple[Any, ...]]) -> None:
    queries, documents = ragged([2, 3, 1], 4, 1), ragged([4, 2, 5], 4, 2)
    pairs = pairs_of([(2, 0), (0, 1), (1, 1), (2, 2), (0, 0)])
    scores = maxsim_avx512(queries, documents, pairs)
    assert scores.tolist() == pytest.approx(plain(queries, documents, pairs), abs=1e-4)
    assert kernel_calls[0][2] == [(0, 1), (0, 0), (1, 1), (2, 0), (2, 2)]
    assert kernel_calls[0][3] == -1e9


def test_the_kernel_computes_in_the_documents_precision(kernel_calls: list[tuple[Any, ...]]) -> None:
    queries, documents, pairs = ragged([2], 4, 1), ragged([4], 4, 2), pairs_of([(0, 0)])
    maxsim_avx512(queries, documents.decoded(torch.bfloat16), pairs)
    maxsim_avx512(queries.decoded(torch.bfloat16), documents, pairs)
    assert [call[:2] for call in kernel_calls] == [(torch.bfloat16,) * 2, (torch.float32,) * 2]
    kernel_calls.clear()
    odd = ragged([2], 5, 1), ragged([4], 5, 2).decoded(torch.bfloat16)
    assert torch.equal(maxsim_avx512(*odd, pairs), maxsim_tiled(*odd, pairs)), "which it does not take"
    assert kernel_calls == []


@dataclass
class Launches:
    """Answers the Triton kernel's launches by the definition, and notes them."""

    noted: list[Any] = field(default_factory=list)

    def __call__(
        self, queries: Any, documents: Any, pairs: Any, empty_score: float, *, split_k: int | None
    ) -> torch.Tensor:
        self.noted.append((queries, documents, pairs, split_k))
        items = [
            Spans(packed.values, packed.starts.numpy(), packed.stops.numpy(), packed.scales)
            .gathered()
            .decoded(torch.float32)
            for packed in (queries, documents)
        ]
        wanted = np.column_stack([pairs.queries, pairs.documents])
        scores = maxsim_reference(items[0], items[1], wanted)
        return torch.where(scores == EMPTY_DOCUMENT_SCORE, empty_score, scores)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    pytest.importorskip("triton")
    from maxsimd.engine.scoring.maxsim import triton

    launches = Launches()
    monkeypatch.setattr(triton, "maxsim", launches)
    return launches


def _triton(queries: Ragged, documents: Ragged, pairs: Pairs, *split: int) -> torch.Tensor:
    from maxsimd.engine.scoring.maxsim.triton import maxsim_triton

    return maxsim_triton(queries, documents, pairs, *split)


def test_triton_is_given_int32_indices_and_longest_lengths(launches: Launches) -> None:
    queries, documents = ragged([2, 7, 1], 4, 1), ragged([0, 3, 9, 2], 4, 2)
    pairs = pairs_of([(2, 0), (0, 1), (1, 2), (1, 3), (0, 2)])
    scores = _triton(queries, documents, pairs, 5)
    assert scores.tolist() == pytest.approx(plain(queries, documents, pairs), abs=1e-4)
    [(packed_queries, packed_documents, indices, split_k)] = launches.noted
    assert (packed_queries.longest, packed_documents.longest, split_k) == (7, 9, 5)
    for packed in (packed_queries, packed_documents):
        assert packed.starts.dtype is packed.stops.dtype is torch.int32
    for numbers in (indices.queries, indices.documents):
        assert numbers.dtype is torch.int32
    assert packed_queries.scales is None
    assert packed_documents.scales is None


def test_triton_is_given_int8_rows_with_their_scales(launches: Launches) -> None:
    queries = ragged([2], 4, 1)
    values = torch.randint(-127, 128, (7, 4), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    documents = Ragged(values, (0, 3, 7), torch.linspace(0.1, 0.7, 7))
    pairs = pairs_of([(0, 1), (0, 0)])
    scores = _triton(queries, documents, pairs)
    assert scores.tolist() == pytest.approx(plain(queries, documents.decoded(torch.float32), pairs), rel=1e-4)
    assert launches.noted[0][1].values.dtype is torch.int8
    assert launches.noted[0][3] is None


def test_triton_is_launched_for_pairs_alone(launches: Launches) -> None:
    scores = _triton(ragged([2], 4, 1), ragged([2], 4, 2), pairs_of([]))
    assert (scores.shape, scores.dtype, scores.device) == ((0,), torch.float32, CPU)
    elsewhere = Ragged(torch.empty(2, 4, device="meta"), (0, 2))
    assert _triton(elsewhere, elsewhere, pairs_of([])).device.type == "meta"
    assert launches.noted == []
    _triton(ragged([0, 0], 4, 1), ragged([2], 4, 2), pairs_of([(1, 0)]))
    assert launches.noted[0][0].longest == 1, "with room for one token at least"


@pytest.mark.parametrize("name", ["auto", "reference", "tiled", "avx512", "triton"])
def test_a_name_means_the_best_backend_that_runs_there(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pytest.importorskip("triton")
    for device, allowed, built, has_triton in product((CPU, GPU), *[(False, True)] * 3):
        monkeypatch.setattr(kernels, "is_available", lambda built=built: built)
        # Interpreted, Triton runs on a CPU, too.
        monkeypatch.setattr(triton_ops, "runs_on", lambda device, there=has_triton: there)
        can_run = {
            "reference": True,
            "tiled": True,
            "avx512": built and device is CPU,
            "triton": has_triton,
        }
        chosen: str | None = name if can_run.get(name) else None
        if name == "auto":
            chosen = "avx512" if device is CPU and built and allowed else "tiled"
            chosen = "triton" if device is GPU and has_triton else chosen
        if chosen is None:
            message = (
                f"^the MaxSim backend '{name}' cannot run on this {device.type}; "
                'use maxsim="auto", "tiled" or "reference"$'
            )
            with pytest.raises(ValueError, match=message):
                choose_maxsim(name, device, allowed)
            continue
        found, backend = choose_maxsim(name, device, allowed)
        assert (found, backend.__name__) == (chosen, f"maxsim_{chosen}")
    monkeypatch.setattr(kernels, "is_available", lambda: True)
    assert choose_maxsim("auto", CPU)[0] == "avx512", "compiled kernels are allowed unless it is said"


# Documents that lie each by itself, in any precision: the same bits as end to end.


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]


def document(length: int, dim: int, dtype: torch.dtype, seed: int) -> Ragged:
    """Numbers from very small to large, not at the beginning of their memory."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(length + 1, dim, generator=random)
    if dtype is torch.int8:
        scales = torch.rand(length + 1, generator=random) + 0.01
        return Ragged((rows * 30).clamp(-127, 127).to(dtype)[1:], (0, length), scales[1:])
    return Ragged((rows * 10 ** (rows[:, :1] - 1)).to(dtype)[1:], (0, length))


def rows_of(documents: list[Ragged]) -> list[Rows]:
    return [(one.values, one.scales) for one in documents]


@st.composite
def apart(draw: st.DrawFn) -> tuple[Ragged, list[Ragged], Pairs]:
    dim = draw(st.sampled_from([1, 2, 15, 16, 34, 128]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    queries = Ragged.from_lengths(torch.randn(sum(lengths), dim).to(dtype), lengths)
    shapes = draw(st.lists(st.tuples(st.integers(0, 70), st.sampled_from(DTYPES)), min_size=1, max_size=8))
    documents = [document(length, dim, kind, i) for i, (length, kind) in enumerate(shapes)]
    pair = st.tuples(st.integers(0, len(lengths) - 1), st.integers(0, len(documents) - 1))
    return queries, documents, pairs_of(draw(st.lists(pair, max_size=12)))


@needs_the_kernel
@settings(max_examples=60)
@given(apart())
def test_apart_the_bits_are_those_end_to_end(problem: tuple[Ragged, list[Ragged], Pairs]) -> None:
    queries, documents, pairs = problem
    dtype = queries.values.dtype
    joined = Ragged.join([one.decoded(dtype) for one in documents])
    scores = maxsim_apart_avx512(queries, rows_of(documents), pairs)
    assert torch.equal(scores, maxsim_avx512(queries, joined, pairs))
    expected = maxsim_reference(queries.decoded(torch.float32), joined.decoded(torch.float32), pairs)
    assert torch.allclose(scores, expected, rtol=1e-2, atol=1e-2)


@needs_the_kernel
def test_rows_and_queries_of_any_form_are_read() -> None:
    """Rows that do not follow each other, and queries of which the kernel takes no dtype or dimension."""
    queries, wide = Ragged(torch.randn(5, 16), (0, 5)), torch.randn(9, 32)
    scores = maxsim_apart_avx512(queries, [(wide[:, ::2], None)], pairs_of([(0, 0)]))
    rows = Ragged(wide[:, ::2].contiguous(), (0, 9))
    assert torch.equal(scores, maxsim_avx512(queries, rows, pairs_of([(0, 0)])))
    documents = [document(3, 7, torch.float32, 1), document(4, 7, torch.int8, 2)]
    pairs = pairs_of([(1, 0), (0, 1)])
    for dtype in (torch.bfloat16, torch.float16):
        queries = Ragged(torch.randn(5, 7).to(dtype), (0, 2, 5))
        joined = Ragged.join([one.decoded(dtype) for one in documents])
        expected = maxsim_reference(queries.decoded(torch.float32), joined.decoded(torch.float32), pairs)
        scores = maxsim_apart_avx512(queries, rows_of(documents), pairs)
        assert torch.allclose(scores, expected, rtol=1e-2, atol=1e-2), dtype
