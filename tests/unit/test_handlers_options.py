"""The server's options: each reaches what it is for, from the command line on."""

import dataclasses
import json
import logging
import sys
import typing
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import click
import pytest
from click.testing import CliRunner

from maxsimd.api.cli import main
from maxsimd.api.config import ServerConfig
from maxsimd.api.logs import JsonFormatter, set_up_logging
from maxsimd.api.options import flag
from maxsimd.engine import EngineConfig

Captured = list[tuple[EngineConfig, ServerConfig, float]]


@click.command()
def measure() -> None:
    click.echo("measured")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Captured:
    """What the server was asked to run, instead of running it."""
    captured: Captured = []

    def serve(engine_config: EngineConfig, server_config: ServerConfig, started: float) -> int:
        captured.append((engine_config, server_config, started))
        return 7

    monkeypatch.setattr("maxsimd.api.serve.serve", serve)
    monkeypatch.setattr("maxsimd.api.logs.set_up_logging", lambda level, form: None)
    return captured


def _sample(config: type, field: "dataclasses.Field[Any]") -> Any:
    """A value of an option that differs from its default."""
    kind = typing.get_type_hints(config)[field.name]
    kinds = [kind, *typing.get_args(kind)]
    for choices in kinds:
        if typing.get_origin(choices) is typing.Literal:
            return next(value for value in typing.get_args(choices) if value != field.default)
    if bool in kinds:
        return not field.default
    if field.name == "steps_in_flight":
        return 1
    if int in kinds:
        return 77
    if float in kinds:
        return 7.5
    if typing.get_origin(kind) is tuple:
        return ("one", "two")
    return "something"


OPTIONS = [
    pytest.param(index, config, field, id=field.name)
    for index, config in enumerate((EngineConfig, ServerConfig))
    for field in dataclasses.fields(config)
    if field.name != "model"
]


@pytest.mark.parametrize(("index", "config", "field"), OPTIONS)
def test_every_option_reaches_its_configuration(
    served: Captured, index: int, config: type, field: "dataclasses.Field[Any]"
) -> None:
    value = _sample(config, field)
    name = flag(field.name)
    if isinstance(value, bool):
        arguments = [name]
    elif isinstance(value, tuple):
        arguments = [part for one in value for part in (name, one)]
    else:
        arguments = [name, str(value)]
    result = CliRunner().invoke(main, ["serve", *arguments])
    assert result.exit_code == 7, result.output
    expected: list[Any] = [EngineConfig(), ServerConfig()]
    assert value != getattr(expected[index], field.name)
    expected[index] = dataclasses.replace(expected[index], **{field.name: value})
    assert list(served[0][:2]) == expected


def test_serve_takes_the_model_as_its_argument_and_ends_with_the_servers_status(served: Captured) -> None:
    result = CliRunner().invoke(main, ["serve", "some/model", "--port", "1"])
    assert result.exit_code == 7
    assert served[0][:2] == (EngineConfig(model="some/model"), ServerConfig(port=1))


