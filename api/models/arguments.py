"""From a command's arguments and file to the models that are to be served."""

from collections.abc import Mapping
from typing import Any

import click
from click.core import ParameterSource

from maxsimd.api.config_file import TwiceError, options_of
from maxsimd.api.models.setup import WEIGHT, ModelSetup, named_by_themselves
from maxsimd.api.options import engine_options
from maxsimd.engine.config import EngineConfig

_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


class ModelsArgument(click.Argument):
    """Any number of models; the environment's variable holds one, whose path may have spaces."""

    def value_from_envvar(self, context: click.Context) -> Any:
        value = self.resolve_envvar_value(context)
        return None if value is None else (value,)


def several_models(context: click.Context, found: Any, values: Mapping[str, Any]) -> tuple[ModelSetup, ...]:
    """The models of a command that names more than one, or whose file does (`found`), with what is said of
    each of them before what the file says of all; `values` are the command's own. Raises click.UsageError."""
    try:
        options = {name: values[name] for name in engine_options() if name in values}
        if found is None:
            return named_by_themselves(values["model"], EngineConfig(**options))
        if values["model"]:
            raise ValueError("the models are named in the file; give none beside it")
        if not isinstance(found, dict) or not found:
            raise ValueError("models must hold names with the options of each; write name: {model: ...}")
        return tuple(_setup(context, str(name), own, options) for name, own in found.items())
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _setup(context: click.Context, name: str, own: Any, options: Mapping[str, Any]) -> ModelSetup:
    if isinstance(own, str):
        own = {"model": own}
    if not isinstance(own, dict):
        raise ValueError(f"models: {name} must hold options, or say which model it is; write model: ...")
    try:
        said = {option: value for option, value in options_of(own).items() if value is not None}
    except TwiceError as error:
        raise ValueError(f"models: {name}: {error}") from error
    unknown = sorted(said.keys() - set(engine_options()) - {"model", WEIGHT})
    if unknown:
        raise ValueError(f"models: {name} has no option {', '.join(unknown)}; the server's are for all")
    try:
        weight = float(said.pop(WEIGHT, 1.0))
        model = said.pop("model", None)
        taken = {key: value for key, value in _typed(context, said).items() if not _is_given(context, key)}
        engine = EngineConfig(**{**options, **taken, "model": None if model is None else str(model)})
        return ModelSetup(name=name, engine=engine, weight=weight)
    except click.BadParameter as error:
        raise ValueError(f"models: {name}: {error.format_message()}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"models: {name}: {error}") from error


def _is_given(context: click.Context, option: str) -> bool:
    """Whether an option was given as a flag or a variable, which go before any file."""
    return context.get_parameter_source(option) in _GIVEN


def _typed(context: click.Context, said: Mapping[str, Any]) -> dict[str, Any]:
    """Values as the command's own options take them. Raises click.BadParameter."""
    parameters = {each.name: each for each in context.command.params}
    return {name: parameters[name].type_cast_value(context, value) for name, value in said.items()}
