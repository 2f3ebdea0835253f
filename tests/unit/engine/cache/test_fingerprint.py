"""What is cached belongs to what made it: where one ingredient alone differs, nothing cached is found."""

import dataclasses
import functools
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maxsimd.bench.datasets import Pair as Texts
from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from maxsimd.engine.cache import CachedEmbedding
from maxsimd.engine.cache.fingerprint import ingredients
from maxsimd.engine.checkpoint import LoadedModel, load_model
from maxsimd.engine.device.open_cache import open_cache
from tests.checkpoints.shared import SharedCheckpoints
from tests.unit.engine.cache.fingerprint_pairs import (
    BUILDERS,
    OF_NO_CONCERN,
    OF_QUERIES,
    PAIRS,
    SEEN_IN_THE_MODEL,
    Pair,
)

# Precisions are options like others here, not the machine's choice.
USUAL: dict[str, Any] = {"dtype": "float32", "cache_precision": "float32"}


@dataclass(frozen=True)
class Start:
    """What a start of the engine knows when it opens its cache."""

    model: LoadedModel
    config: EngineConfig

    def ingredients(self) -> dict[str, bytes]:
        stored: Any = self.config.cache_precision
        return ingredients(self.model, self.config, getattr(torch, self.config.dtype), stored)

    def finds(self, cache_dir: Path) -> bool:
        """Whether a document is cached in the folder. It is from then on."""
        config = dataclasses.replace(self.config, cache_dir=str(cache_dir))
        cache = open_cache(config, self.model, getattr(torch, config.dtype))
        assert cache is not None
        key = cache.key("a document", "as it is")
        found = cache.get(key) is not None
        cache.put([(key, CachedEmbedding(torch.ones(1, 4), None, 1, False))])
        cache.close()
        return found


def start(folder: Path, **options: Any) -> Start:
    config = EngineConfig(model=str(folder), **(USUAL | options))
    return Start(load_model(config, torch.device("cpu")), config)


def built(name: str, checkpoints: SharedCheckpoints) -> Path:
    return Path(checkpoints(BUILDERS[name]))


@functools.cache
def usual(name: str, checkpoints: SharedCheckpoints) -> Start:
    """A start with a checkpoint as it was built and no options of its own."""
    return start(built(name, checkpoints))


def edited(pair: Pair, checkpoints: SharedCheckpoints, tmp_path: Path) -> Path:
    """A copy of the pair's checkpoint with its edit."""
    copied = Path(shutil.copytree(built(pair.checkpoint, checkpoints), tmp_path / "another folder"))
    pair.edit(copied)
    return copied


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_where_one_ingredient_differs_nothing_cached_is_found(
    pair: Pair, checkpoints: SharedCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that it makes a difference on any processor to do without them.
    monkeypatch.setattr("maxsimd.engine.ops.cpu.is_available", lambda: True)
    one = usual(pair.checkpoint, checkpoints)
    if pair.options_of_both:
        one = start(built(pair.checkpoint, checkpoints), **pair.options_of_both)
    one = dataclasses.replace(one, model=pair.first(one.model))
    before = one.ingredients()
    assert not one.finds(tmp_path / "cache")
    assert one.finds(tmp_path / "cache")

    other = start(edited(pair, checkpoints, tmp_path), **(pair.options_of_both | pair.options))
    other = dataclasses.replace(other, model=pair.second(other.model))
    if pair.patch is not None:
        monkeypatch.setattr(*pair.patch)
    after = other.ingredients()
    assert [name for name in before if before[name] != after[name]] == [pair.ingredient]
    assert not other.finds(tmp_path / "cache")


def test_every_ingredient_has_a_pair_that_differs_in_it_alone(checkpoints: SharedCheckpoints) -> None:
    assert set(usual("bert", checkpoints).ingredients()) == {pair.ingredient for pair in PAIRS}


@pytest.mark.parametrize("name", BUILDERS)
def test_a_copy_of_a_checkpoint_in_another_folder_finds_all(
    name: str, checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    assert not usual(name, checkpoints).finds(tmp_path / "cache")
    assert start(edited(Pair("none", "a copy", name), checkpoints, tmp_path)).finds(tmp_path / "cache")


@pytest.mark.parametrize("pair", OF_QUERIES, ids=str)
def test_what_only_queries_depend_on_leaves_documents_cached(
    pair: Pair, checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    assert not usual(pair.checkpoint, checkpoints).finds(tmp_path / "cache")
    assert start(edited(pair, checkpoints, tmp_path)).finds(tmp_path / "cache")


def test_options_that_no_embedding_depends_on_leave_documents_cached(
    checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    assert not usual("colbert", checkpoints).finds(tmp_path / "cache")
    assert start(built("colbert", checkpoints), **OF_NO_CONCERN).finds(tmp_path / "cache")


def test_every_option_is_an_ingredient_or_of_no_concern() -> None:
    """A new option has to be given a pair, or a reason for having none."""
    with_a_pair = {name for pair in PAIRS for name in pair.options}
    options = {field.name for field in dataclasses.fields(EngineConfig)}
    assert options == with_a_pair | OF_NO_CONCERN.keys() | SEEN_IN_THE_MODEL | {"cache_dir"}


def test_a_call_of_the_tokenizer_does_not_change_the_fingerprint(checkpoints: SharedCheckpoints) -> None:
    """A call leaves its truncation and padding behind in the tokeniser; the engine uses neither."""
    one = start(built("bert", checkpoints))
    before = one.ingredients()
    one.model.tokenizer("a document", truncation=True, max_length=7, padding="max_length")
    assert one.ingredients() == before


def test_a_number_in_any_block_of_a_tensor_counts(
    checkpoints: SharedCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maxsimd.engine.cache.fingerprint._BLOCK", 20_000)
    one = start(built("bert", checkpoints))
    weight = one.model.backbone.get_parameter("encoder.layer.0.output.dense.weight").data.view(-1)
    found = {one.ingredients()["weights"]}
    for place in range(0, len(weight), len(weight) // 7):
        weight[place] += 1
        found.add(one.ingredients()["weights"])
    assert len(found) == 9


async def test_an_engine_finds_what_a_copy_of_its_checkpoint_cached_and_nothing_of_another(
    checkpoints: SharedCheckpoints, tmp_path: Path, pairs: list[Texts]
) -> None:
    documents = [pair.document for pair in pairs[:12]]

    async def run(checkpoint: Path) -> tuple[int, np.ndarray]:
        """How many documents were found, and their scores, which are those of documents just encoded."""
        config = EngineConfig(model=str(checkpoint), cache_dir=str(tmp_path / "cache"), **USUAL)
        async with Engine(config) as engine:
            result = await engine.score("how is a file read", documents, truncation=CUT_LONG)
            new = await engine.score("how is a file read", documents, truncation=CUT_LONG, cache="bypass")
        np.testing.assert_allclose(result.scores, new.scores, atol=1e-5)
        return result.usage.cached_documents, np.array(result.scores)

    hits, scores = await run(built("colbert", checkpoints))
    assert hits == 0
    for pair in [pair for pair in PAIRS if pair.checkpoint == "colbert" and not pair.options]:
        hits, others = await run(edited(pair, checkpoints, tmp_path / pair.what))
        assert hits == 0, pair
        assert np.abs(others - scores).max() > 1e-4, f"{pair} makes no difference"
    hits, again = await run(edited(Pair("none", "a copy", "colbert"), checkpoints, tmp_path))
    assert hits == len(documents)
    np.testing.assert_array_equal(again, scores)
