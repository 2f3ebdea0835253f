"""Vision-language models as sentence-transformers saves them score texts, pictures and contents of both as it
does, one by one and in any company."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder, SentenceTransformer

from maxsimd.bench.datasets import Pair
from maxsimd.engine import (
    Content,
    Engine,
    EngineConfig,
    InvalidRequestError,
    ModelLoadError,
    Truncation,
)
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.media import PillowPicture
from maxsimd.engine.scoring.maxsim.reference import EMPTY_DOCUMENT_SCORE
from tests.checkpoints import vision_language, visual
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity import references
from tests.parity.selection import with_default
from tests.parity.test_visual import PAGES, QUERIES, noise

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Texts and pictures as sentence-transformers takes them together: in this order.
MIXED = [("a page about trains", PAGES[0]), ("", PAGES[2]), ("two\nlines ", PAGES[4])]

LATE = (
    vision_language.colqwen2_merged,
    vision_language.colqwen2_5,
    vision_language.colqwen3,
    vision_language.colqwen3_of_pictures,
    vision_language.colsmol,
)
BUILDS = (*LATE, vision_language.qwen3_vl_embedding)


# Qwen's positions in space, pictures in parts, and one vector for all.
DEFAULT = [vision_language.colqwen2_merged, vision_language.colsmol, vision_language.qwen3_vl_embedding]


@pytest.fixture(scope="module", params=with_default(BUILDS, DEFAULT))
def checkpoint(request: pytest.FixtureRequest, checkpoints: SharedCheckpoints) -> str:
    return checkpoints(request.param)


@pytest_asyncio.fixture(loop_scope="module")
async def engine(checkpoint: str, engines: Engines) -> Engine:
    return await engines(EngineConfig(model=checkpoint, dtype="float32"))


def reference(checkpoint: str) -> Any:
    is_late = "embedding" not in checkpoint
    return references.loaded(MultiVectorEncoder if is_late else SentenceTransformer, checkpoint)


def maxsim(query: NDArray[Any], document: NDArray[Any]) -> float:
    if not document.size:  # a text, where only pictures are scored
        return EMPTY_DOCUMENT_SCORE
    return float((query @ document.T).max(axis=1).sum())


def encoded(model: Any, item: Any, role: str) -> NDArray[Any]:
    """A vector a token, or one; by itself, because padding would be scored as well."""
    encode = model.encode_query if role == "query" else model.encode_document
    return np.atleast_2d(np.asarray(encode([item])[0]))


async def test_they_are_packed_and_cut(engine: Engine) -> None:
    prepared = engine.device_model.prepared
    assert (prepared.execution, prepared.runner.chunked) == ("packed", True)


async def test_scores_equal_sentence_transformers(engine: Engine, checkpoint: str) -> None:
    model = reference(checkpoint)
    documents = [*PAGES, "some text", "a longer text, with numbers: 1998.", "spaces behind  "]
    expected = [encoded(model, document, "document") for document in documents]
    for query in QUERIES:
        rows = encoded(model, query, "query")
        result = await engine.score(query, documents, cache="bypass")
        np.testing.assert_allclose(result.scores, [maxsim(rows, each) for each in expected], atol=1e-4)


async def test_contents_of_texts_and_pictures_equal_the_reference(engine: Engine, checkpoint: str) -> None:
    model = reference(checkpoint)
    contents, expected = [], []
    for text, page in MIXED:
        picture = PillowPicture(page)
        contents += [Content.of([picture, text]), Content.of([text, picture])]
        expected += [
            encoded(model, {"image": page, "text": text}, "document"),
            encoded(model, {"text": text, "image": page}, "document"),
        ]
    pictures = [noise(50, 40, 7), noise(90, 90, 8)]
    contents.append(Content.of([PillowPicture(pictures[0]), "and", PillowPicture(pictures[1])]))
    parts = [{"type": "image", "image": pictures[0]}, {"type": "text", "text": "and"}]
    parts.append({"type": "image", "image": pictures[1]})
    expected.append(encoded(model, [{"role": "user", "content": parts}], "document"))
    query = encoded(model, QUERIES[0], "query")
    result = await engine.score(QUERIES[0], contents, cache="bypass")
    np.testing.assert_allclose(result.scores, [maxsim(query, each) for each in expected], atol=1e-4)


async def test_a_picture_as_the_query_is_written_as_one(engine: Engine, checkpoint: str) -> None:
    model = reference(checkpoint)
    query = encoded(model, PAGES[0], "query")
    documents = [*PAGES[1:], "a text"]
    expected = [maxsim(query, encoded(model, document, "document")) for document in documents]
    result = await engine.score(PAGES[0], documents, cache="bypass")
    np.testing.assert_allclose(result.scores, expected, atol=1e-4)


async def test_usage_is_what_the_processor_makes(engine: Engine, checkpoint: str) -> None:
    transformer = reference(checkpoint)[0]
    prompt = reference(checkpoint).prompts.get("query") or None
    count = transformer.preprocess([QUERIES[0]], prompt=prompt, task="query")["input_ids"].numel()
    for page in PAGES:
        count += transformer.preprocess([page], task="document")["input_ids"].numel()
    result = await engine.score(QUERIES[0], PAGES, cache="bypass")
    assert result.usage.prompt_tokens == count


async def test_in_any_company_they_score_as_alone(engine: Engine, pairs: list[Pair]) -> None:
    mixed = [Content.of([PillowPicture(page), text or "b"]) for text, page in MIXED]
    documents: list[Any] = [*PAGES, *mixed, *(pair.document[:300] for pair in pairs[:12])]
    alone = [
        (await engine.score("What is it?", document, cache="bypass")).scores[0] for document in documents
    ]
    calls = [engine.score("What is it?", documents[i:], cache="bypass") for i in range(3)]
    for i, result in enumerate(await asyncio.gather(*calls)):
        np.testing.assert_allclose(result.scores, alone[i:], atol=1e-5)


@pytest.mark.parametrize(
    "checkpoint",
    with_default(BUILDS, [vision_language.colqwen2_merged]),
    indirect=True,
    scope="module",
)
async def test_cut_after_any_token_they_score_as_whole(
    engine: Engine, checkpoint: str, engines: Engines
) -> None:
    """A budget of n tokens cuts a page after each multiple of n."""
    documents: list[Any] = [PAGES[0], Content.of([PillowPicture(PAGES[1]), "and", PillowPicture(PAGES[2])])]
    whole = (await engine.score("What?", documents, cache="bypass")).scores
    for budget in (1, 7):
        cut = await engines(EngineConfig(model=checkpoint, dtype="float32", max_batch_tokens=budget))
        found = (await cut.score("What?", documents, cache="bypass")).scores
        np.testing.assert_allclose(found, whole, atol=1e-4)


async def test_cached_contents_score_as_new_ones(engine: Engine) -> None:
    await engine.clear_cache()
    first, second = (PillowPicture(page) for page in PAGES[:2])
    contents = [
        Content.of([first]),
        Content.of([first, "a"]),
        Content.of(["a", first]),
        Content.of([first, "b"]),
        Content.of([first, second]),
        Content.of([second, first]),
        Content.of([first, "a", second]),
    ]
    new = await engine.score("What?", contents)
    again = await engine.score("What?", contents)
    assert (new.usage.cached_documents, again.usage.cached_documents) == (0, len(contents))
    bypassed = await engine.score("What?", contents, cache="bypass")
    assert new.scores == again.scores == bypassed.scores


async def test_a_text_with_the_token_of_pictures_is_refused(engine: Engine, checkpoint: str) -> None:
    token = reference(checkpoint)[0].processor.image_token
    content = Content.of([PillowPicture(PAGES[0]), f"{token} is a token"])
    with pytest.raises(InvalidRequestError, match=re.escape(f"a text of documents[0] holds '{token}'")):
        await engine.score("a", [content])


async def test_texts_beside_a_picture_that_are_too_long_are_refused(engine: Engine) -> None:
    content = Content.of(["word " * 5000, PillowPicture(PAGES[0])])
    with pytest.raises(
        InvalidRequestError, match=r"documents\[0\] has more than \d+ tokens beside its pictures"
    ):
        await engine.score("a", [content])


async def test_a_prompt_stands_where_the_template_has_it(
    checkpoints: SharedCheckpoints, engines: Engines
) -> None:
    checkpoint = checkpoints(vision_language.qwen3_vl_embedding)
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    model = reference(checkpoint)
    instruction = "Find the page that was drawn last."
    query = np.asarray(model.encode_query(["a"], prompt=instruction)[0])
    expected = [float(query @ encoded(model, page, "document")[0]) for page in PAGES]
    result = await engine.score("a", PAGES, instruction=instruction, cache="bypass")
    np.testing.assert_allclose(result.scores, expected, atol=1e-5)
    without = await engine.score("a", PAGES, cache="bypass")
    assert np.abs(np.subtract(result.scores, without.scores)).max() > 1e-4


async def test_the_formats_of_colqwen2_differ_in_positions_alone(
    checkpoints: SharedCheckpoints, engines: Engines
) -> None:
    """Of the same weights and the same page: what stands before the picture is the same, what is in it and
    behind it is not."""
    rows = []
    for build in (visual.colqwen2, vision_language.colqwen2_merged):
        engine = await engines(EngineConfig(model=checkpoints(build), dtype="float32"))
        rows.append((await engine.embed_tokens([PAGES[4]])).embeddings[0])
    plain, in_space = rows
    transformer = references.loaded(MultiVectorEncoder, checkpoints(vision_language.colqwen2_merged))[0]
    ids = transformer.preprocess([PAGES[4]], task="document")["input_ids"][0].tolist()
    before = ids.index(transformer.processor.image_token_id)
    assert plain.shape == in_space.shape == (len(ids), 48)
    np.testing.assert_allclose(plain[:before], in_space[:before], atol=1e-5)
    assert np.abs(plain[before + 1 :] - in_space[before + 1 :]).max(axis=1).min() > 1e-3


def edited(checkpoints: SharedCheckpoints, build: Any, folder: Path, **settings: Any) -> str:
    """A copy of a checkpoint with other settings for sentence-transformers' first module."""
    checkpoint = checkpoints.copy(build, folder)
    path = checkpoint / "sentence_bert_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return str(checkpoint)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_pixels": 8 * 32 * 32},
        {"size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 9 * 32 * 32}},
        {"do_normalize": False},
    ],
    ids=str,
)
async def test_settings_with_which_pictures_are_read_are_taken(
    checkpoints: SharedCheckpoints, engines: Engines, tmp_path: Path, settings: Any
) -> None:
    build = vision_language.qwen3_vl_embedding
    checkpoint = edited(checkpoints, build, tmp_path / "embedding", processing_kwargs={"image": settings})
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    model = reference(checkpoint)
    result = await engine.embed(PAGES)
    expected = np.concatenate([encoded(model, page, "document") for page in PAGES])
    np.testing.assert_allclose(result.embeddings, expected, atol=1e-5)


