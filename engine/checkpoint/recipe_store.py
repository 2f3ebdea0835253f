"""Stores recipes, and which checkpoints' texts have been compared, in the user's cache folder by a digest of
all that they were made from.

What there is of the embedded model comes with the package, and a test holds that it is right.
"""

import hashlib
import json
import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import msgspec

from maxsimd.engine.checkpoint.files import (
    UNREAD_FOLDERS,
    embedded_model_path,
    find_file,
    local_folder,
    read_files,
)
from maxsimd.engine.checkpoint.recipe import Recipe
from maxsimd.engine.checkpoint.templates import score_template_file
from maxsimd.engine.config import EMBEDDED_MODEL, EngineConfig
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.models.bert import ENCODERS
from maxsimd.engine.versions import versions_of

log = logging.getLogger(__name__)

# Options that do not change what is read from a checkpoint. Any other, and any that is added later, has a
# recipe of its own.
_IRRELEVANT = frozenset(
    {
        *("model", "revision", "offline", "device", "dtype", "max_batch_tokens", "max_batch_sequences"),
        *("max_queued_tokens", "max_wait_seconds", "max_request_tokens", "steps_in_flight", "max_vectors"),
        *("step_timeout_seconds", "quantization", "kernels", "maxsim", "attention", "cuda_graphs", "packing"),
        *("prefix_sharing", "dimensions", "doc_token_pooling", "query_prompt", "document_prompt"),
        *(
            "instruction",
            "calibration",
            "rank_by",
            "window_overlap",
            "cache_mb",
            "device_cache_mb",
            "cache_dir",
        ),
        *("cache_disk_mb", "cache_precision", "threads", "tokenizer_threads", "hybrid_weights"),
        *("cache_by_tenant", "document_store_mb", "score_label"),
    }
)
# Irrelevant options that change how texts are read.
_OF_TEXTS = frozenset({"query_prompt", "document_prompt", "instruction"})
_LIBRARIES = ("maxsimd", "torch", "transformers", "sentence-transformers", "tokenizers", "safetensors")
# Files of a checkpoint that nobody reads who loads it with safetensors.
_UNREAD = re.compile(r"\.(md|onnx|onnx_data|bin|pt|h5|msgpack|ot|tflite|xml|png|jpe?g|gguf)$|^LICENSE")
# In a configuration: code of another repository, which may change while the checkpoint does not.
_CODE_ELSEWHERE = re.compile(rb'"[^"\s/]+/[^"\s/]+--\w+(\.\w+)+"')
# All configuration files together; folders with more hold something else, such as datasets.
_MOST_BYTES = 256 * 2**20
# Files that are read beside a GGUF file.
BESIDE_A_FILE = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "modules.json"),
    *("config_sentence_transformers.json", "sentence_bert_config.json", "generation_config.json"),
)
# More bytes than the metadata of a GGUF file takes.
_BEGINNING = 64 * 2**20
# Recipes that are kept.
_MOST = 100


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint on this machine that a recipe may describe.

    `content` is the digest of its configuration files, its tensors' names and shapes, the libraries' versions
    and the options that matter."""

    name: str
    folder: Path
    content: str
    module_folders: tuple[tuple[str, str], ...]

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.content} {own_sources()}".encode()).hexdigest()


def source_of(config: EngineConfig) -> Source | None:
    """Returns the checkpoint that the configuration names, or None if it cannot have a recipe: it is of no
    family of ours, or its files are not on this machine. Raises ModelLoadError if there is no checkpoint."""
    path = config.model if config.model is not None else embedded_model_path()
    if Path(path).is_file():
        return None
    try:
        if find_file(path, "adapter_config.json", config.revision) is not None:
            return None
        files = read_files(path, config.revision)
    except ModelLoadError:
        if Path(path).is_dir() or path.endswith(".gguf"):  # it may have a GGUF file
            return None
        raise
    if files.config.get("model_type") not in ENCODERS:
        return None
    folder = local_folder(path, config.revision)
    if folder is None:
        return None
    content = _content([folder], config, _IRRELEVANT)
    if content is None:
        return None
    kinds = [str(module["type"]).rpartition(".")[2] for module in files.modules]
    folders = tuple(zip(kinds, [module["path"] for module in files.modules], strict=True))
    return Source(config.model or EMBEDDED_MODEL, folder, content, folders)


def find_recipe(source: Source) -> Recipe | None:
    """The recipe that an earlier start has made, or that comes with the package."""
    if (shipped := _shipped().recipes.get(source.content)) is not None:
        return shipped
    try:
        kept = read_kept(f"{source.key}.json")
        return None if kept is None else msgspec.json.decode(kept, type=Recipe)
    except msgspec.MsgspecError as error:
        log.debug("a recipe cannot be read: %s", error)
        return None


def texts_content(config: EngineConfig) -> str | None:
    """The digest of all that decides how the texts of requests are read, except for our own code: the files
    of the checkpoint except for its weights, the libraries' versions and the options that change texts or
    token ids. None if it cannot be computed."""
    path = config.model if config.model is not None else embedded_model_path()
    is_file = Path(path).is_file()
    try:
        # A GGUF file begins with its tokenizer, and the files beside it say how it is used.
        beginnings = [Path(path)] if is_file else sorted(Path(path).glob("*.gguf"))
        folders = [local_folder(path, config.revision)]
        adapter = None if is_file else find_file(path, "adapter_config.json", config.revision)
        if adapter is not None:
            settings = json.loads(adapter.read_text(encoding="utf-8"))
            folders.append(local_folder(str(settings["base_model_name_or_path"]), settings.get("revision")))
        found = [folder for folder in folders if folder is not None]
        # A file may stand among many others.
        names = BESIDE_A_FILE if is_file else None
        content = _content(found, config, _IRRELEVANT - _OF_TEXTS, names)
        if content is None or len(found) < len(folders):
            return None
        if (template := score_template_file(config)) is not None:
            beginnings.append(template)
        digest = hashlib.sha256(content.encode())
        for file in beginnings:
            with file.open("rb") as opened:
                digest.update(opened.read(_BEGINNING))
        return digest.hexdigest()
    except (OSError, ValueError, KeyError, TypeError, ModelLoadError) as error:
        log.debug("how texts are read is not remembered: %s", error)
        return None


def knows_texts(content: str) -> bool:
    """Whether texts have been found to be read as the checkpoint's own library reads them."""
    return content in _shipped().texts or read_kept(_name_of_texts(content)) == b"equal"


