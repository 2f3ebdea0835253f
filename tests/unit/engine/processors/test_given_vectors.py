"""Queries and documents that come as embeddings, and queries that are encoded once and scored later."""

import asyncio
import base64
import pickle
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from maxsimd.api import reading
from maxsimd.engine import Engine, EngineConfig, QueryRows, Truncation, Vectors, errors
from maxsimd.engine.processors import documents as documents_module
from maxsimd.engine.processors import dual_encoder
from maxsimd.engine.scoring.scorer import ScoringPrice
from tests.checkpoints import cross_encoders, language_models, visual
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.exhaustive import exhaustive
from tests.unit.calling_handlers import Caller, RecordingEngine, error_of
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUERY = "how is a file opened"
DOCUMENTS = ["Open a file and return a stream.", "Sort a list.", "x", "Cats sleep a lot on the sofa."]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def colbert(native_multi_vector: str) -> AsyncIterator[RecordingEngine]:
    config = EngineConfig(model=native_multi_vector, dtype="float32", threads=1, max_vectors=70)
    async with RecordingEngine(config) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vectors(colbert: RecordingEngine) -> tuple[Any, list[Any]]:
    (query,) = (await colbert.embed_tokens([QUERY], input_type="query")).embeddings
    return query, [*(await colbert.embed_tokens(DOCUMENTS, input_type="document")).embeddings]


async def test_vectors_have_the_scores_of_their_texts(colbert: RecordingEngine, vectors: Any) -> None:
    expected = (await colbert.score(QUERY, DOCUMENTS, cache="bypass")).scores
    query, rows = vectors
    given: tuple[tuple[Any, Any], ...] = (
        *((QUERY, rows), (query, rows), (query, DOCUMENTS)),
        (QUERY, [rows[0], DOCUMENTS[1], Vectors(rows[2]), torch.from_numpy(rows[3])]),
        (torch.from_numpy(query), [each.astype(np.float64) for each in rows]),
        ([query, QUERY, query, query], [DOCUMENTS[0], rows[1], rows[2], DOCUMENTS[3]]),
    )
    for queries, documents in given:
        found = await colbert.score(queries, documents)
        np.testing.assert_allclose(found.scores, expected, rtol=1e-5, err_msg=str(type(documents[0])))
    expected = (await colbert.score(QUERY, rows)).scores
    for given, error in (
        ([Vectors(torch.from_numpy(each).to(torch.float16)) for each in rows], 1e-3),
        ([Vectors(torch.from_numpy(each).to(torch.bfloat16)) for each in rows], 1e-2),
        ([_int8(each) for each in rows], 2e-2),
    ):
        found = await colbert.score(QUERY, [*given, rows[0], DOCUMENTS[1]])
        np.testing.assert_allclose(found.scores, [*expected, *expected[:2]], rtol=error)


def _int8(rows: Any) -> Vectors:
    scales = np.abs(rows).max(axis=1) / 127
    return Vectors(np.rint(rows / scales[:, None]).astype(np.int8), scales)


async def test_they_are_normalized_ranked_and_returned(colbert: RecordingEngine, vectors: Any) -> None:
    query, rows = vectors
    normalized = await colbert.score(QUERY, DOCUMENTS, normalize=True)
    found = await colbert.score(query, DOCUMENTS, normalize=True)
    np.testing.assert_allclose(found.scores, normalized.scores, rtol=1e-5)
    expected = await colbert.rerank(QUERY, DOCUMENTS)
    ranked = await colbert.rerank(QUERY, rows)
    assert [one.index for one in ranked.results] == [one.index for one in expected.results]
    for one in ranked.results:
        assert isinstance(one.document, Vectors)
        assert one.document.values is rows[one.index]


async def test_no_token_counts_as_run_or_cached(colbert: RecordingEngine, vectors: Any) -> None:
    query, rows = vectors
    usage = (await colbert.score(query, rows)).usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.cached_documents) == (0, 0, 0)
    await colbert.score(QUERY, DOCUMENTS[0])
    usage = (await colbert.score(query, [rows[1], DOCUMENTS[0]])).usage
    assert usage.cached_documents == 1
    assert usage.prompt_tokens == usage.cached_tokens > 0


