"""Several models behind one server: their configuration, which of them a request goes to, their metrics."""

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from prometheus_client import Counter, generate_latest

from maxsimd.api.cli import main
from maxsimd.api.config import ServerConfig, SetupError
from maxsimd.api.models.choice import UndecidedError, Wanted, first_for
from maxsimd.api.models.metrics import SeveralMetrics
from maxsimd.api.models.setup import Loadable, ModelSetup, by_itself
from maxsimd.engine.config import EngineConfig, ScoreType

TWO = """
dtype: float32
models:
  embed: {score-type: bi-encoder, weight: 3}
  rerank:
    model: some/reranker
    max_batch_tokens: "512"
    dtype: bfloat16
"""


def _asked(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, ["serve", *arguments, "--print-config"], env=environment)


def _config(*arguments: str, **environment: str) -> Any:
    found = _asked(*arguments, **environment)
    assert found.exit_code == 0, found.output
    return yaml.safe_load(found.output)


def _file(folder: Path, text: str) -> str:
    file = folder / "models.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_models_of_the_command_go_by_what_they_are_called() -> None:
    config = _config("one/model", "/a folder/two", "--dtype", "float32")
    assert list(config["models"]) == ["one/model", "/a folder/two"]
    for name, options in config["models"].items():
        assert (options["model"], options["dtype"], options["weight"]) == (name, "float32", 1.0)
    assert config["port"] == 8000
    assert "model" not in config


def test_a_file_gives_each_model_its_options(tmp_path: Path) -> None:
    path = _file(tmp_path, TWO)
    models = _config("--config", path)["models"]
    assert list(models) == ["embed", "rerank"]
    embed, rerank = models.values()
    assert (embed["model"], embed["score_type"], embed["weight"]) == (None, "bi-encoder", 3.0)
    assert (rerank["model"], rerank["max_batch_tokens"], rerank["weight"]) == ("some/reranker", 512, 1.0)
    assert (embed["dtype"], rerank["dtype"]) == ("float32", "bfloat16")
    printed = _asked("--config", path).output
    assert _asked("--config", _file(tmp_path, printed)).output == printed


def test_flags_and_variables_override_a_models_file(tmp_path: Path) -> None:
    path = _file(tmp_path, TWO)
    for models in (
        _config("--config", path, "--dtype", "float16")["models"],
        _config("--config", path, MAXSIMD_DTYPE="float16")["models"],
    ):
        assert {options["dtype"] for options in models.values()} == {"float16"}


def test_one_model_is_configured_as_before(tmp_path: Path) -> None:
    assert _config("one", MAXSIMD_MODEL="other")["model"] == "one"
    assert _config(MAXSIMD_MODEL="/a folder/with spaces")["model"] == "/a folder/with spaces"
    assert _config("--config", _file(tmp_path, "model: x"))["model"] == "x"


def test_what_is_wrong_is_told(tmp_path: Path) -> None:
    for arguments, text, message in (
        (["a", "a"], "", "a is named twice"),
        (["a", "b", "--fronts", "2"], "", "leave out fronts and replicas"),
        (["a", "b", "--replicas", "2"], "", "leave out fronts and replicas"),
        (["a", "b", "--served-model-name", "x"], "", "served_model_name is for one model"),
        (["a", "b", "--restart-on-failure"], "", "restart_on_failure is for one model"),
        (["--models-dir", "x", "--replicas", "2"], "", "models_dir is for one process"),
        (["--models-dir", "x", "--restart-on-failure"], "", "without restart_on_failure"),
        (["a", "--served-model-name", "x", "--served-model-name", "y", "--models-dir", "x"], "", "has one"),
        (["a"], TWO, "the models are named in the file"),
        ([], "model: a\nmodels: {b: c}", "has both model and models"),
        ([], "models: []", "models must hold names"),
        ([], "models: {b: 3}", "models: b must hold options"),
        ([], "models: {b: {prot: 1}}", "models: b has no option prot"),
        ([], "models: {b: {port: 1}}", "models: b has no option port; the server's are for all"),
        ([], "models: {b: {dtype: float8}}", "models: b: "),
        ([], "models: {b: {threads: many}}", "'many' is not a valid integer"),
        ([], "models: {b: {threads: 0}}", "models: b: threads must be at least 1, not 0"),
        ([], "models: {b: {weight: 0}}", "models: b: weight must be a number above 0"),
        ([], "models: {'a/': x, c: y}", "'a/' is no name for a model"),
        ([".", "..", "c"], "", "'.' is no name for a model"),
        ([], "models: {1: a, '1': b}", "there are two entries named 1"),
        ([], "models: {yes: a, 'True': b}", "there are two entries named True"),
        ([], "models: {a: b, c: d, a: e}", "there are two entries named a"),
        ([], "models: {a: {threads: 1, threads: 2}}", "there are two entries named threads"),
        (
            [],
            "models: {a: {cache-mb: 1, cache_mb: 2}}",
            "models: a: cache_mb is there twice, with - and with",
        ),
    ):
        found = _asked(*arguments, *(["--config", _file(tmp_path, text)] if text else []))
        assert found.exit_code == 2, found.output
        assert message in " ".join(found.output.split())


def test_commands_for_one_model_refuse_a_file_of_several(tmp_path: Path) -> None:
    for command in (["inspect"], ["calibrate"], ["cluster", "serve"], ["cluster", "config"]):
        pytest.importorskip("ray")
        found = CliRunner().invoke(main, [*command, "--config", _file(tmp_path, TWO)])
        assert found.exit_code == 2
        assert "one model" in found.output or "has several models" in found.output


