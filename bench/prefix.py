"""A causal reranker whose pairs begin alike: with what they share run once, and run every time, in turns."""

import statistics
import tempfile
import time

import numpy as np

from maxsimd.bench.datasets import docstring_pairs
from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from maxsimd.engine.checkpoint.embedded import embedded_model_path


def save_random_causal_reranker(folder: str) -> None:
    """Saves a small `Qwen3ForSequenceClassification` with random weights and MiniLM's tokeniser."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=1536,
        max_position_embeddings=1024,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


async def measure_prefix_sharing(documents: int, share: float, rounds: int) -> dict[str, float]:
    """Medians of one request of `documents` documents, `share` of whose tokens all pairs begin with."""
    with tempfile.TemporaryDirectory() as folder:
        save_random_causal_reranker(folder)
        return await _measure(folder, documents, share, rounds)


async def _measure(folder: str, documents: int, share: float, rounds: int) -> dict[str, float]:
    texts = [pair.document for pair in docstring_pairs()[:documents]]
    async with (
        Engine(EngineConfig(model=folder, device="cpu", cache_mb=0)) as together,
        Engine(EngineConfig(model=folder, device="cpu", prefix_sharing="off", cache_mb=0)) as apart,
    ):
        own = await apart.score("", texts, truncation=CUT_LONG)
        wanted = own.usage.prompt_tokens / documents * share / (1 - share)
        query = _query_of(apart, round(wanted))
        seconds: dict[Engine, list[float]] = {together: [], apart: []}
        for round_number in range(rounds + 1):
            for engine, taken in seconds.items():
                started = time.perf_counter()
                result = await engine.score(query, texts, truncation=CUT_LONG, use_activation=False)
                if round_number:
                    taken.append(time.perf_counter() - started)
                if engine is together:
                    usage, scores = result.usage, result.scores
                else:
                    others = result.scores
    ratio = statistics.median(b / a for a, b in zip(seconds[together], seconds[apart], strict=True))
    return {
        "documents": documents,
        "tokens": usage.prompt_tokens,
        "share_not_run": round(usage.cached_tokens / usage.prompt_tokens, 3),
        "shared_documents_per_s": round(documents / statistics.median(seconds[together]), 1),
        "apart_documents_per_s": round(documents / statistics.median(seconds[apart]), 1),
        "times_as_fast": round(ratio, 2),
        "largest_difference_of_logits": float(np.abs(np.array(scores) - np.array(others)).max()),
    }


def _query_of(engine: Engine, tokens: int) -> str:
    """Real words of about `tokens` tokens."""
    words = " ".join(pair.query for pair in docstring_pairs()[-40:]).split()
    while len(engine.tokenizer.encode([" ".join(words)], "query")[0]) > tokens:
        words.pop()
    return " ".join(words)