async def test_bi_encoders_take_one_vector_a_text(gte: str) -> None:
    async with Engine(EngineConfig(model=gte, dtype="float32")) as engine:
        expected = (await engine.score(QUERY, DOCUMENTS)).scores
        rows = (await engine.embed(DOCUMENTS, input_type="document")).embeddings
        query = (await engine.embed(QUERY, input_type="query")).embeddings[0]
        for documents in ([*rows], [row[None] for row in rows]):
            found = await engine.score(query, documents)
            np.testing.assert_allclose(found.scores, expected, rtol=1e-4, atol=1e-5)
        with pytest.raises(errors.InvalidRequestError, match=r"documents\[1\] has 2 vectors"):
            await engine.score(query, [rows[0], rows[:2]])


@pytest.mark.parametrize("has_kernels", [True, False])
async def test_what_cannot_be_scored_is_refused(colbert: Any, has_kernels: bool, monkeypatch: Any) -> None:
    if not has_kernels:
        monkeypatch.setattr(documents_module.kernels, "is_available", lambda: False)
    elif not documents_module.kernels.is_available():
        pytest.skip("this processor cannot run the kernel")
    dim = colbert.model.tasks["token_embed"].dim
    good = np.ones((2, dim), dtype=np.float32)
    wrong: dict[str, Any] = {
        rf"has the shape \[2, 3\].*\[tokens, {dim}\]": np.zeros((2, 3), dtype=np.float32),
        r"has the shape \[0, ": good[:0],
        "NaN or infinite": np.where(np.arange(2 * dim).reshape(2, dim) == 3, np.nan, good),
        "number that is NaN or infinite": np.full((2, dim), np.inf, dtype=np.float16),
        "is of int64": good.astype(np.int64),
        "is not an array of numbers": np.zeros((2, dim), dtype="V4"),
        "has 3 scales for 2 vectors": Vectors(good.astype(np.int8), np.ones(3)),
        "scale that is NaN": Vectors(good.astype(np.int8), np.array([1, np.nan])),
        "leave them out": Vectors(good, np.ones(2)),
        "has 71 vectors, and at most 70 are taken.*raise max_vectors": np.zeros((71, dim), dtype=np.int8),
    }
    for reason, bad in wrong.items():
        with pytest.raises(errors.InvalidRequestError, match=r"^documents\[1\] .*" + reason):
            await colbert.score(QUERY, [good, bad])
        with pytest.raises(errors.InvalidRequestError, match=r"^queries\[0\] .*" + reason):
            await colbert.score(bad, [good])
        found = await colbert.score(good, [good, bad, good], on_error="report")
        assert (list(found.errors), found.scores[0]) == ([1], found.scores[2])
        assert re.search(reason, found.errors[1])
    with pytest.raises(errors.InvalidRequestError, match=r"documents\[1\] is neither a string .* but int"):
        await colbert.score(QUERY, [good, 7])  # type: ignore[list-item]


async def test_scores_that_overflow_name_the_embedding(colbert: RecordingEngine, vectors: Any) -> None:
    query, rows = vectors
    # In the directions of what they are compared with, so that products do not cancel out.
    large, large_query = (np.sign(each) * np.float32(3e38) for each in (query, rows[0]))
    scaled = Vectors(np.full(rows[1].shape, 127, dtype=np.int8), np.full(len(rows[1]), 3e38))
    for queries, documents, named in (
        (QUERY, [rows[0], large], r"documents\[1\] has numbers up to 3e\+38, .*not finite; normalize it"),
        (query, [rows[0], scaled], r"documents\[1\] has a scale of 3e\+38: .*finite in float32; normalize"),
        (large_query, DOCUMENTS[:2], r"queries\[0\] has numbers up to 3e\+38"),
    ):
        with pytest.raises(errors.InvalidRequestError, match=f"^{named}") as error:
            await colbert.score(queries, documents, explain=True)
        assert str(error.value).startswith(str(error.value.param))
    found = await colbert.score(QUERY, [rows[0][:, :3], DOCUMENTS[0], large, large], on_error="report")
    assert [re.search("large|shape", found.errors[i])[0] for i in (0, 2, 3)] == ["shape", "large", "large"]
    assert np.isfinite(found.scores).tolist() == [False, True, False, False]


