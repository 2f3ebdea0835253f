"""Options from a YAML file and from the environment, and which go first."""

from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result

from maxsimd.api.cli import main
from maxsimd.api.config import ServerConfig
from maxsimd.engine.config import EngineConfig


def _asked(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, ["serve", *arguments, "--print-config"], env=environment)


def _config(*arguments: str, **environment: str) -> dict[str, Any]:
    found = _asked(*arguments, **environment)
    assert found.exit_code == 0, found.output
    config: dict[str, Any] = yaml.safe_load(found.output)
    return config


def _file(tmp_path: Path, text: str) -> str:
    file = tmp_path / "maxsimd.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_without_anything_the_defaults_are_printed_and_no_key_is() -> None:
    config = _config()
    for settings in (EngineConfig(), ServerConfig()):
        for name in settings.__dataclass_fields__:
            if name != "api_key":
                value = getattr(settings, name)
                assert config.pop(name) == (list(value) if isinstance(value, tuple) else value)
    assert config == {}
    assert "secret" not in _asked("--api-key", "secret", MAXSIMD_API_KEY="also-secret").output


def test_flags_override_variables_that_override_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path, "port: 1\nmax-documents: 7\nmodel: of-the-file\nnormalize_scores: true\n")
    config = _config("--config", path)
    assert (config["port"], config["max_documents"], config["model"]) == (1, 7, "of-the-file")
    assert config["normalize_scores"] is True
    config = _config("--config", path, MAXSIMD_PORT="2", MAXSIMD_MODEL="of-the-environment")
    assert (config["port"], config["max_documents"], config["model"]) == (2, 7, "of-the-environment")
    config = _config("of-the-command", "--config", path, "--port", "3", MAXSIMD_PORT="2")
    assert (config["port"], config["model"]) == (3, "of-the-command")
    assert _config(MAXSIMD_CONFIG=path)["port"] == 1
    assert _config(MAXSIMD_RESTART_ON_FAILURE="1")["restart_on_failure"] is True


def test_an_address_of_kubernetes_is_no_port() -> None:
    assert _config(MAXSIMD_PORT="tcp://10.0.0.1:80", MAXSIMD_SERVICE_HOST="10.0.0.1")["port"] == 8000


def test_what_is_printed_gives_the_same_again(tmp_path: Path) -> None:
    arguments = (
        "m",
        "--dtype",
        "float32",
        "--served-model-name",
        "a",
        "--served-model-name",
        "b",
        "--port",
        "0",
    )
    printed = _asked(*arguments).output
    assert _asked("--config", _file(tmp_path, printed)).output == printed
    assert yaml.safe_load(printed)["served_model_name"] == ["a", "b"]


def test_what_is_wrong_in_a_file_is_told_in_one_line(tmp_path: Path) -> None:
    for text, message in (
        ("prot: 1", "there is no option prot"),
        ("- port", "holds no options but list"),
        ("port: [", "is no YAML"),
        ("port: many", "'many' is not a valid integer"),
        ("port: 70000", "port must be from 0 to 65535"),
        ("dtype: float8", "'float8' is not one of"),
        ("port: 1\nhost: a\nport: 2", "maxsimd.yaml: there are two entries named port, the second in line 3"),
        ("max-documents: 1\nmax_documents: 2", "max_documents is there twice, with - and with _"),
        ("port: 2024-13-45", "is no YAML: month must be in 1..12"),
        ("? [a]\n: b", "is no YAML"),
    ):
        found = _asked("--config", _file(tmp_path, text))
        assert found.exit_code == 2
        assert message in found.output
        assert len([line for line in found.output.splitlines() if line.startswith("Error")]) == 1


def test_what_an_entry_has_from_another_may_be_said_anew(tmp_path: Path) -> None:
    """YAML's own <<, in any order of what is read first; and a file that holds itself."""
    text = "models: {a: &a {dtype: float32, weight: 2}, b: &b {<<: *a, weight: 3}, c: {<<: *b, weight: 4}}"
    models = _config("--config", _file(tmp_path, text))["models"]
    assert [(one["dtype"], one["weight"]) for one in models.values()] == [("float32", n) for n in (2, 3, 4)]
    assert "models must hold names" in _asked("--config", _file(tmp_path, "models: &a [*a]")).output


def test_what_serve_prints_suits_the_other_commands(tmp_path: Path) -> None:
    path = _file(tmp_path, _asked().output)
    found = CliRunner().invoke(main, ["rerank", "--query", "q", "--documents", "/none", "--config", path])
    assert "'/none' does not exist" in found.output


def test_other_commands_take_the_same_file(tmp_path: Path) -> None:
    path = _file(tmp_path, "port: 1\ndtype: float8\n")
    found = CliRunner().invoke(main, ["inspect", "--config", path])
    assert found.exit_code == 2
    assert "float8" in found.output
