"""The last layer for the pooled rows alone: a model that is pooled by its first token needs no other row
of its last layer, so that attention there has one query a sequence and all after it runs on few rows.

For encoders built as BERT is (BERT, RoBERTa, XLM-RoBERTa, ELECTRA), found by their structure.
"""

from typing import Any

import torch
from torch import nn


class FirstRowsOnly(nn.Module):
    """Stands before what follows the last layer's attention and lets only `rows` through, if they are set.

    Wraps the layer's attention output: a module of (attended, residual), both [1, rows, hidden]."""

    def __init__(self, inner: nn.Module, attention: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        # Kept out of the module tree: it is there already.
        self._attention = (attention,)
        self.rows: torch.Tensor | None = None

    def belongs_to(self, attention: nn.Module) -> bool:
        """Whether `attention` is the one whose output this stands behind."""
        return self._attention[0] is attention

    def forward(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self.rows is not None:
            attended, residual = attended[:, self.rows], residual[:, self.rows]
        out: torch.Tensor = self.inner(attended, residual)
        return out


def install(backbone: Any) -> FirstRowsOnly | None:
    """Puts the gate into a backbone's last layer; None where the structure is another."""
    layers = getattr(getattr(backbone, "encoder", None), "layer", None)
    attention = getattr(layers[-1], "attention", None) if layers else None
    if not isinstance(getattr(attention, "self", None), nn.Module):
        return None
    output = getattr(attention, "output", None)
    if not isinstance(output, nn.Module) or not type(output).__name__.endswith("SelfOutput"):
        return None
    assert attention is not None
    gate = FirstRowsOnly(output, attention.self)
    attention.output = gate
    return gate


def remove(backbone: Any, gate: FirstRowsOnly) -> None:
    """Takes the gate out again."""
    backbone.encoder.layer[-1].attention.output = gate.inner
