"""LoRA adapters: a base model and small matrices, whose products are added to its weights.

Sources: Hu et al. 2021 (arXiv 2106.09685); with magnitudes, Liu et al. 2024, DoRA (arXiv 2402.09353); with
other scales, Kalajdzievski 2023, rsLoRA (arXiv 2312.03732). The files are those that peft writes."""

import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from maxsimd.engine.checkpoint.detect import JINA_V5
from maxsimd.engine.checkpoint.files import (
    USAGE,
    check_digests,
    find_file,
    one_line,
    read_files,
    read_object,
    refuse_damaged_files,
)
from maxsimd.engine.checkpoint.known_settings import OF_ADAPTERS
from maxsimd.engine.checkpoint.translate import downloaded, linked
from maxsimd.engine.checkpoint.weights import refuse_not_finite
from maxsimd.engine.config import refuse_missing_folder
from maxsimd.engine.errors import ModelLoadError

log = logging.getLogger(__name__)
WEIGHTS = "adapter_model.safetensors"
_SETTINGS = "adapter_config.json"
# The adapter for queries and documents of a jina-embeddings-v5, which has several.
_FOR_RETRIEVAL = "adapters/retrieval/"
_CLASSIFIER = "ForSequenceClassification"
# The layers of classifiers that have a row for each label.
_LAST_LAYERS = ("classifier.weight", "classifier.out_proj.weight", "score.weight")
# A projection that sentence-transformers' modules have, merged.
_PROJECTION = "custom_text_proj"
# The first parts of all names.
_WRAPPED = "base_model.model."
# Parts of names: of tensors that replace the base's, and of matrices that were saved with the adapter's
# name.
_WITHIN_SAVED = re.compile(r"\.modules_to_save\.(default\.)?")
_DEFAULT = re.compile(r"(\.lora_[A-Za-z_]+)\.default(?=\.weight$|$)")


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A [r, in] and B [out, r], whose product times `scale` is added to a weight. With a `magnitude` [out]
    each row of the sum is then made that long."""

    first: torch.Tensor
    second: torch.Tensor
    scale: float
    magnitude: torch.Tensor | None = None

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight [out, in] as changed, float32."""
        added = self.second.float() @ self.first.float()
        changed: torch.Tensor = weight.float() + added.to(weight.device) * self.scale
        if self.magnitude is None:
            return changed
        lengths = torch.linalg.norm(changed, dim=1, keepdim=True)
        changed *= self.magnitude.float().to(weight.device).reshape(-1, 1) / lengths
        return changed


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The changes of an adapter by the names of the layers whose weights they change, and the `whole` tensors
    that replace the model's, by their names: biases, and layers trained beside."""

    path: str
    changes: Mapping[str, Change]
    whole: Mapping[str, torch.Tensor]

    @torch.no_grad()
    def add_to(self, model: torch.nn.Module) -> None:
        """Changes a model's weights, computing in float32. Raises ModelLoadError for a change that fits no
        weight, or several."""
        modules = {name: module for name, module in model.named_modules() if hasattr(module, "weight")}
        shared = Counter(module.weight.data_ptr() for module in modules.values() if module.weight is not None)
        for name, change in self.changes.items():
            module = _named(self.path, modules, name)
            weight = self._own(name, module.weight, shared)
            if isinstance(module, Conv1D):  # has its weight the other way round: [in, out]
                weight = weight.T
            first, second = change.first, change.second
            if weight.shape != (second.shape[0], first.shape[1]) or len(first) != second.shape[1]:
                raise ModelLoadError(
                    f"the adapter {self.path!r} has matrices {list(second.shape)} and {list(first.shape)} "
                    f"for {name}, which is {list(weight.shape)}"
                )
            if change.magnitude is not None and change.magnitude.numel() != len(weight):
                raise ModelLoadError(f"the adapter {self.path!r} has another number of magnitudes for {name}")
            weight.copy_(change.of(weight).to(weight.dtype))
        for name, tensor in self.whole.items():
            layer, _, part = name.rpartition(".")
            replaced = getattr(_named(self.path, modules, layer), part, None)
            if replaced is None or replaced.shape != tensor.shape:
                shape = None if replaced is None else list(replaced.shape)
                raise ModelLoadError(
                    f"the adapter {self.path!r} has {list(tensor.shape)} in place of {name}, which is {shape}"
                )
            self._own(name, replaced, shared).copy_(tensor.to(replaced.dtype))

    def _own(self, name: str, weight: torch.Tensor, shared: Counter[int]) -> torch.Tensor:
        """A weight, which must not be another layer's too."""
        if shared[weight.data_ptr()] > 1:
            raise ModelLoadError(
                f"the adapter {self.path!r} is for {name}, whose weights are also another layer's; "
                "merge it into its base, with the two apart, and name the result"
            )
        return weight