async def test_infinity_depends_on_the_precision(stanford_colbert: str) -> None:
    async with RecordingEngine(EngineConfig(model=stanford_colbert, dtype="bfloat16", threads=1)) as engine:
        ones = np.ones((2, engine.model.tasks["token_embed"].dim), dtype=np.float32)
        for bad in (_sent(3.402e38 * ones, "float32"), _sent(ones, "int8", scales=[1, 2.675e36])):
            for query, text in ((bad, "a"), ("a", bad)):
                answer = await Caller(engine).ask("POST", "/rerank", {"query": query, "documents": [text]})
                assert re.search("400 .* infinite in bfloat16; norm", f"{answer.status} {error_of(answer)}")


async def test_the_models_own_infinity_stays_its_fault(colbert: Any, vectors: Any, monkeypatch: Any) -> None:
    scorer = colbert._require()._actors._scorer
    monkeypatch.setattr(scorer, "_maxsim", lambda _, documents, pairs: torch.full((len(pairs),), torch.nan))
    monkeypatch.setattr(scorer, "_maxsim_apart", None)
    for documents in (DOCUMENTS[:1], vectors[1]):
        with pytest.raises(errors.RequestFailedError, match="not finite in float32"):
            await colbert.score(QUERY, documents, cache="bypass")


def _sent(rows: Any, dtype: str, **more: Any) -> dict[str, Any]:
    tensor = torch.from_numpy(np.ascontiguousarray(rows)).to(getattr(torch, dtype))
    raw = tensor.view(torch.uint8).numpy().tobytes()
    return {"embedding": base64.b64encode(raw).decode(), "dtype": dtype, "shape": list(rows.shape)} | more


async def test_a_small_request_is_done_before_a_large(colbert: Any, vectors: Any, monkeypatch: Any) -> None:
    """Each document of the large one is a step by itself, and the small one comes behind the first."""
    query, rows = vectors
    engine = colbert._require()
    monkeypatch.setattr(engine.processors.scores, "_price", ScoringPrice(0.001))
    scorer: Any = engine._actors._scorer
    score, go_on = scorer.score, threading.Event()
    monkeypatch.setattr(scorer, "score", lambda *given: go_on.wait(1200) and score(*given))
    documents = [rows[0] + i for i in range(40)]
    large = asyncio.create_task(colbert.score(query, documents))
    await until(lambda: colbert.stats().steps_in_flight > 0)
    small = asyncio.create_task(colbert.score(QUERY, DOCUMENTS[0]))
    await until(lambda: colbert.stats().requests == 2)
    go_on.set()
    await small
    assert not large.done()
    expected = [float((query @ document.T).max(axis=1).sum()) for document in documents]
    np.testing.assert_allclose((await large).scores, expected, rtol=1e-4)


async def test_over_http(colbert: RecordingEngine, vectors: Any) -> None:
    caller = Caller(colbert)
    query, rows = vectors
    expected = (await colbert.score(QUERY, DOCUMENTS)).scores
    scaled = [_int8(rows[0]), _int8(rows[3])]
    packed = base64.b64encode(np.asarray(scaled[0].scales, dtype=np.float32).tobytes()).decode()
    documents = [
        _sent(scaled[0].values, "int8", scales=packed),
        {"embedding": rows[1].tolist()},
        _sent(rows[2], "bfloat16"),
        _sent(scaled[1].values, "int8", scales=np.asarray(scaled[1].scales).tolist()),
    ]
    answer = await caller.json("/score", {"queries": _sent(query, "float16"), "documents": documents})
    np.testing.assert_allclose([item["score"] for item in answer["data"]], expected, rtol=2e-2)
    answer = await caller.json("/rerank", {"query": QUERY, "documents": [*documents, DOCUMENTS[2]]})
    ranked = {item["index"]: item for item in answer["results"]}
    assert [ranked[i].get("document") for i in range(5)] == [None] * 4 + [{"text": DOCUMENTS[2]}]
    assert ranked[2]["relevance_score"] == pytest.approx(ranked[4]["relevance_score"], rel=1e-2)
    for path, body in (
        ("/v1/rerank", {"query": QUERY, "documents": documents, "top_k": 4, "return_documents": True}),
        ("/v1/reranking", {"query": QUERY, "input": documents, "return_input": True}),
        ("/v1/ranking", {"query": {"text": QUERY}, "passages": documents}),
        ("/infinity/rerank", {"query": QUERY, "documents": documents, "return_documents": True}),
    ):
        answer = await caller.json(path, body)
        found = answer.get("rankings") or answer.get("results") or answer["data"]
        assert sorted(item["index"] for item in found) == [0, 1, 2, 3]


