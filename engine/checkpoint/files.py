"""A checkpoint's files, in a folder or on the hub: the small ones that describe it, and how to find any of
them."""

import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from maxsimd.engine.checkpoint.hub import find_on_hub
from maxsimd.engine.config import refuse_missing_folder
from maxsimd.engine.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The small files that describe a checkpoint. `config_at_root` is False if only the folder of a module
    has a config.json. `modules` are sentence-transformers', those of all routes where a Router chooses. With
    `is_restated` the config says more than its file, which the libraries must be told too."""

    config: dict[str, Any]
    sentence_transformers: dict[str, Any]
    modules: list[dict[str, Any]]
    config_at_root: bool
    is_restated: bool = False

    @property
    def architecture(self) -> str:
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else "unknown"


def read_files(model: str, revision: str | None) -> CheckpointFiles:
    """Reads the small files from a folder or the hub. Raises ModelLoadError when there is no checkpoint."""
    config = _read_object(model, "config.json", revision)
    modules = _read_json(model, "modules.json", revision) or []
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelLoadError(f"modules.json of {model!r} is no list of modules")
    modules = _routed(model, modules, revision)
    at_root = config is not None
    if not at_root and not modules:
        raise ModelLoadError(
            f"no checkpoint at {model!r}: there is neither a config.json nor a modules.json; "
            "name a folder that has one, or a hub id that this machine can reach"
        )
    if not at_root:  # newer sentence-transformers saves have it in the folder of the transformer
        for module in modules:
            config = _read_object(model, f"{module.get('path', '')}/config.json", revision)
            if config is None or "model_type" in config:
                break
    name = "config_sentence_transformers.json"
    settings = _read_object(model, name, revision) or {}
    prompts = settings.get("prompts", {})
    if not isinstance(prompts, dict):
        raise ModelLoadError(
            f"prompts in {name} of {model!r} must be an object that maps names to texts, not "
            f"{json.dumps(prompts)[:40]}; remove the key if there are none"
        )
    return CheckpointFiles(config or {}, settings, modules, at_root)


def _routed(model: str, modules: list[dict[str, Any]], revision: str | None) -> list[dict[str, Any]]:
    """The modules of all routes, with their folders, in place of a Router that is the only module."""
    if len(modules) != 1 or not str(modules[0].get("type", "")).endswith("Router"):
        return modules
    prefix = f"{modules[0]['path']}/" if modules[0].get("path") else ""
    settings = _read_object(model, f"{prefix}router_config.json", revision)
    types = (settings or {}).get("types")
    if not isinstance(types, dict):
        raise ModelLoadError(f"router_config.json of {model!r} names no modules")
    return [{"path": f"{prefix}{name}", "type": kind} for name, kind in types.items()]


def module_settings(model: str, files: CheckpointFiles, revision: str | None) -> list[dict[str, Any]]:
    """The config.json of each of sentence-transformers' modules, in their order; {} for one without."""
    named = [f"{module.get('path') or ''}/config.json" for module in files.modules]
    return [_read_object(model, name, revision) or {} for name in named]


def find_file(model: str, name: str, revision: str | None) -> Path | None:
    """The path of a checkpoint's file on this machine, downloaded from the hub if necessary; None when the
    checkpoint has no such file.

    Raises ModelLoadError when neither the hub nor the local cache has the checkpoint."""
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.is_file() else None
    refuse_missing_folder(model)
    # A module without a folder gives a name that begins with a slash.
    return find_on_hub(model, posixpath.normpath(name).lstrip("/"), revision)


# Files that hold a tokeniser's vocabulary; one of them is enough.
VOCABULARIES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
    "spm.model",
    "source.spm",
    "sentencepiece.model",
    "tekken.json",
    "tokenizer.tiktoken",
    "bpe.codes",
)


# Modules that say in a config.json of their own what they do.
_WITH_SETTINGS = ("Pooling", "Dense", "LayerNorm", "Dropout", "WeightedLayerPooling")


def refuse_missing_module_settings(model: str, revision: str | None, files: CheckpointFiles) -> None:
    """Raises ModelLoadError for a module whose settings are gone: sentence-transformers cannot make it."""
    for module in files.modules:
        kind, folder = str(module.get("type", "")).rpartition(".")[2], module.get("path") or ""
        name = f"{folder}/config.json"
        if kind in _WITH_SETTINGS and folder and find_file(model, name, revision) is None:
            raise ModelLoadError(
                f"{model!r} has no {name} with the settings of the {kind} in its modules.json; download the "
                "whole checkpoint again"
            )


def refuse_missing_tokenizer(model: str, revision: str | None, files: CheckpointFiles) -> None:
    """Raises ModelLoadError if there is no tokeniser: transformers would make up an empty one, for which
    every word is unknown."""
    folder = str(files.modules[0].get("path") or "") if files.modules else ""
    folders = dict.fromkeys(["", f"{folder}/" if folder else ""])
    names = [f"{prefix}{name}" for prefix in folders for name in VOCABULARIES]
    there = {name: path for name in names if (path := find_file(model, name, revision)) is not None}
    if there:
        _refuse_missing_sentencepiece(model, there)
        return
    raise ModelLoadError(
        f"{model!r} has no tokeniser: none of {', '.join(VOCABULARIES[:4])} and the like is there; "
        "save the tokeniser of the model that it was made from beside it"
    )


def _refuse_missing_sentencepiece(model: str, vocabularies: Mapping[str, Path]) -> None:
    """Raises ModelLoadError for a vocabulary that only the library of sentencepiece can read, if that is not
    installed."""
    if any(path.suffix in (".json", ".txt") for path in vocabularies.values()) or find_spec("sentencepiece"):
        return
    for name, path in vocabularies.items():
        # Of a file in the format of protobuf the first field is the pieces.
        if path.suffix in (".model", ".spm") and path.read_bytes()[:1] == b"\n":
            raise ModelLoadError(
                f"{model!r} has its tokenizer only as {name}, which needs a library that is not installed: "
                "pip install sentencepiece protobuf, or save a tokenizer.json beside it"
            )


def _read_json(model: str, name: str, revision: str | None) -> Any:
    path = find_file(model, name, revision)
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path else None
    except OSError as error:
        raise ModelLoadError(f"{name} of {model!r} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{name} of {model!r} is not JSON: {error}") from error


def _read_object(model: str, name: str, revision: str | None) -> dict[str, Any] | None:
    read = _read_json(model, name, revision)
    if read is not None and not isinstance(read, dict):
        raise ModelLoadError(f"{name} of {model!r} is no JSON object")
    return read
