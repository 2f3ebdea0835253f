"""Recipes: a checkpoint that the libraries have read once is later built without them, to the same bits."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from maxsimd.engine.checkpoint import LoadedModel, library, recipe_store
from maxsimd.engine.checkpoint import load as loading
from maxsimd.engine.checkpoint.files import embedded_model_path
from maxsimd.engine.checkpoint.recipe import Recipe
from maxsimd.engine.checkpoint.weights import read_tensors
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.load import load_device_model
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.models import bert
from maxsimd.scheduler import ResultSlot, Tokens, TokenSequence
from tests.checkpoints import bi_encoders, cross_encoders, late_interaction
from tests.checkpoints.shared import SharedCheckpoints
from tests.checkpoints.weights import change_config
from tests.embedded_recipes import SCORE_TYPES, made_anew
from tests.exhaustive import exhaustive
from tests.parity.changes import sharded

CPU = torch.device("cpu")

WITH_RECIPES = [
    bi_encoders.gte, partial(cross_encoders.bert, labels=3), cross_encoders.xlm_roberta,
    late_interaction.stanford, late_interaction.native,
    *exhaustive(cross_encoders.ms_marco_minilm, cross_encoders.roberta),
]  # fmt: skip


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "maxsimd" / "recipes"


@pytest.fixture
def path(checkpoints: SharedCheckpoints) -> str:
    return checkpoints(cross_encoders.bert)


@pytest.fixture
def folder(checkpoints: SharedCheckpoints, tmp_path: Path) -> Path:
    return checkpoints.copy(cross_encoders.bert, tmp_path / "copy")


@pytest.fixture(scope="module")
def made_recipes(checkpoints: SharedCheckpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        _load(checkpoints(cross_encoders.bert))
    return cache / "maxsimd" / "recipes"


@pytest.fixture
def kept(made_recipes: Path, cache_folder: Path) -> Path:
    """The recipe of the small cross-encoder, as an earlier start has left it."""
    shutil.copytree(made_recipes, cache_folder)
    (recipe,) = cache_folder.iterdir()
    return recipe


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    fail = Mock(side_effect=AssertionError("the libraries were asked"))
    return lambda: monkeypatch.setattr(library, "read_with_libraries", fail)


def _save(tensors: dict[str, torch.Tensor], folder: Path, file: str = "model.safetensors") -> None:
    save_file(tensors, folder / file, metadata={"format": "pt"})


def _source(path: Path | str, **options: object) -> recipe_store.Source:
    source = recipe_store.source_of(EngineConfig(model=str(path), **options))  # type: ignore[arg-type]
    assert source is not None
    return source


def _load(path: Path | str, **options: object) -> LoadedModel:
    return loading.load_model(EngineConfig(model=str(path), **options), CPU)  # type: ignore[arg-type]


@torch.inference_mode()
def _results(model: LoadedModel) -> list[torch.Tensor]:
    ids = torch.tensor(model.tokenizer("how is a file opened")["input_ids"], dtype=torch.int32).numpy()
    results = []
    for name, task in model.tasks.items():
        assert task.reference is not None
        results.append(task.reference(TokenSequence.text(0, ResultSlot(0, 0), name, Tokens(ids, ids * 0))))
    return results


@pytest.mark.parametrize("build", WITH_RECIPES)
def test_the_second_load_needs_no_libraries(
    build: Callable[[Path], str], checkpoints: SharedCheckpoints, no_libraries: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path, by_libraries, read = checkpoints(build), [], library.read_with_libraries
    noted = lambda *given: by_libraries.append(read(*given)) or by_libraries[0]  # noqa: E731
    monkeypatch.setattr(library, "read_with_libraries", noted)
    first = _load(path)
    (expected,) = by_libraries
    no_libraries()
    second = _load(path)
    assert all(isinstance(each.backbone, bert.Encoder) for each in (first, second))
    assert (first.fingerprint, bool(second.compared)) == (second.fingerprint, True)
    for model in (first, second):
        for found, wanted in zip(_results(model), _results(expected), strict=True):
            torch.testing.assert_close(found, wanted)
    assert (second.labels, second.query.prompt) == (expected.labels, expected.query.prompt)
    assert second.max_tokens == expected.max_tokens


def test_what_a_recipe_cannot_hold_has_none(checkpoints: SharedCheckpoints, cache_folder: Path) -> None:
    for build in (cross_encoders.distilbert, partial(late_interaction.native, token_pooling=True)):
        assert not isinstance(_load(checkpoints(build)).backbone, bert.Encoder)
        assert not cache_folder.exists()


def test_files_options_and_versions_change_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = load_file(folder / "model.safetensors")
    keys = [_source(folder).key, _source(folder, max_model_len=20).key]
    _save({name: tensor + 1 for name, tensor in tensors.items()}, folder)
    (folder / "README.md").write_text("Nobody reads this.")
    assert _source(folder, device="cpu", threads=1, query_prompt="query: ").key == keys[0]
    keys += [_source(folder, trust_remote_code=True).key, _source(folder, allow_pickle=True).key]
    change_config(folder, classifier_dropout=0.5)
    keys.append(_source(folder).key)
    (folder / "special_tokens_map.json").write_text("{}")
    keys.append(_source(folder).key)
    _save(tensors | {"more": torch.zeros(1)}, folder)
    keys.append(_source(folder).key)
    monkeypatch.setattr("maxsimd.engine.versions.version", lambda name: "0.0.1")
    keys.append(_source(folder).key)
    assert len(set(keys)) == len(keys)


@pytest.mark.usefixtures("kept")
def test_new_weights_are_read_by_an_old_recipe(folder: Path, no_libraries: Callable[[], None]) -> None:
    before = _results(_load(folder))
    tensors = load_file(folder / "model.safetensors")
    _save({name: tensor * 1.5 for name, tensor in tensors.items()}, folder)
    expected = _results(library.read_with_libraries(EngineConfig(model=str(folder)), CPU))
    no_libraries()
    found = _results(_load(folder))
    torch.testing.assert_close(found, expected)
    assert not torch.equal(found[0], before[0])
    tensors["classifier.weight"][0, 0] = float("nan")
    _save(tensors, folder)
    with pytest.raises(ModelLoadError, match=r"not finite.*classifier\.weight"):
        _load(folder)


def test_half_precision_stays_half(folder: Path) -> None:
    _save({name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}, folder)
    change_config(folder, dtype="float16")
    for _ in range(2):
        model = _load(folder)
        assert isinstance(model.backbone, bert.Encoder)
        assert model.file_dtype is torch.float16
        assert model.backbone.encoder.layer[0].output.dense.weight.dtype is torch.float16
        assert model.tasks["classify"].head(torch.zeros(1, 128)).dtype is torch.float32


def test_damaged_recipes_are_made_anew(path: str, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.write_bytes(kept.read_bytes()[:100])
    assert loading.find_recipe(_source(path)) is None
    assert isinstance(_load(path).backbone, bert.Encoder)
    assert msgspec.json.decode(kept.read_bytes(), type=Recipe).is_classifier
    kept.write_bytes(kept.read_bytes().replace(b"model.safetensors", b"x"))
    assert isinstance(_load(path).backbone, bert.Encoder)
    monkeypatch.setattr("maxsimd.engine.checkpoint.recipe_store._MOST", 1)
    _load(path, max_model_len=10)
    assert len(list(kept.parent.iterdir())) == 1


def test_only_private_recipes_are_read(path: str, kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    for private, mode in ((kept.parent, 0o700), (kept, 0o600)):
        assert private.stat().st_mode & 0o777 == mode
        private.chmod(0o777)
        caplog.clear()
        assert (loading.find_recipe(_source(path)), "is not" in caplog.text) == (None, True), caplog.text
        private.chmod(mode)
    assert loading.find_recipe(_source(path)) is not None


def test_without_a_folder_nothing_is_kept(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert isinstance(_load(path).backbone, bert.Encoder)
    # Nor for a user without a home.
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    _load(path)
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize("score_types", [SCORE_TYPES[:1], *exhaustive((SCORE_TYPES[1:],))])
def test_the_embedded_recipes_fit(score_types: tuple[str, ...], no_libraries: Callable[[], None]) -> None:
    """If this fails after a change of our code or of a library: `make recipes`."""
    shipped = msgspec.json.decode(recipe_store.SHIPPED.read_bytes(), type=recipe_store.Shipped)
    made = made_anew(score_types)
    for content, recipe in made.recipes.items():
        assert replace(shipped.recipes[content], proof="") == replace(recipe, proof="")
    assert set(made.texts) <= set(shipped.texts)
    # A copy of its folder is not scored as the embedded model is, and has recipes of its own.
    assert _load(embedded_model_path()).score_type.value == "bi-encoder"
    no_libraries()
    assert _load(embedded_model_path()).score_type.value == "bi-encoder"
    expected = ("late-interaction", "late-interaction", "bi-encoder")
    for asked, score_type in zip(SCORE_TYPES, expected, strict=True):
        config = EngineConfig(score_type=asked)  # type: ignore[arg-type]
        model = loading.load_model(config, CPU)
        assert isinstance(model.backbone, bert.Encoder)
        assert model.score_type.value == score_type
        assert recipe_store.knows_texts(recipe_store.texts_content(config) or "")


# Modules that serving a model of these families does not import.
UNWANTED = (
    *("sklearn", "scipy", "pandas", "sympy", "triton", "transformers", "sentence_transformers"),
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor"),
)
_SERVING = """
import asyncio, sys
from maxsimd.api import serve
from maxsimd import Engine, EngineConfig
async def main(model):
    async with Engine(EngineConfig(model=model)) as engine:
        await engine.rerank("how is a file opened", ["Open a file.", "Close a file."])
