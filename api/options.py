"""Command-line options, generated from configuration dataclasses, and options from YAML files."""

import functools
import os
import re
import shlex
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from maxsimd.api.config import ServerConfig
from maxsimd.engine.config import COLLECTIONS, EngineConfig

if TYPE_CHECKING:
    import yaml  # late at run time: a command line without a file does not need it


C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])

# A server's own defaults: it refuses requests rather than let them wait long.
SERVED: Mapping[str, Any] = {"max_wait_seconds": 30.0}
# Options whose variable is read elsewhere: it may hold several values.
_OWN_VARIABLES = {"api_key"}
_KEYS_VARIABLE = "MAXSIMD_API_KEY"


# Collections by the options within them.
_WITHIN: Mapping[str, str] = {
    field.name: field.metadata["within"]
    for config in (EngineConfig, ServerConfig)
    for field in fields(config)
    if field.metadata["within"] is not None
}
_COLLECTION_HELP = {
    "model_option": "Option for some models, such as dimensions=256; repeatable",
    "limit": "Less usual limit or timeout, such as max_vectors=1000; repeatable",
    "debug": "Backend or fast path for diagnosis, such as attention=torch; repeatable",
}
# Keys in a context: values of collections by option and source, and hints.
_GIVEN, _HINTS = "maxsimd.given", "maxsimd.hints"


class GroupedOption(click.Option):
    """An option in a group of a help page. A plain page shows it if it `is_usual`."""

    def __init__(
        self, *args: Any, group: str, within: str | None = None, is_usual: bool = False, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self.group, self.within, self.is_usual = group, within, is_usual

    def get_error_hint(self, ctx: click.Context | None) -> str:
        return super().get_error_hint(ctx) if self.within is None else f"'{flag_with_collection(self.name)}'"

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        """Takes a value from the collection first. The option's own flag and variable still work."""
        value, source = super().consume_value(ctx, opts)
        if self.within is None:
            return value, source
        given = ctx.meta.get(_GIVEN, {})
        if source is ParameterSource.COMMANDLINE:
            _hint(ctx, f"{self.opts[0]} {value}", f"{flag(self.within)} {self.name}={value}")
        elif source is ParameterSource.ENVIRONMENT:
            _hint(ctx, variable(self.name), f'{variable(self.within)}="{self.name}={value}"')
        for place in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT):
            if (self.name, place) in given:
                return given[self.name, place], place
            if source is place:
                break
        return value, source


class CollectionOption(GroupedOption):
    """Options as KEY=VALUE: --debug attention=torch. The variable holds several, quoted as in a shell."""

    def __init__(self, name: str) -> None:
        super().__init__(
            [flag(name)],
            group=COLLECTIONS[name],
            multiple=True,
            metavar="KEY=VALUE",
            envvar=variable(name),
            help=_COLLECTION_HELP[name],
            is_eager=True,
            expose_value=False,
        )

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        keys = [
            each.name
            for each in ctx.command.params
            if isinstance(each, GroupedOption) and each.within == self.name
        ]
        given = ctx.meta.setdefault(_GIVEN, {})
        try:
            of_environment = shlex.split(os.environ.get(variable(self.name), ""))
        except ValueError as error:
            raise click.BadParameter(f"{variable(self.name)}: {error}", ctx, self) from error
        for source, pairs in (
            (ParameterSource.ENVIRONMENT, of_environment),
            (ParameterSource.COMMANDLINE, opts.get(self.name, ())),
        ):
            for pair in pairs:
                key, sign, value = pair.partition("=")
                key = key.replace("-", "_")
                is_of_others = key not in keys and _WITHIN.get(key) == self.name
                if is_of_others and source is ParameterSource.ENVIRONMENT:
                    continue
                if not sign or key not in keys:
                    reason = f"there is no option {key!r}" if sign else f"{pair!r} is not KEY=VALUE"
                    raise click.BadParameter(f"{reason}; the keys are {', '.join(keys)}", ctx, self)
                given[key, source] = value
        return None, args


def _hint(context: click.Context, old: str, new: str) -> None:
    context.meta.setdefault(_HINTS, []).append(f"hint: write {new} instead of {old}, which still works")


def hint_at(context: click.Context, place: str, outside: Mapping[str, Any]) -> None:
    """Notes options of a file that were given outside of their collection."""
    for name, value in outside.items():
        _hint(context, f"{name} in {place}", f"{_WITHIN[name]}: {{{name}: {value}}}")


def hints_of(context: click.Context) -> list[str]:
    """Options that were given outside of their collection, and how to write them."""
    return list(context.meta.get(_HINTS, ()))


def options_from(
    config: type, exclude: frozenset[str] = frozenset(), defaults: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[F], F]:
    """Gives a click command an option for each field of a dataclass, whose defaults `defaults` override."""

    def decorate(command: F) -> F:
        chosen = [field for field in fields(config) if field.name not in exclude]
        for field in reversed(chosen):
            arguments = _click_arguments(config, field, defaults.get(field.name, field.default))
            if field.name not in _OWN_VARIABLES:
                arguments["envvar"] = variable(field.name)
            command = click.option(flag(field.name), cls=GroupedOption, **arguments)(command)
        params: list[click.Parameter] = vars(command)["__click_params__"]
        for name in {field.metadata["within"] for field in chosen} - {None, *(each.name for each in params)}:
            params.append(CollectionOption(name))
        return command

    return decorate


