"""Texts of any length: read as the checkpoint says, cut between steps, through windows, and beside others."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from transformers import AutoModel, Llama4TextConfig, LlamaConfig, MistralConfig

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, WINDOW_LONG, Engine, EngineConfig, ModelLoadError, Truncation
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.execution.self_check.rules import why_not_packed
from tests.checkpoints import cross_encoders, language_models
from tests.checkpoints.architectures import randomise, save_tokenizer
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines, held_steps
from tests.parity.references import loaded
from tests.parity.selection import with_default
from tests.waiting import until

on_one_loop = pytest.mark.asyncio(loop_scope="module")

LONG_QUERY = "how is a file read " * 40


@on_one_loop
async def test_embeddings_are_cut_by_steps(qwen3_embedding: str, engines: Engines, pairs: list[Pair]) -> None:
    texts = [*(pair.document[: 20 + 130 * i] for i, pair in enumerate(pairs[:4])), "one", "a few words"]
    engine = await engines(EngineConfig(model=qwen3_embedding, dtype="float32", max_batch_tokens=7))
    model = loaded(SentenceTransformer, qwen3_embedding)
    whole = await engine.embed(texts, input_type="document")
    np.testing.assert_allclose(whole.embeddings, model.encode_document(texts), atol=1e-5)
    short = await engine.embed(texts, input_type="query", dimensions=32)
    first = model.encode_query(texts, truncate_dim=32, normalize_embeddings=True)
    np.testing.assert_allclose(short.embeddings, first, atol=1e-5)
    matrices = (await engine.embed_tokens(texts, input_type="document")).embeddings
    for text, ours in zip(texts, matrices, strict=True):
        alone = model.encode(text, output_value="token_embeddings").float().numpy()
        np.testing.assert_allclose(ours, alone / np.linalg.norm(alone, axis=-1, keepdims=True), atol=1e-5)


@pytest.fixture(scope="module")
def documents(pairs: list[Pair]) -> list[str]:
    return [" ".join(pair.document for pair in pairs[i : i + 1 + 4 * (i % 3)]) for i in range(9)]


@on_one_loop
@pytest.mark.parametrize(("fixture", "longest"), [("stanford_colbert", 32), ("native_multi_vector", 48)])
async def test_long_texts_are_read_as_the_checkpoint_says(
    fixture: str, longest: int, engines: Engines, documents: list[str], request: pytest.FixtureRequest
) -> None:
    checkpoint = request.getfixturevalue(fixture)
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    await engine.clear_cache()
    model = loaded(MultiVectorEncoder, checkpoint)
    assert max(map(len, engine.tokenizer.encode(documents, "documents"))) > engine.max_tokens
    encoded = model.encode_document(documents)
    expected = model.similarity(model.encode_query([LONG_QUERY]), encoded)[0].numpy()
    for cached in (0, len(documents)):
        result = await engine.score(LONG_QUERY, documents)
        np.testing.assert_allclose(result.scores, expected, atol=1e-4)
        assert (result.usage.cached_documents, result.truncated) == (cached, 0)
    found = (await engine.embed_tokens(documents, input_type="document")).embeddings
    for ours, theirs in zip(found, encoded, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)
    assert (await engine.embed_tokens([LONG_QUERY], input_type="query")).usage.prompt_tokens == longest
    assert (await engine.score(LONG_QUERY, "a", truncation=Truncation(max_tokens=12))).truncated == 1


QUERY = "How is a file opened for reading?"


@pytest.fixture(scope="module")
def long_documents(pairs: list[Pair]) -> list[str]:
    return [" ".join(pair.document for pair in pairs[i : i + 1 + i % 3]) for i in range(4)]


def _windows(ids: np.ndarray, room: int, overlap: int) -> list[np.ndarray]:
    windows, start = [], 0
    while True:
        windows.append(ids[start : start + room])
        if start + room >= len(ids):
            return windows
        start += room - overlap


def _without_ends(engine: Engine, text: str) -> np.ndarray:
    return engine.tokenizer.encode([text], "text")[0]


async def test_late_interaction_reads_the_tokens_of_all_windows(long_documents: list[str]) -> None:
    long_documents = long_documents[:2]
    truncation = Truncation(max_tokens=40, windows=True)
    queries = [f"{QUERY} {i}" for i in range(len(long_documents))]
    async with Engine(EngineConfig(dtype="float32", max_batch_tokens=512, window_overlap=7)) as engine:
        ours = (await engine.score(queries, long_documents, truncation=truncation)).scores
        for score, query, document in zip(ours, queries, long_documents, strict=True):
            rows = (await engine.embed_tokens([query], input_type="query")).embeddings[0]
            windows = _windows(_without_ends(engine, document), 38, 7)
            inputs = [[101, *window.tolist(), 102] for window in windows]
            parts = (await engine.embed_tokens(inputs, input_type="document")).embeddings
            assert score == pytest.approx((rows @ np.concatenate(parts).T).max(axis=1).sum(), abs=1e-4)


_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

# As Phi-3 and MiniCPM have it: other frequencies for all once one sequence is longer than 64 tokens.
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "factor": 8.0, "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8, "original_max_position_embeddings": 64,
}  # fmt: skip
# As Llama 4 has it: attention within chunks, which its mask alone says.
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 128}


@pytest.mark.parametrize(
    ("kind", "more", "execution"),
    [
        (LlamaConfig, {"rope_parameters": _LONGROPE}, "one by one"),
        (Llama4TextConfig, {"attention_chunk_size": 64, **_EXPERTS}, "padded"),
        (MistralConfig, {"sliding_window": 48}, "packed"),  # which is told to attention
    ],
)
async def test_texts_embed_as_alone(kind: Any, more: dict[str, Any], execution: str, tmp_path: Path) -> None:
    size = save_tokenizer(kind.model_type, tmp_path)
    model = AutoModel.from_config(kind(vocab_size=size, **more, **_SIZES))
    randomise(model)
    model.save_pretrained(tmp_path)
    texts = ["a short text", "word after word " * 60, "another one, of some more words " * 3]
    alone = SentenceTransformer(str(tmp_path), device="cpu")
    expected = np.stack([alone.encode(text) for text in texts])
    async with Engine(EngineConfig(model=str(tmp_path), dtype="float32", score_type="bi-encoder")) as engine:
        assert engine.device_model.execution == execution, engine.device_model.not_packed
        ours = (await engine.embed(texts)).embeddings
    assert alone.tokenizer([texts[1]])["input_ids"][0][100:], "one must be long, or this test shows nothing"
    np.testing.assert_allclose(ours, expected, atol=1e-5 * np.abs(expected).max())


async def test_two_checkpoints_loaded_at_a_time_are_checked(tmp_path: Path) -> None:
    good, bad = cross_encoders.bert(tmp_path / "good"), cross_encoders.bert(tmp_path / "bad")
    settings = Path(bad) / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"num_hidden_layers": 4}))

    def load(path: str) -> str:
        try:
            return type(load_model(EngineConfig(model=path), torch.device("cpu")).backbone).__name__
        except ModelLoadError as error:
            return str(error)

    loaded = await asyncio.gather(*(asyncio.to_thread(load, path) for path in [good, bad] * 2))
    assert loaded[::2] == ["BertModel"] * 2
    assert all("missing: bert.encoder.layer.3" in message for message in loaded[1::2])


def test_a_window_that_no_layer_asks_for_is_not_trusted() -> None:
    config = MistralConfig(vocab_size=100, sliding_window=2000, **_SIZES)
    backbone, rules = SimpleNamespace(config=config, modules=list), SimpleNamespace(expansion=None)
    model: Any = SimpleNamespace(backbone=backbone, max_tokens=4096, query=rules, document=rules)
    assert "window of 2000" in (why_not_packed(model, {None}, causal_ends=True) or "")
    assert why_not_packed(model, {None, 2000}, causal_ends=True) is None


_MEASURE = """
import asyncio, resource, sys
from maxsimd.engine import Engine, EngineConfig

