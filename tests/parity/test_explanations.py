"""Explanations of scores, beside plain products of vectors and scores of passages by themselves."""

import asyncio
import math
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from maxsimd.bench.datasets import Pair
from maxsimd.engine import Engine, EngineConfig, RequestTooLargeError, Truncation, Vectors
from maxsimd.engine.processors import dual_encoder, processor
from tests.checkpoints import bi_encoders, cross_encoders, language_models
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines, held_steps
from tests.nearly import nearly
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUERY = "How is a file opened for reading?"
WINDOWS = Truncation(max_tokens=60, windows=True, window_overlap=7)
# Other words than the query's, so that a word has one best match: itself.
WORDS = ("Käse", "東京", "🎉", "e\u0301te\u0301", "naïve", "Straße", "новый", "party")
DOCUMENT = "Der gute {} ist da."


@pytest_asyncio.fixture(loop_scope="module")
async def engine(engines: Engines) -> AsyncIterator[Engine]:
    yield await engines(EngineConfig(dtype="float32"))


async def _explained(engine: Engine, query: str, documents: list[Any]) -> Any:
    return (await engine.rerank(query, documents, explain=True)).results


def _sum(one: Any) -> float:
    return math.fsum(match.similarity for match in one.explanation.matches)


_ROUNDED = ({"maxsim": "tiled"}, {"cache_precision": "int8"})


@pytest.mark.parametrize(
    "options",
    [{"dtype": "float32"}, *({"dtype": "bfloat16", **more} for more in _ROUNDED)],
    ids=lambda options: " ".join(options.values()),
)
async def test_similarities_add_up_to_the_score_also_from_the_cache(
    options: dict[str, Any], stanford_colbert: str, engines: Engines, pairs: list[Pair]
) -> None:
    engine = await engines(EngineConfig(model=stanford_colbert, **options, cache_mb=64))
    await engine.clear_cache()
    documents = [pair.document for pair in pairs[:5]]
    plain = (await engine.score(QUERY, documents, cache="bypass")).scores
    first = await _explained(engine, QUERY, documents)
    again = await _explained(engine, QUERY, documents)
    for one in (*first, *again):
        assert _sum(one) == pytest.approx(one.score, abs=1e-3)
        assert math.fsum(match.share for match in one.explanation.matches) == pytest.approx(1)
    cached = [one.explanation.cached for one in (*first, *again)]
    assert cached == [False] * len(documents) + [True] * len(documents)
    for one, other in zip(first, again, strict=True):
        assert other.score == pytest.approx(one.score, abs=1e-5)
        expected = replace(one, score=other.score, explanation=replace(one.explanation, cached=True))
        assert other == expected
    if options == {"dtype": "float32"}:
        assert {one.index: one.score for one in first} == dict(enumerate(plain))


@pytest.mark.parametrize("fixture", ["native_multi_vector", "stanford_colbert"])
async def test_matches_are_the_largest_products_of_the_vectors(
    fixture: str, engines: Engines, request: pytest.FixtureRequest, pairs: list[Pair]
) -> None:
    engine = await engines(EngineConfig(model=request.getfixturevalue(fixture), dtype="float32"))
    documents = [pair.document for pair in pairs[40:48]]
    (query,) = (await engine.embed_tokens([QUERY], input_type="query")).embeddings
    vectors = (await engine.embed_tokens(documents, input_type="document")).embeddings
    for one in (await engine.rerank(QUERY, documents, explain="maps")).results:
        assert one.explanation is not None
        products = query @ vectors[one.index].T
        np.testing.assert_allclose(one.explanation.similarities, products, atol=1e-5)
        for row, match in zip(products, one.explanation.matches, strict=True):
            assert match.similarity == pytest.approx(row.max(), abs=1e-5)
            assert row[match.document_row] == pytest.approx(row.max(), abs=1e-5)
            assert _says(match.query_token, match.query_span, QUERY)
            assert _says(match.document_token, match.document_span, documents[one.index])
            assert one.explanation.document_tokens[match.document_row] == match.document_token


def _says(token: str | None, span: tuple[int, int] | None, text: str) -> bool:
    """Whether a token is what stands at its span, or a marker, expansion or prompt, which has none."""
    if span is None:
        return re.fullmatch(r"\[[A-Za-z0-9]+\]|search|query|document|_|:", token or "") is not None
    return token == text[slice(*span)]


async def test_a_word_matches_itself_wherever_it_stands(engine: Engine) -> None:
    for word in WORDS:
        document = DOCUMENT.format(word)
        (one,) = await _explained(engine, word, [document])
        found = set()
        for match in one.explanation.matches:
            if match.query_span is not None:
                assert match.document_token == match.query_token
                start = document.index(word)
                assert match.document_span == tuple(start + end for end in match.query_span)
                found |= set(range(*match.query_span))
        assert found == set(range(len(word))), f"the tokens' spans are the whole of {word}"


