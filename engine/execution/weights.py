"""Replaces a model's layers by those of our kernels, if it gives the same with them: linear layers and towers
of pictures on a CPU, fused layers on a GPU. Some models read their layers' weights instead of calling
them."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import nn

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.checkpoint.heads import modules_of
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.execution import int8, linear
from maxsimd.engine.execution.fused_layers import Fused, fuse
from maxsimd.engine.execution.runner import ModelRunner
from maxsimd.engine.execution.self_check.proof import compare, compare_in_parts, pooler_for
from maxsimd.engine.execution.self_check.samples import Sample
from maxsimd.engine.ops.cpu.attention import attention
from maxsimd.engine.ops.cpu.blocks import BlockTensor
from maxsimd.engine.ops.cpu.linear import pack_bfloat16, pack_float32, pack_int8
from maxsimd.engine.ops.qkv import QKV


def why_not_replaced(
    model: LoadedModel,
    runner: ModelRunner,
    samples: Sequence[Sample],
    compiled: bool,
    fusible: Collection[Fused] = (),
) -> str | None:
    """None if the model in float32 gives the expected items for the samples with its linear layers replaced
    (after fusing layers of the `fusible` kinds) and, if `compiled`, its tower run by our kernels; else a
    description of the mismatch. Leaves the model unchanged."""
    # In float32, weights in blocks would take eight times their memory.
    in_blocks = any(isinstance(each, BlockTensor) for each in model.backbone.parameters())
    roots = [*model.encoders, *_head_modules(model)]
    try:
        with tower_attention_restored(_towers(model)), _restored(roots):
            if compiled:
                use_tower_kernels(_towers(model))
            if fusible:
                fuse(model.backbone, fusible)
            for root in roots:
                if compiled and not in_blocks:
                    linear.compile_layers(root, pack_float32)
                else:
                    linear.hide_weights(root)
            comparison = compare(runner, pooler_for(model.tasks), samples)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if comparison.agrees else f"results differ: {comparison}"


def proven_fused(
    model: LoadedModel, runner: ModelRunner, samples: Sequence[Sample]
) -> frozenset[Fused] | str:
    """The kinds of modules that can be fused if the model in float32 then gives the expected items for the
    samples, also in chunks if it runs so; else a description of the mismatch. Leaves the model unchanged."""
    pooler = pooler_for(model.tasks)
    try:
        with _restored([model.backbone]):
            kinds = frozenset(fuse(model.backbone))
            if not kinds:
                return kinds
            comparison = compare(runner, pooler, samples)
            if comparison.agrees and runner.chunked:
                comparison = compare_in_parts(runner, pooler, samples)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return kinds if comparison.agrees else f"results differ: {comparison}"


def lay_out_weights(
    model: LoadedModel, device: torch.device, dtype: torch.dtype, config: EngineConfig, compiled: bool
) -> int:
    """Replaces the linear layers of backbone and heads; returns the number of int8 weights. A tower has none:
    all that follows reads its results."""
    rounded = config.quantization == "int8"
    exact = [*_towers(model), *([] if rounded else [model.backbone])]
    if not compiled:
        if device.type == "cpu":
            for module in exact:
                linear.replace_by_method(module, linear.choose_method(dtype))
    else:
        for module in _head_modules(model):
            linear.compile_layers(module, pack_float32)
        use_tower_kernels(_towers(model))
        for module in exact:
            linear.compile_layers(module, pack_float32 if dtype is torch.float32 else pack_bfloat16)
    if not rounded:
        return 0
    if compiled and dtype is torch.bfloat16:
        return linear.compile_layers(model.backbone, pack_int8)
    return int8.round_layers(model.backbone, int8.choose_path(config.kernels == "auto"))


def _towers(model: LoadedModel) -> tuple[nn.Module, ...]:
    return () if model.vision is None else model.vision.modules


def _head_modules(model: LoadedModel) -> list[nn.Module]:
    return [module for task in model.tasks.values() for module in modules_of(task.head)]


@contextmanager
def _restored(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Restores all attributes and children of the modules under `roots` at the end."""
    before = [
        (module, dict(vars(module)), dict(module._modules)) for root in roots for module in root.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, children in before:
            vars(module).update(attributes)
            module._modules.clear()
            module._modules.update(children)


TOWER_ATTENTION = "maxsimd_tower"


def attend_within_pictures(
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
    """transformers' attention interface for patches that see all of their picture: [pictures, heads, patches,
    head_dim] to [pictures, patches, heads, head_dim]. torch takes calls with a mask. On a CPU its attention
    is several times slower (`bench page-speed`)."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if attention_mask is not None or is_causal or kwargs:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0], None
    pictures, heads, patches, dims = query.shape
    # [heads, rows, head_dim], the pictures end to end
    q, k, v = (x.transpose(0, 1).reshape(x.shape[1], -1, x.shape[-1]) for x in (query, key, value))
    qkv = QKV(q, k, v, dims**-0.5 if scaling is None else scaling)
    out = qkv.new_output()
    table = [(first, patches, patches, -1) for first in range(0, pictures * patches, patches)]
    attention(qkv, torch.tensor(table, dtype=torch.int64), [], False, out)
    return out.view(pictures, patches, heads, -1), None


class PatchProduct(nn.Module):
    """Replaces a convolution with patches side by side by a product with each patch: torch's convolutions
    reorder their weights in every call. `weight` has no contents; models ask for its precision."""

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
        """[n, channels, *sizes] to [n, out channels, *patches]; as in a convolution, a rest after the last
        patch is not read."""
        counts = [size // side for size, side in zip(x.shape[2:], self._sides, strict=True)]
        for dim, (count, side) in enumerate(zip(counts, self._sides, strict=True), start=2):
            x = x.narrow(dim, 0, count * side)
        split = [size for pair in zip(counts, self._sides, strict=True) for size in pair]
        x = x.reshape(*x.shape[:2], *split)
        along = range(2, x.dim(), 2)
        patches = x.permute(0, *along, 1, *(dim + 1 for dim in along)).flatten(1 + len(counts))
        made: torch.Tensor = self.product(patches.flatten(1, len(counts)))
        return made.transpose(1, 2).reshape(len(x), -1, *counts)


def use_tower_kernels(towers: Iterable[nn.Module]) -> None:
    """Runs the attention of towers by our kernel, and replaces their convolutions by products."""
    towers = list(towers)
    if towers:
        _register()
    for tower in towers:
        for config in _attention_configs(tower):
            config._attn_implementation = TOWER_ATTENTION
        for parent, name, child in linear.children_within(tower):
            if _has_patches_side_by_side(child):
                setattr(parent, name, PatchProduct(child))


@contextmanager
def tower_attention_restored(towers: Iterable[nn.Module]) -> Iterator[None]:
    """Restores the attention of towers at the end, but not their modules."""
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

    AttentionInterface.register(TOWER_ATTENTION, attend_within_pictures)
    # Masks as for torch's attention: none if all patches are seen.
    AttentionMaskInterface.register(TOWER_ATTENTION, sdpa_mask)


def _attention_configs(tower: nn.Module) -> list[Any]:
    """The configs by which the attention of a tower is chosen."""
    modules = [module for module in tower.modules() if type(module).__name__.endswith("Attention")]
    configs = [config for module in modules if (config := getattr(module, "config", None)) is not None]
    return [*{id(config): config for config in configs}.values()]


def _has_patches_side_by_side(module: nn.Module) -> TypeGuard[nn.Conv2d | nn.Conv3d]:
    if not isinstance(module, nn.Conv2d | nn.Conv3d) or isinstance(module.padding, str):
        return False
    is_plain = module.groups == 1 and not any(module.padding) and set(module.dilation) == {1}
    return is_plain and module.stride == module.kernel_size
