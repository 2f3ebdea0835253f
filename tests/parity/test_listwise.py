"""Listwise models score as their paper says, however many documents there are."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, InvalidRequestError
from tests.checkpoints import language_models
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.native_bfloat16 import needs_native_bfloat16
from tests.parity import references
from tests.parity.changes import settings

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def checkpoint(checkpoints: SharedCheckpoints) -> str:
    return checkpoints(language_models.jina_reranker_v3)


async def _scores(engines: Engines, path: str, documents: list[str], **options: Any) -> Any:
    engine = await engines(EngineConfig(model=path, **{"dtype": "float32"} | options))
    return np.array((await engine.score("how is a file opened", documents, truncation=CUT_LONG)).scores)


@pytest.mark.parametrize("count", [5, pytest.param(200, marks=pytest.mark.exhaustive)])
async def test_scores_equal_a_plain_reading_of_the_paper(
    checkpoint: str, engines: Engines, pairs: list[Pair], count: int
) -> None:
    """200 documents fill more than one pass. Few are also run in small steps."""
    documents = [pair.document for pair in pairs[:count]]
    reference = references.jina_reranker_v3(checkpoint, "how is a file opened", documents)
    assert reference.std() > 0.01
    for options in [{}, {"max_batch_tokens": 200}] if count == 5 else [{}]:
        ours = await _scores(engines, checkpoint, documents, **options)
        np.testing.assert_allclose(ours, reference, atol=1e-5)


async def test_a_document_over_the_context_starts_a_new_pass(
    changed: Callable[..., str], engines: Engines, pairs: list[Pair]
) -> None:
    """And a long one is cut."""
    path = changed(
        language_models.jina_reranker_v3, settings("tokenizer_config.json", model_max_length=3 * 2048)
    )
    long = " ".join(pair.document for pair in pairs[:60])
    documents = [long, pairs[1].document, long, pairs[2].document]
    ours = await _scores(engines, path, documents)
    reference = references.jina_reranker_v3(path, "how is a file opened", documents)
    np.testing.assert_allclose(ours, reference, atol=1e-5)


@needs_native_bfloat16
async def test_bfloat16_ranks_as_float32_does(checkpoint: str, engines: Engines, pairs: list[Pair]) -> None:
    documents = [pair.document for pair in pairs[:60]]
    exact, rounded = [
        await _scores(engines, checkpoint, documents, dtype=dtype) for dtype in ("float32", "bfloat16")
    ]
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