def config_from(config: type[C], values: dict[str, Any]) -> C:
    """Builds the dataclass and takes its values out of `values`."""
    taken = {field.name: values.pop(field.name) for field in fields(config) if field.name in values}  # type: ignore[arg-type]
    try:
        return cast("C", EngineConfig.of(taken)) if config is EngineConfig else config(**taken)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def without_collections(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Options without collections, and the names of those given outside of theirs. Raises ValueError."""
    flat = {name: value for name, value in options.items() if name not in COLLECTIONS}
    outside = [name for name in flat if name in _WITHIN]
    for collection in COLLECTIONS.keys() & options.keys():
        held = options[collection]
        if not isinstance(held, Mapping):
            raise ValueError(f"{collection} must hold options by name; write {collection}: {{name: value}}")
        for name, value in options_of(held).items():
            if _WITHIN.get(name) != collection:
                keys = ", ".join(each for each, within in _WITHIN.items() if within == collection)
                raise ValueError(f"{collection}: there is no option {name}; the keys are {keys}")
            if name in flat:
                raise ValueError(f"{name} is there twice, alone and in {collection}; leave out one")
            flat[name] = value
    return flat, outside


def in_collections(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same options, in the collections that they belong to."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        (found.setdefault(_WITHIN[name], {}) if name in _WITHIN else found)[name] = value
    return found


def engine_options() -> tuple[str, ...]:
    return tuple(field.name for field in fields(EngineConfig) if field.name != "model")


def flag_with_collection(name: str) -> str:
    """An option as it is given: --port, or --debug attention."""
    return f"{flag(_WITHIN[name])} {name}" if name in _WITHIN else flag(name)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return "MAXSIMD_" + name.upper()


@functools.cache
def _types_of(config: type) -> dict[str, Any]:
    return typing.get_type_hints(config)


def _click_arguments(config: type, field: "Field[Any]", default: Any) -> dict[str, Any]:
    kind = _types_of(config)[field.name]
    about = field.metadata
    arguments: dict[str, Any] = {"help": about["help"], "default": default, "metavar": about["metavar"]}
    arguments |= {name: about[name] for name in ("group", "within", "is_usual")}
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
        number = "SECONDS" if field.name.endswith("_seconds") else "NUMBER"
        arguments["metavar"] = about["metavar"] or {int: "N", float: number}.get(kind, "TEXT")
    if about["within"] is not None:
        arguments["hidden"] = True
    arguments["show_default"] = (
        about["by_default"] or False if default is None else default not in ((), False)
    )
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


def values_of(config: Any) -> dict[str, Any]:
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    shown = {name: value for name, value in values.items() if name not in _SECRET}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in shown.items()}


def options_of(said: Mapping[Any, Any]) -> dict[str, Any]:
    """Options by Python name, from flags or Python names. Raises DuplicateError."""
    names = [str(name).replace("-", "_") for name in said]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DuplicateError(f"{', '.join(twice)} is there twice, with - and with _; leave out one")
    return dict(zip(names, said.values(), strict=True))


def models_in_file(context: click.Context) -> Any:
    """The file's `models`, or None."""
    return context.meta.get(_MODELS)


def _use(context: click.Context, parameter: click.Parameter, path: str | None) -> None:
    if path is None:
        return
    names = {each.name for each in context.command.params if each.name is not None}
    options, outside = _read(path, names)
    hint_at(context, path, {name: options[name] for name in outside})
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


# Flags go before variables, variables before the file, the file before defaults.
config_file_option = click.option(
    "--config",
    cls=GroupedOption,
    group="server",
    is_usual=True,
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    is_eager=True,
    expose_value=False,
    callback=_use,
    envvar="MAXSIMD_CONFIG",
    help="YAML file with options by name",
)


def _read_yaml(text: str) -> Any:
    """Raises ValueError, yaml.YAMLError, and DuplicateError for entries with the same name (1 and "1" too):
    YAML's loaders take the last."""
    import yaml

    checked = set()

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            # Later calls would find entries that << has added.
            if id(node) not in checked:
                checked.add(id(node))
                _check_names(self, [name for name, _ in node.value])
            super().flatten_mapping(node)

    return yaml.load(text, Loader)


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


def _read(path: str, names: set[str]) -> tuple[dict[str, Any], list[str]]:
    """Options by Python name, and those given outside of their collection. Raises click.BadParameter."""
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
        options, outside = without_collections(options_of(values))
    except ValueError as error:
        raise click.BadParameter(f"{path}: {error}") from error
    there = {field.name for config in (EngineConfig, ServerConfig) for field in fields(config)}
    unknown = sorted(options.keys() - there - names - {"models"})
    if unknown:
        raise click.BadParameter(f"{path}: there is no option {', '.join(unknown)}")
    # Null leaves an option at its default.
    there_are = {name: value for name, value in options.items() if value is not None}
    return there_are, [name for name in outside if name in there_are]


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
    """`allow_pickle=True` becomes --allow-pickle, `kernels="torch"` --debug kernels=torch."""
    return _NAMED.sub(_flag, message)


def _flag(found: re.Match[str]) -> str:
    name = found["given"] or found["name"]
    value = found["text"] or found["value"]
    sign = "=" if name in _WITHIN else " "
    return flag_with_collection(name) + (f"{sign}{value}" if value else "")
