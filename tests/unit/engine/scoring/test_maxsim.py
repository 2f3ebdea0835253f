"""MaxSim backends against the definition, on what is ragged, empty, scaled or not a number."""

import importlib.util
import math
import re
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution.attention.select import choose_attention
from maxsimd.engine.ops import cpu as kernels
from maxsimd.engine.ops import triton as triton_ops
from maxsimd.engine.scoring import maxsim
from maxsimd.engine.scoring.maxsim import MaxSim, maxsim_apart_avx512, maxsim_avx512, maxsim_reference
from maxsimd.engine.scoring.similarity import score_pairs
from maxsimd.pooling.ragged import Ragged
from tests.unit.pairs import Pairs, pairs_of

pytestmark = pytest.mark.fast

needs_the_kernel = pytest.mark.skipif(not kernels.is_available(), reason="this processor cannot run it")
BACKENDS = [
    pytest.param(maxsim_reference, id="reference"),
    pytest.param(maxsim.maxsim_tiled, id="tiled"),
    pytest.param(maxsim_avx512, id="avx512", marks=needs_the_kernel),
]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
Problem = tuple[Ragged, Ragged, Pairs]


def ragged(lengths: list[int], dim: int, seed: int) -> Ragged:
    random = torch.Generator().manual_seed(seed)
    return Ragged.from_lengths(torch.randn(sum(lengths), dim, generator=random), lengths)


def plain(queries: Ragged, documents: Ragged, pairs: Pairs) -> list[float]:
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
    dim = draw(st.sampled_from([1, 2, 7, 16, 48]))
    queries = draw(st.lists(st.integers(0, 18), min_size=1, max_size=4))
    documents = draw(st.lists(st.integers(0, 70), min_size=1, max_size=6))
    pair = st.tuples(st.integers(0, len(queries) - 1), st.integers(0, len(documents) - 1))
    pairs = draw(st.lists(pair, max_size=10) | st.just([(0, i) for i in range(len(documents))]))
    return ragged(queries, dim, 1), ragged(documents, dim, 2), pairs_of(pairs)


@pytest.mark.parametrize("maxsim", BACKENDS)
@settings(max_examples=60)
@given(problems(), st.sampled_from(["float32", "bfloat16", "int8"]))
def test_every_backend_follows_the_definition(maxsim: MaxSim, problem: Problem, precision: str) -> None:
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
    tolerance = {"abs": 2e-3, "rel": 1e-5}
    if precision == "bfloat16":
        # The compiled kernel sums in float32, but for dimensions of an odd number.
        is_exact = maxsim is maxsim_avx512 and queries.values.shape[1] % 2 == 0
        tolerance = {"abs": 5e-3, "rel": 1e-3} if is_exact else {"abs": 0.5, "rel": 0.02}
    assert scores.tolist() == pytest.approx(plain(queries, exact, pairs), **tolerance)


