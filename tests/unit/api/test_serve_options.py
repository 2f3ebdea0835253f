"""The server's options: each reaches what it is for, from the command line on."""

import asyncio
import dataclasses
import gc
import json
import re
import runpy
import shlex
import typing
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import pytest
import yaml
from click.testing import CliRunner

from maxsimd.api import options
from maxsimd.api.answer import as_api_error
from maxsimd.api.cli import main
from maxsimd.api.cluster.config import RAYS_OWN, AppConfig
from maxsimd.api.config import ServerConfig
from maxsimd.api.fleet.supervisor import supervise
from maxsimd.api.options import flag, in_collections, in_flags, variable
from maxsimd.engine import EngineConfig, QueueFullError, SyncEngine
from maxsimd.engine.config import COLLECTIONS, GROUPS

Captured = list[tuple[EngineConfig, ServerConfig, float]]


@click.command()
def measure() -> None:
    click.echo("measured")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Captured:
    captured: Captured = []
    serve = lambda *given: captured.append(given[:3]) or 7  # noqa: E731
    monkeypatch.setattr("maxsimd.api.serve.serve", serve)
    monkeypatch.setattr("maxsimd.api.fleet.supervisor.supervise", serve)
    monkeypatch.setattr("maxsimd.api.logs.set_up_logging", lambda level, form: None)
    return captured


SAMPLES: dict[str, Any] = {
    **{"steps_in_flight": 1, "compress_ratio": 4, "fronts": 7, "replicas": 7},
    **dict.fromkeys(("hybrid_weights", "compress_layers"), "1,2,3"),
    "cors_origin": ("https://one.example", "*"),
    "query_prompt": "query: ",
}


def _sample(config: type, field: "dataclasses.Field[Any]") -> Any:
    if field.name in SAMPLES:
        return SAMPLES[field.name]
    kind = typing.get_type_hints(config)[field.name]
    kinds = [kind, *typing.get_args(kind)]
    for choices in kinds:
        if typing.get_origin(choices) is typing.Literal:
            return next(value for value in typing.get_args(choices) if value != field.default)
    if typing.get_origin(kind) is tuple:
        return ("one", "two")
    if bool in kinds:
        return not field.default
    return 77 if int in kinds else 7.5 if float in kinds else "something"


def test_every_option_reaches_its_configuration(served: Captured) -> None:
    for index in (0, 1):
        kind = (EngineConfig, ServerConfig)[index]
        for field in dataclasses.fields(kind):
            if field.name == "model":
                continue
            value = _sample(kind, field)
            name = flag(field.name)
            if isinstance(value, bool):
                arguments = [name]
            elif isinstance(value, tuple):
                arguments = [part for one in value for part in (name, one)]
            else:
                arguments = [name, str(value)]
            # A key is of use only with its certificate.
            also = {"tls_cert": "cert"} if field.name == "tls_key" else {}
            arguments += [part for other in also for part in (flag(other), also[other])]
            served.clear()
            result = CliRunner().invoke(main, ["serve", "some/model", *arguments])
            assert result.exit_code == 7, result.output
            expected: list[Any] = [EngineConfig(model="some/model", max_wait_seconds=30.0), ServerConfig()]
            assert value != getattr(expected[index], field.name)
            expected[index] = dataclasses.replace(expected[index], **{field.name: value} | also)
            assert list(served[0][:2]) == expected