async def test_what_is_no_embedding_gets_a_400(colbert: RecordingEngine) -> None:
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        *(({"embedding": "!"}, "is not base64"), ({"embedding": "AAAA"}, "has 3 bytes")),
        *(({"embedding": ""}, "has 0 bytes"), ({"embedding": 7, "shape": None}, "has the shape")),
        ({"embedding": {"a": 1}}, "neither base64 nor lists"),
        ({"embedding": [[1.0], [1.0, 2.0]]}, "neither base64 nor lists"),
        ({"embedding": [[[0.5]]]}, "neither base64 nor lists"),
        ({"embedding": [["a"]]}, "neither base64 nor lists"),
        ({"embedding": [[1e300]], "shape": None}, "has the shape"),
        ({"dtype": "float8"}, "dtype 'float8' is not known; use float32"),
        ({"dtype": ["float32"] * 100_000}, "dtype of type list is not known"),
        ({"dtype": "x" * 1000}, f"dtype '{'x' * 60}' is not known"),
        *(({"shape": [1, 1]}, r"shape \[1, 1\] does not fit"), ({"shape": [-1]}, "does not fit")),
        *(({"shape": "a"}, "does not fit"), ({"shape": [True]}, "does not fit")),
        ({"shape": [[1] * 1_000_000, 1]}, "something else than whole numbers"),
        ({"shape": [int("9" * 19)] * 60_000}, "shape has 60000 sizes; give"),
        *(({"shape": [1, 2, 1]}, "shape has 3 sizes; give"), ({"shape": [int("9" * 19), 0]}, "does not fit")),
        *(({"scales": [1.0]}, "leave them out"), ({"scales": "!"}, "scales is not base64")),
        ({"scales": ["a"]}, "scales is neither"),
    )
    good = _sent(np.ones((2, colbert.model.tasks["token_embed"].dim), dtype=np.float32), "float32")
    for change, reason in changes:
        body = {"query": "q", "documents": ["d", good | change]}
        begun = time.thread_time()
        answer = await Caller(colbert).ask("POST", "/rerank", body)
        assert time.thread_time() - begun < 2
        error = error_of(answer)
        assert (answer.status, error["param"]) == (400, "documents")
        assert re.search(rf"documents\[1\].*{reason}", error["message"]), error


async def test_small_work_comes_first(colbert: RecordingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, yielded = list[int](), list[None]()
    in_thread = colbert.in_thread
    noted = lambda function, size: sizes.append(size) or in_thread(function, size)  # noqa: E731
    monkeypatch.setattr(colbert, "in_thread", noted)
    monkeypatch.setattr(dual_encoder, "yield_to_smaller", lambda: yielded.append(None))
    rows = np.random.default_rng(0).standard_normal((50, colbert.model.tasks["token_embed"].dim))
    result = await colbert.score(rows, [rows[:i] for i in range(1, 21)], explain=True)
    assert sum(len(each.matches) for each in result.explanations.values()) == 50 * 20
    assert (sizes, len(yielded)) == ([64 * 50 * 20], 20)


async def test_numbers_in_parts_are_those_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).standard_normal((7, 6)).astype(np.float32)
    text = base64.b64encode(rows.tobytes()).decode()
    wrong = {"embedding": text[:12] + "QQ==" + text[12:]}
    monkeypatch.setattr(reading, "_PART", 16)
    tensor, made = torch.tensor, list[torch.Tensor]()
    monkeypatch.setattr(torch, "tensor", lambda *given, **how: made.append(tensor(*given, **how)) or made[-1])
    for given in (text, rows.tolist(), rows.ravel().tolist(), [rows.ravel().tolist()]):
        read = reading.vectors_of({"embedding": given, "shape": [7, 6]}, "it", "documents")
        assert torch.equal(read.values, torch.from_numpy(rows))
    assert max(part.numel() for part in made) <= 16
    with pytest.raises(errors.InvalidRequestError, match="is not base64"):
        reading.vectors_of(wrong, "it", "documents")


