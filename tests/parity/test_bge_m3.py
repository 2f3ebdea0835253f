"""bge-m3: all that its layers give, read or not; and what is refused. Scores are in test_families.py, and
beside FlagEmbedding's in tests/oracles."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from maxsimd.bench.datasets import Pair
from maxsimd.engine import Engine, EngineConfig, ModelLoadError
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.inspection import inspect_model
from maxsimd.engine.ops import cpu as kernels
from tests.checkpoints import bi_encoders
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity import references
from tests.unit.calling_handlers import Caller, RecordingEngine, error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

CPU = torch.device("cpu")
LAYERS = ("sparse_linear", "colbert_linear")


@pytest.fixture
def path(checkpoints: SharedCheckpoints) -> str:
    return checkpoints(bi_encoders.bge_m3)


def converted(checkpoints: SharedCheckpoints, folder: Path) -> Path:
    """As docs/models.md says how to."""
    copy = checkpoints.copy(bi_encoders.bge_m3, folder)
    for name in LAYERS:
        save_file(torch.load(copy / f"{name}.pt", weights_only=True), copy / f"{name}.safetensors")
        (copy / f"{name}.pt").unlink()
    return copy


def _refusal(path: Any, **settings: Any) -> str:
    with pytest.raises(ModelLoadError) as refused:
        load_model(EngineConfig(model=str(path), **settings), CPU)
    return str(refused.value)


async def test_one_engine_gives_all_embeddings(path: str, engines: Engines, pairs: list[Pair]) -> None:
    config = EngineConfig(model=path, dtype="float32", score_type="hybrid", allow_pickle=True)
    engine = await engines(config)
    texts = [pair.document for pair in pairs[:10]]
    dense = (await engine.embed(texts)).embeddings
    sparse = (await engine.embed_sparse(texts)).embeddings
    tokens = (await engine.embed_tokens(texts)).embeddings
    model = references.BgeM3(path)
    for i, text in enumerate(texts):
        vector, weights, vectors = model.read(text)
        np.testing.assert_allclose(dense[i], vector, atol=1e-5)
        np.testing.assert_allclose(tokens[i], vectors, atol=1e-5)
        found = dict(zip(sparse[i].indices.tolist(), sparse[i].values.tolist(), strict=True))
        expected = {token: weight for token, weight in weights.items() if weight > 0}
        assert found == pytest.approx(expected, abs=1e-5)


async def test_weights_are_an_option(path: str, pairs: list[Pair]) -> None:
    queries, documents = [pair.query for pair in pairs[:20]], [pair.document for pair in pairs[:20]]
    config = EngineConfig(
        model=path, dtype="float32", score_type="hybrid", allow_pickle=True, hybrid_weights="1,0.5,2"
    )
    async with Engine(config) as engine:
        found = (await engine.score(queries, documents)).scores
    expected = references.bge_m3(path, queries, documents, weights=(1, 0.5, 2))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert "hybrid_weights is for hybrid scores" in _refusal(path, hybrid_weights="1,1,1")


async def test_a_cached_document_scores_to_the_last_bit_as_a_new_one(path: str, pairs: list[Pair]) -> None:
    """In bfloat16 too, whose numbers would round the ids of tokens."""
    config = EngineConfig(model=path, dtype="bfloat16", score_type="hybrid", allow_pickle=True)
    documents = [pair.document for pair in pairs[:20]]
    async with Engine(config) as engine:
        first = await engine.score(pairs[0].query, documents)
        again = await engine.score(pairs[0].query, documents)
        apart = await engine.score(await engine.encode_query(pairs[0].query), documents)
    if kernels.is_available():
        assert first.scores == again.scores == apart.scores
    else:  # the bits of torch's products depend on the number of rows
        for scored in (again, apart):
            np.testing.assert_allclose(scored.scores, first.scores, rtol=1e-5)
    assert again.usage.cached_documents == 20


async def test_explanations_of_multi_vector_scores_add_up(
    path: str, engines: Engines, pairs: list[Pair]
) -> None:
    config = EngineConfig(model=path, dtype="float32", score_type="late-interaction", allow_pickle=True)
    engine = await engines(config)
    ranked = await engine.rerank(pairs[0].query, [pair.document for pair in pairs[:3]], explain=True)
    for one in ranked.results:
        assert one.explanation is not None
        matches = one.explanation.matches
        assert one.score == pytest.approx(np.mean([match.similarity for match in matches]), abs=1e-4)


async def test_pickles_are_not_opened_unless_they_may_be(
    path: str, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        model = load_model(EngineConfig(model=path), CPU)
    assert sorted(model.tasks) == ["embed", "token_embed"]
    assert model.score_type.value == "bi-encoder"
    assert "colbert_linear and sparse_linear beside the model are not read" in caplog.text
    rows = inspect_model(EngineConfig(model=path, dtype="float32"))
    assert rows["more"] == (
        "colbert_linear.pt and sparse_linear.pt, not read: "
        "sparse, multi-vector and hybrid if pickles are allowed"
    )
    for kind in ("sparse", "hybrid", "late-interaction"):
        assert "allow_pickle=True" in _refusal(path, score_type=kind)


async def test_layers_may_be_converted(
    checkpoints: SharedCheckpoints, path: str, tmp_path: Path, pairs: list[Pair]
) -> None:
    folder = converted(checkpoints, tmp_path / "converted")
    queries, documents = [pair.query for pair in pairs[:10]], [pair.document for pair in pairs[:10]]
    async with Engine(EngineConfig(model=str(folder), dtype="float32", score_type="hybrid")) as engine:
        found = (await engine.score(queries, documents)).scores
    expected = references.bge_m3(path, queries, documents, weights=(0.4, 0.2, 0.4))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    rows = inspect_model(EngineConfig(model=str(folder), dtype="float32"))
    assert rows["kind"] == "bi-encoder"
    assert rows["more"] == "scored as sparse, hybrid or late-interaction too"


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("this must never be run",)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (Harmful(), "cannot read sparse_linear.pt"),
        ({"weight": torch.ones(1, 128)}, "not a weight and a bias"),
        ({"weight": torch.ones(2, 128), "bias": torch.ones(2)}, "not a weight and a bias"),
        ({"weight": torch.ones(1, 64), "bias": torch.ones(1)}, "not a weight and a bias"),
        ({"weight": torch.full((1, 128), torch.nan), "bias": torch.ones(1)}, "not finite"),
    ],
    ids=["code", "no bias", "two weights", "another size", "not finite"],
)
async def test_layers_that_do_not_fit_are_refused(
    checkpoints: SharedCheckpoints, tmp_path: Path, what: Any, reason: str, capfd: Any
) -> None:
    folder = checkpoints.copy(bi_encoders.bge_m3, tmp_path / "wrong")
    torch.save(what, folder / "sparse_linear.pt")
    assert reason in _refusal(folder, allow_pickle=True)
    assert "never be run" not in capfd.readouterr().out


async def test_a_layer_that_is_missing_is_missed_where_it_is_needed(
    checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    folder = converted(checkpoints, tmp_path / "half")
    (folder / "colbert_linear.safetensors").unlink()
    assert sorted(load_model(EngineConfig(model=str(folder)), CPU).tasks) == [
        "embed",
        "sparse_embed",
        "token_embed",
    ]
    for kind in ("hybrid", "late-interaction"):
        assert "has no colbert_linear" in _refusal(folder, score_type=kind)


async def test_other_encoders_have_no_such_kinds_of_scores(
    checkpoints: SharedCheckpoints,
) -> None:
    assert "has no colbert_linear and sparse_linear" in _refusal(
        checkpoints(bi_encoders.bge), score_type="hybrid"
    )


async def test_one_by_one_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxsimd.engine.execution.modes.why_one_by_one", lambda model: "a test wants it")
    with pytest.raises(ModelLoadError, match="cannot be run one by one"):
        async with Engine(EngineConfig(model=path, dtype="float32", allow_pickle=True)):
            pass


async def test_layers_beside_another_pooling_are_refused(
    checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    """Vectors of tokens leave the first one out, which the mean takes in."""
    folder = checkpoints.copy(bi_encoders.bge_m3, tmp_path / "mean")
    (pooling,) = folder.glob("*_Pooling/config.json")
    said = json.loads(pooling.read_text(encoding="utf-8"))
    if "pooling_mode" in said:
        said["pooling_mode"] = "mean"
    else:
        said |= {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    pooling.write_text(json.dumps(said), encoding="utf-8")
    assert "pools mean" in _refusal(folder, allow_pickle=True)
    load_model(EngineConfig(model=str(folder), score_type="bi-encoder"), CPU)


async def test_pooling_has_to_be_asked_for_one_of_several_embeddings(path: str) -> None:
    config = EngineConfig(model=path, dtype="float32", score_type="hybrid", allow_pickle=True, threads=1)
    async with RecordingEngine(config) as engine:
        caller = Caller(engine)
        refused = await caller.post("/pooling", {"input": ["a"]})
        assert (refused.status, error_of(refused)["param"]) == (400, "task")
        assert (await caller.post("/pooling", {"input": ["a"], "task": "embed"})).status == 200