@pytest.mark.parametrize("maxsim", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_number_makes_the_scores_of_its_own_text_none(maxsim: MaxSim, dtype: torch.dtype) -> None:
    pairs = pairs_of([(0, 0), (0, 1), (0, 2), (1, 0), (1, 2)])
    for rows in (slice(None), *range(40)):
        queries, documents = ragged([3, 2], 4, 1), ragged([5, 40, 33], 4, 2)
        documents[1][rows] = torch.nan
        queries[1][0] = torch.nan
        scores = maxsim(queries.decoded(dtype), documents.decoded(dtype), pairs)
        assert scores.isnan().tolist() == [False, True, False, True, True], rows


@pytest.mark.parametrize("tile_bytes", [1, 4 * 3 * 40, 4 * 3 * 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_fit_tiles(monkeypatch: pytest.MonkeyPatch, tile_bytes: int, dtype: torch.dtype) -> None:
    queries = ragged([3, 16], 8, 1).decoded(dtype)
    documents = ragged([40, 1, 64, 33, 32, 90, 2, 5], 8, 2).decoded(dtype)
    pairs = pairs_of([(q, d) for q in range(2) for d in range(8)])
    monkeypatch.setattr(maxsim, "TILE_BYTES", tile_bytes)
    monkeypatch.setattr(maxsim, "LEAST_ROWS", 64)
    sizes: list[int] = []
    product = maxsim._product
    monkeypatch.setattr(maxsim, "_product", lambda r, q: sizes.append(len(r) * len(q[0])) or product(r, q))
    scores = maxsim.maxsim_tiled(queries, documents, pairs)
    tolerance = 1e-4 if dtype is torch.float32 else 0.5
    assert scores.tolist() == pytest.approx(plain(queries, documents, pairs), abs=tolerance)
    assert max(sizes) <= max(tile_bytes // documents.values.itemsize, 64 * 16)
    assert (90 - 64) * 16 in sizes or tile_bytes >= 90 * 16 * documents.values.itemsize


def test_maxima_on_another_device_are_those_of_consecutive_rows() -> None:
    rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)) - 3
    counts = [1, 4, 1, 2]
    found = maxsim.maxima_by_torch(rows, np.array(counts))
    assert torch.equal(found, torch.stack([part.amax(dim=0) for part in rows.split(counts)]))


@pytest.mark.parametrize("rows", [1, 64, 65, 200, 4097, 6500])
def test_products_are_made_in_pieces_of_few_shapes(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    shapes: set[tuple[int, int]] = set()
    mm = torch.mm

    def noted(first: torch.Tensor, second: torch.Tensor, *, out: torch.Tensor) -> None:
        shapes.add((len(first), second.shape[1]))
        mm(first, second, out=out)

    monkeypatch.setattr(torch, "mm", noted)
    random = torch.Generator().manual_seed(rows)
    values = torch.randn(rows, 4, generator=random).bfloat16()
    for columns, padded in ((1, 16), (15, 16), (16, 16), (17, 32)):
        shapes.clear()
        transposed = torch.randn(4, columns, generator=random).bfloat16()
        found = maxsim._product(values, transposed)
        torch.testing.assert_close(found.float(), values.float() @ transposed.float(), atol=0.05, rtol=0.02)
        assert {width for _, width in shapes} == {padded}
        assert {size for size, _ in shapes} <= set(maxsim.PIECES)
        assert max(size for size, _ in shapes) == max([s for s in maxsim.PIECES if s <= rows] or [64])


@pytest.mark.parametrize("name", ["auto", "reference", "tiled", "avx512", "triton"])
def test_a_name_means_the_best_backend_that_runs_there(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pytest.importorskip("triton")
    for device, allowed, built, has_triton in product((CPU, GPU), *[(False, True)] * 3):
        monkeypatch.setattr(kernels, "is_available", lambda built=built: built)
        # Interpreted, Triton runs on a CPU, too.
        monkeypatch.setattr(triton_ops, "runs_on", lambda device, there=has_triton: there)
        runs = {"reference": True, "tiled": True, "avx512": built and device is CPU, "triton": has_triton}
        chosen = name
        if name == "auto":
            chosen = "avx512" if runs["avx512"] and allowed else "tiled"
            chosen = "triton" if device is GPU and has_triton else chosen
        if runs[chosen]:
            found, backend = maxsim.choose_maxsim(name, device, allowed)
            assert (found, backend.__name__) == (chosen, f"maxsim_{chosen}")
            continue
        message = f"^the MaxSim backend '{name}' cannot run on this {device.type}; use maxsim=\"auto\","
        with pytest.raises(ModelLoadError, match=message):
            maxsim.choose_maxsim(name, device, allowed)


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    advice = "triton is not installed: pip install '.[cuda]' in the checkout"
    host = maxsim.choose_maxsim("auto", CPU, compiled_allowed=False)
    assert host[0] == maxsim.choose_maxsim("auto", GPU)[0] == "tiled"
    assert caplog.messages == [f"plain torch runs in place of kernels for this GPU, because {advice}"]
    with pytest.raises(ModelLoadError, match=re.escape(f"'triton' cannot run on this cuda; {advice}")):
        maxsim.choose_maxsim("triton", GPU)
    with pytest.raises(ModelLoadError, match=re.escape(f"by triton cannot run on this cuda; {advice}")):
        choose_attention("triton", None, GPU, torch.float32, False)  # type: ignore[arg-type]


# Documents that lie each by itself, in any precision: the same bits as end to end.


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]


def document(length: int, dim: int, dtype: torch.dtype, seed: int) -> Ragged:
    """Numbers from very small to large, not at the beginning of their memory; the last row of 5 is NaN."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(length + 1, dim, generator=random)
    rows[length] *= torch.nan if seed == 5 else 1
    if dtype is torch.int8:
        scales = torch.rand(length + 1, generator=random) + 0.01 + 0 * rows[:, 0]
        return Ragged((rows * 30).clamp(-127, 127).to(dtype)[1:], (0, length), scales[1:])
    return Ragged((rows * 10 ** (rows[:, :1] - 1)).to(dtype)[1:], (0, length))


def rows_of(documents: list[Ragged]) -> list[maxsim.Rows]:
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
    torch.testing.assert_close(scores, maxsim_avx512(queries, joined, pairs), rtol=0, atol=0, equal_nan=True)
    exact = [queries.decoded(torch.float32), joined.decoded(torch.float32)]
    # Odd dimensions run in torch, which rounds each product to a bfloat16: by at most 1/256 of its size.
    sizes = maxsim_reference(*(Ragged(each.values.abs(), each.offsets) for each in exact), pairs)
    scores, expected = (each.nan_to_num(1e30) for each in (scores, maxsim_reference(*exact, pairs)))
    assert ((scores == expected) | ((scores - expected).abs() <= sizes / 250)).all()


@needs_the_kernel
def test_rows_and_queries_of_any_form_are_read() -> None:
    queries, wide = Ragged(torch.randn(5, 16), (0, 5)), torch.randn(9, 32)
    scores = maxsim_apart_avx512(queries, [(wide[:, ::2], None)], pairs_of([(0, 0)]))
    rows = Ragged(wide[:, ::2].contiguous(), (0, 9))
    assert torch.equal(scores, maxsim_avx512(queries, rows, pairs_of([(0, 0)])))
    documents = [document(3, 7, torch.float32, 1), document(4, 7, torch.int8, 2)]
    pairs = pairs_of([(1, 0), (0, 1)])
    for dtype in (torch.bfloat16, torch.float16):
        queries = Ragged(torch.randn(5, 7).to(dtype), (0, 2, 5))
        joined = Ragged.join([one.decoded(dtype) for one in documents])
        exact = [queries.decoded(torch.float32), joined.decoded(torch.float32)]
        scores = maxsim_apart_avx512(queries, rows_of(documents), pairs)
        sizes = maxsim_reference(*(Ragged(each.values.abs(), each.offsets) for each in exact), pairs)
        assert ((scores - maxsim_reference(*exact, pairs)).abs() <= sizes / 250).all(), dtype


# Every similarity against its definition.


def _dot(q: list[float], d: list[float]) -> float:
    return sum(a * b for a, b in zip(q, d, strict=True))


def by_hand(similarity: str, query: torch.Tensor, document: torch.Tensor) -> float:
    q, d = query.tolist(), document.tolist()
    match similarity:
        case "dot":
            return _dot(q[0], d[0])
        case "cosine":
            return _dot(q[0], d[0]) / math.sqrt(_dot(q[0], q[0]) * _dot(d[0], d[0]))
        case _:
            total = sum(max(_dot(a, b) for b in d) for a in q)
            return total / len(q) if similarity == "meanmaxsim" else total


@settings(max_examples=60)
@given(
    st.sampled_from(["maxsim", "meanmaxsim", "cosine", "dot"]),
    st.lists(st.integers(1, 5), min_size=1, max_size=4), st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.data(),
)  # fmt: skip
def test_a_similarity_follows_its_definition(
    similarity: str, queries: list[int], documents: list[int], data: st.DataObject
) -> None:
    random = torch.Generator().manual_seed(len(queries) * 100 + len(documents))
    if similarity in ("cosine", "dot"):
        queries, documents = [1] * len(queries), [1] * len(documents)
    q = Ragged.from_lengths(3 * torch.randn(sum(queries), 5, generator=random), queries)
    d = Ragged.from_lengths(2 * torch.randn(sum(documents), 5, generator=random), documents)
    index = st.tuples(st.integers(0, len(queries) - 1), st.integers(0, len(documents) - 1))
    pairs = pairs_of(data.draw(st.lists(index, min_size=1, max_size=8)))
    scores = score_pairs(similarity, q, d, pairs, maxsim_reference)
    assert scores.dtype is torch.float32
    assert scores.shape == (len(pairs),)
    assert scores.tolist() == pytest.approx([by_hand(similarity, q[i], d[j]) for i, j in pairs], abs=1e-4)


def test_edges_of_similarities() -> None:
    values = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, d = Ragged(values[:1], (0, 1)), Ragged(values[1:], (0, 1))
    none, two = Ragged(torch.zeros(0, 4), (0, 0)), Ragged(torch.ones(2, 4), (0, 2))
    for similarity in ("cosine", "dot"):
        [score] = score_pairs(similarity, q, d, pairs_of([(0, 0)]), maxsim_reference).tolist()
        expected = by_hand(similarity, values[:1].float(), values[1:].float())
        assert score == pytest.approx(expected, abs=1e-5)
    for similarity in ("maxsim", "meanmaxsim"):
        assert score_pairs(similarity, none, two, pairs_of([(0, 0)]), maxsim_reference).tolist() == [0.0]
