"""The models of a server as configured: by arguments, by `models` of a YAML file, or by a folder."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import click
from click.core import ParameterSource

from maxsimd.api.config import ServerConfig, SetupError
from maxsimd.api.options import (
    SERVED,
    engine_options,
    hint_at,
    in_collections,
    options_of,
    values_of,
    without_collections,
)
from maxsimd.engine.config import EngineConfig

# A model's option beside its engine's.
WEIGHT = "weight"
_LONGEST_NAME = 200
# A folder with one of these holds a model. So does a GGUF file.
_MARKS = ("config.json", "modules.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup:
    """A model's name in requests, its options, and its share of the device."""

    name: str
    engine: EngineConfig
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight must be a number above 0, not {self.weight}")


def check_together(models: Sequence[ModelSetup], server: ServerConfig) -> None:
    """Raises ValueError for options that several models cannot have."""
    if server.is_fleet:
        raise ValueError(
            "several models are served by one process: leave out fronts and replicas, or start a server for "
            "each model"
        )
    if server.served_model_name:
        raise ValueError(
            "served_model_name is for one model; name several in a file's `models`, or leave it out"
        )
    if server.restart_on_failure:
        raise ValueError(
            "restart_on_failure is for one model; of several, one that has died is loaded again by "
            "POST /v1/models/NAME"
        )
    for setup in models:
        _check_name(setup.name, "give it one in a file's `models`")


def single_setup(engine: EngineConfig, server: ServerConfig, unnamed: str) -> ModelSetup:
    """The only model of a command, beside which others may be loaded later. `unnamed` is its name if the
    command gives none. Raises ValueError for an unusable name."""
    called = unnamed if engine.model is None else engine.model.rstrip("/")
    name = next(iter(server.served_model_name), called)
    _check_name(name, "give it one as served_model_name")
    return ModelSetup(name=name, engine=engine)


def _check_name(name: str, advice: str) -> None:
    if not _is_name(name):
        raise ValueError(
            f"{name!r} is no name for a model: it must have 1 to {_LONGEST_NAME} visible characters and no "
            f"slash at its end, and be neither . nor ..; {advice}"
        )


def _is_name(name: str) -> bool:
    """Whether paths can have it. Clients change the path for `.` and `..`."""
    is_plain = name.isprintable() and name == name.strip() and name[-1:] != "/" and name not in (".", "..")
    return is_plain and 0 < len(name) <= _LONGEST_NAME


def shown(engine: EngineConfig | Sequence[ModelSetup], server: ServerConfig) -> str:
    """The configuration of one model or of several as YAML, without keys."""
    import yaml

    if isinstance(engine, EngineConfig):
        page = in_collections(values_of(engine) | values_of(server))
    else:
        own = {each.name: {**in_collections(values_of(each.engine)), WEIGHT: each.weight} for each in engine}
        page = {"models": own, **in_collections(values_of(server))}
    return str(yaml.safe_dump(page, sort_keys=False, allow_unicode=True))


