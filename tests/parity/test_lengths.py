"""Models that treat long sequences otherwise than short ones, which a proof with short texts cannot show."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, Llama4TextConfig, LlamaConfig, MistralConfig

from maxsimd.engine import Engine, EngineConfig, ModelLoadError
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.execution.selfcheck.rules import why_not_packed
from tests.checkpoints import cross_encoders, language_models
from tests.checkpoints.architectures import randomise, save_tokenizer

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _longrope(size: int) -> Any:
    """As Phi-3 and MiniCPM have it: other frequencies for all once one sequence is longer than 64 tokens."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
    }
    return LlamaConfig(vocab_size=size, rope_parameters=rope, **_SIZES)


def _chunked(size: int) -> Any:
    """As Llama 4 has it: attention within chunks, which its mask alone says."""
    more = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 128}
    return Llama4TextConfig(vocab_size=size, attention_chunk_size=64, **more, **_SIZES)


def _windowed(size: int) -> Any:
    """As Mistral has it, with a window that is told to attention."""
    return MistralConfig(vocab_size=size, sliding_window=48, **_SIZES)


@pytest.mark.parametrize(
    ("kind", "config_of", "execution"),
    [
        pytest.param("llama", _longrope, "one by one", id="longrope"),
        pytest.param("llama4_text", _chunked, "padded", id="chunks"),
        pytest.param("mistral", _windowed, "packed", id="window"),
    ],
)
async def test_a_text_beside_a_long_one_is_embedded_as_alone(
    kind: str, config_of: Callable[[int], Any], execution: str, tmp_path: Path
) -> None:
    model = AutoModel.from_config(config_of(save_tokenizer(kind, tmp_path)))
    randomise(model)
    model.save_pretrained(tmp_path)
    texts = ["a short text", "word after word " * 60, "another one, of some more words " * 3]
    alone = SentenceTransformer(str(tmp_path), device="cpu")
    expected = np.stack([alone.encode(text) for text in texts])
    async with Engine(EngineConfig(model=str(tmp_path), dtype="float32", score_type="bi-encoder")) as engine:
        assert engine.device_model.prepared.execution == execution, engine.device_model.prepared.not_packed
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

    loaded = await asyncio.gather(*(asyncio.to_thread(load, path) for path in [good, bad] * 4))
    assert loaded[::2] == ["BertModel"] * 4
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
        [sys.executable, "-c", _MEASURE, checkpoint], capture_output=True, text=True, check=True, timeout=300
    )
    assert int(done.stdout.split()[-1]) < 400_000, "kilobytes"
