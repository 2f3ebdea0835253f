"""Calls that people write in Python work, or say at once what to do."""

import asyncio
import inspect
import io
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
import pytest
from rich.console import Console

from maxsimd.engine import Engine, EngineConfig, Engines, RerankResult, SyncEngine, errors
from maxsimd.engine.several.cascade import CascadeOptions
from tests.nearly import nearly
from tests.waiting import wait_for


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
        ("m", {"instruction": "a", "model_option": {"instruction": "b"}}, ValueError, "is there twice"),
        ("m", {"dtype": "fp16"}, ValueError, "dtype must be one of auto, float32, bfloat16, float16, not"),
        ("m", {"threads": 0}, ValueError, "threads must be at least 1"),
    ]
    for model, options, error, said in cases:
        with pytest.raises(error, match=said):
            kind(model, **options)


def test_in_a_notebook_it_is_started_and_closed() -> None:
    engine = SyncEngine(dtype="float32", progress=False)
    with pytest.raises(errors.EngineNotReadyError, match=r"with SyncEngine.*call start\(\)"):
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
    before = {*threading.enumerate()}
    SyncEngine(dtype="float32", progress=False).start().rerank(QUERY, TEXTS)
    wait_for(lambda: {*threading.enumerate()} <= before)


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


def test_help_has_the_meaning_and_default_of_every_parameter() -> None:
    public = [each for kind in (Engine, SyncEngine) for each in inspect.getmembers(kind, inspect.isfunction)]
    methods = [method for name, method in public if not name.startswith("_")]
    assert len(methods) > 30
    for method in (*methods, EngineConfig, Engines.rerank):
        sections = re.split(r"^(?=\w+:$)", inspect.getdoc(method) or "", flags=re.MULTILINE)
        described = "".join(each for each in sections if each.startswith("Args:"))
        meanings = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", described, flags=re.MULTILINE))
        for name, each in inspect.signature(method).parameters.items():
            if each.kind is not each.VAR_KEYWORD and name != "self":
                has_other = each.default is each.empty or method is EngineConfig  # computed ones in words
                default = "." if has_other else f"Default: {each.default!r}."
                assert " ".join(meanings[name].split()).endswith(default), (method, name)
    assert meanings.keys() >= CascadeOptions.__annotations__.keys()


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
    engine, before = Engine(dtype="float32"), {*threading.enumerate()}
    first = asyncio.new_event_loop()
    try:
        first.run_until_complete(engine.start())
        with pytest.raises(errors.EngineNotReadyError, match="another event loop"):
            asyncio.run(engine.score(QUERY, TEXTS))
        with pytest.raises(errors.EngineNotReadyError, match="stop it there"):
            asyncio.run(engine.stop())
        assert first.run_until_complete(engine.score(QUERY, TEXTS)).scores
    finally:
        first.run_until_complete(engine.stop())
        first.close()
    asyncio.run(engine.start())
    asyncio.run(engine.stop())  # its own loop has ended
    assert {*threading.enumerate()} <= before


DOCUMENTS = ["Cats <b>sleep</b>.", "[red]Paris[/red]\x1b is\nthe $capital$ of France.", "x " * 500]


@pytest.fixture(scope="module")
def ranked(engine: SyncEngine) -> RerankResult:
    return engine.rerank(QUERY, DOCUMENTS, explain="maps")


def test_a_ranking_is_a_sequence_and_a_table(ranked: RerankResult, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (len(ranked), [*ranked], ranked[-1]) == (3, ranked.results, ranked.results[2])
    assert (ranked[:2].results, ranked[:2].usage) == (ranked.results[:2], ranked.usage)
    shown = ranked._repr_html_()
    assert "Cats &lt;b&gt;sleep&lt;/b&gt;." in shown
    assert "[red]Paris[/red] is the $capital$ of France.</td>" in shown
    assert len(shown) < 1500, "long texts are shortened"
    long = replace(ranked, results=[ranked[0]] * 60, unscored=(3, 4))
    assert "<p>10 more rows; 2 timed out</p>" in long._repr_html_()
    with (console := Console(width=120)).capture() as captured:
        console.print(ranked)
    assert re.search(r"│    1 │ \d\.\d{4} │     1 │ \[red\]Paris\[/red\] is the \$cap", captured.get())
    frame = ranked.to_pandas()
    assert [*frame.columns, *frame["index"]] == ["index", "score", "document", *(one.index for one in ranked)]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"to_pandas\(\) needs pandas, .*: pip install pandas"):
        ranked.to_pandas()


def test_a_heat_map_has_the_similarity_of_all_tokens(ranked: RerankResult, engine: SyncEngine) -> None:
    matplotlib.use("Agg")
    explanation = ranked[0].explanation
    assert explanation is not None
    assert explanation.similarities is not None
    found = explanation.similarities.max(axis=1)
    np.testing.assert_allclose(found, [match.similarity for match in explanation.matches], atol=1e-4)
    axes = ranked.plot()
    labels = [each.get_text() for each in (*axes.get_yticklabels(), *axes.get_xticklabels())]
    assert labels[:6] == ["[CLS]", "the", "capital", "of", "France", "[SEP]"]
    assert " ".join(labels[6:]) == "[CLS] [ red ] Paris [ / red ] is the $ capital $ of France . [SEP]"
    axes.figure.savefig(io.BytesIO())
    assert ranked.plot(2, axes) is axes, "of 256 tokens some have labels"
    for result in (engine.rerank(QUERY, TEXTS), engine.rerank(QUERY, TEXTS, explain=True)):
        with pytest.raises(ValueError, match='explain="maps"'):
            result.plot()


def test_tokens_of_texts_are_shown(engine: SyncEngine) -> None:
    words = ["[CLS]", "sp", "##ree", "[SEP]"]
    assert engine.embed_tokens(["spree", "a b"]).tokens == [words, ["[CLS]", "a", "b", "[SEP]"]]
    assert engine.embed_tokens("spree", return_tokens=False).tokens is None
    short, long = engine.tokenize(["spree", "x " * 255])
    assert (short.tokens, short.ids.tolist()[::3]) == (words, [101, 102])
    assert (len(short), short.truncated) == (4, False)
    assert (len(long), long.truncated) == (257, True)
    assert engine.tokenize("spree", add_special_tokens=False)[0].tokens == words[1:-1]
    with pytest.raises(errors.InvalidRequestError, match="texts is empty"):
        engine.tokenize([])
