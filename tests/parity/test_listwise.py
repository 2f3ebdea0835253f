"""Listwise models score as their paper says, however many documents there are."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, InvalidRequestError
from maxsimd.engine.checkpoint import ListwiseRules
from maxsimd.engine.preprocess.listwise import in_blocks
from tests.checkpoints import language_models
from tests.checkpoints.shared import SharedCheckpoints
from tests.native_bfloat16 import needs_native_bfloat16
from tests.parity import references


@pytest.fixture(scope="module")
def checkpoint(checkpoints: SharedCheckpoints) -> str:
    return checkpoints(language_models.jina_reranker_v3)


async def _score(checkpoint: str, query: str, documents: list[str], **settings: object) -> np.ndarray:
    config = EngineConfig(model=checkpoint, **settings)  # type: ignore[arg-type]
    async with Engine(config) as engine:
        return np.array((await engine.score(query, documents, truncation=CUT_LONG)).scores)


@pytest.mark.parametrize("count", [1, 10, pytest.param(200, marks=pytest.mark.exhaustive)])
async def test_scores_equal_a_plain_reading_of_the_paper(
    checkpoint: str, pairs: list[Pair], count: int
) -> None:
    """200 documents fill more than one pass."""
    documents = [pair.document for pair in pairs[:count]]
    ours = await _score(checkpoint, pairs[0].query, documents, dtype="float32")
    reference = references.jina_reranker_v3(checkpoint, pairs[0].query, documents)
    assert count == 1 or reference.std() > 0.01
    np.testing.assert_allclose(ours, reference, atol=1e-5)


async def test_a_document_over_the_context_starts_a_new_pass(
    checkpoints: SharedCheckpoints, pairs: list[Pair], tmp_path: Path
) -> None:
    """And a long one is cut."""
    folder = checkpoints.copy(language_models.jina_reranker_v3, tmp_path / "short")
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"model_max_length": 3 * 2048}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    long = " ".join(pair.document for pair in pairs[:60])
    documents = [long, pairs[1].document, long, long, pairs[2].document]
    ours = await _score(str(folder), "why", documents, dtype="float32")
    reference = references.jina_reranker_v3(str(folder), "why", documents)
    np.testing.assert_allclose(ours, reference, atol=1e-5)


async def test_markers_in_a_text_are_not_taken_for_markers(checkpoint: str) -> None:
    plain = await _score(checkpoint, "what is it", ["one text", "another"], dtype="float32")
    marked = await _score(
        checkpoint, "what <|rerank_token|>is it", ["one <|embed_token|>text", "another"], dtype="float32"
    )
    np.testing.assert_allclose(marked, plain, atol=1e-6)


async def test_scores_do_not_depend_on_the_budget(checkpoint: str, pairs: list[Pair]) -> None:
    documents = [pair.document for pair in pairs[:10]]
    whole = await _score(checkpoint, "why", documents, dtype="float32", max_batch_tokens=16_384)
    cut = await _score(checkpoint, "why", documents, dtype="float32", max_batch_tokens=200)
    np.testing.assert_allclose(cut, whole, atol=1e-5)


@needs_native_bfloat16
async def test_bfloat16_ranks_as_float32_does(checkpoint: str, pairs: list[Pair]) -> None:
    documents = [pair.document for pair in pairs[:100]]
    exact = await _score(checkpoint, "how is a file opened", documents, dtype="float32")
    rounded = await _score(checkpoint, "how is a file opened", documents, dtype="bfloat16")
    assert spearmanr(exact, rounded).statistic >= 0.995


async def test_an_instruction_changes_the_scores(checkpoint: str) -> None:
    async with Engine(EngineConfig(model=checkpoint, dtype="float32")) as engine:
        plain = await engine.score("a", ["b", "c"])
        instructed = await engine.score("a", ["b", "c"], instruction="prefer the letter c")
        alone = await engine.score("a", ["b"])
        by_pair = await engine.score(["a", "d"], ["b", "c"])
        with pytest.raises(InvalidRequestError, match="cannot embed"):
            await engine.embed(["a"])
    assert np.abs(np.array(plain.scores) - np.array(instructed.scores)).max() > 1e-4
    assert by_pair.scores[0] == pytest.approx(alone.scores[0], abs=1e-6)


async def test_documents_are_spread_over_passes_of_short_contexts(checkpoint: str) -> None:
    """Prompts around short documents can be more than what the packing rule counts."""
    documents = [f"document {i}" for i in range(120)]
    results = []
    for most in (None, 2600):
        config = EngineConfig(model=checkpoint, dtype="float32", max_model_len=most)
        async with Engine(config) as engine:
            results.append(await engine.score("why", documents))
    whole, spread = results
    assert spread.usage.prompt_tokens > whole.usage.prompt_tokens > 2600, "each pass has a prompt of its own"
    assert len(spread.scores) == 120
    assert np.isfinite(spread.scores).all()
    # Who else is in a pass makes a difference, but not one document for another.
    assert np.corrcoef(spread.scores, whole.scores)[0, 1] > 0.5


def test_a_pass_is_closed_before_the_context_is_full() -> None:
    rules = ListwiseRules("q", "d", context=10_000, max_document_tokens=2048, block_documents=4)
    assert in_blocks([10] * 9, 20, rules) == [4, 4, 1]
    assert in_blocks([2000] * 6, 20, rules) == [4, 2]
    assert in_blocks([2048] * 6, 1000, rules) == [3, 3]
    assert in_blocks([], 20, rules) == []
