"""The command line: `maxsimd serve`, and commands in modules of their own or of other rooms."""

import time

_STARTED = time.perf_counter()  # before the imports below, which take seconds

import dataclasses
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from maxsimd.api.config import ServerConfig
from maxsimd.api.help import Command, Commands
from maxsimd.api.model_setup import ModelsArgument, ModelSetup, check_together, several_models, shown
from maxsimd.api.options import (
    SERVED,
    GroupedOption,
    config_file_option,
    config_from,
    hints_of,
    in_flags,
    keys_of_environment,
    models_in_file,
    options_from,
)
from maxsimd.api.process import (
    exiting_on_signals,
    let_waiting_threads_sleep,
    open_standard_files,
    show_stacks_on_sigusr1,
)
from maxsimd.engine.config import EngineConfig, refuse_missing_folder, shown_name
from maxsimd.engine.errors import ModelLoadError

# Commands that are imported when they are asked for: module and function.
_LATE = {
    "calibrate": ("evaluate", "calibrate"),
    "compare": ("compare", "compare"),
    "download": ("download", "download"),
    "embed": ("embed", "embed"),
    "eval": ("evaluate", "evaluate"),
    "rerank": ("rank", "rerank"),
    "score": ("rank", "score"),
}


class _Commands(Commands):
    """A group that imports a command when it is asked for, and that also knows the commands which installed
    packages register."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted({*super().list_commands(context), *_LATE, *(point.name for point in _registered())})

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        command: click.Command | None = super().get_command(context, name)
        if command is not None:
            return command
        if name in _LATE:
            module, attribute = _LATE[name]
            command = getattr(import_module(f"maxsimd.api.cli.{module}"), attribute)
        for point in _registered() if command is None else ():
            if point.name == name:
                command = point.load()
        return command

    def invoke(self, context: click.Context) -> Any:
        """Runs a command. Ctrl-C ends the process with the status that shells expect, where click's is 1."""
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(128 + signal.SIGINT)


def _registered() -> Any:
    from importlib.metadata import entry_points

    return entry_points(group="maxsimd.commands")


@click.group(cls=_Commands)
@click.version_option(package_name="maxsimd")
def main() -> None:
    """Score documents against queries, over HTTP or from files."""
    open_standard_files()
    let_waiting_threads_sleep()
    _ignore_service_links()


@main.command()
def version() -> None:
    """Show the versions of maxsimd, Python and libraries."""
    from importlib.metadata import version as installed_version

    for name in ("maxsimd", "torch", "transformers", "sentence-transformers", "tokenizers", "aiohttp"):
        click.echo(f"{name:<22} {installed_version(name)}")
    click.echo(f"{'python':<22} {sys.version.split()[0]}")


@main.command()
@click.argument("model", required=False, envvar="MAXSIMD_MODEL")
@config_file_option
@options_from(EngineConfig, exclude=frozenset({"model"}))
@click.option("--check", is_flag=True, help="Show the self-check: what was compared, and the differences")
@click.option("--supported", is_flag=True, help="List supported architectures instead")
@click.option("--json", "as_json", is_flag=True, help="Print JSON")
def inspect(check: bool, supported: bool, as_json: bool, **values: Any) -> None:
    """Show how MODEL would be served, without serving it."""
    if supported:
        from maxsimd.engine.checkpoint.detect import SUPPORTED, kinds_as_lines

        rows_of_table = [dataclasses.asdict(row) for row in SUPPORTED]
        click.echo(json.dumps(rows_of_table, indent=2) if as_json else "\n".join(kinds_as_lines()))
        return
    config = config_from(EngineConfig, values)
    try:
        refuse_missing_folder(config.model)
        click.echo(f"Loading {shown_name(config.model)} ...", err=True)
        from maxsimd.engine.inspection import inspect_model, show

        rows = inspect_model(config, check)
    except ModelLoadError as error:
        raise click.ClickException(in_flags(str(error))) from error
    click.echo(json.dumps(rows, indent=2, ensure_ascii=False) if as_json else show(rows))


@main.command(cls=Command, shows_usual=True, logs_hints=True)
@click.argument("model", nargs=-1, envvar="MAXSIMD_MODEL", cls=ModelsArgument)
@config_file_option
@options_from(EngineConfig, exclude=frozenset({"model"}), defaults=SERVED)
@options_from(ServerConfig)
@click.option(
    "--print-config",
    cls=GroupedOption,
    group="server",
    is_flag=True,
    help="Print all options as YAML for --config, and exit",
)
@click.pass_context
def serve(context: click.Context, /, print_config: bool, **values: Any) -> None:
    """Serve MODEL, a folder or hub id, over HTTP. The default is all-MiniLM-L6-v2."""
    in_file = models_in_file(context)
    several: Sequence[ModelSetup] | None = None
    if in_file is not None or len(values["model"]) > 1:
        several = several_models(context, in_file, values)
    values["model"] = None if several is not None else next(iter(values["model"]), None)
    engine_config = config_from(EngineConfig, values)
    values["api_key"] += keys_of_environment()
    server_config = config_from(ServerConfig, values)
    if several is not None:
        try:
            check_together(several, server_config)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
    hints = hints_of(context)
    if print_config:
        for hint in hints:
            click.echo(hint, err=True)
        click.echo(shown(engine_config if several is None else several, server_config), nl=False)
        return
    from maxsimd.api.logs import set_up_logging

    set_up_logging(server_config.log_level, server_config.log_format)
    show_stacks_on_sigusr1()
    log = logging.getLogger("maxsimd.serve")
    for hint in hints:
        log.warning("%s", hint)
    with exiting_on_signals():
        # Before the imports that take seconds.
        for config in [engine_config] if several is None else [setup.engine for setup in several]:
            try:
                if several is None:  # others can serve without one of several
                    refuse_missing_folder(config.model)
            except ModelLoadError as error:
                log.error("%s", error)
                sys.exit(1)
            log.info("Loading %s ...", shown_name(config.model))
        if server_config.is_fleet:
            from maxsimd.api.fleet.supervisor import supervise

            sys.exit(supervise(engine_config, server_config, _STARTED))
        from maxsimd.api.serve import serve as run

        sys.exit(run(engine_config, server_config, _STARTED, several))


def _ignore_service_links() -> None:
    """Kubernetes sets MAXSIMD_PORT to an address where a service is named maxsimd: drops such variables."""
    for name, value in list(os.environ.items()):
        if name.startswith("MAXSIMD_") and re.match(r"(tcp|udp|sctp)://", value):
            del os.environ[name]
