"""Files of a checkpoint that are there and cannot be used: what is wrong with which file, and what to do."""

import json
import os
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from maxsimd.engine.checkpoint.files import VOCABULARIES
from maxsimd.engine.errors import ModelLoadError

# How a file begins that Git LFS has left in the place of another, and its greatest length.
_POINTER, _POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024
# Files that are read wherever they are. A folder may hold others, which do no harm however they are.
_ALWAYS_READ = frozenset(
    {
        *("config.json", "modules.json", "router_config.json", "adapter_config.json", "artifact.metadata"),
        *("config_sentence_transformers.json", "sentence_bert_config.json", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("preprocessor_config.json", "processor_config.json", "chat_template.json", "chat_template.jinja"),
    }
)
_WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
_INDEX = "model.safetensors.index.json"
# Folders of exports for other programs.
_UNREAD_FOLDERS = frozenset({"onnx", "openvino", "coreml"})
# A longer header is no header.
_LONGEST_HEADER = 100_000_000


def refuse_damaged_files(model: str) -> None:
    """Raises ModelLoadError for a file of a local checkpoint that is an LFS pointer, empty, cut short or not
    readable. Looks at lengths and first bytes, at the root and in the folders of its modules: others may be
    read by nobody, and are looked at when loading has failed."""
    try:
        if Path(model).is_file():
            _check_file(model, Path(model), Path(model).name)
        elif Path(model).is_dir():
            for name in _folders_read(Path(model)):
                read = _ALWAYS_READ | _names_of_weights(Path(model, name))
                for path in _files_in(Path(model, name)):
                    if path.name in read:
                        _check_file(model, path, str(Path(name, path.name)))
    except OSError as error:
        raise _unreadable(model, error) from error


def damage_of(model: str, config: Path | None = None) -> ModelLoadError | None:
    """What is wrong with the files of a checkpoint that could not be loaded; None if nothing is. Of a hub's
    the files beside its `config` are looked at."""
    try:
        is_local = Path(model).is_dir()
        if not is_local and config is None:
            return None
        folder = Path(model) if is_local or config is None else config.parent
        for files in _all_files(folder):
            weights = _names_of_weights(files[0].parent) if files else frozenset()
            for path in files:
                if not _may_be_read(path, weights):
                    continue
                name = str(path.relative_to(folder))
                _check_file(model, path, name)
                if path.suffix == ".json":
                    _check_json(model, path, name)
                elif path.suffix == ".bin" and not zipfile.is_zipfile(path):
                    return ModelLoadError(
                        f"{name} of {model!r} is damaged: it is not a torch archive; download it again, or "
                        "save the weights as safetensors"
                    )
    except ModelLoadError as error:
        return error
    except OSError as error:
        return _unreadable(model, error)
    return None


def one_line(error: BaseException) -> str:
    """The message of a library's error, without line breaks."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _folders_read(folder: Path) -> Iterator[str]:
    """The root of a checkpoint, as "", and the folders that modules.json and router_config.json name, each
    once and if it is there. Those files are opened late, when the caller has checked them."""
    yield ""
    modules = _json_of(folder / "modules.json")
    named = [
        module["path"]
        for module in (modules if isinstance(modules, list) else [])
        if isinstance(module, dict) and isinstance(module.get("path"), str)
    ]
    seen = {""}
    for parent in ["", *named]:
        if parent not in seen and (folder / parent).is_dir():
            yield parent
        seen.add(parent)
        routes = _json_of(folder / parent / "router_config.json")
        types = routes.get("types") if isinstance(routes, dict) else None
        for name in types if isinstance(types, dict) else ():
            if (inner := str(Path(parent, name))) not in seen and (folder / inner).is_dir():
                yield inner
            seen.add(inner)


def _json_of(path: Path) -> Any:
    """Returns the parsed JSON of a file; None if it is missing or no JSON, which its loader reports."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None


def _all_files(folder: Path) -> Iterator[list[Path]]:
    """The files of a checkpoint, and those of each folder in it that may be listed."""
    yield _files_in(folder)
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in _UNREAD_FOLDERS and not path.name.startswith("."):
            with suppress(PermissionError):
                yield _files_in(path)


def _files_in(folder: Path) -> list[Path]:
    """The files of a folder, by their names."""
    return [path for path in sorted(folder.iterdir()) if path.is_file()]


def _may_be_read(path: Path, weights: frozenset[str]) -> bool:
    """Whether a file is read in some checkpoint that has it: pickles only where no safetensors are."""
    if path.suffix == ".bin":
        return not any(path.parent.glob("*.safetensors"))
    is_named = path.name in _ALWAYS_READ or path.name in VOCABULARIES or path.name == "merges.txt"
    return is_named or path.name in weights


def _names_of_weights(folder: Path) -> frozenset[str]:
    """The files of a folder from which weights are read."""
    try:
        weight_map = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        return frozenset(weight_map.values())
    except (FileNotFoundError, NotADirectoryError):
        return frozenset(_WEIGHTS)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        # Whoever reads the index says what is wrong with it.
        return frozenset(_WEIGHTS)


def _check_file(model: str, path: Path, name: str) -> None:
    if not os.access(path, os.R_OK):
        raise PermissionError(None, "permission denied", str(path))
    size = path.stat().st_size
    if size <= _POINTER_BYTES:
        with path.open("rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                raise ModelLoadError(
                    f"{name} of {model!r} is a Git LFS pointer, not the file itself; fetch the file with "
                    "`git lfs pull` in that folder"
                )
    if size == 0 and path.suffix in (".json", ".safetensors", ".bin", ".model", ".gguf"):
        raise ModelLoadError(f"{name} of {model!r} is empty; download it again")
    if path.suffix == ".safetensors":
        _check_length(model, path, name, size)


def _check_length(model: str, path: Path, name: str, size: int) -> None:
    """Refuses a file of safetensors that is shorter than its header says."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size >= 8 and 8 + length <= size and length <= _LONGEST_HEADER:
            try:
                tensors = json.loads(file.read(length))
                ends = [each["data_offsets"][1] for key, each in tensors.items() if key != "__metadata__"]
                whole = 8 + length + max(ends, default=0)
            except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError):
                whole = None
        else:
            whole = 8 + length if length <= _LONGEST_HEADER else None
    if whole is None:
        raise ModelLoadError(f"{name} of {model!r} is not a safetensors file; download it again")
    if size < whole:
        raise ModelLoadError(
            f"{name} of {model!r} is cut short: it has {size} of at least {whole} bytes; download it again"
        )


def _check_json(model: str, path: Path, name: str) -> None:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{name} of {model!r} is not JSON: {error}; download it again") from error


def _unreadable(model: str, error: OSError) -> ModelLoadError:
    where = error.filename if isinstance(error.filename, str) else model
    reason = (error.strerror or type(error).__name__).lower()
    return ModelLoadError(
        f"{where} cannot be read: {reason}; give the user who runs maxsimd read access (chmod), also to "
        "the folders above"
    )
