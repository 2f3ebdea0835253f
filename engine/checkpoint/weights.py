"""The weight files of a checkpoint: which ones there are, reading single tensors from them, and holding what
was read apart from them."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open

from maxsimd.engine.checkpoint.files import CheckpointFiles, find_file
from maxsimd.engine.errors import ModelLoadError

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = "pytorch_model.bin"
_OF_OTHERS = frozenset({".h5", ".msgpack", ".onnx", ".ot", ".tflite"})


def refuse_pickles(model: str, revision: str | None, files: CheckpointFiles) -> None:
    """Raises ModelLoadError when any part of a checkpoint has its weights only as pickles."""
    if files.config_at_root and not _has_safetensors(model, "", revision):
        if not any(find_file(model, name, revision) for name in (_PICKLED, f"{_PICKLED}.index.json")):
            raise _no_weights(model)
        raise _only_pickles(model, "")
    for folder in dict.fromkeys(module["path"] for module in files.modules if module.get("path")):
        # Many modules have no weights at all, so a missing safetensors file alone proves nothing.
        if not _has_safetensors(model, f"{folder}/", revision):
            pickled = find_file(model, f"{folder}/{_PICKLED}", revision)
            if pickled is not None:
                raise _only_pickles(model, f"{folder}/")


def _has_safetensors(model: str, folder: str, revision: str | None) -> bool:
    if (index := find_file(model, folder + _INDEX, revision)) is not None:
        _check_index(model, folder, index)
        return True
    return find_file(model, folder + _WHOLE, revision) is not None


def _check_index(model: str, folder: str, index: Path) -> None:
    """Refuses an index that names anything but safetensors files beside it."""
    for name in sorted(set(_weight_map(model, index).values())):
        if not name.endswith(".safetensors") or "/" in name or "\\" in name:
            raise ModelLoadError(
                f"{folder}{_INDEX} of {model!r} names {name!r}, which is no safetensors file beside it; save "
                "the weights anew, or trust them with allow_pickle=True"
            )
        is_gone = Path(model).is_dir() and not (index.parent / name).is_file()
        if is_gone and not (index.parent / _WHOLE).is_file():
            raise ModelLoadError(
                f"{folder}{name} of {model!r} is not there, and {_INDEX} names it; download it again"
            )


def _weight_map(model: str, index: Path) -> dict[str, str]:
    """The file of each tensor."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index.name} of {model!r} has no map of weights: {error!r}") from error


def refuse_missing_weights(model: str, revision: str | None, files: CheckpointFiles) -> None:
    """Raises ModelLoadError for a checkpoint without weights, where pickles are allowed too."""
    names = (_WHOLE, _INDEX, _PICKLED, f"{_PICKLED}.index.json")
    if files.config_at_root and not any(find_file(model, name, revision) for name in names):
        raise _no_weights(model)


def _no_weights(model: str) -> ModelLoadError:
    other = next((each.name for each in sorted(Path(model).glob("*")) if each.suffix in _OF_OTHERS), None)
    beside = f" ({other} is for another library)" if other else ""
    return ModelLoadError(
        f"{model!r} has no weights: there is neither {_WHOLE} nor {_INDEX}{beside}; download it whole, or "
        "save the model anew"
    )


def _only_pickles(model: str, folder: str) -> ModelLoadError:
    return ModelLoadError(
        f"{model!r} has no {folder}{_WHOLE}; weights that are there only as pickles ({folder}{_PICKLED}) "
        "can run code as they are read: convert them to safetensors, or trust them with allow_pickle=True"
    )


def read_tensors(model: str, revision: str | None, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names start with `prefix`, by the rest of their names."""
    index = find_file(model, _INDEX, revision)
    if index is None:
        names = [_WHOLE]
    else:
        weight_map = _weight_map(model, index)
        names = sorted({file for tensor, file in weight_map.items() if tensor.startswith(prefix)})
    tensors = {}
    for name in names:
        path = find_file(model, name, revision)
        if path is None:
            raise ModelLoadError(f"{model!r} has no {name}")
        with safe_open(path, framework="pt") as file:
            for tensor in file.keys():  # noqa: SIM118 (not a mapping)
                if tensor.startswith(prefix):
                    tensors[tensor.removeprefix(prefix)] = file.get_tensor(tensor).float()
    return tensors


def tensor_names(model: str, revision: str | None, folder: str = "") -> frozenset[str]:
    """The names of all tensors in a checkpoint's safetensors files, or in those of a `folder/` of it; none if
    its weights are pickles."""
    index = find_file(model, folder + _INDEX, revision)
    if index is not None:
        return frozenset(_weight_map(model, index))
    path = find_file(model, folder + _WHOLE, revision)
    if path is None:
        return frozenset()
    with safe_open(path, framework="pt") as file:
        return frozenset(file.keys())


def files_of_tensors(model: str, revision: str | None) -> dict[str, Path]:
    """The file of each tensor of the backbone, by the tensor's name. Raises ModelLoadError where one is
    missing."""
    index = find_file(model, _INDEX, revision)
    named = {_WHOLE} if index is None else set(_weight_map(model, index).values())
    tensors = {}
    for name in sorted(named):
        path = find_file(model, name, revision)
        if path is None:
            raise ModelLoadError(f"{model!r} has no {name}")
        with safe_open(path, framework="pt") as file:
            tensors.update(dict.fromkeys(file.keys(), path))
    return tensors


def hold_in_memory(modules: Iterable[torch.nn.Module]) -> None:
    """Copies all weights on the CPU into memory of the process's own. As they are read they may be mapped
    from their files: who writes to a file would change them, and who cuts one short would end the process."""
    for root in modules:
        for module in root.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.device.type == "cpu":
                    parameter.data = parameter.data.clone()
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.device.type == "cpu":
                    module._buffers[name] = buffer.clone()