async def test_repeated_documents_and_queries_of_their_own(engine: Engine) -> None:
    queries = ["cheese", "party time", "cheese"]
    documents = ["a piece of cheese", "the party", "a piece of cheese"]
    result = await engine.score(queries, documents, explain=True)
    assert list(result.explanations) == [0, 1, 2]
    assert result.explanations[0] == result.explanations[2]
    alone = await engine.score("party time", "the party", explain=True, cache="bypass")
    (matches,) = [one.matches for one in alone.explanations.values()]
    for ours, match in zip(result.explanations[1].matches, matches, strict=True):
        assert replace(ours, similarity=0, share=0) == replace(match, similarity=0, share=0)
        assert ours.similarity == pytest.approx(match.similarity, abs=1e-5)


async def test_texts_that_came_as_vectors_have_rows_in_place_of_words(engine: Engine) -> None:
    (query,) = (await engine.embed_tokens([QUERY], input_type="query")).embeddings
    (document,) = (await engine.embed_tokens(["Open a file."], input_type="document")).embeddings
    result = await engine.score(query, [Vectors(document), "Open a file."], explain="maps")
    given, read = (result.explanations[i] for i in range(2))
    assert given.document_tokens == (None,) * len(document)
    assert (given.tokens, given.cached, given.truncated) == (0, False, False)
    assert read.tokens == len(document)
    for ours, match in zip(given.matches, read.matches, strict=True):
        assert (ours.query_token, ours.query_span, ours.document_token, ours.document_span) == (None,) * 4
        assert ours.document_row == match.document_row
        assert match.document_token is not None
        assert ours.similarity == pytest.approx(match.similarity, abs=1e-5)


async def test_what_is_ranked_and_scored_is_explained(engine: Engine) -> None:
    documents = ["a file", "\ud800", "a list", "a party"]
    result = await engine.score(QUERY, documents, explain=True, on_error="report")
    assert list(result.explanations) == [0, 2, 3]
    assert result.explanations[2].matches[1].query_token == "How"
    ranked = await engine.rerank(QUERY, documents, top_n=2, explain=True, on_error="report")
    plain = await engine.rerank(QUERY, documents, top_n=2, on_error="report")
    assert len(ranked.results) == len(plain.results) == 2
    for one, other in zip(ranked.results, plain.results, strict=True):
        assert one.explanation is not None
        assert other.explanation is None
        assert (other.index, other.score) == nearly((one.index, one.score))
        assert _sum(one) == pytest.approx(one.score, abs=1e-3)
    assert not (await engine.score(QUERY, documents[2:])).explanations


async def test_too_many_explanations_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = len((await engine.embed_tokens([QUERY], input_type="query")).embeddings[0])
    monkeypatch.setattr(processor, "MOST_EXPLAINED", 3 * tokens)
    await engine.rerank(QUERY, ["a", "b", "c", "d"], explain=True, top_n=3)
    # Documents of three tokens, which maps name.
    for explain, top_n, most in ((True, 4, 4 * tokens), ("maps", 3, 3 * tokens + 9)):
        said = f"up to {most} matches, windows and tokens for {top_n} results, .* at most {top_n - 1} results"
        with pytest.raises(RequestTooLargeError, match=said):
            await engine.rerank(QUERY, ["a", "b", "c", "d"], explain=explain, top_n=top_n)
    monkeypatch.setattr(dual_encoder, "MOST_NOTED", 3 * tokens)
    with pytest.raises(RequestTooLargeError, match="send fewer documents"):
        await engine.rerank(QUERY, ["a", "b", "c", "d"], explain=True, top_n=1)


def _long(pairs: list[Pair]) -> str:
    return " ".join(pair.document for pair in pairs[:3])


@pytest.mark.parametrize("build", [None, bi_encoders.gte])
async def test_a_window_has_the_score_of_its_passage(
    build: Any, checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair]
) -> None:
    engine = await engines(EngineConfig(model=build and checkpoints(build), dtype="float32"))
    is_late = build is None
    await engine.clear_cache()
    document = _long(pairs)
    for cached in (False, True):
        result = await engine.score(QUERY, [document], explain=True, truncation=WINDOWS)
        explanation = result.explanations[0]
        assert explanation.cached is (cached and is_late)
        await _compare_windows(engine, document, explanation, 2)
        best = max(window.score for window in explanation.windows)
        assert explanation.passage is not None
        assert explanation.passage.score == best
        if not is_late:
            assert result.scores == [best]
            assert not explanation.matches
        else:
            assert result.scores[0] >= best
            assert math.fsum(match.similarity for match in explanation.matches) == pytest.approx(
                result.scores[0], abs=1e-3
            )
            for match in explanation.matches:
                assert _says(match.document_token, match.document_span, document)


async def _compare_windows(engine: Engine, document: str, explanation: Any, least: int) -> None:
    """Windows cover the document, and those of whole words have the score of their passage alone."""
    spans = [window.span for window in explanation.windows]
    assert len(spans) > 3
    assert (spans[0][0], spans[-1][1]) == (0, len(document))
    assert all(next_one[0] < span[1] <= next_one[1] for span, next_one in pairwise(spans))
    spaced = f" {document} "
    around = {window: spaced[window.span[0]] + spaced[window.span[1] + 1] for window in explanation.windows}
    whole = [window for window, characters in around.items() if characters.isspace()]
    assert len(whole) >= least
    alone = await engine.score(QUERY, [document[slice(*window.span)] for window in whole], cache="bypass")
    np.testing.assert_allclose([window.score for window in whole], alone.scores, atol=2e-5)


