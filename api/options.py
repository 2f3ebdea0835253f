"""Command-line options, generated from configuration dataclasses, and options from YAML files."""

import dataclasses
import functools
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from maxsimd.api.config import ServerConfig
from maxsimd.engine.config import EngineConfig

if TYPE_CHECKING:
    import yaml  # late at run time: a command line without a file does not need it


C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])

# A server's own defaults: it refuses requests rather than let them wait long.
SERVED: Mapping[str, Any] = {"max_wait_seconds": 30.0}
# Options whose variable is read elsewhere: it may hold several values.
_OWN_VARIABLES = {"api_key"}
_KEYS_VARIABLE = "MAXSIMD_API_KEY"


def options_from(
    config: type, exclude: frozenset[str] = frozenset(), defaults: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[F], F]:
    """Gives a click command an option for each field of a configuration dataclass. `defaults` override the
    dataclass's."""

    def decorate(command: F) -> F:
        for field in reversed(_fields(config, exclude)):
            arguments = _click_arguments(config, field, defaults.get(field.name, field.default))
            if field.name not in _OWN_VARIABLES:
                arguments["envvar"] = variable(field.name)
            command = click.option(flag(field.name), **arguments)(command)
        return command

    return decorate


def config_from(config: type[C], values: dict[str, Any]) -> C:
    """Builds the dataclass and takes its values out of `values`."""
    names = [field.name for field in dataclasses.fields(config) if field.name in values]  # type: ignore[arg-type]
    try:
        return config(**{name: values.pop(name) for name in names})
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def engine_options() -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(EngineConfig) if field.name != "model")


def markdown_table(*configs: type) -> str:
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
    """Keys that the list of processes shall not show."""
    value = os.environ.get(_KEYS_VARIABLE)
    if value is None:
        return ()
    keys = tuple(key.strip() for key in re.split(r"[,\n]", value) if key.strip())
    if not keys:
        raise click.UsageError(f"{_KEYS_VARIABLE} is set, but holds no key; give it one or unset it")
    return keys


# Fields that are not printed.
_SECRET = {"api_key"}
# Key of the file's `models` in a context.
_MODELS = "maxsimd.models"
# YAML's tag of the name <<.
_FROM_ANOTHER = "tag:yaml.org,2002:merge"


class DuplicateError(ValueError):
    """Something is in a file twice."""


def config_file_option(command: F) -> F:
    """`--config FILE`: flags go before variables, variables before the file, the file before defaults."""
    return click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False),
        is_eager=True,
        expose_value=False,
        callback=_use,
        envvar="MAXSIMD_CONFIG",
        help="YAML file with options by their names, for those that are not given otherwise.",
    )(command)


def shown(*configs: Any) -> str:
    """Configurations as YAML, without keys."""
    import yaml

    values = {name: value for config in configs for name, value in values_of(config).items()}
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def values_of(config: Any) -> dict[str, Any]:
    values = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _SECRET:
            values[field.name] = list(value) if isinstance(value, tuple) else value
    return values


def options_of(said: Mapping[Any, Any]) -> dict[str, Any]:
    """Options by Python name, from flags or Python names. Raises DuplicateError."""
    options = {str(name).replace("-", "_"): value for name, value in said.items()}
    if len(options) < len(said):
        names = [str(name).replace("-", "_") for name in said]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise DuplicateError(f"{', '.join(twice)} is there twice, with - and with _; leave out one")
    return options


def models_in_file(context: click.Context) -> Any:
    """The file's `models`, or None."""
    return context.meta.get(_MODELS)


def _use(context: click.Context, parameter: click.Parameter, path: str | None) -> None:
    if path is None:
        return
    names = {each.name for each in context.command.params if each.name is not None}
    options = _read(path, names)
    takes_several = any(each.name == "model" and each.nargs == -1 for each in context.command.params)
    models = options.pop("models", None)
    if models is not None:
        if not takes_several:
            raise click.BadParameter(f"{path} has several models; this command takes one, as `model`")
        if "model" in options:
            raise click.BadParameter(f"{path} has both model and models; leave one of them out")
        context.meta[_MODELS] = models
    given = {name: value for name, value in options.items() if name in names}
    if takes_several and "model" in given:
        given["model"] = (given["model"],)
    context.default_map = {**(context.default_map or {}), **given}


def _read_yaml(text: str) -> Any:
    """Raises ValueError, yaml.YAMLError, and DuplicateError for entries with the same name (1 and "1" too):
    YAML's loaders take the last."""
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_no_entry_twice(loader, node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_no_entry_twice(loader: "yaml.SafeLoader", whole: "yaml.Node") -> None:
    """Runs before nodes are constructed: << would add entries."""
    import yaml

    seen, left = {id(whole)}, [whole]
    while left:
        node = left.pop()
        parts = []
        if isinstance(node, yaml.MappingNode):
            _check_names(loader, [name for name, _ in node.value])
            parts = [part for entry in node.value for part in entry]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        left += [part for part in parts if id(part) not in seen]
        seen.update(map(id, parts))


def _check_names(loader: "yaml.SafeLoader", nodes: Sequence["yaml.Node"]) -> None:
    import yaml

    names = set()
    for node in nodes:
        if not isinstance(node, yaml.ScalarNode) or node.tag == _FROM_ANOTHER:
            continue
        name = str(loader.construct_object(node))
        if name in names:
            line = node.start_mark.line + 1
            message = f"there are two entries named {name}, the second in line {line}; leave out one"
            raise DuplicateError(message)
        names.add(name)


def _read(path: str, names: set[str]) -> dict[str, Any]:
    """Options by Python name. Raises click.BadParameter for unknown ones."""
    import yaml

    try:
        values = _read_yaml(Path(path).read_text(encoding="utf-8"))
    except DuplicateError as error:
        raise click.BadParameter(f"{path}: {error}") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise click.BadParameter(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise click.BadParameter(f"{path} holds no options but {type(values).__name__}; write name: value")
    try:
        options = options_of(values)
    except DuplicateError as error:
        raise click.BadParameter(f"{path}: {error}") from error
    there = {field.name for config in (EngineConfig, ServerConfig) for field in dataclasses.fields(config)}
    unknown = sorted(options.keys() - there - names - {"models"})
    if unknown:
        raise click.BadParameter(f"{path}: there is no option {', '.join(unknown)}")
    # Null leaves an option at its default.
    return {name: value for name, value in options.items() if value is not None}


# A field of requests too.
_AMBIGUOUS = {"window_overlap"}
_NAMES = [field.name for field in fields(EngineConfig)]
_UNMISTAKABLE = [name for name in _NAMES if "_" in name and name not in _AMBIGUOUS]
# A name with a value, or one that is no word of English; not as a part of a path or of another name,
# and not where the file of keys gives it to a tenant.
_NAMED = re.compile(
    rf'(?<![\w./-])(?:(?P<given>{"|".join(_NAMES)})=(?:True\b|"(?P<text>[^"]*)"|(?P<value>[\w.-]*\w))'
    rf"|(?P<name>{'|'.join(_UNMISTAKABLE)}))(?![\w/=]| of the tenant)"
)


def in_flags(message: str) -> str:
    """`allow_pickle=True` becomes --allow-pickle, `kernels="torch"` --kernels torch and `cache_mb`
    --cache-mb."""
    return _NAMED.sub(_flag, message)


def _flag(found: re.Match[str]) -> str:
    name = found["given"] or found["name"]
    value = found["text"] or found["value"]
    return f"--{name.replace('_', '-')}" + (f" {value}" if value else "")
