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
from tests.unit.test_packed import LeakyBackend

CHECKPOINTS = ["bert_cross_encoder", "xlm_roberta_cross_encoder"]


@pytest.fixture(params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


async def _score(config: EngineConfig, pairs: list[Pair], **options: bool) -> np.ndarray:
    async with Engine(config) as engine:
        result = await engine.score(
            [pair.query for pair in pairs], [pair.document for pair in pairs], truncation=CUT_LONG, **options
        )
    return np.array(result.scores)


def _reference(checkpoint: str, pairs: list[Pair], **options: object) -> np.ndarray:
    model = CrossEncoder(checkpoint, device="cpu")
    texts = [(pair.query, pair.document) for pair in pairs]
    return np.asarray(model.predict(texts, show_progress_bar=False, **options))


async def test_scores_equal_predict_in_float32(checkpoint: str, pairs: list[Pair]) -> None:
    scores = await _score(EngineConfig(model=checkpoint, dtype="float32"), pairs)
    reference = _reference(checkpoint, pairs)
    assert reference.std() > 0.01, "the checkpoint must tell pairs apart, or this test shows nothing"
    np.testing.assert_allclose(scores, reference, atol=1e-5)


async def test_logits_equal_predict_without_activation(checkpoint: str, pairs: list[Pair]) -> None:
    scores = await _score(EngineConfig(model=checkpoint, dtype="float32"), pairs[:50], use_activation=False)
    reference = _reference(checkpoint, pairs[:50], activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(scores, reference, atol=1e-5)


async def test_padded_execution_equals_packed(checkpoint: str, pairs: list[Pair]) -> None:
    packed = await _score(EngineConfig(model=checkpoint, dtype="float32"), pairs[:50])
    padded = await _score(EngineConfig(model=checkpoint, dtype="float32", packing="off"), pairs[:50])
    np.testing.assert_allclose(padded, packed, atol=1e-5)


async def test_bfloat16_ranks_as_float32_does(checkpoint: str, pairs: list[Pair]) -> None:
    exact = await _score(EngineConfig(model=checkpoint, dtype="float32"), pairs)
    rounded = await _score(EngineConfig(model=checkpoint, dtype="bfloat16"), pairs)
    assert spearmanr(exact, rounded).statistic >= 0.999


async def test_cross_encoders_are_packed(checkpoint: str) -> None:
    async with Engine(EngineConfig(model=checkpoint)) as engine:
        assert engine.on_device.prepared.not_packed is None


async def test_a_model_with_three_labels_classifies_but_does_not_score(three_label_classifier: str) -> None:
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


async def test_with_a_broken_attention_the_engine_runs_padded_and_right(
    checkpoint: str, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that leak into each other must be noticed at load."""
    monkeypatch.setattr(choice, "GroupedBackend", LeakyBackend)
    monkeypatch.setattr(choice, "CompiledBackend", LeakyBackend)
    async with Engine(EngineConfig(model=checkpoint, dtype="float32")) as engine:
        assert "differ" in (engine.on_device.prepared.not_packed or "")
        result = await engine.score(
            [pair.query for pair in pairs[:40]],
            [pair.document for pair in pairs[:40]],
            truncation=CUT_LONG,
        )
    np.testing.assert_allclose(result.scores, _reference(checkpoint, pairs[:40]), atol=1e-5)