async def test_parts_add_up(colbert: RecordingEngine, vectors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    query, rows = vectors
    await colbert.score(QUERY, DOCUMENTS)
    processor = colbert._require().processors.scores
    scorer = colbert._require()._actors._scorer
    asked: list[int] = []
    add = scorer._add
    for similarity in ("maxsim", "meanmaxsim"):
        monkeypatch.setattr(processor, "_price", ScoringPrice(1000))
        monkeypatch.setattr(scorer, "_similarity", similarity)
        monkeypatch.setattr(processor, "_model", replace(processor._model, similarity=similarity))
        for given in (query, QUERY):
            request = given, [rows[1], *DOCUMENTS, rows[0]]
            expected = await colbert.score(*request, explain=True)
            with monkeypatch.context() as patched:
                patched.setattr(processor, "_price", ScoringPrice(len(rows[0]) * len(query) / 50_000))
                patched.setattr(scorer, "_add", lambda scores, *rest: asked.append(1) or add(scores, *rest))
                parted = await colbert.score(*request, explain=True)
                plain = await colbert.score(*request)
            for found in (parted, plain):
                np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5)
                assert found.usage == expected.usage
            for i, explanation in expected.explanations.items():
                rows_of = [match.document_row for match in explanation.matches]
                assert [match.document_row for match in parted.explanations[i].matches] == rows_of
    assert len(asked) > 4 * 2 * 6