@pytest.mark.parametrize("build", [cross_encoders.bert, language_models.qwen3_reranker])
async def test_windows_of_a_cross_encoder_score_as_their_passages(
    build: Any, checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair]
) -> None:
    engine = await engines(EngineConfig(model=checkpoints(build), dtype="float32"))
    document = _long(pairs)
    room = 250 if build is language_models.qwen3_reranker else 90
    truncation = Truncation(max_tokens=room, windows=True, window_overlap=9)
    documents = [document, "Open a file."]
    result = await engine.score(QUERY, documents, explain=True, truncation=truncation)
    explanation, short = (result.explanations[i] for i in range(2))
    assert result.scores[0] == max(window.score for window in explanation.windows)
    assert explanation.tokens + short.tokens == result.usage.prompt_tokens
    assert (short.windows, short.passage, short.matches) == ((), None, ())
    if build is not language_models.qwen3_reranker:  # whose tokens at a space are the next word's
        await _compare_windows(engine, document, explanation, 1)
    again = await engine.score(QUERY, documents, explain=True, truncation=truncation)
    assert again.explanations[0] == nearly(explanation), "of the score in the cache there are no windows"
    assert again.explanations[1] == nearly(replace(short, cached=True))


async def test_a_listwise_model_says_what_it_read(listwise: str) -> None:
    async with Engine(EngineConfig(model=listwise)) as engine:
        documents = ["Open a file.", "a"]
        for _ in range(2):
            result = await engine.score(QUERY, documents, explain=True)
            lengths = [len(ids) for ids in engine.tokenizer.encode(documents, "documents")]
            assert [result.explanations[i].tokens for i in range(2)] == lengths
            assert not any(one.cached or one.truncated for one in result.explanations.values())


async def test_what_was_cut_is_told(engine: Engine, pairs: list[Pair]) -> None:
    document = _long(pairs)
    right, left = Truncation(max_tokens=20), Truncation(max_tokens=20, side="left")
    result = await engine.score(QUERY, [document, "short"], explain=True, truncation=right)
    assert [result.explanations[i].truncated for i in range(2)] == [True, False]
    assert result.explanations[0].tokens == 20
    first, short = (result.explanations[i].read_span for i in range(2))
    assert short is None
    end = max(match.document_span[1] for match in result.explanations[0].matches if match.document_span)
    result = await engine.score(QUERY, [document], explain=True, truncation=left)
    begin = min(match.document_span[0] for match in result.explanations[0].matches if match.document_span)
    assert end < len(document) / 2 < begin, "each end was cut once"
    last = result.explanations[0].read_span
    assert first is not None
    assert last is not None
    assert (first[0], last[1]) == (0, len(document))
    assert end <= first[1] < len(document) / 2 < last[0] <= begin


async def test_a_long_word_is_shown_in_part_and_its_span_is_whole(engine: Engine) -> None:
    word = "x" * 5000  # one unknown token
    (one,) = await _explained(engine, word, [f"a {word}"])
    match = next(match for match in one.explanation.matches if match.query_span is not None)
    assert (match.query_token, match.query_span) == ("x" * 100, (0, 5000))
    marks = "e" + "\u0301" * 5000
    (one,) = await _explained(engine, marks, [marks])
    assert all(len(match.query_token or "") <= 100 for match in one.explanation.matches)


@pytest.mark.parametrize("fixture", ["stanford_colbert", "bert_cross_encoder"])
async def test_many_windows_are_refused_before_they_are_run(
    fixture: str, engines: Engines, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await engines(EngineConfig(model=request.getfixturevalue(fixture), dtype="float32"))
    monkeypatch.setattr(processor, "MOST_EXPLAINED", 52)
    truncation = Truncation(max_tokens=20, windows=True, window_overlap=0)
    document = "word " * 300
    for documents in ([document, document, document], ["a", document * 3]):
        with pytest.raises(RequestTooLargeError, match="matches, windows and tokens"):
            await engine.score("q", documents, explain=True, truncation=truncation)
    result = await engine.rerank("q", [document, "a"], explain=True, truncation=truncation, top_n=1)
    assert result.results[0].explanation is not None


async def test_an_engine_that_stops_still_explains_what_it_has_scored(stanford_colbert: str) -> None:
    engine = Engine(EngineConfig(model=stanford_colbert, dtype="float32", max_batch_tokens=256, cache_mb=0))
    await engine.start()
    with held_steps(engine):
        asked = asyncio.create_task(engine.score(QUERY, [f"a file {i}" for i in range(80)], explain=True))
        await until(lambda: engine.stats().open_requests == 1)
    await engine.stop(30)
    assert len((await asked).explanations) == 80
