"""Several models behind one server: their configuration, which of them a request goes to."""

from pathlib import Path
from typing import Any

import pytest

from maxsimd.api.config import ServerConfig, SetupError
from maxsimd.api.model_setup import Loadable, ModelSetup, single_setup
from maxsimd.api.models import Wanted, first_suited
from maxsimd.engine.config import EngineConfig, ScoreType


def test_only_what_is_configured_or_in_the_folder_may_be_loaded(tmp_path: Path) -> None:
    folder, outside = tmp_path / "models", tmp_path / "outside"
    for each in (folder / "org" / "model", outside, folder / "empty"):
        each.mkdir(parents=True)
    for each in (folder / "org" / "model", outside):
        (each / "config.json").write_text("{}")
    (folder / "one.gguf").write_bytes(b"GGUF")
    for link, target in (
        *(("link", outside), ("nowhere", tmp_path / "nowhere"), ("loop", "loop"), ("itself", ".")),
        ("empty/config.json", "config.json"),
    ):
        (folder / link).symlink_to(target)
    (folder / "alias").symlink_to("org/model")
    configured = ModelSetup(name="mine", engine=EngineConfig(model="x"))
    loadable = Loadable([configured], str(folder), EngineConfig(dtype="float32"))
    assert loadable.setup_of("mine") == configured
    for name, path in (("org/model", "org/model"), ("one.gguf", "one.gguf"), ("alias", "org/model")):
        setup = loadable.setup_of(name)
        assert setup is not None
        assert setup.engine == EngineConfig(model=str(folder / path), dtype="float32")
    for name in (
        *("nope", "", ".", "..", "org", "empty", "org/../org/model", "org//model", "./org/model"),
        *("link", "nowhere", "loop", "loop/model", "itself", "itself/org/model/", "~", "/", "//"),
        *("../outside", str(outside), str(folder / "org" / "model"), "org/model/", "org\0model", "a" * 5000),
    ):
        assert loadable.setup_of(name) is None, name
    # Links in a model's folder lead to others in the folder of models, and no further.
    (folder / "org" / "model" / "weights").symlink_to(folder / "empty")
    assert loadable.link_out("alias") == "empty/config.json"
    (folder / "empty" / "config.json").unlink()
    assert [loadable.link_out(name) for name in ("alias", "one.gguf", "mine")] == [None] * 3
    (folder / "empty" / "far.json").symlink_to(outside / "config.json")
    assert loadable.link_out("alias") == loadable.link_out("org/model") == "empty/far.json"
    (folder / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    (folder / "1_Pooling").symlink_to(outside)
    assert loadable.link_out("one.gguf") == "1_Pooling"
    (folder / "tokenizer.json").symlink_to(outside / "config.json")
    (folder / "1_Pooling").unlink()
    assert loadable.link_out("one.gguf") == "tokenizer.json"
    assert Loadable([configured]).setup_of("org/model") is None
    for nowhere in ("nowhere", "models/loop", "models/nowhere", "models/one.gguf", "a\0b"):
        with pytest.raises(SetupError, match="there is no folder"):
            Loadable([], str(tmp_path / nowhere))


def test_a_model_that_others_join_has_a_name_for_paths() -> None:
    def name(model: str | None, *names: str) -> str:
        return single_setup(EngineConfig(model=model), ServerConfig(served_model_name=names), "embedded").name

    names = (name(None), name("a/b//"), name("/a/b/"), name("..", "mine"))
    assert names == ("embedded", "a/b", "/a/b", "mine")
    for model, served in (("/", ()), ("..", ()), ("./", ()), ("a" * 201, ()), ("a", ("b/",))):
        with pytest.raises(ValueError, match=r"is no name for a model: .*; give it one as served_model_name"):
            name(model, *served)


class _Facts:
    def __init__(self, score_type: str, *tasks: str, labels: int = 0) -> None:
        self.score_type, self.score_task, self.is_classifier = ScoreType(score_type), tasks[0], labels > 1
        self.dims, self.has_score = dict.fromkeys(tasks), not self.is_classifier


MODELS: dict[str, Any] = {
    "classifier": _Facts("cross-encoder", "classify", labels=3), "splade": _Facts("sparse", "sparse_embed"),
    "colbert": _Facts("late-interaction", "token_embed"), "bi": _Facts("bi-encoder", "embed", "token_embed"),
    "reranker": _Facts("cross-encoder", "classify", labels=1), "unknown": None,
    "language": _Facts("language-model", "label_scores"),
}  # fmt: skip


def test_a_request_without_a_model_goes_to_the_first_fit() -> None:
    for wanted, models, expected in (
        (Wanted.RANKING, "bi reranker colbert", "reranker"),
        (Wanted.RANKING, "bi colbert reranker", "colbert"),
        *((Wanted.RANKING, "classifier splade bi", "splade"), (Wanted.RANKING, "classifier", "classifier")),
        *((Wanted.VECTORS, "reranker colbert bi", "bi"), (Wanted.VECTORS, "reranker colbert", "colbert")),
        (Wanted.TOKEN_VECTORS, "reranker bi colbert", "bi"),
        (Wanted.SPARSE_VECTORS, "bi splade", "splade"),
        *((Wanted.CLASSES, "reranker classifier", "classifier"), (Wanted.CLASSES, "bi reranker", "reranker")),
        *((Wanted.LABELS, "reranker language", "language"), (Wanted.RANKING, "language bi", "language")),
        *((Wanted.ANYTHING, "splade bi", "splade"), (Wanted.VECTORS, "bi unknown", "bi")),
    ):
        assert first_suited(wanted, {name: MODELS[name] for name in models.split()}) == expected
    for models in ("unknown reranker", "bi unknown"):
        assert first_suited(Wanted.CLASSES, {name: MODELS[name] for name in models.split()}) == "unknown"