async def main():
    async with Engine(EngineConfig(model=sys.argv[1], dtype="float32", max_batch_tokens=4096)) as engine:
        await engine.score("q", ["warm " * 20] * 4)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = await engine.score("q", ["a document of many words " * 40] * 40)
        assert result.usage.prompt_tokens > 8000
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

asyncio.run(main())
"""


@pytest.mark.exhaustive
def test_memory_does_not_grow_with_vocabulary_times_tokens(folder: Path) -> None:
    """The logits of one step of 4,096 tokens alone would be 2.4 GB."""
    checkpoint = language_models.qwen3_reranker(folder / "large-vocabulary", 150_000)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, checkpoint], capture_output=True, text=True, check=True, timeout=600
    )
    assert int(done.stdout.split()[-1]) < 400_000, "kilobytes"


SHARED_QUERY = "How is a file opened for reading, and what is returned when there is none of that name?"

BUILDS = [
    language_models.qwen3_reranker, language_models.mxbai_rerank_v2, language_models.bge_reranker_v2_gemma,
    cross_encoders.llama, cross_encoders.qwen2,
]  # fmt: skip


@pytest.fixture(scope="module", params=with_default(BUILDS, [BUILDS[0]]))
def causal(request: pytest.FixtureRequest, checkpoints: SharedCheckpoints) -> str:
    return checkpoints(request.param)


@pytest.fixture(scope="module")
def few_documents(pairs: list[Pair]) -> list[str]:
    return [pair.document[:300] for pair in pairs[:12]]


async def _run(causal: str, documents: list[str], sharing: str, budget: int) -> tuple[np.ndarray, int]:
    config = EngineConfig(model=causal, dtype="float32", prefix_sharing=sharing, max_batch_tokens=budget)
    async with Engine(config) as engine:
        result = await engine.score(SHARED_QUERY, documents, truncation=CUT_LONG, use_activation=False)
        # The last pair's results are there just before its prefix goes.
        await until(lambda: engine.stats().device.prefill_kv == 0)
        return np.array(result.scores), result.usage.cached_tokens


async def test_scores_with_and_without_sharing_are_equal(causal: str, few_documents: list[str]) -> None:
    apart, none = await _run(causal, few_documents, "off", 2048)
    assert none == 0
    for budget in (37, 2048):
        shared, saved = await _run(causal, few_documents, "auto", budget)
        # Logits: float32 knows them to so many parts of their own size.
        np.testing.assert_allclose(shared, apart, atol=1e-5 * max(1.0, np.abs(apart).max()), rtol=0)
        assert saved > 8 * (len(few_documents) - 1)


async def test_a_cancelled_request_leaves_no_prefix_behind(causal: str, few_documents: list[str]) -> None:
    async with Engine(EngineConfig(model=causal, dtype="float32", max_batch_tokens=200)) as engine:
        for after in (1, 2, 4):
            with held_steps(engine, after):
                task = asyncio.create_task(engine.score(SHARED_QUERY, few_documents, truncation=CUT_LONG))
                await until(lambda: engine.stats().device.prefill_kv > 0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await engine.score("a", ["b", "c"])
        # The last pair's results are there just before its prefix goes.
        await until(lambda: engine.stats().device.prefill_kv == 0)


async def test_windows_share_their_prefix_too(causal: str, few_documents: list[str]) -> None:
    long = [" ".join(few_documents[i : i + 6]) for i in range(0, 12, 6)]
    results = []
    for sharing in ("auto", "off"):
        options: dict[str, Any] = {"prefix_sharing": sharing, "max_model_len": 400, "window_overlap": 10}
        async with Engine(EngineConfig(model=causal, dtype="float32", **options)) as engine:
            results.append(await engine.score(SHARED_QUERY, long, truncation=WINDOW_LONG))
    shared, apart = results
    np.testing.assert_allclose(shared.scores, apart.scores, atol=1e-5, rtol=1e-5)
    assert shared.usage.cached_tokens > 8 * len(long)
    assert apart.usage.cached_tokens == 0