def remember_texts(content: str) -> None:
    """Keeps for the next start that texts were found to be read as the library reads them."""
    if content not in _shipped().texts:
        keep(_name_of_texts(content), b"equal")


def _name_of_texts(content: str) -> str:
    return hashlib.sha256(f"texts {content} {own_sources()}".encode()).hexdigest() + ".texts"


def read_kept(name: str) -> bytes | None:
    """The content of a file in the user's cache folder; None where the user has none."""
    folder = _cache_folder(create=False)
    if folder is None:
        return None
    path = folder / name
    try:
        with path.open("rb") as file:
            if not _is_own(os.fstat(file.fileno())):
                log.warning("%s belongs to somebody else and is not read", path)
                return None
            kept = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.debug("%s cannot be read: %s", path, error)
        return None
    with suppress(OSError):  # in an image it may be read only
        os.utime(path)
    return kept


def keep(name: str, data: bytes) -> None:
    """Writes a file into the user's cache folder, in which the latest of each kind are kept. That it cannot
    be written is no failure."""
    folder = _cache_folder(create=True)
    if folder is None:
        return
    written = None
    try:
        descriptor, written = tempfile.mkstemp(dir=folder)  # only the user may read it
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(written).replace(folder / name)
        kept = sorted(folder.glob(f"*{Path(name).suffix}"), key=lambda path: path.stat().st_mtime)
        for path in kept[:-_MOST]:
            path.unlink(missing_ok=True)
    except OSError as error:
        log.debug("%s cannot be kept: %s", name, error)
        if written is not None:
            Path(written).unlink(missing_ok=True)


