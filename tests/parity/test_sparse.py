"""Sparse vectors are those of `SparseEncoder`, and those of bge-m3's layers its authors' code's."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, InvalidRequestError, ModelLoadError, SparseVector
from maxsimd.engine.cache.fingerprint import fingerprint, ingredients
from maxsimd.engine.checkpoint.load import identity_of, load_model
from maxsimd.engine.inspection import inspect_model
from maxsimd.engine.ops import cpu as kernels
from tests.checkpoints import bi_encoders, gte, sparse_encoders
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity import references
from tests.parity.changes import CPU, converted, removed, written
from tests.parity.conftest import Changed
from tests.parity.families import FAMILIES, SPARSE, Family
from tests.parity.selection import families
from tests.unit.calling_handlers import Caller, RecordingEngine, error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

_OTHERS = ("bge-m3, sparse", "gte-multilingual, sparse")
SAVES = [family for family in FAMILIES if family.kind == SPARSE and family.name not in _OTHERS]
HYBRID: dict[str, Any] = {"score_type": "hybrid", "allow_pickle": True}


def dense(vectors: list[SparseVector], words: int) -> Any:
    made = np.zeros((len(vectors), words), dtype=np.float32)
    for row, vector in zip(made, vectors, strict=True):
        assert (np.diff(vector.indices) > 0).all()
        assert (vector.values != 0).all()
        row[vector.indices] = vector.values
    return made


@families(SAVES, {"SPLADE", "OpenSearch, queries looked up"})
async def test_sparse_vectors_equal_the_reference(
    family: Family, checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair]
) -> None:
    path = checkpoints(family.build)
    engine = await engines(EngineConfig(model=path, dtype="float32", **family.settings))
    roles: list[Any] = ["query", "document", None]
    for role in roles:
        texts = [pair.query if role == "query" else pair.document for pair in pairs[:2]]
        found = await engine.embed_sparse(texts, input_type=role, truncation=CUT_LONG)
        expected = references.sparse_vectors(path, texts, role)
        np.testing.assert_allclose(dense(found.embeddings, expected.shape[1]), expected, atol=1e-4, rtol=0)


async def test_bge_m3_gives_all_three_embeddings(bge_m3: str, engines: Engines, pairs: list[Pair]) -> None:
    engine = await engines(EngineConfig(model=bge_m3, dtype="float32", **HYBRID))
    texts = [pair.document for pair in pairs[:6]]
    dense = (await engine.embed(texts)).embeddings
    sparse = (await engine.embed_sparse(texts)).embeddings
    tokens = (await engine.embed_tokens(texts)).embeddings
    model = references.BgeM3(bge_m3)
    for i, text in enumerate(texts):
        vector, weights, vectors = model.read(text)
        np.testing.assert_allclose(dense[i], vector, atol=1e-5)
        np.testing.assert_allclose(tokens[i], vectors, atol=1e-5)
        found = dict(zip(sparse[i].indices.tolist(), sparse[i].values.tolist(), strict=True))
        expected = {token: weight for token, weight in weights.items() if weight > 0}
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("build", "options"),
    [(sparse_encoders.splade, {}), (bi_encoders.bge_m3, HYBRID)],
    ids=["splade", "bge-m3"],
)
async def test_a_cached_document_scores_to_the_last_bit_as_a_new_one(
    build: Any, options: Any, checkpoints: SharedCheckpoints, pairs: list[Pair], tmp_path: Path
) -> None:
    config = EngineConfig(model=checkpoints(build), dtype="bfloat16", cache_dir=str(tmp_path), **options)
    query, documents = pairs[0].query, [pair.document for pair in pairs[:4]]
    async with Engine(config) as engine:
        new = await engine.score(query, documents)
        again = await engine.score(query, documents)
        apart = await engine.score(await engine.encode_query(query), documents)
    async with Engine(config) as engine:
        from_disk = await engine.score(query, documents)
    for each in (again, apart, from_disk):
        assert each.usage.cached_documents == len(documents)
        # Without our kernels the bits of products depend on the number of rows.
        np.testing.assert_allclose(each.scores, new.scores, rtol=0 if kernels.is_available() else 1e-5)
    assert max(new.scores) > 0


async def test_sparse_models_refuse_dense_vectors(splade: str, engines: Engines) -> None:
    engine = await engines(EngineConfig(model=splade, dtype="float32"))
    with pytest.raises(InvalidRequestError, match="give its text"):
        await engine.score("a query", [np.ones((3, 2), dtype=np.float32)])
    with pytest.raises(InvalidRequestError, match="cannot embed"):
        await engine.embed(["a text"])


async def test_one_by_one_gives_the_same_as_packed(
    checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, bge_m3 = checkpoints(sparse_encoders.opensearch_v3), checkpoints(bi_encoders.bge_m3)
    packed = await engines.scores(EngineConfig(model=path, dtype="float32"), pairs[:3])
    monkeypatch.setattr("maxsimd.engine.execution.modes.why_one_by_one", lambda model: "a test wants it")
    async with Engine(EngineConfig(model=path, dtype="float32")) as engine:
        assert engine.device_model.execution == "one by one"
        alone = await engine.score([p.query for p in pairs[:3]], [p.document for p in pairs[:3]])
    np.testing.assert_allclose(alone.scores, packed, atol=1e-4, rtol=0)
    with pytest.raises(ModelLoadError, match="cannot be run one by one"):
        async with Engine(EngineConfig(model=bge_m3, dtype="float32", allow_pickle=True)):
            pass


async def test_weights_that_are_looked_up_tell_caches_apart(opensearch: str) -> None:
    config = EngineConfig(model=opensearch, dtype="float32")
    model = load_model(config, CPU)
    before = fingerprint(ingredients(model, config, torch.float32, "float32")), identity_of(model)
    head: Any = model.tasks[model.score_task].head
    head.static_weights[100:] *= 2
    after = fingerprint(ingredients(model, config, torch.float32, "float32")), identity_of(model)
    assert {*before}.isdisjoint(after)


async def test_explanations_of_bge_m3_add_up(bge_m3: str, engines: Engines, pairs: list[Pair]) -> None:
    options: dict[str, Any] = HYBRID | {"score_type": "late-interaction"}
    engine = await engines(EngineConfig(model=bge_m3, dtype="float32", **options))
    ranked = await engine.rerank(pairs[0].query, [pair.document for pair in pairs[:3]], explain=True)
    for one in ranked.results:
        assert one.explanation is not None
        matches = one.explanation.matches
        assert one.score == pytest.approx(np.mean([match.similarity for match in matches]), abs=1e-4)


async def test_pickles_are_not_read(
    bge_m3: str, changed: Changed, checkpoints: SharedCheckpoints, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        model = load_model(EngineConfig(model=bge_m3), CPU)
    assert (sorted(model.tasks), model.score_type.value) == (["embed", "token_embed"], "bi-encoder")
    assert "colbert_linear and sparse_linear beside the model are not read" in caplog.text
    rows = inspect_model(EngineConfig(model=bge_m3, dtype="float32"))
    assert rows["more"].startswith("colbert_linear.pt and sparse_linear.pt, not read: sparse, multi-vector")
    rows = inspect_model(EngineConfig(model=changed(bi_encoders.bge_m3, converted, removed("*.pt"))))
    assert rows["kind"] == "bi-encoder"
    assert rows["more"] == "scored as sparse, hybrid or late-interaction too"
    alibaba = EngineConfig(model=checkpoints(gte.multilingual), score_type="late-interaction")
    assert load_model(alibaba, CPU).similarity == "maxsim", "the mean is that of bge-m3's own layer"


async def test_a_table_of_queries_that_is_not_read_is_said(changed: Changed, caplog: Any) -> None:
    path = changed(sparse_encoders.plain, written("idf.json", "{}"))
    load_model(EngineConfig(model=path, score_type="sparse"), CPU)
    assert "idf.json, which is not read: queries are read by the model, as documents are" in caplog.text


async def test_pooling_has_to_be_asked_for_one_of_several_embeddings(bge_m3: str) -> None:
    async with RecordingEngine(EngineConfig(model=bge_m3, dtype="float32", threads=1, **HYBRID)) as engine:
        caller = Caller(engine)
        refused = await caller.post("/pooling", {"input": ["a"]})
        assert (refused.status, error_of(refused)["param"]) == (400, "task")
        assert (await caller.post("/pooling", {"input": ["a"], "task": "embed"})).status == 200
