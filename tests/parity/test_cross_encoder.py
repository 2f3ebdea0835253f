"""Cross-encoders score as sentence-transformers' CrossEncoder.predict does."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, InvalidRequestError, Truncation
from maxsimd.engine.execution.attention import select as choice
from tests.engines import Engines
from tests.parity.references import loaded
from tests.unit.engine.execution.test_packed import LeakyBackend

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHECKPOINTS = ["bert_cross_encoder", "xlm_roberta_cross_encoder"]


@pytest.fixture(params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def _reference(checkpoint: str, pairs: list[Pair], **options: object) -> np.ndarray:
    model = loaded(CrossEncoder, checkpoint)
    texts = [(pair.query, pair.document) for pair in pairs]
    return np.asarray(model.predict(texts, show_progress_bar=False, **options))


async def test_scores_equal_predict_in_float32(checkpoint: str, engines: Engines, pairs: list[Pair]) -> None:
    pairs = pairs[:100]
    scores = await engines.scores(EngineConfig(model=checkpoint, dtype="float32"), pairs)
    reference = _reference(checkpoint, pairs)
    assert reference.std() > 0.01, "the checkpoint must tell pairs apart, or this test shows nothing"
    np.testing.assert_allclose(scores, reference, atol=1e-5)


async def test_logits_equal_predict_without_activation(
    checkpoint: str, engines: Engines, pairs: list[Pair]
) -> None:
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    queries, documents = [pair.query for pair in pairs[:20]], [pair.document for pair in pairs[:20]]
    result = await engine.score(queries, documents, truncation=CUT_LONG, use_activation=False)
    reference = _reference(checkpoint, pairs[:20], activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(result.scores, reference, atol=1e-5)


async def test_padded_execution_equals_packed(checkpoint: str, engines: Engines, pairs: list[Pair]) -> None:
    pairs = pairs[:100]
    packed = await engines.scores(EngineConfig(model=checkpoint, dtype="float32"), pairs[:20])
    padded = await engines.scores(EngineConfig(model=checkpoint, dtype="float32", packing="off"), pairs[:20])
    np.testing.assert_allclose(padded, packed, atol=1e-5)


async def test_bfloat16_ranks_as_float32_does(checkpoint: str, engines: Engines, pairs: list[Pair]) -> None:
    pairs = pairs[:100]
    exact = await engines.scores(EngineConfig(model=checkpoint, dtype="float32"), pairs)
    rounded = await engines.scores(EngineConfig(model=checkpoint, dtype="bfloat16"), pairs)
    assert spearmanr(exact, rounded).statistic >= 0.999


async def test_a_model_of_three_labels_classifies_and_scores_not(three_label_classifier: str) -> None:
    async with Engine(EngineConfig(model=three_label_classifier, dtype="float32")) as engine:
        with pytest.raises(InvalidRequestError, match="3 labels"):
            await engine.score("a", ["b"])
        result = await engine.classify(["some text", "another one"], use_activation=False)
    model = CrossEncoder(three_label_classifier, device="cpu")
    features = model.tokenizer(["some text", "another one"], padding=True, return_tensors="pt")
    with torch.inference_mode():
        reference = model.model(**features).logits
    np.testing.assert_allclose(result.scores, reference.numpy(), atol=1e-5)


@pytest.mark.parametrize("truncation", ["longest_first", "only_second"])
async def test_pairs_are_cut_as_the_checkpoint_says(
    bert_cross_encoder: str, tmp_path: Path, pairs: list[Pair], truncation: str
) -> None:
    transformer = Transformer(
        bert_cross_encoder,
        transformer_task="sequence-classification",
        processing_kwargs={"text": {"truncation": truncation, "max_length": 60}},
    )
    CrossEncoder(modules=[transformer], device="cpu").save_pretrained(str(tmp_path))
    texts = [(f"{pair.query} " * (1 + i % 4), pair.document) for i, pair in enumerate(pairs[:40])]
    texts = [(" ".join(query.split()[:12]), document) for query, document in texts]
    reference = CrossEncoder(str(tmp_path), device="cpu").predict(texts, show_progress_bar=False)
    async with Engine(EngineConfig(model=str(tmp_path), dtype="float32")) as engine:
        result = await engine.score(
            [query for query, _ in texts],
            [document for _, document in texts],
            truncation=Truncation(max_tokens=60),
        )
    np.testing.assert_allclose(result.scores, reference, atol=1e-5)


async def test_with_broken_attention_an_engine_runs_padded(
    checkpoint: str, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that leak into each other must be noticed at load."""
    monkeypatch.setattr(choice, "GroupedBackend", LeakyBackend)
    monkeypatch.setattr(choice, "CompiledBackend", LeakyBackend)
    async with Engine(EngineConfig(model=checkpoint, dtype="float32")) as engine:
        assert "differ" in (engine.device_model.prepared.not_packed or "")
        result = await engine.score(
            [pair.query for pair in pairs[:40]],
            [pair.document for pair in pairs[:40]],
            truncation=CUT_LONG,
        )
    np.testing.assert_allclose(result.scores, _reference(checkpoint, pairs[:40]), atol=1e-5)