class Shipped(msgspec.Struct, frozen=True):
    """Recipes of the embedded model by the content of their sources, and the contents whose `texts` have been
    compared."""

    recipes: dict[str, Recipe] = {}
    texts: tuple[str, ...] = ()


SHIPPED = Path(__file__).with_name("embedded_recipes.json")


@cache
def _shipped() -> Shipped:
    return msgspec.json.decode(SHIPPED.read_bytes(), type=Shipped) if SHIPPED.exists() else Shipped()


def _content(
    folders: list[Path], config: EngineConfig, irrelevant: frozenset[str], names: Iterable[str] | None = None
) -> str | None:
    """The digest of the folders' configuration files, or those of these names, the libraries' versions and
    all options but the irrelevant ones; None if a file cannot be read, the files are too large to be
    configurations, or trusted code is in another repository."""
    digest = hashlib.sha256()
    options = [(each.name, getattr(config, each.name)) for each in fields(config)]
    # "auto" scores the embedded model in another way than a copy of its folder.
    options.append(("is embedded", config.model is None))
    digest.update(repr([each for each in options if each[0] not in irrelevant]).encode())
    # The build of torch ("+cpu") makes no difference to what is read.
    versions = [version.partition("+")[0] for version in versions_of(_LIBRARIES)]
    digest.update(repr(versions).encode())
    left = _MOST_BYTES
    try:
        for folder in folders:
            for path in _read_files(folder) if names is None else _named_files(folder, names):
                data = _read(path, left)
                left -= len(data)
                if config.trust_remote_code and path.suffix == ".json" and _CODE_ELSEWHERE.search(data):
                    log.debug("nothing is remembered of %s: it names code of another repository", folder)
                    return None
                digest.update(f"\n{path.relative_to(folder).as_posix()} {len(data)}\n".encode() + data)
    except (OSError, ValueError) as error:
        log.debug("nothing is remembered of %s: %s", folders[0], error)
        return None
    return digest.hexdigest()


def _read_files(folder: Path) -> Iterator[Path]:
    """Raises ValueError for a link to a folder, whose files would not be seen."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith(".") for part in parts) or UNREAD_FOLDERS & {*parts[:-1]}
        if hidden or _UNREAD.search(path.name):
            continue
        if path.is_symlink() and path.is_dir():
            raise ValueError(f"{path.name} is a link to a folder")
        if path.is_file():
            yield path


def _named_files(folder: Path, names: Iterable[str]) -> Iterator[Path]:
    """Files of these names in a folder, and those of the modules that its modules.json names."""
    for path in (folder / name for name in names):
        if path.is_file():
            yield path
    if (folder / "modules.json").is_file():
        for module in read_files(str(folder), None).modules:
            if module["path"]:
                yield from _read_files(folder / module["path"])


def _read(path: Path, most: int) -> bytes:
    """The content of a file; of a safetensors file the header: names, types, shapes and places of its
    tensors. Raises ValueError for one of more bytes than `most`."""
    has_weights = path.suffix == ".safetensors"
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little") if has_weights else path.stat().st_size
        if size > most:
            raise ValueError(f"{path.name} is too large for a configuration")
        data = file.read(size)
    if has_weights:
        json.loads(data)
    return data


@cache
def own_sources() -> str:
    """The digest of our own code that reads and builds models."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *(root.parent / "pooling").glob("*.py")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _cache_folder(create: bool) -> Path | None:
    """The user's own folder for recipes, which nobody else may write to; None if there is none."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if home.startswith("~"):  # without HOME, and of a user whom the system does not know
        log.debug("no recipes are kept: there is no home folder")
        return None
    folder = Path(home) / "maxsimd" / "recipes"
    try:
        if create:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if not _is_own(status) or not stat.S_ISDIR(status.st_mode):
            log.warning("%s belongs to somebody else, or others may write to it, and is not used", folder)
            return None
        return folder
    except OSError as error:
        log.debug("no recipes are kept: %s", error)
        return None


def _is_own(status: os.stat_result) -> bool:
    """Whether a file or folder is the user's, and nobody else may write to it."""
    if not hasattr(os, "getuid"):
        return True
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
