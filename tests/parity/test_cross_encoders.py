"""Cross-encoders as sentence-transformers or their card has them, and listwise models as their paper has."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from transformers import AutoModelForCausalLM

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, InvalidRequestError, Truncation
from tests.checkpoints import language_models, t5
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.exhaustive import exhaustive
from tests.native_bfloat16 import needs_native_bfloat16
from tests.parity import references
from tests.parity.changes import settings
from tests.parity.conftest import Changed

pytestmark = pytest.mark.asyncio(loop_scope="module")


def _texts(pairs: list[Pair]) -> tuple[list[str], list[str]]:
    return [pair.query for pair in pairs], [pair.document for pair in pairs]


async def test_without_activation_scores_are_logits(
    bert_cross_encoder: str, checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair]
) -> None:
    queries, documents = _texts(pairs[:4])
    for path, score in (
        (bert_cross_encoder, references.sigmoid),
        (checkpoints(language_models.qwen3_reranker), references.sigmoid),
        (checkpoints(t5.monot5), lambda odds: -np.log1p(np.exp(-odds))),
    ):
        engine = await engines(EngineConfig(model=path, dtype="float32"))
        asked: dict[str, Any] = {"queries": queries, "documents": documents, "truncation": CUT_LONG}
        odds = np.array((await engine.score(**asked, use_activation=False)).scores)
        np.testing.assert_allclose((await engine.score(**asked)).scores, score(odds), atol=1e-5)
        normalized = await engine.score(**asked, normalize=True)
        np.testing.assert_allclose(normalized.scores, references.sigmoid(odds), atol=1e-5)
    assert np.ptp(odds) > 0.01


@pytest.mark.parametrize("truncation", [*exhaustive("longest_first"), "only_second"])
async def test_pairs_are_cut_as_the_checkpoint_says(
    bert_cross_encoder: str, tmp_path: Path, pairs: list[Pair], truncation: str
) -> None:
    said = {"text": {"truncation": truncation, "max_length": 60}}
    task = "sequence-classification"
    transformer = Transformer(bert_cross_encoder, transformer_task=task, processing_kwargs=said)
    CrossEncoder(modules=[transformer], device="cpu").save_pretrained(str(tmp_path), create_model_card=False)
    queries, documents = _texts(pairs[:20])
    queries = [" ".join((f"{query} " * (1 + i % 4)).split()[:12]) for i, query in enumerate(queries)]
    reference = references.cross_encoder(str(tmp_path), queries, documents)
    async with Engine(EngineConfig(model=str(tmp_path), dtype="float32")) as engine:
        result = await engine.score(queries, documents, truncation=Truncation(max_tokens=60))
    np.testing.assert_allclose(result.scores, reference, atol=1e-5)


async def test_a_template_may_be_a_file(qwen3_reranker: str, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text("Query: {{ query }}\nText: {{ document }}\nAnswer:")
    file = str(tmp_path / "template.jinja")
    async with Engine(EngineConfig(model=qwen3_reranker, dtype="float32", score_template=file)) as engine:
        ours = (await engine.score("why", ["because", "for no reason"])).scores
    template = "Query: {query}\nText: {document}\nAnswer:"
    expected = references.qwen3_template(qwen3_reranker, ["why"] * 2, ["because", "for no reason"], template)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


async def test_ends_are_kept(checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair]) -> None:
    path = checkpoints(language_models.zerank_2)
    documents = [" ".join(pair.document for pair in pairs[i : i + 6]) for i in range(8)]
    model = CrossEncoder(path, device="cpu", max_length=200)
    reference = model.predict([("what is it", document) for document in documents], show_progress_bar=False)
    engine = await engines(EngineConfig(model=path, dtype="float32"))
    ours = (await engine.score("what is it", documents, truncation=Truncation(max_tokens=200))).scores
    np.testing.assert_allclose(ours, reference, atol=1e-4)


async def test_an_untied_output_layer_in_bfloat16(qwen3_reranker: str, tmp_path: Path) -> None:
    folder = language_models.qwen3_reranker(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    async with Engine(EngineConfig(model=folder)) as engine:
        assert engine.device_model.execution == "packed"
        ours = (await engine.score("q", ["one", "two"])).scores
    asked = ["q"] * 2, ["one", "two"]
    exact, tied = (references.qwen3_reranker(path, *asked) for path in (folder, qwen3_reranker))
    assert np.abs(exact - tied).max() > 0.1, "the output layer must matter, or this test shows nothing"
    np.testing.assert_allclose(ours, exact, atol=3e-2)


async def test_the_encoder_of_monot5_alone(checkpoints: SharedCheckpoints, engines: Engines) -> None:
    config = EngineConfig(model=checkpoints(t5.monot5), dtype="float32", score_type="bi-encoder")
    ours = (await (await engines(config)).embed(["some text"])).embeddings
    theirs = references.loaded(references.SentenceTransformer, config.model or "").encode(["some text"])
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4)


async def _listwise(engines: Engines, path: str, documents: list[str], **options: Any) -> Any:
    engine = await engines(EngineConfig(model=path, **{"dtype": "float32"} | options))
    return np.array((await engine.score("how is a file opened", documents, truncation=CUT_LONG)).scores)


@pytest.mark.parametrize("count", [5, *exhaustive(200)])
async def test_scores_as_the_paper(listwise: str, engines: Engines, pairs: list[Pair], count: int) -> None:
    documents = [pair.document for pair in pairs[:count]]
    reference = references.jina_reranker_v3(listwise, "how is a file opened", documents)
    assert reference.std() > 0.01
    for options in [{}, {"max_batch_tokens": 200}] if count == 5 else [{}]:
        ours = await _listwise(engines, listwise, documents, **options)
        np.testing.assert_allclose(ours, reference, atol=1e-5)


async def test_long_lists_take_another_pass(changed: Changed, engines: Engines, pairs: list[Pair]) -> None:
    edit = settings("tokenizer_config.json", model_max_length=3 * 2048)
    path = changed(language_models.jina_reranker_v3, edit)
    long = " ".join(pair.document for pair in pairs[:60])
    documents = [long, pairs[1].document, long, pairs[2].document]
    ours = await _listwise(engines, path, documents)
    reference = references.jina_reranker_v3(path, "how is a file opened", documents)
    np.testing.assert_allclose(ours, reference, atol=1e-5)


@needs_native_bfloat16
async def test_bfloat16_ranks_as_float32_does(listwise: str, engines: Engines, pairs: list[Pair]) -> None:
    documents = [pair.document for pair in pairs[:60]]
    exact = await _listwise(engines, listwise, documents, dtype="float32")
    rounded = await _listwise(engines, listwise, documents, dtype="bfloat16")
    assert spearmanr(exact, rounded).statistic >= 0.995


async def test_an_instruction_changes_the_scores(listwise: str) -> None:
    async with Engine(EngineConfig(model=listwise, dtype="float32")) as engine:
        plain = await engine.score("a", ["b", "c"])
        instructed = await engine.score("a", ["b", "c"], instruction="prefer the letter c")
        alone = await engine.score("a", ["b"])
        by_pair = await engine.score(["a", "d"], ["b", "c"])
        with pytest.raises(InvalidRequestError, match="cannot embed"):
            await engine.embed(["a"])
    assert np.abs(np.array(plain.scores) - np.array(instructed.scores)).max() > 1e-4
    assert by_pair.scores[0] == pytest.approx(alone.scores[0], abs=1e-6)
