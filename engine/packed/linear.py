"""Linear layers for a CPU that multiplies bfloat16: weights laid out once for oneDNN, GELU fused in.

Plain `nn.Linear` reorders its weight in every call and writes what GELU reads again.
"""

from typing import Any

import torch
from torch import nn
from transformers.activations import GELUActivation

# A feed-forward's first linear layer and the activation that follows it, by attribute name.
_FUSABLE = {"dense": "intermediate_act_fn", "lin1": "activation"}


class PrepackedLinear(nn.Module):
    """Stands in for an `nn.Linear` in inference, and for the GELU behind it when `gelu` is set."""

    def __init__(self, linear: nn.Linear, gelu: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self._bias = linear.bias.detach() if linear.bias is not None else None
        self._activation = "gelu" if gelu else "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, self._activation, [], "none"
        )
        return out


def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the layers can be used: oneDNN's bfloat16 products on a CPU that has them."""
    return device.type == "cpu" and dtype is torch.bfloat16 and torch.backends.mkldnn.is_available()


def prepack(backbone: nn.Module) -> int:
    """Replaces every `nn.Linear` of a backbone in place; returns how many."""
    replaced = 0
    for parent in list(backbone.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            activation: Any = getattr(parent, _FUSABLE.get(name, ""), None)
            gelu = _is_exact_gelu(activation)
            setattr(parent, name, PrepackedLinear(child, gelu))
            if gelu:
                setattr(parent, _FUSABLE[name], nn.Identity())
            replaced += 1
    return replaced


def _is_exact_gelu(activation: Any) -> bool:
    if isinstance(activation, nn.GELU):
        return activation.approximate == "none"
    return isinstance(activation, GELUActivation) and activation.act is nn.functional.gelu