def test_ray_refuses_several_models() -> None:
    pytest.importorskip("ray")
    found = CliRunner().invoke(main, ["cluster", "serve", "a", "b"])
    assert found.exit_code == 2
    assert "on Ray one model is served" in found.output


def test_only_what_is_configured_or_in_the_folder_may_be_loaded(tmp_path: Path) -> None:
    folder, outside = tmp_path / "models", tmp_path / "outside"
    for each in (folder / "org" / "model", outside, folder / "empty"):
        each.mkdir(parents=True)
    for each in (folder / "org" / "model", outside):
        (each / "config.json").write_text("{}")
    (folder / "one.gguf").write_bytes(b"GGUF")
    for link, target in (
        *(("link", outside), ("nowhere", tmp_path / "nowhere"), ("loop", "loop"), ("there", "back")),
        *(("back", "there"), ("itself", "."), ("empty/config.json", "config.json")),
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
        *("link", "nowhere", "loop", "loop/model", "there", "itself", "itself/org/model/", "~", "/", "//"),
        *("../outside", str(outside), str(folder / "org" / "model"), "org/model/", "org\0model", "a" * 5000),
    ):
        assert loadable.setup_of(name) is None, name
    assert Loadable([configured]).setup_of("org/model") is None
    for nowhere in ("nowhere", "models/loop", "models/nowhere", "models/one.gguf", "a\0b"):
        with pytest.raises(SetupError, match="there is no folder"):
            Loadable([], str(tmp_path / nowhere))


def test_a_model_that_others_join_has_a_name_for_paths() -> None:
    def name(model: str | None, *served: str) -> str:
        return by_itself(EngineConfig(model=model), ServerConfig(served_model_name=served), "embedded").name

    assert (name(None), name("org/model"), name("a/b//"), name("/a/b/")) == (
        "embedded",
        "org/model",
        "a/b",
        "/a/b",
    )
    assert name("..", "mine") == "mine"
    for model, served in (("/", ()), ("..", ()), (".", ()), ("./", ()), ("a" * 201, ()), ("a", ("b/",))):
        with pytest.raises(ValueError, match=r"is no name for a model: .*; give it one as served_model_name"):
            name(model, *served)


class _Facts:
    """What of a model decides which requests are for it."""

    def __init__(self, score_type: str, *tasks: str, labels: int = 0) -> None:
        self.score_type = ScoreType(score_type)
        self.tasks = dict.fromkeys(tasks)
        self.score_task = tasks[0]
        self.is_classifier = labels > 1


BI_ENCODER = _Facts("bi-encoder", "embed", "token_embed")
COLBERT = _Facts("late-interaction", "token_embed")
RERANKER = _Facts("cross-encoder", "classify", labels=1)
CLASSIFIER = _Facts("cross-encoder", "classify", labels=3)
SPLADE = _Facts("sparse", "sparse_embed")
ALL: dict[str, Any] = {
    "classifier": CLASSIFIER,
    "splade": SPLADE,
    "colbert": COLBERT,
    "bi": BI_ENCODER,
    "reranker": RERANKER,
}


def test_a_request_without_a_model_goes_to_the_first_fit() -> None:
    for wanted, models, expected in (
        (Wanted.RANKING, "bi reranker colbert", "reranker"),
        (Wanted.RANKING, "bi colbert reranker", "colbert"),
        (Wanted.RANKING, "classifier splade bi", "splade"),
        (Wanted.RANKING, "classifier", "classifier"),
        (Wanted.VECTORS, "reranker colbert bi", "bi"),
        (Wanted.VECTORS, "reranker colbert", "colbert"),
        (Wanted.TOKEN_VECTORS, "reranker bi colbert", "bi"),
        (Wanted.SPARSE_VECTORS, "bi splade", "splade"),
        (Wanted.CLASSES, "reranker classifier", "classifier"),
        (Wanted.CLASSES, "bi reranker", "reranker"),
        (Wanted.ANYTHING, "splade bi", "splade"),
    ):
        assert first_for(wanted, {name: ALL[name] for name in models.split()}) == expected


def test_an_unknown_model_decides_nothing_silently() -> None:
    """Whatever it turned out to be, the choice is the same; else there is none."""
    rng = random.Random(7)
    for _ in range(300):
        names = rng.sample(list(ALL), rng.randint(1, 4))
        models = {name: ALL[name] for name in names}
        unknown = rng.choice(names)
        wanted = rng.choice([each for each in Wanted if each is not Wanted.CASCADE])
        possible = {first_for(wanted, models | {unknown: facts}) for facts in ALL.values()}
        try:
            found = {first_for(wanted, models | {unknown: None})}
        except UndecidedError:
            assert unknown in possible
        else:
            assert possible == found


def test_each_models_metrics_have_its_name() -> None:
    registries = {name: SeveralMetrics(dict, dict).registry for name in ("a", "b/c")}
    for count, registry in enumerate(registries.values(), start=1):
        Counter("maxsimd_things", "Things", ("kind",), registry=registry).labels("x").inc(count)
    metrics = SeveralMetrics(lambda: registries, lambda: {"a": True, "b/c": True, "d": False})
    page = generate_latest(metrics.registry).decode()
    assert page.count("# TYPE maxsimd_things_total counter") == 1
    for name, value in (("a", 1.0), ("b/c", 2.0)):
        found = metrics.registry.get_sample_value("maxsimd_things_total", {"model": name, "kind": "x"})
        assert found == value
    assert metrics.registry.get_sample_value("maxsimd_model_served", {"model": "d"}) == 0