def test_logging_is_set_up(served: Captured, monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    set_up: list[tuple[str, str]] = []
    monkeypatch.setattr("maxsimd.api.logs.set_up_logging", lambda level, form: set_up.append((level, form)))
    CliRunner().invoke(main, ["serve", "--log-level", "debug", "--log-format", "json"])
    CliRunner().invoke(main, ["serve"])
    assert set_up == [("debug", "json"), ("info", "text")]
    result = CliRunner().invoke(main, ["serve", "--packing", "off", "--log-format", "json"])
    assert "hint: write --debug packing=off instead of --packing off" in caplog.text
    assert "hint" not in result.output, "it is a line of the log"


def test_a_wrong_option_is_explained(served: Captured) -> None:
    for arguments, message in (
        (["--max-body-mb", "0"], "max_body_mb must be at least 1, not 0"),
        (["--steps-in-flight", "3"], "steps_in_flight must be one of 1, 2, not 3"),
        (["--drain-seconds", "-1"], "drain_seconds must be a number from 0 on, not -1"),
        (["--grace-seconds", "nan"], "grace_seconds must be a number from 0 on, not nan"),
        (["--header-seconds", "0"], "header_seconds must be a number above 0, not 0.0"),
        (["--transfer-seconds", "inf"], "transfer_seconds must be a number above 0, not inf"),
        (["--min-bytes-per-second", "-1"], "min_bytes_per_second must be at least 0, not -1"),
        (["--port", "65536"], "port must be from 0 to 65535, not 65536"),
        (["--grpc-port", "1", "--fronts", "2"], "grpc_port needs one front"),
        (["--api-key", "one", "--api-key", " \t"], "api_key must not be empty"),
        (["--tls-key", "key"], "tls_key needs tls_cert"),
        (["--cors-origin", "example.com"], "cors_origin must be * or like https://example.com"),
        (["--cors-origin", "https://example.com/"], "cors_origin must be * or like https://example.com"),
        (["--port", "x"], "Invalid value for '--port'"),
        (["--long-documents", "all"], "Invalid value for '--long-documents'"),
        (["--nope"], "No such option"),
    ):
        result = CliRunner().invoke(main, ["serve", *arguments])
        assert (result.exit_code, message in result.output) == (2, True), result.output
        assert served == []


def test_keys_come_from_the_environment_too(served: Captured) -> None:
    for value in ("two,three", " two , three,", "two\nthree\n"):
        served.clear()
        CliRunner().invoke(main, ["serve", "--api-key", "one"], env={"MAXSIMD_API_KEY": value})
        assert served[0][1] == ServerConfig(api_key=("one", "two", "three"))
    served.clear()
    for value in ("", " ", ",\n,"):
        result = CliRunner().invoke(main, ["serve"], env={"MAXSIMD_API_KEY": value})
        assert result.exit_code == 2
        assert "MAXSIMD_API_KEY is set, but holds no key; give it one or unset it" in result.output
        assert served == []


def _printed(*arguments: str, **variables: str) -> tuple[dict[str, Any], list[str]]:
    """The configuration of `serve`, and the hints."""
    result = CliRunner().invoke(main, ["serve", *arguments, "--print-config"], env=variables)
    assert result.exit_code == 0, result.output
    hints = [line for line in result.stderr.splitlines() if line.startswith("hint: ")]
    return yaml.safe_load(result.stdout), hints


def test_options_in_collections_keep_their_old_names(tmp_path: Path) -> None:
    fields = {
        field.name: (field.metadata["within"], _sample(config, field))
        for config in (EngineConfig, ServerConfig)
        for field in dataclasses.fields(config)
        if field.metadata["within"]
    }
    values = {name: value for name, (_, value) in fields.items()}
    nested: dict[str, dict[str, Any]] = {collection: {} for collection in COLLECTIONS}
    for name, (collection, value) in fields.items():
        nested[collection][name] = value
    old_file, new_file = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old_file.write_text(yaml.safe_dump(values))
    new_file.write_text(yaml.safe_dump(nested))
    old = (
        _printed(*(part for name, value in values.items() for part in (flag(name), str(value)))),
        _printed(**{variable(name): str(value) for name, value in values.items()}),
        _printed("--config", str(old_file)),
    )
    pairs = [(of, f"{name}={value}") for name, (of, value) in fields.items()]
    of_environment = {of: shlex.join(pair for each, pair in pairs if each == of) for of in nested}
    new = (
        _printed(*(part for of, pair in pairs for part in (flag(of), pair))),
        _printed(**{variable(of): value for of, value in of_environment.items()}),
        _printed("--config", str(new_file)),
    )
    for printed, hints in (*old, *new):
        assert {of: printed[of] for of in nested} == nested
        assert len(hints) == (0 if (printed, hints) in new else len(values))
    assert "hint: write --debug packing=off instead of --packing off, which still works" in old[0][1]
    of_ray = {name: value for name, value in values.items() if name not in RAYS_OWN}
    application = AppConfig.of(of_ray)
    assert application == AppConfig.of(in_collections(of_ray)) == AppConfig.of(application.arguments())
    assert application.arguments() == in_collections(of_ray) | {"threads": 1}
    # In Python, limits and most options of models are keywords like others.
    keywords = {name: value for name, (of, value) in fields.items() if of in ("debug", "model_option")}
    with pytest.warns(FutureWarning, match="which still works") as hinted:
        config = EngineConfig(**keywords)
    assert len(hinted) == len(nested["debug"]) + 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = EngineConfig(debug=nested["debug"], model_option=nested["model_option"])
        assert dataclasses.replace(same, max_vectors=3) == dataclasses.replace(config, max_vectors=3)
        assert SyncEngine(debug={"packing": "off"}).config.packing == "off"
    with pytest.raises(ValueError, match="debug has no option 'dtype'"):
        EngineConfig(debug={"dtype": "float32"})


def test_each_source_of_a_collection_goes_before_the_next(tmp_path: Path) -> None:
    file = tmp_path / "maxsimd.yaml"
    file.write_text("debug: {kernels: torch, packing: 'off', cuda_graphs: 'off'}")
    given = ("--config", str(file), "--debug", "kernels=auto")
    printed, _ = _printed(*given, MAXSIMD_DEBUG="packing=auto kernels=torch", MAXSIMD_LIMIT="max_vectors=7")
    kept = {name: printed["debug"][name] for name in ("kernels", "packing", "cuda_graphs")}
    assert kept == {"kernels": "auto", "packing": "auto", "cuda_graphs": "off"}
    assert printed["limit"]["max_vectors"] == 7
    for variables, message in (
        ({"MAXSIMD_DEBUG": "1"}, "'1' is not KEY=VALUE; the keys are steps_in_flight"),
        ({"MAXSIMD_DEBUG": "dtype=1"}, "there is no option 'dtype'"),
        ({"MAXSIMD_DEBUG": "a='"}, "MAXSIMD_DEBUG: No closing quotation"),
        ({"MAXSIMD_DEBUG": "kernels=x"}, "Invalid value for '--debug kernels'"),
    ):
        result = CliRunner().invoke(main, ["serve"], env=variables)
        assert (result.exit_code, message in result.output) == (2, True), result.output
    of_a_server = CliRunner().invoke(main, ["rerank", "--query", "q"], env={"MAXSIMD_LIMIT": "max_images=1"})
    assert "Missing option '--documents'" in of_a_server.output


def _help(*arguments: str, width: int = 200) -> str:
    return CliRunner().invoke(main, arguments, terminal_width=width).output


def test_help_shows_usual_options_groups_or_all() -> None:
    usual = _help("serve", "--help", width=80).splitlines()
    assert len(usual) <= 24
    assert all(len(line) <= 80 for line in usual)
    assert len([line for line in usual if line.startswith("  --")]) == 12
    assert usual == _help("serve", "-h", width=80).splitlines()
    groups = {group: _help("serve", f"--help={group}") for group in GROUPS}
    everything = _help("serve", "--help-all")
    assert len(re.findall(r"^  -", everything, flags=re.MULTILINE)) <= 60
    for config in (EngineConfig, ServerConfig):
        for field in dataclasses.fields(config):
            about, page = field.metadata, groups[field.metadata["group"]]
            if field.name != "model":
                shown = f"\n  {field.name if about['within'] else flag(field.name)} "
                assert (shown in page, shown in everything) == (True, about["within"] is None), page
                assert re.sub(r"\s+", "", about["help"]) in re.sub(r"\s+", "", page)
                assert about["within"] or f"[env: {variable(field.name)}]" in page or field.name == "api_key"
            assert len(about["help"]) <= 100
            for choice in typing.get_args(typing.get_type_hints(config)[field.name]):
                assert not isinstance(choice, str) or choice in about["help"]
    for default in ("[default: 127.0.0.1]", "[default: 8000]", "[default: 30.0]", "[default: truncate]"):
        assert default in everything
    assert "[default: False]" not in everything
    for command in ("rerank", "eval", "embed", "inspect"):
        own = _help(command, "--help", width=80)
        assert ("--dtype TYPE" in own, "--help-all" in own) == (False, True), own
        assert "--dtype" in _help(command, "--help=performance")
        assert "there is no group 'processes'" in _help(command, "--help=processes")
    assert all(len(_help(command, "-h", width=80).splitlines()) <= 24 for command in ("rerank", "eval"))


def test_commands_of_other_packages_join_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"maxsimd.commands": [EntryPoint("measure", f"{__name__}:measure", "maxsimd.commands")]}
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: points[group])
    runner = CliRunner()
    listed = runner.invoke(main, ["--help"]).output.partition("Commands:\n")[2]
    names = "calibrate compare download embed eval inspect measure rerank score serve version"
    assert re.findall(r"^  (\w+)", listed, flags=re.MULTILINE) == names.split()
    assert runner.invoke(main, ["measure"]).output == "measured\n"
    assert runner.invoke(main, ["inspect", "--help"]).exit_code == 0
    assert "No such command 'weigh'" in runner.invoke(main, ["weigh"]).output