async def test_a_length_that_the_checkpoint_sets_is_that_of_its_texts(
    checkpoints: SharedCheckpoints, engines: Engines, tmp_path: Path, pairs: list[Pair]
) -> None:
    build, settings = vision_language.qwen3_vl_embedding, {"text": {"max_length": 90}}
    checkpoint = edited(checkpoints, build, tmp_path / "embedding", processing_kwargs=settings)
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    model = reference(checkpoint)
    texts = [pair.document for pair in pairs[:5]] + ["short"]
    result = await engine.embed(texts, input_type="document")
    expected = np.concatenate([encoded(model, text, "document") for text in texts])
    np.testing.assert_allclose(result.embeddings, expected, atol=1e-5)


async def test_what_is_cut_is_the_text_and_not_the_template(
    checkpoints: SharedCheckpoints, engines: Engines
) -> None:
    checkpoint = checkpoints(vision_language.qwen3_vl_embedding)
    engine = await engines(EngineConfig(model=checkpoint, dtype="float32"))
    texts = ["abc " * 90, "a completely different text " * 30]
    shortest = (await engine.embed(["a"])).usage.prompt_tokens
    for side in ("left", "right"):
        cut = Truncation(max_tokens=shortest + 8, side=side)  # type: ignore[arg-type]
        result = await engine.embed(texts, truncation=cut)
        assert result.usage.prompt_tokens == 2 * (shortest + 8)
        assert result.truncated == 2
        first, second = result.embeddings
        assert float(first @ second) < 0.999
    with pytest.raises(InvalidRequestError):
        await engine.embed(texts, truncation=Truncation(max_tokens=12))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image": {"patch_size": 8}}, "the setting patch_size for pictures, which is not known here"),
        (
            {"text": {"max_length": 90}, "chat_template": {"restore_suffix": False}},
            "texts that are cut without what stands behind them are not supported",
        ),
    ],
    ids=str,
)
async def test_settings_that_are_not_known_are_refused(
    checkpoints: SharedCheckpoints, tmp_path: Path, settings: Any, message: str
) -> None:
    build = vision_language.qwen3_vl_embedding
    checkpoint = edited(checkpoints, build, tmp_path / "embedding", processing_kwargs=settings)
    with pytest.raises(ModelLoadError, match=message):
        load_model(EngineConfig(model=checkpoint, dtype="float32"), torch.device("cpu"))


