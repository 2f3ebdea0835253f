"""Options from a YAML file, and as one: the same as the command line's flags and MAXSIMD_ variables."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from maxsimd.api.config import ServerConfig
from maxsimd.engine.config import EngineConfig

if TYPE_CHECKING:
    import yaml  # late at run time: a command line without a file does not need it

F = TypeVar("F", bound=Callable[..., Any])

# Whoever may read a configuration need not know the keys.
_SECRET = {"api_key"}
# Where a context keeps what the file says of several models.
_MODELS = "maxsimd.models"
# What YAML calls the name << of an entry.
_FROM_ANOTHER = "tag:yaml.org,2002:merge"


class TwiceError(ValueError):
    """Something is in a file twice, and it is not said which counts."""


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
    """Configurations as the YAML that gives them, without keys."""
    import yaml

    values = {name: value for config in configs for name, value in values_of(config).items()}
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def values_of(config: Any) -> dict[str, Any]:
    """The values of a configuration as YAML has them, without keys."""
    values = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _SECRET:
            values[field.name] = list(value) if isinstance(value, tuple) else value
    return values


def options_of(said: Mapping[Any, Any]) -> dict[str, Any]:
    """Options by their names in Python, of names as flags have them or as Python has. Raises TwiceError."""
    options = {str(name).replace("-", "_"): value for name, value in said.items()}
    if len(options) < len(said):
        names = [str(name).replace("-", "_") for name in said]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise TwiceError(f"{', '.join(twice)} is there twice, with - and with _; leave out one")
    return options


def models_in_file(context: click.Context) -> Any:
    """What `models` of the file holds; None where there is no file, or no models in it."""
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
    """What YAML holds. Raises ValueError and yaml.YAMLError, and TwiceError for two entries whose names are
    the same text, 1 and "1" for instance: of two with one name YAML's loaders take the last."""
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
    """Before anything is made of the nodes: then what one has from another by << would be there, too."""
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
    """The names of one mapping's entries."""
    import yaml

    names = set()
    for node in nodes:
        if not isinstance(node, yaml.ScalarNode) or node.tag == _FROM_ANOTHER:
            continue
        name = str(loader.construct_object(node))
        if name in names:
            line = node.start_mark.line + 1
            raise TwiceError(f"there are two entries named {name}, the second in line {line}; leave out one")
        names.add(name)


def _read(path: str, names: set[str]) -> dict[str, Any]:
    """The options in a file by their names in Python, those of a command or of others that serve. Raises
    click.BadParameter for what is none."""
    import yaml

    try:
        values = _read_yaml(Path(path).read_text(encoding="utf-8"))
    except TwiceError as error:
        raise click.BadParameter(f"{path}: {error}") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise click.BadParameter(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise click.BadParameter(f"{path} holds no options but {type(values).__name__}; write name: value")
    try:
        options = options_of(values)
    except TwiceError as error:
        raise click.BadParameter(f"{path}: {error}") from error
    there = {field.name for config in (EngineConfig, ServerConfig) for field in dataclasses.fields(config)}
    unknown = sorted(options.keys() - there - names - {"models"})
    if unknown:
        raise click.BadParameter(f"{path}: there is no option {', '.join(unknown)}")
    # Those that are null are left open.
    return {name: value for name, value in options.items() if value is not None}