def test_inspect_hands_on_what_it_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(main, ["inspect", "/nowhere/at/all"])
    assert result.exit_code == 1
    assert "Error: there is no folder '/nowhere/at/all'" in result.output
    asked: list[tuple[EngineConfig, bool]] = []
    note = lambda config, check: asked.append((config, check)) or {"größe": 1}  # noqa: E731
    monkeypatch.setattr("maxsimd.engine.inspection.inspect_model", note)
    monkeypatch.setattr("maxsimd.engine.inspection.show", lambda rows: f"shown: {rows}")
    shown = CliRunner().invoke(main, ["inspect", "some/model", "--dtype", "float16"])
    assert (shown.stdout, shown.stderr) == ("shown: {'größe': 1}\n", "Loading some/model ...\n")
    as_json = CliRunner().invoke(main, ["inspect", "some/model", "--dtype", "float16", "--json", "--check"])
    assert (json.loads(as_json.stdout), "größe" in as_json.stdout) == ({"größe": 1}, True), as_json.stdout
    config = EngineConfig(model="some/model", dtype="float16")
    assert asked == [(config, False), (config, True)]


def test_the_tables_of_options_have_a_row_for_each() -> None:
    tables = runpy.run_path("docs/extensions/option_tables.py")["markdown_tables"]()
    assert re.findall(r"^## (.+)", tables, flags=re.MULTILINE) == [*GROUPS.values()]
    rows = [line.strip("| ").split(" | ") for line in tables.splitlines() if line.startswith("| `")]
    fields = [*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig)]
    defaults = {row[0].strip("`"): row[1] for row in rows}
    assert len(rows) == len(defaults)
    assert defaults.keys() == {options.flag_with_collection(field.name) for field in fields} - {"--model"}
    for name, shown in (
        ("--port", "8000"), ("--served-model-name", ""), ("--restart-on-failure", "off"),
        ("--max-wait-seconds", "30.0"), ("--debug packing", "auto"), ("--max-model-len", "the model's"),
    ):  # fmt: skip
        assert defaults[name] == shown