async def test_much_is_a_413(colbert: RecordingEngine, vectors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    query, rows = vectors
    await colbert.score(QUERY, DOCUMENTS[3])
    monkeypatch.setattr(colbert._require().processors.scores, "_price", ScoringPrice(1e-8))
    for documents in ([_sent(rows[0], "float16")], [DOCUMENTS[3]]):
        body = {"query": _sent(query, "float16"), "documents": documents}
        answer = await Caller(colbert).ask("POST", "/rerank", body)
        assert answer.status == 413
        assert re.search(r"more than the 10000000 that one may have", error_of(answer)["message"])


async def test_a_text_comes_before_an_embedding(colbert: RecordingEngine) -> None:
    caller = Caller(colbert)
    document = {"text": DOCUMENTS[0], "embedding": [1.0]}
    answer = await caller.json("/rerank", {"query": QUERY, "documents": [document]})
    assert answer["results"][0]["document"] == {"text": DOCUMENTS[0]}
    body = {"query": QUERY, "documents": [{"embedding": "a word"}], "rank_fields": ["embedding"]}
    answer = await caller.json("/rerank", body)
    assert answer["results"][0]["document"] == {"text": "embedding: a word"}


# Late interaction with expansion, attended or not, and with a skip list; and a bi-encoder.
MODELS = ("stanford_colbert", "stanford_colbert_attending", "native_multi_vector", "qwen3_embedding")

MAIN = [(model, "float32", "use") for model in MODELS]
MAIN += [(model, "bfloat16", "bypass") for model in ("stanford_colbert", "qwen3_embedding")]
EVERY = product(MODELS, ("float32", "bfloat16"), ("use", "bypass"))
CASES = [*MAIN, *exhaustive(*(case for case in EVERY if case not in MAIN))]


@pytest.mark.parametrize(("fixture", "dtype", "cache"), CASES)
async def test_its_scores_are_those_of_the_text(
    request: pytest.FixtureRequest, engines: Engines, fixture: str, dtype: Any, cache: Any
) -> None:
    engine = await engines(EngineConfig(model=request.getfixturevalue(fixture), dtype=dtype, threads=1))
    for query in (QUERY, "?", "how is a very long file opened " * 9):
        await engine.score(query, DOCUMENTS, cache=cache)
        expected = await engine.score(query, DOCUMENTS, cache=cache)
        rows = await engine.encode_query(query)
        found = await engine.score(rows, DOCUMENTS, cache=cache)
        # Texts that are packed with others may differ by a rounding.
        error = 1e-6 if dtype == "float32" or cache == "use" else 1e-2
        np.testing.assert_allclose(found.scores, expected.scores, rtol=error, atol=error)
        assert found.usage == expected.usage
        assert found.usage.query_tokens == rows.tokens > 0
        assert (found.truncated, found.truncated_queries) == (expected.truncated, expected.truncated_queries)
        assert rows.truncated == (expected.truncated_queries == 1)


async def test_it_is_ranked_streamed_and_sent_beside_texts(engines: Engines, stanford_colbert: str) -> None:
    engine = await engines(EngineConfig(model=stanford_colbert, dtype="float32", threads=1))
    rows = pickle.loads(pickle.dumps(await engine.encode_query(QUERY)))
    expected = await engine.rerank(QUERY, DOCUMENTS, top_n=2, normalize=True)
    found = await engine.rerank(rows, DOCUMENTS, top_n=2, normalize=True)
    assert [one.index for one in found.results] == [one.index for one in expected.results]
    scores = [one.score for one in expected.results]
    assert [one.score for one in found.results] == pytest.approx(scores, abs=1e-6)
    async with engine.stream(rows, DOCUMENTS) as stream:
        async for _ in stream:
            pass
    scores = (await engine.score(QUERY, DOCUMENTS)).scores
    assert stream.result.scores == pytest.approx(scores, abs=1e-5)
    explained = await engine.score(rows, DOCUMENTS[:1], explain=True)
    assert explained.explanations[0].matches[0].query_token is None, "the rows do not have the text"
    vectors = (await engine.embed_tokens(QUERY, input_type="query")).embeddings[0]
    mixed = await engine.score([QUERY, rows, Vectors(vectors), rows], DOCUMENTS)
    assert mixed.scores == pytest.approx(scores, abs=1e-5)
    assert mixed.usage.query_tokens == rows.tokens * 3, "vectors that came along were not run"


async def test_lengths_dimensions_and_errors_are_the_texts(engines: Engines, stanford_colbert: str) -> None:
    engine = await engines(EngineConfig(model=stanford_colbert, dtype="float32", threads=1, dimensions=16))
    options: dict[str, Any] = {"truncation": Truncation(max_tokens=-1, max_query_tokens=3)}
    rows = await engine.encode_query(QUERY, **options)
    assert rows.rows.shape[1] == 16
    expected = await engine.score(QUERY, DOCUMENTS, cache="bypass", **options)
    found = await engine.score(rows, DOCUMENTS, cache="bypass", **options)
    assert found.scores == pytest.approx(expected.scores, abs=1e-5)
    assert (found.usage, found.truncated) == (expected.usage, expected.truncated)
    reported = await engine.score(rows, ["a", np.zeros((1, 3))], on_error="report")
    assert ([*reported.errors], reported.usage.query_tokens) == ([1], rows.tokens)


async def test_an_instruction_is_part_of_it(engines: Engines, qwen3_embedding: str) -> None:
    engine = await engines(EngineConfig(model=qwen3_embedding, dtype="float32", threads=1))
    rows = await engine.encode_query(QUERY, instruction="Find cats")
    expected = await engine.score(QUERY, DOCUMENTS, instruction="Find cats")
    assert (await engine.score(rows, DOCUMENTS)).scores == pytest.approx(expected.scores, abs=1e-6)
    assert expected.scores != (await engine.score(QUERY, DOCUMENTS)).scores
    with pytest.raises(errors.InvalidRequestError, match="give it to encode_query"):
        await engine.score(rows, DOCUMENTS, instruction="Find cats")


async def test_pictures_are_queries_too(engines: Engines, checkpoints: SharedCheckpoints) -> None:
    engine = await engines(EngineConfig(model=checkpoints(visual.colqwen2), dtype="float32", threads=1))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8))
    expected = await engine.score(picture, DOCUMENTS, cache="bypass")
    found = await engine.score(await engine.encode_query(picture), DOCUMENTS, cache="bypass")
    assert (found.scores, found.usage) == (pytest.approx(expected.scores, rel=1e-5), expected.usage)


