"""Language models that answer yes or no: prompts, instructions, templates, truncation, memory."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import CrossEncoder

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, InvalidRequestError, ModelLoadError, Truncation
from tests.checkpoints import language_models
from tests.checkpoints.shared import SharedCheckpoints
from tests.parity import references

VOCABULARY = 150_000


@pytest.fixture(scope="module")
def qwen3_reranker(checkpoints: SharedCheckpoints) -> str:
    return checkpoints(language_models.qwen3_reranker)


@pytest.fixture(scope="module")
def zerank(checkpoints: SharedCheckpoints) -> str:
    return checkpoints(language_models.zerank_2)


async def _score(
    checkpoint: str, query: str, documents: list[str], truncation: Truncation = CUT_LONG, **settings: object
) -> np.ndarray:
    config = EngineConfig(model=checkpoint, dtype="float32", **settings)  # type: ignore[arg-type]
    async with Engine(config) as engine:
        return np.array((await engine.score(query, documents, truncation=truncation)).scores)


async def test_logits_are_the_log_odds(qwen3_reranker: str) -> None:
    async with Engine(EngineConfig(model=qwen3_reranker, dtype="float32")) as engine:
        odds = (await engine.score("q", ["some document"], use_activation=False)).scores[0]
        probability = (await engine.score("q", ["some document"])).scores[0]
    assert probability == pytest.approx(1 / (1 + np.exp(-odds)), abs=1e-6)


@pytest.mark.parametrize("by", ["request", "flag"])
async def test_an_instruction_takes_the_place_of_the_cards(qwen3_reranker: str, by: str) -> None:
    instruction = "Find documents about snakes"
    flag = {"instruction": instruction} if by == "flag" else {}
    async with Engine(EngineConfig(model=qwen3_reranker, dtype="float32", **flag)) as engine:
        asked = instruction if by == "request" else None
        ours = await engine.score("python", ["a snake", "a language"], instruction=asked)
    reference = references.qwen3_reranker(
        qwen3_reranker, ["python"] * 2, ["a snake", "a language"], instruction=instruction
    )
    np.testing.assert_allclose(ours.scores, reference, atol=1e-5)


async def test_an_instruction_for_a_model_that_takes_none_is_an_error(bert_cross_encoder: str) -> None:
    async with Engine(EngineConfig(model=bert_cross_encoder)) as engine:
        with pytest.raises(InvalidRequestError, match="takes no instruction"):
            await engine.score("a", ["b"], instruction="c")
    with pytest.raises(ModelLoadError, match="takes no instruction"):
        async with Engine(EngineConfig(model=bert_cross_encoder, instruction="c")):
            pass


@pytest.mark.parametrize("form", ["text", "file"])
async def test_a_template_of_ones_own_takes_the_place_of_the_cards(
    qwen3_reranker: str, tmp_path: Path, form: str
) -> None:
    template = "Query: {{ query }}\nText: {{ document }}\nAnswer:"
    given = template
    if form == "file":
        (tmp_path / "template.jinja").write_text(template)
        given = str(tmp_path / "template.jinja")
    ours = await _score(qwen3_reranker, "why", ["because", "for no reason"], score_template=given)
    model = references.LanguageModel(qwen3_reranker)
    for score, document in zip(ours, ["because", "for no reason"], strict=True):
        logits = model.logits(model.ids(f"Query: why\nText: {document}\nAnswer:"))
        odds = float(logits[model.word("yes")] - logits[model.word("no")])
        assert score == pytest.approx(1 / (1 + np.exp(-odds)), abs=1e-5)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ query }} only", "one place for the document, not 0"),
        ("{{ document }} {{ document }} {{ query }}", "not 2"),
        ("{{ document }}", "no place for the query"),
        ("{% if %}{{ query }}", "cannot be rendered"),
        ("no-such-file", "neither Jinja nor a file"),
    ],
)
async def test_a_template_that_makes_no_sense_is_refused(
    qwen3_reranker: str, template: str, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        async with Engine(EngineConfig(model=qwen3_reranker, score_template=template)):
            pass


async def test_truncation_keeps_the_end_of_the_template(zerank: str, pairs: list[Pair]) -> None:
    """As sentence-transformers, which writes the template's end over the last tokens of a cut prompt."""
    documents = [" ".join(pair.document for pair in pairs[i : i + 6]) for i in range(8)]
    model = CrossEncoder(zerank, device="cpu", max_length=200)
    reference = model.predict([("what is it", document) for document in documents], show_progress_bar=False)
    ours = await _score(zerank, "what is it", documents, truncation=Truncation(max_tokens=200))
    np.testing.assert_allclose(ours, reference, atol=1e-4)


async def test_a_query_that_leaves_no_room_for_documents_is_an_error(qwen3_reranker: str) -> None:
    with pytest.raises(InvalidRequestError, match="leave no room"):
        await _score(qwen3_reranker, "word " * 300, ["text"], truncation=Truncation(max_tokens=200))


async def test_limits_count_the_tokens_of_texts_alone(qwen3_reranker: str) -> None:
    truncation = Truncation(max_tokens=-1, max_query_tokens=2, max_document_tokens=3)
    cut = await _score(qwen3_reranker, "yes no yes no", ["yes" * 9], truncation=truncation)
    tokens = references.LanguageModel(qwen3_reranker)
    query = tokens.tokenizer.decode(tokens.ids("yes no yes no")[:2])
    assert tokens.ids("yes" * 9)[:3] == tokens.ids("yes" * 3)
    short = await _score(qwen3_reranker, query, ["yes" * 3])
    np.testing.assert_allclose(cut, short, atol=1e-5)


async def test_a_language_model_of_an_unknown_family_needs_a_template(
    checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    folder = checkpoints.copy(language_models.qwen3_reranker, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Exaone4ForCausalLM"]}))
    with pytest.raises(ModelLoadError, match=r"Qwen/Qwen3-Reranker-0\.6B"):
        async with Engine(EngineConfig(model=str(folder))):
            pass


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
    checkpoint = language_models.qwen3_reranker(folder / "large-vocabulary", VOCABULARY)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, checkpoint], capture_output=True, text=True, check=True, timeout=300
    )
    grown_kilobytes = int(done.stdout.split()[-1])
    assert grown_kilobytes < 400_000
