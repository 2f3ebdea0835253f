"""A last layer that computes the first row of each sequence alone. A model that is pooled by its first token
needs no other row of it, so its attention has one query a sequence and all that follows runs on few rows.

For encoders built as BERT is (BERT, RoBERTa, XLM-RoBERTa, ELECTRA), recognised by their structure.
"""

from typing import Any

import torch
from torch import nn


class ClsOnlyLastLayer(nn.Module):
    """Takes the place of the output module of the last layer's attention and hands only `rows` on to it, if
    they are set.

    The output module maps (attended, residual), both [1, rows, hidden]."""

    def __init__(self, inner: nn.Module, attention: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        # In a tuple, so that it does not become a child a second time: it is one of the layer's already.
        self._attention = (attention,)
        self.rows: torch.Tensor | None = None

    def belongs_to(self, attention: nn.Module) -> bool:
        """Whether `attention` is the one whose output this module receives."""
        return self._attention[0] is attention

    def forward(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self.rows is not None:
            attended, residual = attended[:, self.rows], residual[:, self.rows]
        out: torch.Tensor = self.inner(attended, residual)
        return out


def install(backbone: Any) -> ClsOnlyLastLayer | None:
    """Installs the module in a backbone's last layer; None if the structure is not BERT's."""
    layers = getattr(getattr(backbone, "encoder", None), "layer", None)
    attention = getattr(layers[-1], "attention", None) if layers else None
    if not isinstance(getattr(attention, "self", None), nn.Module):
        return None
    output = getattr(attention, "output", None)
    if not isinstance(output, nn.Module) or not type(output).__name__.endswith("SelfOutput"):
        return None
    assert attention is not None
    cls_only = ClsOnlyLastLayer(output, attention.self)
    attention.output = cls_only
    return cls_only


def remove(backbone: Any, cls_only: ClsOnlyLastLayer) -> None:
    """Restores the backbone's last layer."""
    backbone.encoder.layer[-1].attention.output = cls_only.inner
