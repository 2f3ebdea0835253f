"""The engine without async: the same results by the same calls."""

import pytest

from maxsimd.bench.datasets import Pair
from maxsimd.engine import (
    WINDOW_LONG,
    EngineConfig,
    EngineNotReadyError,
    InvalidRequestError,
    RequestTooLargeError,
    SyncEngine,
    Tenant,
)
from tests.checkpoints import bi_encoders, language_models
from tests.checkpoints.shared import SharedCheckpoints


@pytest.fixture(scope="module")
def documents(pairs: list[Pair]) -> list[str]:
    return [f"{i} {pair.document}" for i, pair in enumerate((pairs * 2)[:300])]


def test_every_method_is_there(
    three_label_classifier: str, checkpoints: SharedCheckpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    with SyncEngine(EngineConfig(model=checkpoints(bi_encoders.gte))) as engine:
        assert len(engine.rerank("what is it", ["a", "b", "c", "d"], top_n=3).results) == 3
        assert engine.embed([[101, 102]]).embeddings.shape == (1, 128)
        query = engine.encode_query("what is it")
        expected = engine.score("what is it", ["a", "b"]).scores
        assert engine.score(query, ["a", "b"]).scores == pytest.approx(expected, abs=1e-6)
        assert engine.embed_tokens("hello").embeddings[0].shape == (4, 128)
        with pytest.raises(InvalidRequestError, match="top_n must not be negative, not -1"):
            engine.rerank("a", ["b", "c"], top_n=-1)
        with pytest.raises(InvalidRequestError, match=r"documents\[300\] has"):
            engine.score("a", ["short"] * 300 + ["word " * 600], truncation="error")
        capsys.readouterr()
        # A progress of one's own takes the place of the bar.
        texts, seen = [f"text {i}" for i in range(300)], []
        engine.embed(texts, progress=lambda there, in_all: seen.append((there, in_all)))
        assert (seen[-1], "300/300" in capsys.readouterr().err) == ((300, 300), False)
        engine.embed(texts)
        assert "300/300" in capsys.readouterr().err
        engine.set_tenants({"a": Tenant(max_request_tokens=1)})
        with pytest.raises(RequestTooLargeError, match="have max_request_tokens of the tenant 'a' raised"):
            engine.score("q", "d", tenant="a")
    with SyncEngine(EngineConfig(model=three_label_classifier)) as engine:
        assert engine.classify(["a", "b"]).scores.shape == (2, 3)
        assert engine.classify(["a"], text_pairs=["b"]).labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    with pytest.raises(EngineNotReadyError, match="with SyncEngine"):
        SyncEngine().score("a", "b")


@pytest.mark.exhaustive
def test_the_bar_counts_documents_whatever_they_come_to(
    documents: list[str],
    checkpoints: SharedCheckpoints,
    qwen3_embedding: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Windows, equal documents and the passes of a listwise model are other numbers of values."""
    with SyncEngine(EngineConfig(model=qwen3_embedding, max_model_len=100, window_overlap=0)) as engine:
        engine.score("what", documents, truncation=WINDOW_LONG)
        assert "300/300" in capsys.readouterr().err
        engine.score("what", ["the same"] * 400)
        assert "400/400" in capsys.readouterr().err
    with SyncEngine(EngineConfig(model=checkpoints(language_models.jina_reranker_v3))) as engine:
        engine.rerank("what", [document[:50] for document in documents])
        assert "300/300" in capsys.readouterr().err