def test_serve_sets_up_logging_as_asked(served: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up: list[tuple[str, str]] = []
    monkeypatch.setattr("maxsimd.api.logs.set_up_logging", lambda level, form: set_up.append((level, form)))
    CliRunner().invoke(main, ["serve", "--log-level", "debug", "--log-format", "json"])
    CliRunner().invoke(main, ["serve"])
    assert set_up == [("debug", "json"), ("info", "text")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-body-mb", "0"], "max_body_mb must be at least 1, not 0"),
        (["--max-documents", "0"], "max_documents must be at least 1, not 0"),
        (["--steps-in-flight", "3"], "steps_in_flight must be 1 or 2, not 3"),
        (["--port", "x"], "Invalid value for '--port'"),
        (["--long-documents", "all"], "Invalid value for '--long-documents'"),
        (["--nope"], "No such option"),
    ],
)
def test_a_wrong_option_is_explained(served: Captured, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["serve", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert served == []


def test_the_least_values_are_taken() -> None:
    config = ServerConfig(max_body_mb=1, max_documents=1)
    assert (config.max_body_mb, config.max_documents) == (1, 1)


def test_help_says_what_each_option_is_for_and_its_default() -> None:
    shown = " ".join(CliRunner().invoke(main, ["serve", "--help"], terminal_width=200).output.split())
    for config in (EngineConfig, ServerConfig):
        for field in dataclasses.fields(config):
            if field.name != "model":
                assert flag(field.name) in shown
                assert " ".join(field.metadata["help"].split()) in shown
    for default in ("[default: 127.0.0.1]", "[default: 8000]", "[default: 30.0]", "[default: truncate]"):
        assert default in shown
    assert "[default: False]" not in shown


def test_commands_of_other_packages_join_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("measure", f"{__name__}:measure", "maxsimd.commands")
    points = {"maxsimd.commands": [point]}
    monkeypatch.setattr("maxsimd.api.cli.entry_points", lambda *, group: points[group])
    runner = CliRunner()
    listed = runner.invoke(main, ["--help"]).output.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == ["inspect", "measure", "serve"]
    assert runner.invoke(main, ["measure"]).output == "measured\n"
    assert runner.invoke(main, ["inspect", "--help"]).exit_code == 0
    assert "No such command 'weigh'" in runner.invoke(main, ["weigh"]).output


def test_inspect_says_what_is_wrong_with_a_model() -> None:
    result = CliRunner().invoke(main, ["inspect", "/nowhere/at/all"])
    assert result.exit_code == 1
    assert "Error: there is no folder '/nowhere/at/all'" in result.output


@pytest.mark.parametrize("check", [False, True])
def test_inspect_hands_on_what_it_was_asked(monkeypatch: pytest.MonkeyPatch, check: bool) -> None:
    asked: list[tuple[EngineConfig, bool]] = []

    def inspect_model(config: EngineConfig, check: bool) -> dict[str, Any]:
        asked.append((config, check))
        return {"größe": 1}

    monkeypatch.setattr("maxsimd.engine.inspection.inspect_model", inspect_model)
    monkeypatch.setattr("maxsimd.engine.inspection.show", lambda rows: f"shown: {rows}")
    flags = ["--check"] if check else []
    shown = CliRunner().invoke(main, ["inspect", "some/model", "--dtype", "float16", *flags])
    assert shown.output == "shown: {'größe': 1}\n"
    as_json = CliRunner().invoke(main, ["inspect", "some/model", "--dtype", "float16", "--json", *flags])
    assert json.loads(as_json.output) == {"größe": 1}
    assert "größe" in as_json.output
    assert asked == [(EngineConfig(model="some/model", dtype="float16"), check)] * 2


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("maxsimd")
    handlers, level, our_level = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(our_level)


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("form", ["text", "json"])
def test_log_lines_are_for_people_or_for_machines(capsys: pytest.CaptureFixture[str], form: str) -> None:
    logging.getLogger().setLevel(logging.DEBUG)  # as somebody else may have done before
    set_up_logging("info", form)
    logging.getLogger("maxsimd.http").info("größer als %d", 3)
    logging.getLogger("maxsimd.http").debug("too fine")
    logging.getLogger("other.library").info("not ours")
    logging.getLogger("other.library").warning("from elsewhere")
    out, err = capsys.readouterr()
    ours, other = err.splitlines()
    assert out == ""
    if form == "text":
        assert ours[8:] == " INFO    größer als 3"
        assert other[8:] == " WARNING from elsewhere"
    else:
        line = json.loads(ours)
        assert list(line) == ["time", "level", "logger", "message"]
        assert len(line["time"]) == 19
        assert (line["level"], line["logger"], line["message"]) == ("info", "maxsimd.http", "größer als 3")
        assert "größer" in ours
        assert json.loads(other)["level"] == "warning"


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_the_level_is_the_least_that_is_logged(capsys: pytest.CaptureFixture[str], level: str) -> None:
    set_up_logging(level, "text")
    for name in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("maxsimd.http"), name)(name)
    levels = ["debug", "info", "warning", "error"]
    shown = [line.split()[-1] for line in capsys.readouterr().err.splitlines()]
    assert shown == levels[levels.index(level) :]


def test_an_exception_is_part_of_a_machines_line() -> None:
    try:
        raise ValueError("inside")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    line = json.loads(JsonFormatter().format(record))
    assert "ValueError: inside" in line["exception"]
