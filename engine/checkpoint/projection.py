"""The projection of colpali-engine's models, of which sentence-transformers' modules have a copy."""

from typing import Any

import torch

from maxsimd.engine.checkpoint.heads import Dense, modules_of
from maxsimd.engine.checkpoint.weights import read_tensors
from maxsimd.engine.errors import ModelLoadError

NAME = "custom_text_proj"


def check_projection(path: str, revision: str | None, parts: dict[str, Any]) -> None:
    """Raises ModelLoadError where the modules of a checkpoint lack its projection, or have another one."""
    modules = modules_of(parts["tasks"][parts["score_task"]].head)
    dense = [module for module in modules if isinstance(module, Dense)]
    if not dense:
        raise ModelLoadError(f"{path!r} has no module for its projection {NAME}, which would be left out")
    linear = dense[0].linear
    for name, tensor in read_tensors(path, revision, f"{NAME}.").items():
        ours = linear.weight if name == "weight" else linear.bias
        if ours is None or ours.shape != tensor.shape:
            raise ModelLoadError(f"{path!r} has modules that do not fit its projection {NAME}.{name}")
        if not torch.allclose(ours.float().cpu(), tensor.float(), atol=1e-2, rtol=1e-2):
            raise ModelLoadError(f"{path!r} has modules with another projection than its {NAME}.{name}")
