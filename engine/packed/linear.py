"""Linear layers for a CPU that multiplies bfloat16: weights laid out once, what follows them fused in.

Plain `nn.Linear` reorders its weight in every call and writes what GELU or a layer norm reads again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import GELUActivation

from maxsimd.kernels.linear import Norm, Weights, linear, linear_norm, pack_bfloat16, pack_int8

# A feed-forward's first linear layer and the activation that follows it, by attribute name.
_FUSABLE = {"dense": "intermediate_act_fn", "lin1": "activation"}


class CompiledLinear(nn.Module):
    """Stands in for an `nn.Linear` in inference, and for the GELU behind it when `gelu` is set, with our own
    kernels. With int8 weights, activations are rounded to int8 too, row by row."""

    def __init__(self, layer: nn.Linear, gelu: bool, pack: Callable[[torch.Tensor], Weights]) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._weights = pack(layer.weight.detach())
        self._bias = layer.bias.detach().float() if layer.bias is not None else None
        self._gelu = gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._weights, self._bias, self._gelu)


class CompiledOutput(nn.Module):
    """Stands in for what ends both halves of a BERT layer: a linear layer, the sum with the half's input, and
    a layer norm."""

    def __init__(self, output: Any, pack: Callable[[torch.Tensor], Weights]) -> None:
        super().__init__()
        dense, norm = output.dense, output.LayerNorm
        self._weights = pack(dense.weight.detach())
        self._bias = dense.bias.detach().float() if dense.bias is not None else None
        self._norm = Norm(norm.weight.detach().float(), norm.bias.detach().float(), norm.eps)

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        return linear_norm(hidden_states, input_tensor, self._weights, self._bias, self._norm)


class PrepackedLinear(nn.Module):
    """Likewise, with oneDNN's kernels and bfloat16 weights."""

    def __init__(self, layer: nn.Linear, gelu: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
        self._bias = layer.bias.detach() if layer.bias is not None else None
        self._activation = "gelu" if gelu else "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, self._activation, [], "none"
        )
        return out


def is_prepacked_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN's layers can be used: its bfloat16 products on a CPU that has them."""
    return device.type == "cpu" and dtype is torch.bfloat16 and torch.backends.mkldnn.is_available()


def prefers_prepacked() -> bool:
    """Whether oneDNN's bfloat16 products are better than ours here: it knows AMX tiles, we do not."""
    return torch.cpu._is_amx_tile_supported()


def compile_bfloat16(backbone: nn.Module) -> int:
    """Puts our kernels with bfloat16 weights in the place of every layer that they can stand in for; returns
    how many weights that is."""
    return _compile(backbone, pack_bfloat16, lambda layer: layer.in_features % 2 == 0)


def compile_int8(backbone: nn.Module) -> int:
    """Likewise with int8 weights."""
    return _compile(backbone, pack_int8, lambda layer: True)


def prepack(backbone: nn.Module) -> int:
    """Replaces every `nn.Linear` by one that oneDNN has packed; returns how many weights that is."""
    return _replace(backbone, PrepackedLinear)


def _compile(
    backbone: nn.Module, pack: Callable[[torch.Tensor], Weights], fits: Callable[[nn.Linear], bool]
) -> int:
    replaced = 0
    for parent in list(backbone.modules()):
        child: Any
        for name, child in list(parent.named_children()):
            if _is_output(child) and fits(child.dense):
                replaced += child.dense.weight.numel()
                setattr(parent, name, CompiledOutput(child, pack))
    return replaced + _replace(backbone, lambda layer, gelu: CompiledLinear(layer, gelu, pack), fits)


def _replace(
    backbone: nn.Module,
    stand_in: Callable[[nn.Linear, bool], nn.Module],
    fits: Callable[[nn.Linear], bool] = lambda layer: True,
) -> int:
    replaced = 0
    for parent in list(backbone.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or not fits(child):
                continue
            activation: Any = getattr(parent, _FUSABLE.get(name, ""), None)
            gelu = _is_exact_gelu(activation)
            setattr(parent, name, stand_in(child, gelu))
            if gelu:
                setattr(parent, _FUSABLE[name], nn.Identity())
            replaced += child.weight.numel()
    return replaced


def _is_output(module: Any) -> bool:
    """Whether a module is made of what ends the halves of a BERT layer, and does with it what they do."""
    children = dict(module.named_children())
    if children.keys() != {"dense", "LayerNorm", "dropout"} or not type(module).__name__.endswith("Output"):
        return False
    dense, norm = module.dense, module.LayerNorm
    if (
        type(dense) is not nn.Linear
        or type(norm) is not nn.LayerNorm
        or norm.weight is None
        or norm.bias is None
    ):
        return False
    x = torch.linspace(-1, 1, dense.in_features, dtype=dense.weight.dtype)[None]
    residual = torch.linspace(2, -1, dense.out_features, dtype=dense.weight.dtype)[None]
    try:
        with torch.inference_mode():
            return torch.equal(module(x, residual), norm(dense(x) + residual))
    except (TypeError, RuntimeError):
        return False  # it takes something else


def _is_exact_gelu(activation: Any) -> bool:
    if isinstance(activation, nn.GELU):
        return activation.approximate == "none"
    return isinstance(activation, GELUActivation) and activation.act is nn.functional.gelu
