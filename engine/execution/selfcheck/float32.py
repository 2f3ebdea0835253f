"""A backbone in float32 for the time of a proof: all but its large embedding tables, whose rows are converted
as they are looked up, because converting a whole vocabulary takes longer than the proof.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# Tables with fewer numbers are converted like everything else.
_LARGE = 4_000_000


@contextmanager
def in_float32(backbone: nn.Module) -> Iterator[None]:
    """Converts the layers that the backbone now has to float32, for good; large tables keep their
    precision."""
    tables = {
        module
        for module in backbone.modules()
        if type(module) is nn.Embedding
        and module.weight.numel() >= _LARGE
        and module.weight.dtype is not torch.float32
    }
    for module in backbone.modules():
        if module not in tables:
            module._apply(_widened, recurse=False)
    hooks = [table.register_forward_hook(lambda table, ids, rows: rows.float()) for table in tables]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