async def test_another_model_refuses_it(engines: Engines, stanford_colbert: str, tmp_path: Path) -> None:
    engine = await engines(EngineConfig(model=stanford_colbert, dtype="float32", threads=1))
    rows = await engine.encode_query(QUERY)
    in_bfloat16 = await engines(EngineConfig(model=stanford_colbert, dtype="bfloat16", threads=1))
    assert (await in_bfloat16.encode_query(QUERY)).fingerprint == rows.fingerprint
    # The same architecture, with other weights.
    other = shutil.copytree(stanford_colbert, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    name = next(name for name in weights if "layer.0.attention.self.query.weight" in name)
    weights[name] = weights[name] * 1.001
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    changed = await engines(EngineConfig(model=str(other), threads=1))
    with pytest.raises(errors.InvalidRequestError, match="was encoded by another model") as refused:
        await changed.score(rows, DOCUMENTS)
    assert refused.value.param == "queries"


async def test_what_makes_no_sense_is_refused(engines: Engines, native_multi_vector: str) -> None:
    engine = await engines(EngineConfig(model=native_multi_vector, dtype="float32", threads=1))
    rows = await engine.encode_query(QUERY)
    for query, reason, options in [
        *((["a", "b"], "one query to encode, not 2", {}), (rows, "is an embedding already", {})),
        *(([], "is empty", {}), (3, "must be a string", {}), ("\ud800", "has half of a character", {})),
        (QUERY, "no instruction", {"instruction": "Find cats"}),
    ]:
        with pytest.raises(errors.InvalidRequestError, match=reason):
            await engine.encode_query(query, **options)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidRequestError, match=r"documents\[1\] is a query's embedding"):
        await engine.score(QUERY, ["a", rows])
    none = QueryRows(rows.rows[:0], tokens=3, truncated=False, fingerprint=rows.fingerprint)
    assert (await engine.score(none, DOCUMENTS)).scores == [0.0] * len(DOCUMENTS)
    wrong = QueryRows(rows.rows[:, :3], tokens=1, truncated=False, fingerprint=rows.fingerprint)
    with pytest.raises(errors.InvalidRequestError, match="has the shape"):
        await engine.score(wrong, DOCUMENTS)
    with pytest.raises(errors.RequestTimeoutError):
        await engine.encode_query(QUERY, timeout=0)


@pytest.mark.parametrize("build", [cross_encoders.bert, *exhaustive(language_models.jina_reranker_v3)])
async def test_joint_readers_refuse_it(engines: Engines, build: Any, checkpoints: SharedCheckpoints) -> None:
    engine = await engines(EngineConfig(model=checkpoints(build), dtype="float32", threads=1))
    with pytest.raises(errors.InvalidRequestError, match="reads query and document together"):
        await engine.encode_query(QUERY)
    embedding = np.ones((2, 8), dtype=np.float32)
    with pytest.raises(errors.InvalidRequestError, match=r"documents\[1\] is an embedding.*give texts"):
        await engine.score(QUERY, ["a", embedding])
    with pytest.raises(errors.InvalidRequestError, match=r"queries\[0\] is an embedding"):
        await engine.score(embedding, ["a"])
    rows = QueryRows(torch.zeros(2, 4), tokens=2, truncated=False, fingerprint="f")
    with pytest.raises(errors.InvalidRequestError, match="reads query and document together"):
        await engine.score(rows, DOCUMENTS)
