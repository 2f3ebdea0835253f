"""LoRA adapters: checkpoints that are a base model and small matrices, which are added to its weights when it
is loaded. Here is which base, and which settings; what they change is in `lora.py`."""

import json
import logging
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maxsimd.engine.checkpoint.damage import one_line, refuse_damaged_files
from maxsimd.engine.checkpoint.digests import check_digests
from maxsimd.engine.checkpoint.files import find_file, read_files
from maxsimd.engine.checkpoint.known_settings import OF_ADAPTERS
from maxsimd.engine.checkpoint.lora import WEIGHTS, Adapter, read_adapter
from maxsimd.engine.checkpoint.retrained import JINA_V5
from maxsimd.engine.checkpoint.translate import downloaded
from maxsimd.engine.config import refuse_missing_folder
from maxsimd.engine.errors import ModelLoadError

log = logging.getLogger(__name__)

_SETTINGS = "adapter_config.json"
# Of the adapters that a jina-embeddings-v5 has in a folder each, the one for queries and documents.
_FOR_RETRIEVAL = "adapters/retrieval/"
# What of the base says how it is used, where the adapter does not say so itself.
_OF_THE_BASE = frozenset({"modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"})
_CLASSIFIER = "ForSequenceClassification"
# The layers of classifiers that have a row for each label.
_LAST_LAYERS = ("classifier.weight", "classifier.out_proj.weight", "score.weight")
# How matrices may have been begun without a change to the base.
_BEGUN = (None, True, False, "gaussian", "eva", "orthogonal")


@contextmanager
def with_base(path: str, revision: str | None, offline: bool) -> Iterator[tuple[str, Adapter | None]]:
    """The path to load a checkpoint from: its own, or for an adapter a temporary folder with links to its
    files and to those of its base; and the adapter, which some checkpoints have within them. Raises
    ModelLoadError for one that cannot be added."""
    found = find_file(path, _SETTINGS, revision)
    if found is None:
        yield path, _within(path, revision)
        return
    if any(find_file(path, name, revision) for name in ("model.safetensors", "model.safetensors.index.json")):
        log.warning("%s has weights of its own; the adapter beside them is not used", path)
        with _linked(path, [_folder_of(path, revision)]) as alone:
            yield alone, None
        return
    folder = _folder_of(path, revision)
    settings = _settings(path, found)
    base = str(settings.get("base_model_name_or_path") or "")
    if not base:
        raise ModelLoadError(
            f"{_SETTINGS} of {path!r} names no base; set base_model_name_or_path to the folder of the model "
            "that the adapter was trained on"
        )
    try:
        refuse_missing_folder(base)
        base_folder = _folder_of(base, settings.get("revision"))
    except Exception as error:
        raise ModelLoadError(
            f"the base {base!r} of the adapter {path!r} cannot be read: {one_line(error)}; put it there, or "
            f"name the folder that has it as base_model_name_or_path in {_SETTINGS}"
        ) from error
    refuse_damaged_files(str(base_folder))
    if (base_folder / _SETTINGS).exists():
        raise ModelLoadError(f"the base {base!r} of the adapter {path!r} is an adapter too; merge that first")
    if offline:
        check_digests(base_folder)
    adapter = read_adapter(path, folder, settings)
    config = _with_classifier(base_folder, settings, adapter)
    with _linked(path, [base_folder, folder], config) as together:
        yield together, adapter


def _within(path: str, revision: str | None) -> Adapter | None:
    """The adapter for retrieval of a jina-embeddings-v5; None for all other checkpoints."""
    config = find_file(path, "config.json", revision)
    if config is None or JINA_V5 not in config.read_text(encoding="utf-8", errors="replace"):
        return None
    if read_files(path, revision).architecture != JINA_V5:
        return None
    found = [find_file(path, f"{_FOR_RETRIEVAL}{name}", revision) for name in (_SETTINGS, WEIGHTS)]
    if found[0] is None or found[1] is None:
        raise ModelLoadError(
            f"{path!r} is a {JINA_V5} without {_FOR_RETRIEVAL}, by which it embeds queries and documents; "
            "name the whole checkpoint, or one that an adapter is merged into"
        )
    return read_adapter(path, found[1].parent, _settings(path, found[0]))


def _with_classifier(base: Path, settings: dict[str, Any], adapter: Adapter) -> dict[str, Any] | None:
    """The config of a base that is no classifier and becomes one with the adapter; None for all others."""
    if settings.get("task_type") != "SEQ_CLS" or not (base / "config.json").is_file():
        return None
    config: dict[str, Any] = json.loads((base / "config.json").read_text(encoding="utf-8"))
    named = (config.get("architectures") or [""])[0]
    last = [adapter.whole[name] for name in _LAST_LAYERS if name in adapter.whole]
    if named.endswith(_CLASSIFIER) or not last:
        return None
    labels = {i: f"LABEL_{i}" for i in range(len(last[0]))}
    return config | {
        "architectures": [re.sub(r"(Model|For[A-Z]\w*)$", "", named) + _CLASSIFIER],
        "id2label": labels,
        "label2id": {label: i for i, label in labels.items()},
    }


def _folder_of(path: str, revision: str | None) -> Path:
    return Path(path) if Path(path).is_dir() else downloaded(path, revision)


@contextmanager
def _linked(path: str, folders: Sequence[Path], config: dict[str, Any] | None = None) -> Iterator[str]:
    """A temporary folder with links to the files of some folders but for those of an adapter; where several
    have one, to the last one's. How it is used the last one says, if it says that at all. A `config` is
    written in the stead of theirs. Errors name the `path`."""
    says_how = (folders[-1] / "modules.json").exists()
    with tempfile.TemporaryDirectory(prefix="maxsimd-") as together:
        for folder in folders:
            for entry in folder.iterdir():
                of_another = says_how and folder is not folders[-1]
                if entry.name in (_SETTINGS, WEIGHTS):
                    continue
                if of_another and (entry.is_dir() or entry.name in _OF_THE_BASE):
                    continue
                link = Path(together) / entry.name
                link.unlink(missing_ok=True)
                link.symlink_to(entry.resolve())
        if config is not None:
            (Path(together) / "config.json").unlink()
            (Path(together) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            yield together
        except ModelLoadError as error:
            raise ModelLoadError(str(error).replace(together, path)) from error


def _settings(path: str, found: Path) -> dict[str, Any]:
    try:
        settings = json.loads(found.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{_SETTINGS} of {path!r} is not JSON: {error}") from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise ModelLoadError(f"the adapter {path!r} is no LoRA; merge it into its base and name the result")
    otherwise = sorted(name for name, value in settings.items() if value and not OF_ADAPTERS.use_of(name))
    if settings.get("bias", "none") not in ("none", "all", "lora_only"):
        otherwise.append("bias")
    if settings.get("init_lora_weights") not in _BEGUN:
        otherwise.append("init_lora_weights")
    if otherwise:
        raise ModelLoadError(
            f"the adapter {path!r} sets {', '.join(otherwise)}, with which it cannot be added here; merge "
            "it into its base and name the result"
        )
    return settings
