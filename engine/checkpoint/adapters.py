"""LoRA adapters: checkpoints that are a base model and small matrices, which are added to its weights when it
is loaded.

Source: Hu et al. 2021 (arXiv 2106.09685); the files are those that the library peft writes."""

import json
import logging
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from maxsimd.engine.checkpoint.digests import check_digests
from maxsimd.engine.checkpoint.files import find_file
from maxsimd.engine.checkpoint.fit import refuse_not_finite
from maxsimd.engine.checkpoint.translate import downloaded
from maxsimd.engine.errors import ModelLoadError

log = logging.getLogger(__name__)

_SETTINGS, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What of the base says how it is used, where the adapter does not say so itself.
_OF_THE_BASE = frozenset({"modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"})
# Settings that change nothing about weights that are the base's and the product of two matrices. All others
# must be off.
_HARMLESS = frozenset(
    {
        *("peft_type", "base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping"),
        *("r", "lora_alpha", "lora_dropout", "use_rslora", "init_lora_weights", "bias", "peft_version"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core"),
        *("qalora_group_size", "ensure_weight_tying", "runtime_config", "ephemeral_gpu_offload"),
    }
)
# How matrices may have been begun without a change to the base.
_BEGUN = (None, True, False, "gaussian", "eva", "orthogonal")
# A projection that sentence-transformers' modules have, merged.
_PROJECTION = "custom_text_proj"


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The matrices of an adapter by the names of the weights that they are added to: A [r, in] and B [out, r]
    each, whose product is multiplied by `scale`."""

    path: str
    matrices: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    scale: float

    @torch.no_grad()
    def add_to(self, model: torch.nn.Module) -> None:
        """Adds the matrices to a model's weights, in float32. Raises ModelLoadError for one that fits no
        weight, or several."""
        modules = {name: module for name, module in model.named_modules() if hasattr(module, "weight")}
        shared = Counter(module.weight.data_ptr() for module in modules.values() if module.weight is not None)
        for name, (first, second) in self.matrices.items():
            weight = _named(self.path, modules, name).weight
            if shared[weight.data_ptr()] > 1:
                raise ModelLoadError(
                    f"the adapter {self.path!r} is for {name}, whose weights are also another layer's; "
                    "merge it into its base, with the two apart, and name the result"
                )
            if weight.shape != (second.shape[0], first.shape[1]) or len(first) != second.shape[1]:
                raise ModelLoadError(
                    f"the adapter {self.path!r} has matrices {list(second.shape)} and {list(first.shape)} "
                    f"for {name}, which is {list(weight.shape)}"
                )
            added = (second.float() @ first.float()).to(weight.device) * self.scale
            weight.copy_((weight.float() + added).to(weight.dtype))


@contextmanager
def with_base(path: str, revision: str | None, offline: bool) -> Iterator[tuple[str, Adapter | None]]:
    """The path to load a checkpoint from: its own, or for an adapter a temporary folder with links to its
    files and to those of its base; and the adapter. Raises ModelLoadError for one that cannot be added."""
    found = find_file(path, _SETTINGS, revision)
    if found is None:
        yield path, None
        return
    if any(find_file(path, name, revision) for name in ("model.safetensors", "model.safetensors.index.json")):
        log.warning("%s has weights of its own; the adapter beside them is not used", path)
        with _linked(path, [_folder_of(path, revision)]) as alone:
            yield alone, None
        return
    folder = _folder_of(path, revision)
    settings = _settings(path, found)
    base = str(settings.get("base_model_name_or_path") or "")
    try:
        base_folder = _folder_of(base, settings.get("revision"))
    except Exception as error:
        raise ModelLoadError(f"the base {base!r} of the adapter {path!r} cannot be read: {error}") from error
    if (base_folder / _SETTINGS).exists():
        raise ModelLoadError(f"the base {base!r} of the adapter {path!r} is an adapter too; merge that first")
    if offline:
        check_digests(base_folder)
    adapter = _read(path, folder, settings)
    with _linked(path, [base_folder, folder]) as together:
        yield together, adapter


def _folder_of(path: str, revision: str | None) -> Path:
    return Path(path) if Path(path).is_dir() else downloaded(path, revision)


@contextmanager
def _linked(path: str, folders: Sequence[Path]) -> Iterator[str]:
    """A temporary folder with links to the files of some folders but for those of an adapter; where several
    have one, to the last one's. How it is used the last one says, if it says that at all. Errors name the
    `path`."""
    says_how = (folders[-1] / "modules.json").exists()
    with tempfile.TemporaryDirectory(prefix="maxsimd-") as together:
        for folder in folders:
            for entry in folder.iterdir():
                of_another = says_how and folder is not folders[-1]
                if entry.name in (_SETTINGS, _WEIGHTS):
                    continue
                if of_another and (entry.is_dir() or entry.name in _OF_THE_BASE):
                    continue
                link = Path(together) / entry.name
                link.unlink(missing_ok=True)
                link.symlink_to(entry.resolve())
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
    otherwise = sorted(name for name, value in settings.items() if value and name not in _HARMLESS)
    if settings.get("bias", "none") != "none":
        otherwise.append("bias")
    if settings.get("init_lora_weights") not in _BEGUN:
        otherwise.append("init_lora_weights")
    if otherwise:
        raise ModelLoadError(
            f"the adapter {path!r} sets {', '.join(otherwise)}, with which it cannot be added here; merge "
            "it into its base and name the result"
        )
    return settings


def _read(path: str, folder: Path, settings: Mapping[str, Any]) -> Adapter:
    if not (folder / _WEIGHTS).is_file():
        raise ModelLoadError(f"the adapter {path!r} has no {_WEIGHTS}")
    tensors = load_file(folder / _WEIGHTS)
    refuse_not_finite(path, tensors.items())
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        inner, _, half = name.removesuffix(".weight").rpartition(".lora_")
        if half not in ("A", "B"):
            raise ModelLoadError(f"the adapter {path!r} has a tensor {name}, which is not of LoRA")
        if _PROJECTION not in inner:
            halves.setdefault(inner.removeprefix("base_model.model."), {})[half] = tensor
    single = [name for name, found in halves.items() if len(found) != 2]
    if single or not halves:
        raise ModelLoadError(f"the adapter {path!r} lacks matrices: {', '.join(single) or 'it has none'}")
    rank, alpha = int(settings.get("r") or 0), float(settings.get("lora_alpha") or 0)
    if rank < 1 or any(len(found["A"]) != rank for found in halves.values()):
        raise ModelLoadError(
            f"the adapter {path!r} says that its rank is {rank}, which its matrices have not"
        )
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return Adapter(path, {name: (found["A"], found["B"]) for name, found in halves.items()}, scale)


def _named(path: str, modules: Mapping[str, Any], name: str) -> Any:
    """The module of a name, of which the first parts may be others than in the model: those change with
    transformers' versions. The longest rest that a module has must be that of one alone."""
    parts = name.split(".")
    for first in range(len(parts)):
        rest = ".".join(parts[first:])
        found = [each for each in modules if each == rest or each.endswith(f".{rest}")]
        if len(found) == 1:
            return modules[found[0]]
        if found:
            raise ModelLoadError(f"the adapter {path!r} may mean {' or '.join(found[:4])} by {name}")
    raise ModelLoadError(f"the adapter {path!r} is for {name}, which the model does not have")
