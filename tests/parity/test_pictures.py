"""Models that read pictures score them and texts as their libraries do, in any company, cut or cached."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray
from sentence_transformers.multi_vector_encoder.interpretability import get_n_patches, maxsim_similarity_map
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

from maxsimd.bench.datasets import Pair
from maxsimd.engine import Content, Engine, EngineConfig, InvalidRequestError, Truncation, errors
from maxsimd.engine.checkpoint.visual import ImageInputs
from maxsimd.engine.media import Picture, PictureUrl, PillowPicture
from tests.checkpoints import two_towers, vision_language, visual
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity import pictures as reading
from tests.parity.changes import settings
from tests.parity.conftest import Changed, Start
from tests.parity.pictures import PAGES, QUERIES, Bare, Embedder, Encoder, Pairs, PictureModel, maxsim, noise
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["some text", "a longer text, with numbers: 1998.", "spaces behind  ", "two\nlines"]


def models(
    are: Callable[[PictureModel], bool] = lambda model: True, main: Collection[str] = ()
) -> pytest.MarkDecorator:
    """The argument `model`: those that are so. Only the `main` ones run by default, where any are named."""

    params = []
    for model in filter(are, reading.MODELS):
        name = model.build.__name__
        is_exhaustive = model.exhaustive or (main and name not in main)
        params.append(pytest.param(model, id=name, marks=pytest.mark.exhaustive if is_exhaustive else ()))
    return pytest.mark.parametrize("model", params, scope="module")


@pytest.fixture(scope="module")
def path(model: PictureModel, checkpoints: SharedCheckpoints) -> str:
    return checkpoints(model.build)


@pytest.fixture(scope="module")
def reference(model: PictureModel, path: str) -> Any:
    return model.reference(path)


@pytest_asyncio.fixture(loop_scope="module")
async def engine(path: str, engines: Engines) -> Engine:
    return await engines(EngineConfig(model=path, dtype="float32"))


async def scored(engine: Engine, query: Any, documents: Any, **options: Any) -> Any:
    activation = {"use_activation": False} if engine.model.score_type.value == "cross-encoder" else {}
    return await engine.score(query, documents, cache="bypass", **activation, **options)


@models()
async def test_scores_and_vectors_are_theirs(model: PictureModel, engine: Engine, reference: Any) -> None:
    prepared = engine.device_model
    assert prepared.execution == "packed"
    assert prepared.runner.chunked or not model.chunked
    queries, documents = [*QUERIES, PAGES[1]], [*PAGES, *TEXTS]
    if model.is_pair:
        expected = [[reference.score(query, document) for document in documents] for query in queries[3:]]
    else:
        made = [
            [reference.vectors(item, role) for item in items]
            for role, items in (("query", queries), ("document", documents))
        ]
        expected = [[reference.compared(query, document) for document in made[1]] for query in made[0]][3:]
        embed: Any = engine.embed_tokens if model.is_late else engine.embed
        for role, items, theirs in zip(("query", "document"), (QUERIES, PAGES), made, strict=True):
            found = (await embed(items, input_type=role)).embeddings
            for ours, vectors in zip(found, theirs[: len(items)], strict=True):
                np.testing.assert_allclose(np.atleast_2d(ours), vectors, atol=1e-4, rtol=1e-4)
    for query, scores in zip(queries[3:], expected, strict=True):
        result = await scored(engine, query, documents)
        np.testing.assert_allclose(result.scores, scores, atol=1e-4)
        assert np.ptp(scores) > 0.05
    if model.mixed or model.is_pair:
        lengths = [reference.tokens(QUERIES[2], document) for document in PAGES]
        result = await scored(engine, QUERIES[2], PAGES)
        assert result.usage.prompt_tokens == lengths[0][0] + sum(length for _, length in lengths)


@models(lambda model: model.mixed)
async def test_contents_score_as_the_librarys(model: PictureModel, engine: Engine, reference: Any) -> None:
    contents, expected = [], []
    for text, page in [("a page about trains", PAGES[0]), ("", PAGES[2]), ("two\nlines ", PAGES[4])]:
        picture = PillowPicture(page)
        if text or not model.is_pair:
            contents += [Content.of([picture, text]), Content.of([text, picture])]
            expected += [{"image": page, "text": text}, {"text": text, "image": page}]
    if not model.is_pair:
        pictures = [noise(50, 40, 7), noise(90, 90, 8)]
        contents.append(Content.of([PillowPicture(pictures[0]), "and", PillowPicture(pictures[1])]))
        parts = [{"type": "image", "image": picture} for picture in pictures]
        parts.insert(1, {"type": "text", "text": "and"})
        expected.append([{"role": "user", "content": parts}])  # type: ignore[arg-type]
    queries: list[tuple[Any, Any]] = [(QUERIES[0], QUERIES[0])]
    if model.is_pair:
        queries.append((contents[0], expected[0]))
    for query, given in queries:
        found = (await scored(engine, query, contents)).scores
        np.testing.assert_allclose(found, [reference.score(given, each) for each in expected], atol=1e-4)


@models(main=("qwen3_vl_reranker", "siglip"))
async def test_they_score_in_company_as_alone(model: PictureModel, engine: Engine, pairs: list[Pair]) -> None:
    mixed = [Content.of([PillowPicture(page), "b"]) for page in PAGES[:2]] if model.mixed else []
    documents: list[Any] = [*PAGES, *mixed, *(pair.document[:300] for pair in pairs[:3])]
    queries: list[Any] = [PAGES[3], "What is it?"]
    alone = [[(await scored(engine, query, each)).scores[0] for each in documents] for query in queries]
    calls = [scored(engine, queries[i % 2], documents[i // 2 :]) for i in range(6)]
    for i, result in enumerate(await asyncio.gather(*calls)):
        np.testing.assert_allclose(result.scores, alone[i % 2][i // 2 :], atol=1e-4)
    each_its_own = await scored(engine, queries * 2, documents[:4])
    np.testing.assert_allclose(each_its_own.scores, [alone[i % 2][i] for i in range(4)], atol=1e-4)


@models(lambda model: model.chunked, main=("colqwen2_merged", "qwen3_vl_reranker"))
@pytest.mark.parametrize("budget", [13, pytest.param(1, marks=pytest.mark.exhaustive)])
async def test_cut_between_steps_they_score_as_whole(
    budget: int, model: PictureModel, path: str, engine: Engine, engines: Engines
) -> None:
    documents: list[Any] = [PAGES[0], "a text"]
    if model.mixed:
        documents.append(Content.of([PillowPicture(PAGES[1]), "and", PillowPicture(PAGES[2])]))
    cut = await engines(EngineConfig(model=path, dtype="float32", max_batch_tokens=budget))
    for query in ("What?", PAGES[1]):
        whole = (await scored(engine, query, documents)).scores
        np.testing.assert_allclose((await scored(cut, query, documents)).scores, whole, atol=1e-4)


@models()
async def test_cached_contents_score_as_new_ones(model: PictureModel, engine: Engine) -> None:
    await engine.clear_cache()
    first, second = (PillowPicture(page) for page in PAGES[:2])
    contents: list[Any] = [*PAGES, "a text"]
    if model.mixed:
        parts = ([first, "a"], ["a", first], [first, "b"], [first, second], [second, first])
        contents += [Content.of(each) for each in parts]
    new, again = [await engine.score("What?", contents) for _ in range(2)]
    cached = 1 if model.is_pair else len(contents)
    assert (new.usage.cached_documents, again.usage.cached_documents) == (0, cached)
    assert new.usage.prompt_tokens == again.usage.prompt_tokens
    for each in (again, await engine.score("What?", contents, cache="bypass")):
        np.testing.assert_allclose(each.scores, new.scores, atol=1e-6)


async def test_a_prompt_stands_in_its_place(checkpoints: SharedCheckpoints, start: Start) -> None:
    instruction = "Find the page that was drawn last."
    path = checkpoints(vision_language.qwen3_vl_embedding)
    embedder, engine = Embedder(path), await start(path)
    query = embedder.vectors("a", "query", prompt=instruction)
    expected = [maxsim(query, embedder.vectors(page, "document")) for page in PAGES]
    result = await scored(engine, "a", PAGES, instruction=instruction)
    np.testing.assert_allclose(result.scores, expected, atol=1e-5)
    path = checkpoints(vision_language.qwen3_vl_reranker)
    reranker, engine = Pairs(path), await start(path)
    expected = [reranker.score("a", page, prompt=instruction) for page in PAGES]
    result = await scored(engine, "a", PAGES, instruction=instruction)
    np.testing.assert_allclose(result.scores, expected, atol=1e-4)
    assert np.abs(np.subtract(result.scores, (await scored(engine, "a", PAGES)).scores)).max() > 1e-4


async def test_a_picture_as_the_query_is_run_once(start: Start) -> None:
    engine = await start(vision_language.qwen3_vl_reranker)
    usage = (await scored(engine, PAGES[4], [*PAGES[:3], *TEXTS])).usage
    assert usage.cached_tokens > 0.6 * usage.prompt_tokens


async def test_jina_reranker_m0_is_as_its_card_says(checkpoints: SharedCheckpoints, start: Start) -> None:
    path, documents = checkpoints(vision_language.jina_reranker_m0), [*PAGES, *TEXTS]
    engine = await start(path)
    logits = np.array((await scored(engine, "a", documents)).scores)
    result = await engine.score("a", documents, cache="bypass")
    np.testing.assert_allclose(result.scores, 1 / (1 + np.exp(2.65 - logits)), atol=1e-5)
    same = "**Document**:\n{{ document }}\n**Query**:\n{{ query }}"
    other = await scored(await start(path, score_template=same), "a", documents)
    np.testing.assert_allclose(other.scores, logits, atol=1e-5)


@pytest.mark.parametrize(
    "image",
    [
        pytest.param({"max_pixels": 8 * 32 * 32}, marks=pytest.mark.exhaustive),
        {"size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 9 * 32 * 32}, "do_normalize": False},
    ],
)
async def test_settings_are_applied(changed: Changed, start: Start, pairs: list[Pair], image: Any) -> None:
    said = {"image": image, "text": {"max_length": 90}}
    edit = settings("sentence_bert_config.json", processing_kwargs=said)
    path = changed(vision_language.qwen3_vl_embedding, edit)
    items: list[Any] = [*PAGES, *(pair.document for pair in pairs[:5]), "short"]
    found = (await (await start(path)).embed(items, input_type="document")).embeddings
    embedder = Embedder(path)
    expected = np.concatenate([embedder.vectors(item, "document") for item in items])
    np.testing.assert_allclose(found, expected, atol=1e-5)


async def test_what_is_cut_is_the_text_and_not_the_template(start: Start) -> None:
    engine = await start(vision_language.qwen3_vl_embedding)
    texts = ["abc " * 90, "a completely different text " * 30]
    shortest = (await engine.embed(["a"])).usage.prompt_tokens
    for side in ("left", "right"):
        cut = Truncation(max_tokens=shortest + 8, side=side)  # type: ignore[arg-type]
        result = await engine.embed(texts, truncation=cut)
        assert (result.usage.prompt_tokens, result.truncated) == (2 * (shortest + 8), 2)
        first, second = result.embeddings
        assert float(first @ second) < 0.999
    with pytest.raises(InvalidRequestError):
        await engine.embed(texts, truncation=Truncation(max_tokens=12))


async def test_clip_reads_to_the_first_end_of_a_text(checkpoints: SharedCheckpoints, start: Start) -> None:
    path, texts = checkpoints(two_towers.clip), ["a photo<|endoftext|>of two cats", "<|endoftext|>"]
    found = (await (await start(path)).embed(texts)).embeddings
    expected = np.concatenate([reading.TwoTowers(path).vectors(text, "") for text in texts])
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


async def test_vectors_of_pages_are_merged_alike(checkpoints: SharedCheckpoints, start: Start) -> None:
    path, pooling = checkpoints(visual.colpali), HierarchicalTokenPooling(3, num_protected_tokens=0)
    engine, encoder = await start(path, doc_token_pooling=3), Bare(path)
    merged = [pooling.pool_one(torch.from_numpy(encoder.vectors(page, "document"))).numpy() for page in PAGES]
    expected = list(map(partial(maxsim, encoder.vectors(QUERIES[0], "query")), merged))
    for _ in range(2):  # the second time they are cached
        result = await engine.score(QUERIES[0], PAGES)
        np.testing.assert_allclose(result.scores, expected, atol=1e-4)
    assert result.usage.cached_documents == len(PAGES)
    with pytest.raises(InvalidRequestError, match="explain is not possible"):
        await engine.score(QUERIES[0], PAGES, explain=True)


def theirs(encoder: Encoder, page: Any) -> NDArray[Any]:
    """The map [query tokens, rows, columns] as sentence-transformers' interpretability makes it."""
    query = torch.as_tensor(encoder.vectors(QUERIES[2], "query"))
    document = torch.as_tensor(encoder.vectors(page, "document"))
    patches = get_n_patches(encoder.model, page.size)
    first = encoder.model[0]
    mask = first.preprocess([page], task="document")["input_ids"][0] == first.processor.image_token_id
    if len(document) == int(mask.sum()):  # the model scores pictures alone
        mask = torch.ones(len(document), dtype=torch.bool)
    made: NDArray[Any] = maxsim_similarity_map(query, document, patches, image_mask=mask).numpy()
    return made


