"""Linear layers for the CPU: weights are laid out once, and the operation that follows is fused into the
layer. The embeddings before the layers, if they are built as BERT's, are compiled with them.

Plain `nn.Linear` reorders its weight in every call, and writes to memory what GELU or a layer norm reads
again. Its result for a row depends in the last bits on the number of rows; that of our own kernels does not.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from maxsimd.engine.execution.embeddings import compile_embeddings
from maxsimd.engine.ops import elementwise
from maxsimd.engine.ops.cpu.layers import Product
from maxsimd.engine.ops.cpu.linear import (
    LANES,
    Norm,
    Weights,
    gated_order,
    linear,
    linear_added,
    linear_gated,
    linear_norm,
    pack_bfloat16,
    pack_float32,
    pack_int8,
)

Pack = Callable[[torch.Tensor], Weights]

# A feed-forward's first linear layer and the activation that follows it, by attribute name.
_FUSABLE = {"dense": "intermediate_act_fn", "lin1": "activation"}


class CompiledLinear(nn.Module):
    """Replaces an `nn.Linear` in inference by our own kernels, together with the GELU that follows it if
    `gelu` is set. With int8 weights, activations are rounded to int8 too, row by row.

    `weight` has no contents; it is there for models that ask for its precision or shape."""

    def __init__(self, layer: nn.Linear, gelu: bool, pack: Pack) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = torch.empty_like(layer.weight, device="meta", requires_grad=False)
        self.product = _product(layer, pack)
        self.gelu = gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.product.weights, self.product.bias, self.gelu)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The layer's output for `x` plus the residual, in one call. For layers without GELU."""
        return linear_added(x, self.product.weights, self.product.bias, residual)


class CompiledOutput(nn.Module):
    """Replaces the module that ends the attention and the feed-forward part of a BERT layer: a linear layer,
    the residual sum, and a layer norm."""

    def __init__(self, output: Any, pack: Pack) -> None:
        super().__init__()
        dense, norm = output.dense, output.LayerNorm
        self.product = _product(dense, pack)
        self.norm = Norm(norm.weight.detach().float(), norm.bias.detach().float(), norm.eps)

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        return linear_norm(hidden_states, input_tensor, self.product.weights, self.product.bias, self.norm)


class Gated(nn.Module):
    """The first products of a feed-forward as one, whose first half is activated and gates the second."""

    def __init__(self, up: nn.Linear, activation: elementwise.Activation) -> None:
        super().__init__()
        self.up, self.activation = up, activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to [rows, inner]."""
        return elementwise.gated(self.up(x), self.activation)


class CompiledGated(nn.Module):
    """Replaces a `Gated` by our own kernels: the gate is applied before anything leaves the registers."""

    def __init__(self, replaced: Gated, pack: Pack) -> None:
        super().__init__()
        self.activation = replaced.activation
        order = gated_order(replaced.up.out_features // 2)
        bias = replaced.up.bias
        in_order = None if bias is None else bias.detach().float()[order]
        self.product = Product(pack(replaced.up.weight.detach()[order]), in_order)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to [rows, inner]."""
        return linear_gated(x, self.product.weights, self.product.bias, self.activation)


def compile_float32(module: nn.Module) -> int:
    """Replaces every float32 layer that our kernels can compute, within a backbone or a head; returns the
    number of weights."""
    return _compile(module, pack_float32, lambda layer: layer.weight.dtype is torch.float32)


def compile_bfloat16(backbone: nn.Module) -> int:
    """Replaces the layers of a backbone that runs in bfloat16, with weights in bfloat16; returns the number
    of weights."""
    return _compile(backbone, pack_bfloat16)


def compile_int8(backbone: nn.Module) -> int:
    """Replaces the layers of a backbone that runs in bfloat16, with weights in int8; returns the number of
    weights."""
    return _compile(backbone, pack_int8)


def hide(module: nn.Module) -> int:
    """Replaces every layer by one that computes the same and hides its weight. A model that gives the same
    with these calls its layers instead of reading their weights, so any replacement will do."""
    return replace_layers(module, lambda layer, gelu: _Hidden(layer, gelu), _HiddenOutput)


class _Hidden(nn.Module):
    def __init__(self, layer: nn.Linear, gelu: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._layer = (layer,)  # out of the module tree
        self._gelu = gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._layer[0](x)
        return nn.functional.gelu(out) if self._gelu else out


class _HiddenOutput(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self._parts = (output.dense, output.LayerNorm)  # out of the module tree

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        dense, norm = self._parts
        out: torch.Tensor = norm(dense(hidden_states) + input_tensor)
        return out


def _product(layer: nn.Linear, pack: Pack) -> Product:
    bias = layer.bias.detach().float() if layer.bias is not None else None
    return Product(pack(layer.weight.detach()), bias)


def _compile(backbone: nn.Module, pack: Pack, fits: Callable[[nn.Linear], bool] = lambda layer: True) -> int:
    compile_embeddings(backbone)
    replaced = 0
    for parent in list(backbone.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Gated) and fits(child.up) and child.up.out_features % (2 * LANES) == 0:
                replaced += child.up.weight.numel()
                setattr(parent, name, CompiledGated(child, pack))
    return replaced + replace_layers(
        backbone,
        lambda layer, gelu: CompiledLinear(layer, gelu, pack),
        lambda output: CompiledOutput(output, pack),
        fits,
    )


def replace_layers(
    backbone: nn.Module,
    stand_in: Callable[[nn.Linear, bool], nn.Module],
    stand_in_output: Callable[[Any], nn.Module],
    fits: Callable[[nn.Linear], bool] = lambda layer: True,
) -> int:
    """Replaces the modules that end the parts of a BERT layer, then every `nn.Linear` that is left, told
    whether it takes the GELU behind it along; returns the number of weights."""
    replaced = 0
    for parent in list(backbone.modules()):
        child: Any
        for name, child in list(parent.named_children()):
            if _is_output(child) and fits(child.dense):
                replaced += child.dense.weight.numel()
                setattr(parent, name, stand_in_output(child))
    return replaced + replace_linears(backbone, stand_in, fits)


def replace_linears(
    backbone: nn.Module,
    stand_in: Callable[[nn.Linear, bool], nn.Module],
    fits: Callable[[nn.Linear], bool] = lambda layer: True,
) -> int:
    """Replaces every `nn.Linear`, told whether it takes the GELU behind it along; returns the number of
    weights."""
    replaced = 0
    for parent in list(backbone.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or not fits(child):
                continue
            activation: Any = getattr(parent, _FUSABLE.get(name, ""), None)
            gelu = is_exact_gelu(activation)
            setattr(parent, name, stand_in(child, gelu))
            if gelu:
                setattr(parent, _FUSABLE[name], nn.Identity())
            replaced += child.weight.numel()
    return replaced


def _is_output(module: Any) -> bool:
    """Whether a module has the children of a BERT output module, and computes what such a module computes."""
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
        return False  # its forward takes other arguments


def is_exact_gelu(activation: Any) -> bool:
    """Whether a module is GELU in its exact form, by the error function."""
    if isinstance(activation, nn.GELU):
        return activation.approximate == "none"
    # transformers' class, by its name: importing it takes a second.
    return type(activation).__name__ == "GELUActivation" and activation.act is nn.functional.gelu
