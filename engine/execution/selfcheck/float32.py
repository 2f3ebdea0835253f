"""A backbone in float32 for a while: all but its large tables, whose rows are widened as they are taken,
because to convert a whole vocabulary takes longer than all that is proven with it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# Tables with fewer numbers are converted like all else.
_LARGE = 4_000_000


@contextmanager
def in_float32(backbone: nn.Module) -> Iterator[None]:
    """Makes the layers that the backbone has float32, which they stay; large tables keep their precision."""
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
