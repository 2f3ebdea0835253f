"""Options from a YAML file and from the environment, and which go first."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from maxsimd.api.cli import main
from maxsimd.api.config import ServerConfig
from maxsimd.engine.config import COLLECTIONS, EngineConfig

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


def _config(*arguments: str, **environment: str) -> dict[str, Any]:
    found = _asked(*arguments, **environment)
    assert found.exit_code == 0, found.output
    config: dict[str, Any] = yaml.safe_load(found.output)
    return config


def _file(tmp_path: Path, text: str) -> str:
    tmp_path.mkdir(exist_ok=True)
    file = tmp_path / "maxsimd.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_without_anything_the_defaults_are_printed_and_no_key_is() -> None:
    config = _config()
    for settings in (EngineConfig(max_wait_seconds=30.0), ServerConfig()):
        for field in dataclasses.fields(settings):
            if field.name != "api_key":
                value = getattr(settings, field.name)
                place = config if field.metadata["within"] is None else config[field.metadata["within"]]
                assert place.pop(field.name) == (list(value) if isinstance(value, tuple) else value)
    assert config == {collection: {} for collection in COLLECTIONS}
    assert "secret" not in _asked("--api-key", "secret", MAXSIMD_API_KEY="also-secret").output


def test_flags_override_variables_that_override_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path, "port: 1\nmax-documents: 7\nmodel: of-the-file\nnormalize_scores: true\n")
    config = _config("--config", path)
    assert (config["port"], config["max_documents"], config["model"]) == (1, 7, "of-the-file")
    assert config["normalize_scores"] is True
    config = _config("--config", path, MAXSIMD_PORT="2", MAXSIMD_MODEL="of the environment")
    assert (config["port"], config["max_documents"], config["model"]) == (2, 7, "of the environment")
    config = _config("of-the-command", "--config", path, "--port", "3", MAXSIMD_PORT="2")
    assert (config["port"], config["model"], _config(MAXSIMD_CONFIG=path)["port"]) == (3, "of-the-command", 1)
    assert _config(MAXSIMD_RESTART_ON_FAILURE="1")["restart_on_failure"] is True
    of_kubernetes = _config(MAXSIMD_PORT="tcp://10.0.0.1:80", MAXSIMD_SERVICE_HOST="10.0.0.1")
    assert of_kubernetes["port"] == 8000, "an address is no port"


def test_other_commands_take_a_servers_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = _file(tmp_path, _asked().output)
    for command, message in (
        (["rerank", "--query", "q", "--documents", "/none", "--config", printed], "'/none' does not exist"),
        (["inspect", "--config", _file(tmp_path / "wrong", "port: 1\ndtype: float8\n")], "float8"),
    ):
        found = CliRunner().invoke(main, command)
        assert (found.exit_code, message in found.output) == (2, True), found.output
    monkeypatch.setattr("maxsimd.api.cluster.cli.require_ray", lambda: None)  # importing it takes seconds
    for command in (["inspect"], ["calibrate"], ["cluster", "serve"], ["cluster", "config"]):
        found = CliRunner().invoke(main, [*command, "--config", _file(tmp_path, TWO)])
        assert found.exit_code == 2
        assert "one model" in found.output or "has several models" in found.output
    found = CliRunner().invoke(main, ["cluster", "serve", "a", "b"])
    assert (found.exit_code, "on Ray one model is served" in found.output) == (2, True), found.output


def test_each_model_has_its_options(tmp_path: Path) -> None:
    config = _config("one/model", "/a folder/two", "--dtype", "float32")
    assert list(config["models"]) == ["one/model", "/a folder/two"]
    for name, options in config["models"].items():
        assert (options["model"], options["dtype"], options["weight"]) == (name, "float32", 1.0)
    assert (config["port"], "model" in config) == (8000, False), config
    path = _file(tmp_path, TWO)
    models = _config("--config", path)["models"]
    assert list(models) == ["embed", "rerank"]
    embed, rerank = models.values()
    assert (embed["model"], embed["score_type"], embed["weight"]) == (None, "bi-encoder", 3.0)
    assert (rerank["model"], rerank["max_batch_tokens"], rerank["weight"]) == ("some/reranker", 512, 1.0)
    assert (embed["dtype"], rerank["dtype"]) == ("float32", "bfloat16")
    for others in (["--dtype", "float16"], []):
        variables = {} if others else {"MAXSIMD_DTYPE": "float16"}
        overridden = _config("--config", path, *others, **variables)["models"]
        assert {options["dtype"] for options in overridden.values()} == {"float16"}
    printed = _asked("--config", path, "--api-key-file", "keys").output
    assert _asked("--config", _file(tmp_path, printed)).output == printed, "what is printed gives the same"
    text = "models: {a: &a {dtype: float32, weight: 2}, b: &b {<<: *a, weight: 3}, c: {<<: *b, weight: 4}}"
    models = _config("--config", _file(tmp_path, text))["models"]
    assert [(one["dtype"], one["weight"]) for one in models.values()] == [("float32", n) for n in (2, 3, 4)]
    assert "models must hold names" in _asked("--config", _file(tmp_path, "models: &a [*a]")).output


def test_what_is_wrong_is_told_in_one_line(tmp_path: Path) -> None:
    for arguments, text, message in (
        *(([], "prot: 1", "there is no option prot"), ([], "- port", "holds no options but list")),
        *(([], "port: [", "is no YAML"), ([], "port: many", "'many' is not a valid integer")),
        ([], "port: 1\nhost: a\nport: 2", "there are two entries named port, the second in line 3"),
        ([], "max-documents: 1\nmax_documents: 2", "max_documents is there twice, with - and with _"),
        ([], "port: 2024-13-45", "is no YAML: month must be in 1..12"),
        (["a", "a"], "", "a is named twice"),
        (["a", "b", "--fronts", "2"], "", "leave out fronts and replicas"),
        (["a", "b", "--served-model-name", "x"], "", "served_model_name is for one model"),
        (["a", "b", "--restart-on-failure"], "", "restart_on_failure is for one model"),
        (["--models-dir", "x", "--replicas", "2"], "", "models_dir is for one process"),
        (["a", "--served-model-name", "x", "--served-model-name", "y", "--models-dir", "x"], "", "has one"),
        (["a"], TWO, "the models are named in the file"),
        ([], "model: a\nmodels: {b: c}", "has both model and models"),
        ([], "models: []", "models must hold names"),
        ([], "models: {b: 3}", "models: b must hold options"),
        ([], "models: {b: {prot: 1}}", "models: b has no option prot"),
        ([], "models: {b: {port: 1}}", "models: b has no option port; the server's are for all"),
        ([], "models: {b: {dtype: float8}}", "models: b: "),
        ([], "models: {b: {threads: 0}}", "models: b: threads must be at least 1, not 0"),
        ([], "models: {b: {weight: 0}}", "models: b: weight must be a number above 0"),
        ([], "models: {'a/': x, c: y}", "'a/' is no name for a model"),
        ([], "models: {1: a, '1': b}", "there are two entries named 1"),
        ([], "models: {a: {threads: 1, threads: 2}}", "there are two entries named threads"),
        ([], "models: {a: {cache-mb: 1, cache_mb: 2}}", "models: a: cache_mb is there twice"),
        ([], "packing: auto\ndebug: {packing: auto}", "packing is there twice, alone and in debug"),
        ([], "limit: 3", "limit must hold options by name"),
        ([], "limit: {port: 3}", "limit: there is no option port; the keys are "),
        ([], "models: {b: {limit: {max_images: 3}}}", "models: b has no option max_images"),
    ):
        found = _asked(*arguments, *(["--config", _file(tmp_path, text)] if text else []))
        assert found.exit_code == 2, found.output
        assert message in " ".join(found.output.split())
        assert len([line for line in found.output.splitlines() if line.startswith("Error")]) == 1