# Those of a grid that is read row by row, which are all that sentence-transformers maps, and those of tiles.
TILED = (visual.colmodernvbert, vision_language.colsmol)


@models(lambda model: model.is_late and model.build not in (*TILED, vision_language.colqwen2_5))
async def test_maps_equal_sentence_transformers(engine: Engine, reference: Encoder) -> None:
    await engine.clear_cache()
    expected = [theirs(reference, page) for page in PAGES]
    for cached in (False, True):
        result = await engine.score(QUERIES[2], PAGES, explain="maps")
        for index, each in enumerate(expected):
            assert result.explanations[index].cached is cached
            (found,) = result.explanations[index].maps
            np.testing.assert_allclose(found, each, atol=1e-5)


@models(lambda model: model.is_late)
async def test_the_best_cell_is_the_patch_that_maxsim_took(engine: Engine) -> None:
    result = await engine.score(QUERIES[2], PAGES, explain="maps", cache="bypass")
    patches = 0
    for index, page in enumerate(PAGES):
        explanation = result.explanations[index]
        (found,) = explanation.maps
        assert np.isfinite(found).all()
        for match, similarities in zip(explanation.matches, found, strict=True):
            if match.patch is None:
                # A token beside the picture, or of a small copy of it, that is at least as good as any patch.
                assert match.similarity >= similarities.max() - 1e-5
                continue
            patches += 1
            similarity = pytest.approx(match.similarity, abs=1e-5)
            assert similarities[match.patch.row, match.patch.column] == similarity == similarities.max()
            left, top, right, bottom = match.patch.box
            assert 0 <= left < right <= page.width
            assert 0 <= top < bottom <= page.height
    assert patches