async def test_a_template_that_moves_pictures_is_refused(
    checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    """Which of two pictures is the query's cannot be told then."""
    folder = checkpoints.copy(vision_language.qwen3_vl_reranker, tmp_path / "reranker")
    (template,) = (folder / "additional_chat_templates").glob("*.jinja")
    written = template.read_text(encoding="utf-8")
    moved = written.replace("<Document>:{{ parts(message) }}", "<Document>:")
    moved = moved.replace("<Query>:", "{% set d = messages[-1] %}{{ parts(d) }}<Query>:")
    template.write_text(moved, encoding="utf-8")
    with pytest.raises(ModelLoadError, match="the chat template"):
        load_model(EngineConfig(model=str(folder), dtype="float32"), torch.device("cpu"))


async def test_an_answer_has_the_modules_that_the_projection_needs(
    checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    """colpali-engine's projection must be among the modules, and the same."""
    folder = checkpoints.copy(vision_language.colqwen2_merged, tmp_path / "other")
    tensors = load_file(folder / "1_Dense" / "model.safetensors")
    save_file(
        {name: tensor + 0.5 for name, tensor in tensors.items()}, folder / "1_Dense" / "model.safetensors"
    )
    with pytest.raises(ModelLoadError, match="has modules with another projection than its custom_text_proj"):
        load_model(EngineConfig(model=str(folder), dtype="float32"), torch.device("cpu"))
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([each for each in modules if each["path"] != "1_Dense"]))
    with pytest.raises(ModelLoadError, match="has no module for its projection custom_text_proj"):
        load_model(EngineConfig(model=str(folder), dtype="float32"), torch.device("cpu"))
