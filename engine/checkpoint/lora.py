"""What a LoRA adapter changes about a model's weights: products of small matrices are added to some, others
are replaced.

Sources: Hu et al. 2021 (arXiv 2106.09685); with magnitudes, Liu et al. 2024, DoRA (arXiv 2402.09353); with
other scales, Kalajdzievski 2023, rsLoRA (arXiv 2312.03732). The files are those that peft writes."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from maxsimd.engine.checkpoint.fit import refuse_not_finite
from maxsimd.engine.errors import ModelLoadError

WEIGHTS = "adapter_model.safetensors"
# A projection that sentence-transformers' modules have, merged.
_PROJECTION = "custom_text_proj"
# The first parts of all names.
_WRAPPED = "base_model.model."
# What stands within the names of tensors that replace the base's, and of matrices, where they were saved with
# the name of the adapter.
_WITHIN_SAVED = re.compile(r"\.modules_to_save\.(default\.)?")
_DEFAULT = re.compile(r"(\.lora_[A-Za-z_]+)\.default(?=\.weight$|$)")


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What is added to one weight: A [r, in] and B [out, r], whose product is multiplied by `scale`. With a
    `magnitude` [out], each row of the sum is then made as long as it says."""

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
                    f"the adapter {self.path!r} has {list(tensor.shape)} in the stead of {name}, which is "
                    f"{shape}"
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


def read_adapter(path: str, folder: Path, settings: Mapping[str, Any]) -> Adapter:
    """The adapter of a folder with the settings of its config. Raises ModelLoadError for tensors that are not
    of LoRA, or do not agree with the settings."""
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
    """The name of the model's tensor that one of the adapter replaces. Raises ModelLoadError for one that
    replaces none."""
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
        raise ModelLoadError(
            f"the adapter {path!r} says that its rank is {rank}, which its matrices have not"
        )
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return Change(found["A"], found["B"], scale, found.get("magnitude_vector"))


def _for(path: str, name: str, patterns: Any, otherwise: Any) -> Any:
    """What the first pattern says that is the end of a layer's name, from the start of a part on."""
    try:
        for pattern, value in (patterns or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
    except (re.error, AttributeError) as error:
        raise ModelLoadError(f"the adapter {path!r} has patterns that cannot be read: {error}") from error
    return otherwise


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