@contextmanager
def with_base(path: str, revision: str | None, offline: bool) -> Iterator[tuple[str, Adapter | None]]:
    """The path to load a checkpoint from, and its adapter. For an adapter with a base the path is a temporary
    folder with links to the files of both. Raises ModelLoadError for an adapter that cannot be added."""
    if find_file(path, _SETTINGS, revision) is None:
        yield path, _within(path, revision)
        return
    if any(find_file(path, name, revision) for name in ("model.safetensors", "model.safetensors.index.json")):
        log.warning("%s has weights of its own; the adapter beside them is not used", path)
        with _linked(path, [downloaded(path, revision)]) as alone:
            yield alone, None
        return
    folder = downloaded(path, revision)
    settings = _checked(path, read_object(path, _SETTINGS, revision) or {})
    base = str(settings.get("base_model_name_or_path") or "")
    if not base:
        raise ModelLoadError(
            f"{_SETTINGS} of {path!r} names no base; set base_model_name_or_path to the folder of the model "
            "that the adapter was trained on"
        )
    try:
        refuse_missing_folder(base)
        base_folder = downloaded(base, settings.get("revision"))
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
    is_named = config is not None and JINA_V5 in config.read_text(encoding="utf-8", errors="replace")
    if not is_named or read_files(path, revision).architecture != JINA_V5:
        return None
    said = read_object(path, f"{_FOR_RETRIEVAL}{_SETTINGS}", revision)
    weights = find_file(path, f"{_FOR_RETRIEVAL}{WEIGHTS}", revision)
    if said is None or weights is None:
        raise ModelLoadError(
            f"{path!r} is a {JINA_V5} without {_FOR_RETRIEVAL}, by which it embeds queries and documents; "
            "name the whole checkpoint, or one that an adapter is merged into"
        )
    return read_adapter(path, weights.parent, _checked(path, said))


def _with_classifier(base: Path, settings: dict[str, Any], adapter: Adapter) -> dict[str, Any] | None:
    """The config of a base that is no classifier and becomes one with the adapter; None for all others."""
    config = read_object(str(base), "config.json", None)
    if settings.get("task_type") != "SEQ_CLS" or config is None:
        return None
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


def _linked(
    path: str, folders: Sequence[Path], config: dict[str, Any] | None = None
) -> AbstractContextManager[str]:
    """A temporary folder with links to the files of some folders, without those of adapters. The last folder
    counts where several have a file, and says how the model is used if it has a modules.json. A `config`
    replaces theirs. Errors name the `path`."""
    says_how = (folders[-1] / "modules.json").exists()
    entries = [
        entry
        for folder in folders
        for entry in folder.iterdir()
        if entry.name not in (_SETTINGS, WEIGHTS)
        and not (says_how and folder != folders[-1] and (entry.is_dir() or entry.name in USAGE))
    ]
    return linked(path, entries, config)


