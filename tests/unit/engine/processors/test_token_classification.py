"""Entities are those of transformers' TokenClassificationPipeline, from text to characters."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

from maxsimd.engine import EngineConfig, InvalidRequestError, RequestTooLargeError, SyncEngine
from maxsimd.engine.requests import TokenEntity
from tests.checkpoints import token_classifiers
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines

on_one_loop = pytest.mark.asyncio(loop_scope="module")
LONG = "Sarah Parker went from London to New York, and then to a file. " * 45
TEXTS = [
    "Sarah Jessica Parker lives in Z\u00fcrich, not in New York City.",
    "  repeated   spaces\tand\nlines  ",
    "\U0001f469\u200d\U0001f4bb emoji \u2705\ufe0f! \u6771\u4eac and nai\u0308ve caf\u00e9",
    "Donaudampfschifffahrtsgesellschaft U.K. j.d. vance 2,100,000",
    "[SEP] and </s> within, [MASK]ed",
]
# Labels to leave out for each strategy.
STRATEGIES = {"none": ["B-PER"], "simple": ["O"], "first": [], "average": ["PER"], "max": ["O", "MISC"]}
BUILDS = {
    "BERT": token_classifiers.labeled,
    "RoBERTa": token_classifiers.roberta,
    **{
        family: partial(token_classifiers.labeled, like=like)
        for family, like in (
            *(("XLM-R", "xlm_roberta"), ("DeBERTa", "deberta_v2"), ("ModernBERT", "modernbert")),
            ("Qwen2, in chunks", "qwen2"),
        )
    },
}


def _config(path: str, step: int = 600) -> EngineConfig:
    return EngineConfig(model=path, dtype="float32", threads=1, device="cpu", max_batch_tokens=step)


def _pipeline(path: str) -> Any:
    model = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32).eval()
    return pipeline("token-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(path))


def _same(found: list[TokenEntity], expected: list[dict[str, Any]]) -> None:
    label = "entity" if expected and "entity" in expected[0] else "entity_group"
    assert [(one.label, one.word, one.start, one.end, one.index) for one in found] == [
        (one[label], one["word"], one["start"], one["end"], one.get("index")) for one in expected
    ]
    scores = [float(one["score"]) for one in expected]
    np.testing.assert_allclose([one.score for one in found], scores, atol=1e-4)


@on_one_loop
# The pipeline says so of tokenizers that mark no subwords.
@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("family", BUILDS)
async def test_entities_are_those_of_the_pipeline(
    family: str, checkpoints: SharedCheckpoints, engines: Engines
) -> None:
    path = checkpoints(BUILDS[family])
    # Causal models read texts that are longer than a step in chunks.
    engine, reference = await engines(_config(path, 200 if "chunks" in family else 600)), _pipeline(path)
    assert engine.facts.score_type.value == "token-classifier"
    assert engine.facts.execution == "packed"
    for strategy, ignored in STRATEGIES.items():
        options: dict[str, Any] = {"aggregation_strategy": strategy, "ignore_labels": ignored}
        result = await engine.token_classify(TEXTS, **options)
        for found, expected in zip(result.entities, reference(TEXTS, **options), strict=True):
            _same(found, expected)
        labels = {entity.label for found in result.entities for entity in found}
        assert len(labels) >= 2, sorted(labels)
    # RoBERTa's library counts the space before the first token of a window.
    for options in ({}, {"stride": 60})[: 1 if family == "RoBERTa" else 2]:
        options |= {"aggregation_strategy": "first"}
        result = await engine.token_classify(["a file", LONG], **options)
        for found, expected in zip(result.entities, reference(["a file", LONG], **options), strict=True):
            _same(found, expected)
        assert result.truncated == ("stride" not in options)


@on_one_loop
async def test_logits_are_those_of_all_tokens(checkpoints: SharedCheckpoints, engines: Engines) -> None:
    path = checkpoints(BUILDS["BERT"])
    engine, reference = await engines(_config(path)), _pipeline(path)
    result = await engine.token_classify(["", *TEXTS[:3]], return_logits=True)
    assert result.entities == []
    assert result.logits is not None
    for text, found in zip(["", *TEXTS[:3]], result.logits, strict=True):
        encoded = reference.tokenizer(text, return_offsets_mapping=True)
        ids = torch.tensor([encoded["input_ids"]])
        with torch.inference_mode():
            expected = reference.model(input_ids=ids).logits[0].numpy()
        np.testing.assert_allclose(found.logits, expected, atol=1e-3)
        assert found.ids.tolist() == encoded["input_ids"]
        assert found.spans[1:-1].tolist() == [list(span) for span in encoded["offset_mapping"][1:-1]]
        assert found.spans[[0, -1]].tolist() == [[-1, -1]] * 2


@on_one_loop
async def test_what_a_token_classifier_refuses(checkpoints: SharedCheckpoints, engines: Engines) -> None:
    engine = await engines(_config(checkpoints(BUILDS["BERT"])))
    for call, says in (
        (engine.score("a", ["b"]), "labels tokens and scores no documents"),
        (engine.rerank("a", ["b"]), "labels tokens and scores no documents"),
        (engine.encode_query("a"), "labels tokens and scores no documents"),
        (engine.embed("a"), "cannot embed; it can token_classify"),
        (engine.classify("a"), "cannot classify; it can token_classify"),
        (engine.token_classify("a", stride=4), "set aggregation_strategy to simple"),
        (engine.token_classify("a", aggregation_strategy="simple", stride=256), "share from 0 to 255"),
        (engine.token_classify("a", aggregation_strategy="best"), "'best' is not known; use none"),  # type: ignore[arg-type]
        (engine.token_classify("a", ignore_labels="O"), "ignore_labels must be a list"),
        (engine.token_classify("a", aggregation_strategy="max", return_logits=True), "joins them"),
        (engine.token_classify([LONG], truncation="error"), "input[0] has"),
        (engine.token_classify(["a", "\ud83d"]), "input[1] has half of a character"),
    ):
        with pytest.raises(InvalidRequestError) as raised:
            await call
        assert says in str(raised.value)
    with pytest.raises(RequestTooLargeError, match="have 4 tokens, each with labels, and an answer has room"):
        await engine.token_classify(["", ""], max_tokens=3)


def test_the_blocking_engine_gives_the_same(checkpoints: SharedCheckpoints) -> None:
    path = checkpoints(BUILDS["BERT"])
    with SyncEngine(_config(path)) as engine:
        (found,) = engine.token_classify(TEXTS[0], aggregation_strategy="simple").entities
    _same(found, _pipeline(path)(TEXTS[0], aggregation_strategy="simple"))