async def test_each_picture_of_a_document_has_a_map(start: Start) -> None:
    engine = await start(vision_language.colqwen2_merged)
    parts = [PillowPicture(PAGES[0]), "and", PillowPicture(PAGES[4])]
    result = await engine.score(QUERIES[2], [Content.of(parts), "a text"], explain="maps", cache="bypass")
    first, second = result.explanations[0].maps
    assert (first.shape[1:], second.shape[1:]) == ((3, 2), (4, 5))
    assert result.explanations[1].maps == ()
    shown = {match.patch.picture for match in result.explanations[0].matches if match.patch is not None}
    assert shown <= {0, 1}
    for match in result.explanations[0].matches:
        if match.patch is not None:
            found = (first, second)[match.patch.picture]
            query = result.explanations[0].matches.index(match)
            cell = found[query, match.patch.row, match.patch.column]
            assert cell == pytest.approx(match.similarity, abs=1e-5)


async def test_maps_must_be_asked_for_and_not_too_many(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await start(visual.colpali)
    assert (await engine.score("a", PAGES[:1], explain=True, cache="bypass")).explanations[0].maps == ()
    with pytest.raises(InvalidRequestError, match="explain 'map' is not known; use true, false or maps"):
        await engine.score("a", PAGES[:1], explain="map")  # type: ignore[arg-type]
    monkeypatch.setattr("maxsimd.engine.processors.dual_encoder.MOST_MAPPED", 100)
    told = r"explain would map \d+ similarities .* at most 100 are"
    with pytest.raises(errors.RequestTooLargeError, match=told):
        await engine.score("a", PAGES, explain="maps", cache="bypass")


# A picture that fails harms no other, and leaves nothing on the device.


def failing_on(tower: Any, digest: bytes) -> Any:
    """The tower, which fails whenever one picture is among those that it is to encode."""
    encode = type(tower).__call__

    def called(self: Any, images: Sequence[ImageInputs], device: torch.device) -> list[torch.Tensor]:
        if any(image.digest == digest for image in images):
            raise RuntimeError("this picture breaks it")
        made: list[torch.Tensor] = encode(self, images, device)
        return made

    return called


async def test_a_picture_that_breaks_fails_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await start(vision_language.colqwen2_merged)
    expected = (await engine.score("what?", PAGES, cache="bypass")).scores
    assert engine.model.vision is not None
    tower = engine.model.vision.tower
    broken = Picture(np.asarray(PAGES[2])).digest
    monkeypatch.setattr(type(tower), "__call__", failing_on(tower, broken))
    result = await engine.score("what?", PAGES, cache="bypass", on_error="report")
    assert set(result.errors) == {2}
    others = [0, 1, 3, 4]
    np.testing.assert_allclose([result.scores[i] for i in others], [expected[i] for i in others], atol=1e-5)
    with pytest.raises(errors.RequestFailedError):
        await engine.score("what?", PAGES, cache="bypass")
    monkeypatch.undo()
    assert (await engine.score("what?", PAGES, cache="bypass")).scores == pytest.approx(expected, abs=1e-5)
    await until(lambda: engine.stats().device.features == 0)


async def test_requests_that_are_cancelled_leave_no_features(start: Start) -> None:
    engine = await start(vision_language.colqwen2_merged, max_batch_tokens=64)
    for delay in (0.0, 0.003, 0.03):
        calls = [asyncio.create_task(engine.score("what?", PAGES * 2, cache="bypass")) for _ in range(3)]
        await asyncio.sleep(delay)
        for call in calls[:2]:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert len(calls[2].result().scores) == 2 * len(PAGES)
    await until(lambda: engine.stats().device.features == 0)
    await until(lambda: engine.stats().device.cut_sequences == 0)


async def test_a_page_that_fits_no_step_is_refused_with_both_numbers(start: Start) -> None:
    engine = await start(visual.colpali, max_batch_tokens=30)
    with pytest.raises(InvalidRequestError, match="has 31 tokens as a picture, and at most 30 can be run"):
        await engine.score("a", ["a text", PAGES[0]])
    assert len((await engine.score("a", ["a text"])).scores) == 1


async def test_content_that_the_model_does_not_read_is_refused(start: Start) -> None:
    picture = PillowPicture(PAGES[0])
    engine = await start(visual.colqwen2)
    for each in (engine, await start(two_towers.clip)):
        with pytest.raises(InvalidRequestError, match=r"documents\[1\] has 1 picture and 1 text"):
            await each.score("a", [PAGES[0], Content.of([picture, "a"])])
        # Else its processor would make gigabytes of it.
        line = Picture(np.zeros((1, 8_000, 3), dtype=np.uint8))
        with pytest.raises(InvalidRequestError, match=r"documents\[0\], of 8000 x 1 pixels, cannot be"):
            await each.score("a", [Content.of([line])])
    with pytest.raises(InvalidRequestError, match=r"queries\[0\] has 2 pictures and no texts"):
        await engine.score(Content.of([picture] * 2), ["a"])
    with pytest.raises(InvalidRequestError, match=r"documents\[0\] is at a URL"):
        await engine.score("a", [Content.of([PictureUrl("https://example.com/a.png")])])
    of_texts, joined = [(await engine.score("a", [each])).scores for each in (Content.of(["a", "b"]), "a\nb")]
    assert of_texts == joined


@models(lambda model: model.mixed, main=("colqwen2_merged", "colsmol", "qwen3_vl_reranker"))
async def test_wrong_contents_of_pictures_and_texts_are_refused(model: PictureModel, engine: Engine) -> None:
    token = "<image>" if model.build is vision_language.colsmol else "<|image_pad|>"
    picture = PillowPicture(PAGES[0])
    with pytest.raises(InvalidRequestError, match=r"a text of documents\[0\] holds"):
        await engine.score("a", [Content.of([picture, f"{token} is a token"])])
    long = Content.of(["word " * 5000, picture])
    for truncation in ("cut", "window", "error"):
        with pytest.raises(InvalidRequestError, match=r"documents\[0\] has more than \d+ tokens beside its"):
            await engine.score("a", [long], truncation=truncation)
    if model.build is vision_language.colsmol:  # whose pages are cut to tiles of any shape
        return
    thin = Content.of([PillowPicture(noise(1, 3000))])
    with pytest.raises(InvalidRequestError, match=r"^documents\[2\] has 1 x 3,000 pixels, but may be"):
        await engine.score("a", ["a text", PAGES[0], thin])
    result = await engine.score("a", ["a text", PAGES[0], thin], on_error="report")
    assert list(result.errors) == [2]
    assert "documents[2] has 1 x 3,000 pixels" in result.errors[2]
    with pytest.raises(InvalidRequestError, match=r"^queries\[0\] has 1 x 3,000 pixels"):
        await engine.score(thin, ["a text", PAGES[0]])
