"""Calls that people write in Python work, or say at once what to do."""

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from maxsimd.engine import Engine, EngineConfig, SyncEngine, errors
from tests.nearly import nearly


class DataFrame:
    """As far as a caller sees: of a table of pandas one gets the names of its columns."""

    ndim = 2

    def __iter__(self) -> Iterator[str]:
        return iter(["text", "id"])


class Series:
    ndim = 1

    def __iter__(self) -> Iterator[str]:
        return iter(TEXTS)


QUERY, TEXTS = "the capital of France", ["Paris is the capital of France.", "Cats sleep."]


async def test_a_model_by_its_name_and_options(bert_cross_encoder: str) -> None:
    async with Engine(bert_cross_encoder, dtype="float32", threads=1) as engine:
        assert engine.config == EngineConfig(model=bert_cross_encoder, dtype="float32", threads=1)
        scores = (await engine.score(QUERY, TEXTS)).scores
    with SyncEngine(bert_cross_encoder, dtype="float32") as other:
        np.testing.assert_allclose(other.score(QUERY, TEXTS).scores, scores, atol=1e-5)
    assert Engine(dtype="float32").config == EngineConfig(dtype="float32")


@pytest.mark.parametrize("kind", [Engine, SyncEngine])
def test_wrong_options_are_told_at_once(kind: Any) -> None:
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (7, {}, TypeError, "give an EngineConfig, or a model's folder or hub id, not int"),
        (EngineConfig(), {"threads": 1}, TypeError, "put threads into the EngineConfig"),
        ("m", {"dtpye": "float32"}, TypeError, "unexpected keyword argument 'dtpye'"),
        ("m", {"dtype": "fp16"}, ValueError, "dtype must be one of auto, float32, bfloat16, float16, not"),
        ("m", {"threads": 0}, ValueError, "threads must be at least 1"),
    ]
    for model, options, error, said in cases:
        with pytest.raises(error, match=said):
            kind(model, **options)


def test_in_a_notebook_it_is_started_and_closed() -> None:
    engine = SyncEngine(dtype="float32", progress=False)
    with pytest.raises(errors.EngineNotReadyError, match=r"call start\(\)"):
        engine.score(QUERY, TEXTS)
    for _ in range(2):
        assert engine.start() is engine
        with pytest.raises(errors.EngineRunningError):
            engine.start()
        assert engine.rerank(QUERY, TEXTS).results[0].index == 0
        assert (engine.model.name, engine.max_tokens) == ("all-MiniLM-L6-v2", 256)
        assert engine.stats().requests == 0
        engine.clear_cache()
        engine.close()
        engine.close()
    with pytest.raises(errors.EngineNotReadyError):
        engine.score(QUERY, TEXTS)


def test_methods_and_options_are_those_of_the_engine() -> None:
    own = {"start", "stop", "until_dead", "check_rate", "in_thread"}
    own |= {"device_model", "tokenizer", "is_healthy", "score_processor", "facts", "conversation"}
    own |= {"caches_by_tenant", "check_readable", "tokens_per_second"}
    public = {name for name in vars(Engine) if not name.startswith("_")} - own
    assert public <= {name for name in vars(SyncEngine) if not name.startswith("_")}
    options = set(inspect.signature(Engine.score).parameters) - {"self", "queries", "documents"}
    for method in (SyncEngine.score, SyncEngine.rerank, SyncEngine.stream, Engine.rerank, Engine.stream):
        assert options <= set(inspect.signature(method).parameters)
    assert SyncEngine.rerank.__doc__ == Engine.rerank.__doc__


@pytest.fixture(scope="module")
def engine() -> Any:
    with SyncEngine(dtype="float32", progress=False) as engine:
        yield engine


def test_lists_of_texts_and_what_is_like_them_are_read(engine: SyncEngine) -> None:
    others: list[Any] = [DataFrame(), set(TEXTS), dict.fromkeys(TEXTS), np.array([TEXTS]), b"bytes", 7, None]
    for documents in others:
        kind = type(documents).__name__
        for method in (engine.rerank, engine.score):
            with pytest.raises(errors.InvalidRequestError, match=f"documents must be .* not {kind};"):
                method(QUERY, documents)
        with pytest.raises(errors.InvalidRequestError, match=f"input must be .* not {kind};"):
            engine.embed(documents)
    alike: list[Any] = [tuple(TEXTS), Series(), np.array(TEXTS), np.array(TEXTS, dtype=object)]
    for documents in alike:
        assert engine.score(QUERY, documents).scores == nearly(engine.score(QUERY, TEXTS).scores)
        assert engine.embed(documents).embeddings.shape == (2, 384)
    call: Any = engine.rerank
    with pytest.raises(TypeError, match=r"rerank\(\) .*top_k"):
        call(QUERY, TEXTS, top_k=1)


def test_a_second_event_loop_is_told_why_it_gets_nothing() -> None:
    engine = Engine(dtype="float32")
    first = asyncio.new_event_loop()
    try:
        first.run_until_complete(engine.start())
        with pytest.raises(errors.EngineNotReadyError, match="another event loop"):
            asyncio.run(engine.score(QUERY, TEXTS))
        assert first.run_until_complete(engine.score(QUERY, TEXTS)).scores
    finally:
        first.run_until_complete(engine.stop())
        first.close()
