"""Towers of pictures on a CPU that runs our kernels: attention, and patches that are multiplied like the rows
of any linear layer.

torch's attention takes several times as long there, and its convolutions reorder their weights in every
call. `bench page-speed` shows both."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import nn

from maxsimd.engine.ops.cpu.attention import attention
from maxsimd.engine.ops.qkv import QKV

NAME = "maxsimd_tower"


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query, key and value are [pictures, heads, patches, head_dim], and
    all patches of a picture see each other. Returns [pictures, patches, heads, head_dim]. What has a mask
    goes to torch."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if attention_mask is not None or is_causal or kwargs:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        made: torch.Tensor = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )[0]
        return made, None
    pictures, heads, patches, dims = query.shape
    # [heads, rows, head_dim], the pictures end to end
    q, k, v = (x.transpose(0, 1).reshape(x.shape[1], -1, x.shape[-1]) for x in (query, key, value))
    qkv = QKV(q, k, v, dims**-0.5 if scaling is None else scaling)
    out = qkv.new_output()
    table = [(first, patches, patches, -1) for first in range(0, pictures * patches, patches)]
    attention(qkv, torch.tensor(table, dtype=torch.int64), [], False, out)
    return out.view(pictures, patches, heads, -1), None


class PatchProduct(nn.Module):
    """Replaces a convolution whose patches lie side by side by a product with each patch.

    `weight` has no contents; it is there for models that ask for its precision."""

    def __init__(self, convolution: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        self._sides = tuple(int(side) for side in convolution.kernel_size)
        weight = convolution.weight.detach()
        self.weight = torch.empty_like(weight, device="meta", requires_grad=False)
        inner, outer = math.prod(weight.shape[1:]), len(weight)
        self.product = nn.Linear(inner, outer, convolution.bias is not None, dtype=weight.dtype)
        self.product.weight = nn.Parameter(weight.reshape(outer, inner), requires_grad=False)
        if convolution.bias is not None:
            self.product.bias = nn.Parameter(convolution.bias.detach(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, channels, *sizes] to [n, out channels, *patches along each]; what is left behind the last patch
        is not read, as in a convolution."""
        counts = [size // side for size, side in zip(x.shape[2:], self._sides, strict=True)]
        for dim, (count, side) in enumerate(zip(counts, self._sides, strict=True), start=2):
            x = x.narrow(dim, 0, count * side)
        split = [size for pair in zip(counts, self._sides, strict=True) for size in pair]
        x = x.reshape(*x.shape[:2], *split)
        along = range(2, x.dim(), 2)
        patches = x.permute(0, *along, 1, *(dim + 1 for dim in along)).flatten(1 + len(counts))
        made: torch.Tensor = self.product(patches.flatten(1, len(counts)))
        return made.transpose(1, 2).reshape(len(x), -1, *counts)


def use_kernels(towers: Iterable[nn.Module]) -> None:
    """Has the attention of towers run by our kernel, and replaces convolutions by products."""
    towers = list(towers)
    if towers:
        _register()
    for tower in towers:
        for config in _attention_configs(tower):
            config._attn_implementation = NAME
        for parent in list(tower.modules()):
            for name, child in list(parent.named_children()):
                if _has_patches_side_by_side(child):
                    setattr(parent, name, PatchProduct(child))


@contextmanager
def attention_restored(towers: Iterable[nn.Module]) -> Iterator[None]:
    """Restores at the end how the towers' attention is run. Modules are others' to restore."""
    before = [
        (config, config._attn_implementation) for tower in towers for config in _attention_configs(tower)
    ]
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    # Masks are made as for torch's attention: none where all patches are seen.
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attention_configs(tower: nn.Module) -> list[Any]:
    """The configurations that the attention of a tower is chosen by; those of other parts stay as they
    are."""
    modules = [module for module in tower.modules() if type(module).__name__.endswith("Attention")]
    configs = [config for module in modules if (config := getattr(module, "config", None)) is not None]
    return [*{id(config): config for config in configs}.values()]


def _has_patches_side_by_side(module: nn.Module) -> TypeGuard[nn.Conv2d | nn.Conv3d]:
    if not isinstance(module, nn.Conv2d | nn.Conv3d) or isinstance(module.padding, str):
        return False
    is_plain = module.groups == 1 and not any(module.padding) and set(module.dilation) == {1}
    return is_plain and module.stride == module.kernel_size
