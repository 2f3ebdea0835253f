"""What is cached belongs to what made it: where one ingredient alone differs, nothing cached is found."""

import dataclasses
import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from maxsimd.engine.cache.fingerprint import ingredients
from maxsimd.engine.checkpoint import LoadedModel, load_model
from tests.checkpoints.shared import SharedCheckpoints
from tests.unit.engine.cache.fingerprint_variants import (
    BUILDERS,
    FIRST,
    INGREDIENTS,
    OF_NO_CONCERN,
    OF_QUERIES,
    SEEN_IN_THE_MODEL,
    VARIANTS,
    Variant,
)
from tests.unit.engine.cache.test_fingerprint_parts import CHANGES

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

    def changed(self, other: "Start") -> set[str]:
        one, two = self.ingredients(), other.ingredients()
        return {name for name in one if one[name] != two[name]}


def start(folder: Path, **options: Any) -> Start:
    config = EngineConfig(model=str(folder), **(USUAL | options))
    return Start(load_model(config, torch.device("cpu")), config)


@pytest.fixture(scope="module")
def usual(checkpoints: SharedCheckpoints) -> Callable[..., Start]:
    """A start with a checkpoint as it was built."""

    @functools.cache
    def started(name: str, **options: Any) -> Start:
        return start(Path(checkpoints(BUILDERS[name])), **options)

    return started


def edited(one: Start, folder: Path, *edits: Callable[[Path], None]) -> Path:
    """A copy of a start's checkpoint with edits."""
    copied = Path(shutil.copytree(one.config.model, folder))
    for edit in edits:
        edit(copied)
    return copied


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, id=str(variant), marks=() if variant in FIRST else pytest.mark.exhaustive)
        for variant in VARIANTS
    ],
)
def test_each_edit_of_a_checkpoint_changes_its_one_ingredient(
    variant: Variant, usual: Callable[..., Start], tmp_path: Path
) -> None:
    one = usual(variant.checkpoint, **variant.both)
    copied = edited(one, tmp_path / "another folder", *variant.edits.values())
    other = start(copied, **(variant.both | variant.options))
    assert one.changed(other) == {*variant.edits, *variant.by_options}


@pytest.mark.parametrize("name", OF_QUERIES)
def test_what_only_queries_depend_on_is_no_ingredient(
    name: str, usual: Callable[..., Start], tmp_path: Path
) -> None:
    one = usual(name)
    options = OF_NO_CONCERN if name == "colbert" else {}
    assert one.changed(start(edited(one, tmp_path / "copy", OF_QUERIES[name]), **options)) == set()


def test_every_ingredient_and_option_is_tried(usual: Callable[..., Start]) -> None:
    """A new one needs a variant, a change in test_fingerprint_parts, or a reason for having none."""
    in_variants = {name for variant in VARIANTS for name in (*variant.edits, *variant.by_options)}
    in_parts = {name for name, *_ in CHANGES} | {"device", "versions"}
    assert set(usual("bert").ingredients()) == in_variants | in_parts
    with_a_variant = {name for variant in VARIANTS for name in variant.options}
    options = {field.name for field in dataclasses.fields(EngineConfig)}
    tried = with_a_variant | INGREDIENTS | OF_NO_CONCERN.keys() | SEEN_IN_THE_MODEL
    assert options == tried | {"cache_dir"}


def test_a_number_in_any_block_of_a_tensor_counts(
    checkpoints: SharedCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maxsimd.engine.cache.fingerprint._BLOCK", 20_000)
    one = start(Path(checkpoints(BUILDERS["bert"])))
    weight = one.model.backbone.get_parameter("encoder.layer.0.output.dense.weight").data.view(-1)
    found = {one.ingredients()["weights"]}
    for place in range(0, len(weight), len(weight) // 7):
        weight[place] += 1
        found.add(one.ingredients()["weights"])
    assert len(found) == 9


async def test_an_engine_finds_what_a_copy_of_its_checkpoint_cached(
    usual: Callable[..., Start], tmp_path: Path, pairs: list[Pair]
) -> None:
    """And nothing of another."""
    documents = [pair.document for pair in pairs[:12]]
    colbert = usual("colbert")

    async def run(checkpoint: str | Path) -> tuple[int, np.ndarray]:
        """How many documents were found, and their scores, which are those of documents just encoded."""
        config = EngineConfig(model=str(checkpoint), cache_dir=str(tmp_path / "cache"), **USUAL)
        async with Engine(config) as engine:
            result = await engine.score("how is a file read", documents, truncation=CUT_LONG)
            new = await engine.score("how is a file read", documents, truncation=CUT_LONG, cache="bypass")
        np.testing.assert_allclose(result.scores, new.scores, atol=1e-5)
        return result.usage.cached_documents, np.array(result.scores)

    hits, scores = await run(colbert.config.model)
    assert hits == 0
    for name, edit in VARIANTS[0].edits.items():
        if name in ("weights", "tokenizer"):
            hits, others = await run(edited(colbert, tmp_path / name, edit))
            assert hits == 0, name
            assert np.abs(others - scores).max() > 1e-4, f"{name} makes no difference"
    # The same documents' embeddings: query expansion is a matter of queries.
    hits, _ = await run(edited(colbert, tmp_path / "queries", OF_QUERIES["colbert"]))
    assert hits == len(documents)
    hits, again = await run(edited(colbert, tmp_path / "a copy"))
    assert hits == len(documents)
    np.testing.assert_array_equal(again, scores)
