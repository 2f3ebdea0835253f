"""Late chunking: the whole document through transformers, then the mean of each chunk's tokens."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize

from maxsimd.bench.datasets import Pair
from maxsimd.engine import EmbedResult, Engine, EngineConfig, InvalidRequestError
from maxsimd.engine.requests import LongInputPolicy
from tests.checkpoints import bi_encoders
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity.references import loaded

pytestmark = pytest.mark.asyncio(loop_scope="module")

Chunks = Sequence[tuple[int, int]]


@torch.no_grad()
def plain(checkpoint: str, text: str, chunks: Chunks, prompt: str, skips_prompt: bool) -> NDArray[Any]:
    """One vector a chunk. Special tokens and a prompt count with the nearest token of the text."""
    model = loaded(SentenceTransformer, checkpoint)
    read = model.tokenizer(
        prompt + text, return_offsets_mapping=True, return_special_tokens_mask=True, return_tensors="pt"
    )
    offsets, special = read.pop("offset_mapping")[0].tolist(), read.pop("special_tokens_mask")[0].tolist()
    states = model[0].auto_model(**read).last_hidden_state[0]
    characters: list[int | None] = []
    for (start, stop), is_special in zip(offsets, special, strict=True):
        is_text = not is_special and stop > len(prompt)
        start = max(0, start - len(prompt))
        visible = (i for i in range(start, stop - len(prompt)) if not text[i].isspace())
        characters.append(next(visible, start) if is_text else None)
    first = next(each for each in characters if each is not None)
    vectors = []
    for chunk_start, chunk_stop in chunks:
        rows, nearest = [], first
        for i, character in enumerate(characters):
            nearest = nearest if character is None else character
            is_prompt = not special[i] and character is None
            is_skipped = skips_prompt and (is_prompt or (i == 0 and special[i]))
            if chunk_start <= nearest < chunk_stop and not is_skipped:
                rows.append(states[i])
        pooled = {"sentence_embedding": torch.stack(rows).mean(dim=0)[None]}
        for module in list(model)[2:]:
            assert isinstance(module, Dense | Normalize)
            pooled = module(pooled)
        vectors.append(pooled["sentence_embedding"][0].numpy())
    return np.array(vectors)


def parts_of(text: str, seed: int) -> list[str]:
    draw = np.random.default_rng(seed)
    cuts = sorted({0, len(text), *draw.integers(1, len(text), 1 + seed % 5).tolist()})
    parts = [text[start:stop] for start, stop in pairwise(cuts)]
    return parts if all(part.strip() for part in parts) else [text]


def documents(pairs: list[Pair]) -> list[str]:
    texts = [pair.document[: 40 + 90 * i] for i, pair in enumerate(pairs[:6])]
    return [*texts, "A naïve café — 日本語の文書、and 🤖 emoji."]


async def _embedded(engine: Engine, texts: Any, **options: Any) -> EmbedResult | None:
    """None where a cut within a word has left a chunk without a token."""
    try:
        return await engine.embed(texts, late_chunking=True, **options)
    except InvalidRequestError as error:
        if "has no token of its own" not in str(error):
            raise
        return None


CASES = [
    *((bi_encoders.qwen3_mean, None, False, budget) for budget in (7, 61, 4096)),
    (bi_encoders.gte, None, False, None),
    (bi_encoders.jina_v3, "document", False, None),
    (bi_encoders.without_prompt, "document", True, None),
    (bi_encoders.embeddinggemma, "document", False, None),
]


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if i in (1, 5, 6) else pytest.mark.exhaustive)
                                  for i, case in enumerate(CASES)])  # fmt: skip
async def test_chunks_equal_a_plain_reading(
    checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair], case: Any
) -> None:
    build, role, skips_prompt, budget = case
    checkpoint = checkpoints(build)
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32", max_batch_tokens=budget))
    prompt = engine.model.rules(role).prompt
    checked = 0
    for seed, text in enumerate(documents(pairs)):
        parts = parts_of(text, seed)
        spans = [*pairwise(accumulate(map(len, parts), initial=0))]
        spans += [(0, len(text)), (len(text) // 3, len(text))]
        found = await _embedded(engine, text, chunks=spans, input_type=role)
        if found is None:
            continue
        expected = plain(checkpoint, text, spans, prompt, skips_prompt)
        np.testing.assert_allclose(found.embeddings, expected, atol=1e-5)
        whole = await engine.embed(text, input_type=role)
        np.testing.assert_allclose(found.embeddings[-2], whole.embeddings[0], atol=1e-6)
        by_parts = await engine.embed(parts, late_chunking=True, input_type=role)
        np.testing.assert_allclose(by_parts.embeddings, expected[:-2], atol=1e-5)
        assert by_parts.usage == whole.usage
        checked += 1
    assert checked >= 3


async def test_what_has_no_plain_meaning_is_refused(
    checkpoints: SharedCheckpoints, engines: Engines, qwen3_embedding: str
) -> None:
    for path, reason in ((checkpoints(bi_encoders.bge), "first token"), (qwen3_embedding, "last token")):
        engine = await engines(EngineConfig(model=path, dtype="float32"))
        with pytest.raises(InvalidRequestError, match=reason):
            await engine.embed(["a", "b"], late_chunking=True)
    engine = await engines(EngineConfig(model=checkpoints(bi_encoders.gte), dtype="float32"))
    policies: list[LongInputPolicy] = ["cut", "error", "window"]
    for truncation in policies:
        with pytest.raises(InvalidRequestError, match="more than the 510 tokens"):
            await engine.embed(["word " * 300, "word " * 300], late_chunking=True, truncation=truncation)
