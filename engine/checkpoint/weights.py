"""The weight files of a checkpoint: which ones there are, and reading single tensors from them."""

import json

import torch
from safetensors import safe_open

from maxsimd.engine.checkpoint.files import CheckpointFiles, find_file
from maxsimd.engine.errors import ModelLoadError

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = "pytorch_model.bin"


def refuse_pickles(model: str, revision: str | None, files: CheckpointFiles) -> None:
    """Raises ModelLoadError when any part of a checkpoint has its weights only as pickles."""
    if files.config_at_root and not _has_safetensors(model, "", revision):
        raise _only_pickles(model, "")
    for folder in dict.fromkeys(module["path"] for module in files.modules if module.get("path")):
        # Many modules have no weights at all, so a missing safetensors file alone proves nothing.
        if not _has_safetensors(model, f"{folder}/", revision):
            pickled = find_file(model, f"{folder}/{_PICKLED}", revision)
            if pickled is not None:
                raise _only_pickles(model, f"{folder}/")


def _has_safetensors(model: str, folder: str, revision: str | None) -> bool:
    return any(find_file(model, folder + name, revision) is not None for name in (_INDEX, _WHOLE))


def _only_pickles(model: str, folder: str) -> ModelLoadError:
    return ModelLoadError(
        f"{model!r} has no {folder}{_WHOLE}; weights that are there only as pickles ({folder}{_PICKLED}) "
        "can run code as they are read: convert them to safetensors, or trust them with --allow-pickle"
    )


def read_tensors(model: str, revision: str | None, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names start with `prefix`, by the rest of their names."""
    index = find_file(model, _INDEX, revision)
    if index is None:
        names = [_WHOLE]
    else:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
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