for model in sys.argv[2:]:
    asyncio.run(main(model))
print([name for name in sys.argv[1].split(",") if name in sys.modules])
"""


def test_serving_imports_no_library(checkpoints: SharedCheckpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the cache of the run, in which other tests have left what this one needs
    paths = [checkpoints(build) for build in (cross_encoders.bert, late_interaction.stanford)]
    for path in paths:
        load_device_model(EngineConfig(model=path))
    command = [sys.executable, "-c", _SERVING, ",".join(UNWANTED), *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.strip() == "[]"


def test_folders_of_many_files_or_links_have_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(folder))
    with monkeypatch.context() as patch:
        patch.setattr("maxsimd.engine.checkpoint.recipe_store._MOST_BYTES", 10_000)
        assert recipe_store.source_of(config) is None
        assert not isinstance(_load(folder).backbone, bert.Encoder)
    assert recipe_store.source_of(config) is not None
    (folder / "1_Pooling").symlink_to(folder.parent)  # changes there would not be noticed
    assert recipe_store.source_of(config) is None


def test_a_sharded_checkpoint_has_a_recipe(folder: Path, no_libraries: Callable[[], None]) -> None:
    sharded(folder)
    (folder / "onnx").mkdir()  # changes there would not be noticed
    shutil.copy(folder / "tokenizer.json", folder / "onnx")
    expected = _results(_load(folder))
    assert getattr(loading.find_recipe(_source(folder)), "tokenizer_file", "") == "tokenizer.json"
    no_libraries()
    torch.testing.assert_close(_results(_load(folder)), expected)
    _save({"classifier.bias": torch.ones(1)}, folder)  # read before the index that is left
    assert read_tensors(str(folder), None, "classifier.") == {"bias": torch.ones(1)}
