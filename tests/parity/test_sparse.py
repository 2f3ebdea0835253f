"""Sparse vectors are those of sentence-transformers' `SparseEncoder`, and so are scores of saves whose scores
are large; what is not a sparse encoder is refused."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, InvalidRequestError, ModelLoadError, SparseVector
from maxsimd.engine.cache.fingerprint import fingerprint, ingredients
from maxsimd.engine.checkpoint import load_model
from tests.checkpoints import bi_encoders, sparse_encoders
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity import references
from tests.parity.families import FAMILIES, SPARSE, Family
from tests.parity.selection import families

pytestmark = pytest.mark.asyncio(loop_scope="module")

CPU = torch.device("cpu")
# Saves of SparseEncoder. test_bge_m3.py has the vectors of bge-m3, test_families.py the scores of
# gte-multilingual.
_OTHERS = ("bge-m3, sparse", "gte-multilingual, sparse")
SPARSE_FAMILIES = [family for family in FAMILIES if family.kind == SPARSE and family.name not in _OTHERS]


def dense(vectors: list[SparseVector], words: int) -> Any:
    made = np.zeros((len(vectors), words), dtype=np.float32)
    for row, vector in zip(made, vectors, strict=True):
        assert (np.diff(vector.indices) > 0).all()
        assert (vector.values != 0).all()
        row[vector.indices] = vector.values
    return made


@pytest.mark.parametrize("role", ["query", "document", None])
@families(SPARSE_FAMILIES, {"SPLADE", "OpenSearch, queries looked up"})
async def test_sparse_vectors_equal_the_reference(
    family: Family,
    checkpoints: SharedCheckpoints,
    engines: Engines,
    pairs: list[Pair],
    role: Any,
) -> None:
    path = checkpoints(family.build)
    engine = await engines(EngineConfig(model=path, dtype="float32", **family.settings))
    texts = [pair.query if role == "query" else pair.document for pair in pairs[:3]]
    found = await engine.embed_sparse(texts, input_type=role, truncation=CUT_LONG)
    expected = references.sparse_vectors(path, texts, role)
    np.testing.assert_allclose(dense(found.embeddings, expected.shape[1]), expected, atol=1e-4, rtol=0)


async def test_sums_of_weights_equal_the_reference(
    checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair]
) -> None:
    path = checkpoints(sparse_encoders.splade_sum)
    scores = await engines.scores(EngineConfig(model=path, dtype="float32"), pairs[:3])
    texts = [pair.query for pair in pairs[:3]], [pair.document for pair in pairs[:3]]
    np.testing.assert_allclose(scores, references.sparse_encoder(path, *texts), rtol=1e-5)


async def test_a_cached_document_scores_to_the_last_bit_as_a_new_one(
    checkpoints: SharedCheckpoints, pairs: list[Pair], tmp_path: Path
) -> None:
    """In bfloat16 too, whose numbers would round the ids of words."""
    config = EngineConfig(
        model=checkpoints(sparse_encoders.splade), dtype="bfloat16", cache_dir=str(tmp_path / "cache")
    )
    documents = [pair.document for pair in pairs[:3]]
    async with Engine(config) as engine:
        first = await engine.score(pairs[0].query, documents)
        again = await engine.score(pairs[0].query, documents)
        query = await engine.encode_query(pairs[0].query)
        apart = await engine.score(query, documents)
    async with Engine(config) as engine:
        from_disk = await engine.score(pairs[0].query, documents)
    assert first.scores == again.scores == apart.scores == from_disk.scores
    assert again.usage.cached_documents == from_disk.usage.cached_documents == len(documents)
    assert max(first.scores) > 0


async def test_vectors_of_others_are_not_taken(checkpoints: SharedCheckpoints, engines: Engines) -> None:
    engine = await engines(EngineConfig(model=checkpoints(sparse_encoders.splade), dtype="float32"))
    with pytest.raises(InvalidRequestError, match="give its text"):
        await engine.score("a query", [np.ones((3, 2), dtype=np.float32)])
    with pytest.raises(InvalidRequestError, match="no bounds"):
        await engine.score("a query", ["a document"], normalize=True)
    with pytest.raises(InvalidRequestError, match="cannot embed"):
        await engine.embed(["a text"])


async def test_one_by_one_gives_the_same_as_packed(
    checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints(sparse_encoders.opensearch_v3)
    packed = await engines.scores(EngineConfig(model=path, dtype="float32"), pairs[:3])
    monkeypatch.setattr("maxsimd.engine.execution.modes.why_one_by_one", lambda model: "a test wants it")
    async with Engine(EngineConfig(model=path, dtype="float32")) as engine:
        assert engine.device_model.prepared.execution == "one by one"
        alone = await engine.score([p.query for p in pairs[:3]], [p.document for p in pairs[:3]])
    np.testing.assert_allclose(alone.scores, packed, atol=1e-4, rtol=0)


def _refusal(path: str, **settings: Any) -> str:
    with pytest.raises(ModelLoadError) as refused:
        load_model(EngineConfig(model=path, **settings), CPU)
    return str(refused.value)


async def test_what_weighs_no_words_is_refused(checkpoints: SharedCheckpoints) -> None:
    path = checkpoints(bi_encoders.bge)
    assert "or name a SparseEncoder save" in await asyncio.to_thread(
        lambda: _refusal(path, score_type="sparse")
    )


async def test_settings_that_would_change_the_scores_are_refused(
    checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    changed = checkpoints.copy(sparse_encoders.splade, tmp_path / "cosine")
    settings = json.loads((changed / "config_sentence_transformers.json").read_text())
    (changed / "config_sentence_transformers.json").write_text(
        json.dumps(settings | {"similarity_fn_name": "cosine"})
    )
    assert "of sparse models dot is supported" in _refusal(str(changed))

    path = checkpoints(sparse_encoders.splade)
    config = EngineConfig(model=path, dtype="float32", cache_precision="int8")
    with pytest.raises(ModelLoadError, match="would round the ids of words"):
        async with Engine(config):
            pass
    assert "dimensions is for vectors" in _refusal(path, dimensions=8)


async def test_other_modules_are_refused(checkpoints: SharedCheckpoints, tmp_path: Path) -> None:
    """An encoder that sentence-transformers would turn into a sparse one, with random weights."""
    model = SentenceTransformer(checkpoints(bi_encoders.bge), device="cpu")
    model.save_pretrained(str(tmp_path / "bge"))
    settings = json.loads((tmp_path / "bge" / "config_sentence_transformers.json").read_text())
    (tmp_path / "bge" / "config_sentence_transformers.json").write_text(
        json.dumps(settings | {"model_type": "SparseEncoder"})
    )
    assert "a masked language model with SpladePooling is supported" in _refusal(str(tmp_path / "bge"))


async def test_two_models_behind_a_router_are_refused(checkpoints: SharedCheckpoints, tmp_path: Path) -> None:
    from sentence_transformers.base.modules import Router

    routes = [list(SparseEncoder(checkpoints(sparse_encoders.splade), device="cpu")) for _ in range(2)]
    router = Router.for_query_document(query_modules=routes[0], document_modules=routes[1])
    SparseEncoder(modules=[router], device="cpu").save_pretrained(str(tmp_path / "two"))
    assert "by two models" in _refusal(str(tmp_path / "two"))


async def test_pickles_in_the_folders_of_routes_are_refused(
    checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    folder = checkpoints.copy(sparse_encoders.opensearch_v3, tmp_path / "pickled")
    static = folder / "query_0_SparseStaticEmbedding"
    weights = {"weight": torch.ones(30522)}
    torch.save(weights, static / "pytorch_model.bin")
    (static / "model.safetensors").unlink()
    assert "allow_pickle" in _refusal(str(folder))
    shutil.rmtree(folder)


async def test_weights_that_are_looked_up_tell_caches_apart(checkpoints: SharedCheckpoints) -> None:
    config = EngineConfig(model=checkpoints(sparse_encoders.opensearch_v3), dtype="float32")
    model = load_model(config, torch.device("cpu"))
    before = fingerprint(ingredients(model, config, torch.float32, "float32"))
    head: Any = model.tasks[model.score_task].head
    head.static_weights *= 2
    assert fingerprint(ingredients(model, config, torch.float32, "float32")) != before