def test_options_become_flags() -> None:
    for message, expected in (
        ("trust them with allow_pickle=True", "trust them with --allow-pickle"),
        ('try kernels="torch" or another dtype: 1e-3', "try --debug kernels=torch or another dtype: 1e-3"),
        ("raise cache_mb, name a folder (cache_dir)", "raise --cache-mb, name a folder (--cache-dir)"),
        ("with max_model_len=512 there is none", "with --max-model-len 512 there is none"),
        ("dimensions=99 is more than 8", "--model-option dimensions=99 is more than 8"),
        ("raise max_vectors", "raise --limit max_vectors"),
        ("raise max_request_tokens", "raise --max-request-tokens"),
        # Not what only looks like one.
        ("max_request_tokens of the tenant 'a'", "max_request_tokens of the tenant 'a'"),
        ("no model of this device, in dtype float32", "no model of this device, in dtype float32"),
        ("/tmp/cache_dir/x is full", "/tmp/cache_dir/x is full"),
        ("my_cache_dir and cache_dirs", "my_cache_dir and cache_dirs"),
        ("window_overlap must be less", "window_overlap must be less"),
        ("models-device=1", "models-device=1"),
    ):
        assert in_flags(message) == expected
    assert str(as_api_error(QueueFullError("(max_wait_seconds)", 1.0))) == "(--max-wait-seconds)"
    for path in sorted((Path(__file__).parents[3] / "engine").rglob("*.py")):
        for line in path.read_text(encoding="utf-8").splitlines():
            for named in re.findall(r"(?<!-)--[a-z][a-z-]+", line.partition("#")[0]):
                assert named in ("--no-deps", "--check", "--merge"), f"{path.name}: {line.strip()}"


def test_no_temp_folder_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    nowhere = FileNotFoundError(2, "No usable temporary directory found")
    monkeypatch.setattr("tempfile.gettempdir", Mock(side_effect=nowhere))
    assert supervise(EngineConfig(), ServerConfig(host="127.0.0.1", port=0, fronts=2), 0.0) == 1
    assert caplog.messages == ["no folder for temporary files can be written to; set TMPDIR to one that can"]


def test_a_fleet_without_replicas_ends_quietly(monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    live = lambda process: asyncio.sleep(100 * process._setup.is_front)  # noqa: E731
    monkeypatch.setattr("maxsimd.api.fleet.supervisor._Process.live", live)
    monkeypatch.setattr("maxsimd.api.fleet.supervisor.show_stacks_on_sigusr1", lambda also: None)
    assert supervise(EngineConfig(), ServerConfig(host="127.0.0.1", port=0, fronts=2), 0.0) == 1
    gc.collect()
    assert caplog.records == []