def _resolved(path: Path) -> Path | None:
    """The path without links; None if it leads nowhere, such as to a link to itself."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # Python 3.11 and 3.12 raise RuntimeError for such a link
        return None


def _is_model(path: Path) -> bool:
    with suppress(OSError):  # it may not be looked into
        if path.is_dir():
            return any((path / mark).is_file() for mark in _MARKS)
        return path.suffix == ".gguf" and path.is_file()
    return False


def _files_beside(file: Path) -> list[Path]:
    """The files beside a GGUF file that are read with it, and the folders of its modules."""
    if not file.is_file():
        return []
    found = [each for each in file.parent.iterdir() if each.suffix in (".json", ".jinja")]
    try:
        modules = json.loads((file.parent / "modules.json").read_bytes())
        paths = [str(module.get("path") or "") for module in modules]
        found += [file.parent / path for path in paths if "/" not in path and path not in ("", "..")]
    except (OSError, ValueError, TypeError, AttributeError):
        pass  # Loading the model says what is wrong.
    return [each for each in found if each.exists() or each.is_symlink()]


class Loadable:
    """The models that may be loaded while the server runs: the configured ones, and those in a folder by
    their paths there, with common options."""

    def __init__(
        self, configured: Sequence[ModelSetup], folder: str | None = None, options: EngineConfig | None = None
    ) -> None:
        """Raises SetupError if there is no such folder."""
        self._configured = {setup.name: setup for setup in configured}
        self._options = options or EngineConfig(**SERVED)
        self._folder = None if folder is None else _resolved(Path(folder))
        if folder is not None and (self._folder is None or not self._folder.is_dir()):
            raise SetupError(f"there is no folder {folder!r}; give one that holds models, or leave it out")

    @property
    def caches_by_tenant(self) -> bool:
        configs = [self._options, *(setup.engine for setup in self._configured.values())]
        return any(config.cache_by_tenant for config in configs)

    def setup_of(self, name: str) -> ModelSetup | None:
        """None if the model is not for this server."""
        if name in self._configured:
            return self._configured[name]
        path = self._path_of(name)
        if path is None:
            return None
        return ModelSetup(name=name, engine=dataclasses.replace(self._options, model=str(path)))

    def link_out(self, name: str) -> str | None:
        """The first link in a model's folder, or beside its GGUF file, that leads out of the folder of models
        or nowhere; None without one. Links of configured models are not checked. Reads the file system."""
        path = None if name in self._configured else self._path_of(name)
        folders = [] if path is None else [path]
        seen = set(folders)
        while folders:
            folder = folders.pop()
            for each in sorted(folder.iterdir() if folder.is_dir() else _files_beside(folder)):
                target = _resolved(each) if each.is_symlink() else each
                if self._folder is None or target is None or not target.is_relative_to(self._folder):
                    return str(each.relative_to(self._folder or folder))
                if target.is_dir() and target not in seen:
                    seen.add(target)
                    folders.append(target)
        return None

    def _path_of(self, name: str) -> Path | None:
        """The path of a model in the folder of models; None outside of it."""
        plain = PurePosixPath(name)
        is_within = not plain.is_absolute() and ".." not in plain.parts and str(plain) == name
        if self._folder is None or not _is_name(name) or not is_within:
            return None
        path = _resolved(self._folder / name)
        if path is None or path == self._folder or not path.is_relative_to(self._folder):
            return None
        return path if _is_model(path) else None


_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


class ModelsArgument(click.Argument):
    """Any number of models. The environment's variable holds one, whose path may have spaces."""

    def value_from_envvar(self, context: click.Context) -> Any:
        value = self.resolve_envvar_value(context)
        return None if value is None else (value,)


def several_models(context: click.Context, found: Any, values: Mapping[str, Any]) -> tuple[ModelSetup, ...]:
    """The models of a command that names several, or whose file does (`found`). Options of a model go before
    the file's common ones; `values` are the command's. Raises click.UsageError."""
    try:
        options = {name: values[name] for name in engine_options() if name in values}
        if found is None:
            names, engine = [model.rstrip("/") for model in values["model"]], EngineConfig.of(options)
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(
                    f"{', '.join(twice)} is named twice; give each a name of its own in a file's `models`"
                )
            return tuple(
                ModelSetup(name=name, engine=dataclasses.replace(engine, model=model))
                for name, model in zip(names, values["model"], strict=True)
            )
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
        flat, outside = without_collections(options_of(own))
        said = {option: value for option, value in flat.items() if value is not None}
        hint_at(context, f"models: {name}", {each: flat[each] for each in outside})
    except ValueError as error:
        raise ValueError(f"models: {name}: {error}") from error
    unknown = sorted(said.keys() - set(engine_options()) - {"model", WEIGHT})
    if unknown:
        raise ValueError(f"models: {name} has no option {', '.join(unknown)}; the server's are for all")
    parameters = {each.name: each for each in context.command.params}
    try:
        weight = float(said.pop(WEIGHT, 1.0))
        model = said.pop("model", None)
        converted = {key: parameters[key].type_cast_value(context, value) for key, value in said.items()}
        # Flags and variables go before any file.
        taken = {
            key: value for key, value in converted.items() if context.get_parameter_source(key) not in _GIVEN
        }
        engine = EngineConfig.of({**options, **taken, "model": None if model is None else str(model)})
        return ModelSetup(name=name, engine=engine, weight=weight)
    except click.BadParameter as error:
        raise ValueError(f"models: {name}: {error.format_message()}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"models: {name}: {error}") from error
