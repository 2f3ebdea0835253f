"""Modules whose weights are int8, in place of a backbone's linear layers."""

from typing import Any

import torch
from torch import nn

from maxsimd.engine.execution.int8.choose import Path
from maxsimd.engine.execution.int8.rounding import Product, round_weights
from maxsimd.engine.execution.linear import replace_layers
from maxsimd.engine.ops.cpu.linear import Norm


class RoundedLinear(nn.Module):
    """Replaces an `nn.Linear` in inference, together with the GELU that follows it if `gelu` is set.

    `weight` has no contents; it is there for models that ask for its precision or shape."""

    def __init__(self, layer: nn.Linear, gelu: bool, path: Path) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = torch.empty_like(layer.weight, device="meta", requires_grad=False)
        self._product = _product(layer, path)
        self._gelu = gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._product.linear(_rows(x), self._gelu)
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)


class RoundedOutput(nn.Module):
    """Replaces the module that ends the attention and the feed-forward part of a BERT layer: a linear layer,
    the residual sum, and a layer norm."""

    def __init__(self, output: Any, path: Path) -> None:
        super().__init__()
        norm = output.LayerNorm
        self._product = _product(output.dense, path)
        self._norm = Norm(norm.weight.detach().float(), norm.bias.detach().float(), norm.eps)

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        out = self._product.linear_norm(_rows(hidden_states), _rows(input_tensor), self._norm)
        return out.to(input_tensor.dtype).view(input_tensor.shape)


def round_layers(backbone: nn.Module, path: Path) -> int:
    """Replaces every linear layer of a backbone; returns the number of weights."""
    return replace_layers(
        backbone,
        lambda layer, gelu: RoundedLinear(layer, gelu, path),
        lambda output: RoundedOutput(output, path),
    )


def _product(layer: nn.Linear, path: Path) -> Product:
    bias = None if layer.bias is None else layer.bias.detach()
    return path.make(round_weights(layer.weight.detach(), bias, path.most))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., n] as float32 [rows, n]."""
    return x.float().reshape(-1, x.shape[-1])
