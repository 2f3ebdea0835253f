"""Several linear layers of one input as one product."""

from collections.abc import Sequence

import torch
from torch import nn


class JoinedLinear(nn.Module):
    """Linear layers of one input as one product, whose outputs stand side by side in each row.

    It has copies of their weights."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.weight = _constant(torch.cat([layer.weight.detach() for layer in layers]))
        self.bias: nn.Parameter | None = None
        if any(layer.bias is not None for layer in layers):
            self.bias = _constant(torch.cat([_bias_of(layer) for layer in layers]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, inputs] to [rows, outputs of all]."""
        return nn.functional.linear(x, self.weight, self.bias)


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a linear layer and nothing else: no adapter, no quantised weight, no hook."""
    return type(module) is nn.Linear and not has_hooks(module) and module.weight.is_floating_point()


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has a hook that may do something. transformers leaves hooks behind when a model was
    asked for the states of all layers; without that question, as in a step, they do nothing."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(hook.__module__ != "transformers.utils.output_capturing" for hook in hooks)


def add_product_(total: torch.Tensor, x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    """Adds a linear layer's output for `x` [rows, inputs] to `total` [rows, outputs]. Without a bias the
    product does it, in float32 and rounded once; otherwise its output is rounded first."""
    bias: torch.Tensor | None = layer.bias
    if bias is None:
        return total.addmm_(x, layer.weight.t())
    return total.add_(layer(x))


def _bias_of(layer: nn.Linear) -> torch.Tensor:
    return layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()


def _constant(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
