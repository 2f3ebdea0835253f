"""Command-line options and their documentation, generated from configuration dataclasses."""

import dataclasses
import functools
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import click

from maxsimd.engine.config import EngineConfig

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])

# A server's own defaults. It refuses a client rather than let it wait.
SERVED: Mapping[str, Any] = {"max_wait_seconds": 30.0}
# Options whose variable is read elsewhere: it may hold several values.
_OWN_VARIABLES = {"api_key"}
_KEYS_VARIABLE = "MAXSIMD_API_KEY"


def options_from(
    config: type, exclude: frozenset[str] = frozenset(), defaults: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[F], F]:
    """A decorator that gives a click command one option a field of a configuration dataclass. `defaults` are
    the command's own, where they are not the dataclass's."""

    def decorate(command: F) -> F:
        for field in reversed(_fields(config, exclude)):
            arguments = _click_arguments(config, field, defaults.get(field.name, field.default))
            if field.name not in _OWN_VARIABLES:
                arguments["envvar"] = variable(field.name)
            command = click.option(flag(field.name), **arguments)(command)
        return command

    return decorate


def config_from(config: type[C], values: dict[str, Any]) -> C:
    """Builds the dataclass from a click command's values, and takes those out of `values`."""
    names = [field.name for field in dataclasses.fields(config) if field.name in values]  # type: ignore[arg-type]
    try:
        return config(**{name: values.pop(name) for name in names})
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def engine_options() -> tuple[str, ...]:
    """The names of the options of a model's engine."""
    return tuple(field.name for field in dataclasses.fields(EngineConfig) if field.name != "model")


def markdown_table(*configs: type) -> str:
    """The table of a server's options."""
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    for config in configs:
        for field in _fields(config, frozenset({"model"})):
            value = SERVED.get(field.name, field.default)
            default = "" if value in (None, ()) else _shown(value)
            lines.append(f"| `{flag(field.name)}` | {default} | {field.metadata['help']} |")
    return "\n".join(lines)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment's variable for an option."""
    return "MAXSIMD_" + name.upper()


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:,}" if isinstance(default, int) and default >= 10_000 else str(default)


def _fields(config: type, exclude: frozenset[str]) -> list["dataclasses.Field[Any]"]:
    return [field for field in dataclasses.fields(config) if field.name not in exclude]


@functools.cache
def _types_of(config: type) -> dict[str, Any]:
    return typing.get_type_hints(config)


def _click_arguments(config: type, field: "dataclasses.Field[Any]", default: Any) -> dict[str, Any]:
    kind = _types_of(config)[field.name]
    arguments: dict[str, Any] = {"help": field.metadata["help"], "default": default}
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        arguments["type"] = click.Choice(list(typing.get_args(kind)))
    elif typing.get_origin(kind) is tuple:
        arguments["multiple"] = True
    elif kind is bool:
        arguments["is_flag"] = True
    else:
        arguments["type"] = kind
    arguments["show_default"] = default not in (None, (), False)
    return arguments


def keys_of_environment() -> tuple[str, ...]:
    """Keys that are not to be seen in the list of processes."""
    value = os.environ.get(_KEYS_VARIABLE)
    if value is None:
        return ()
    keys = tuple(key.strip() for key in re.split(r"[,\n]", value) if key.strip())
    if not keys:
        raise click.UsageError(f"{_KEYS_VARIABLE} is set, but holds no key; give it one or unset it")
    return keys