def _checked(path: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of an adapter. Raises ModelLoadError for those with which it cannot be added."""
    if settings.get("peft_type") != "LORA":
        raise ModelLoadError(f"the adapter {path!r} is no LoRA; merge it into its base and name the result")
    otherwise = sorted(name for name, value in settings.items() if value and not OF_ADAPTERS.use_of(name))
    if settings.get("bias", "none") not in ("none", "all", "lora_only"):
        otherwise.append("bias")
    # Other initializations of matrices change the base.
    if settings.get("init_lora_weights") not in (None, True, False, "gaussian", "eva", "orthogonal"):
        otherwise.append("init_lora_weights")
    if otherwise:
        raise ModelLoadError(
            f"the adapter {path!r} sets {', '.join(otherwise)}, with which it cannot be added here; merge "
            "it into its base and name the result"
        )
    return settings


def read_adapter(path: str, folder: Path, settings: Mapping[str, Any]) -> Adapter:
    """The adapter of a folder. Raises ModelLoadError for tensors that do not agree with its settings."""
    if not (folder / WEIGHTS).is_file():
        raise ModelLoadError(f"the adapter {path!r} has no {WEIGHTS}")
    tensors = load_file(folder / WEIGHTS)
    refuse_not_finite(path, tensors.items())
    parts: dict[str, dict[str, torch.Tensor]] = {}
    whole: dict[str, torch.Tensor] = {}
    allowed = {"A", "B", "magnitude_vector"} if settings.get("use_dora") else {"A", "B"}
    for name, tensor in tensors.items():
        layer, _, part = _DEFAULT.sub(r"\1", name).removesuffix(".weight").rpartition(".lora_")
        if part in allowed and _PROJECTION not in layer:
            parts.setdefault(layer.removeprefix(_WRAPPED), {})[part] = tensor
        elif part not in allowed and ".original_module." not in name:  # the base's own
            whole[_replaced(path, name, settings)] = tensor
    incomplete = [name for name, found in parts.items() if found.keys() != allowed]
    if incomplete or not parts:
        raise ModelLoadError(f"the adapter {path!r} lacks matrices: {', '.join(incomplete) or 'it has none'}")
    saved = settings.get("modules_to_save") or ()
    if saved and not any(_is_in(name, saved) for name in whole):
        raise ModelLoadError(
            f"the adapter {path!r} has no tensors of its modules_to_save, {', '.join(saved)}"
        )
    return Adapter(path, {name: _change(path, name, found, settings) for name, found in parts.items()}, whole)


def _replaced(path: str, name: str, settings: Mapping[str, Any]) -> str:
    """The name of the model's tensor that one of the adapter's replaces. Raises ModelLoadError for none."""
    own = _WITHIN_SAVED.sub(".", name.removeprefix(_WRAPPED)).replace(".base_layer.", ".")
    is_bias = own.endswith(".bias") and settings.get("bias", "none") != "none"
    if ".lora_" in name or not (is_bias or _is_in(own, settings.get("modules_to_save") or ())):
        raise ModelLoadError(f"the adapter {path!r} has a tensor {name}, which is not of LoRA")
    return own


def _is_in(name: str, modules: Any) -> bool:
    """Whether a tensor belongs to one of some modules, each named by the end of its path."""
    return any(f".{module}." in f".{name}" for module in modules)


def _change(path: str, name: str, found: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> Change:
    rank = int(_for(path, name, settings.get("rank_pattern"), settings.get("r")) or 0)
    alpha = float(_for(path, name, settings.get("alpha_pattern"), settings.get("lora_alpha")) or 0)
    if rank < 1 or len(found["A"]) != rank:
        raise ModelLoadError(f"the adapter {path!r} says that its rank is {rank}; its matrices have another")
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return Change(found["A"], found["B"], scale, found.get("magnitude_vector"))


def _for(path: str, name: str, patterns: Any, otherwise: Any) -> Any:
    """The value of the first pattern that matches the end of a layer's name."""
    try:
        for pattern, value in (patterns or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
    except (re.error, AttributeError) as error:
        raise ModelLoadError(f"the adapter {path!r} has patterns that cannot be read: {error}") from error
    return otherwise


def _named(path: str, modules: Mapping[str, Any], name: str) -> Any:
    """The module whose name ends as this one, by the longest ending that a module has: first parts change
    with transformers' versions. Raises ModelLoadError for several modules, or none."""
    parts = name.split(".")
    for first in range(len(parts)):
        rest = ".".join(parts[first:])
        found = [each for each in modules if each == rest or each.endswith(f".{rest}")]
        if len(found) == 1:
            return modules[found[0]]
        if found:
            raise ModelLoadError(f"the adapter {path!r} may mean {' or '.join(found[:4])} by {name}")
    raise ModelLoadError(f"the adapter {path!r} is for {name}, which the model does not have")
