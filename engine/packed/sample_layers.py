"""A backbone with few of its layers for a while: enough to have one of each kind, and the last.

The layers of a model differ in their weights and perhaps in kind, so what is proven of these is so of all, in
a fraction of the time and memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def sample_layers(backbone: Any) -> Iterator[None]:
    """Leaves the backbone with its first layers, up to one of each kind, and its last. All of them where its
    list of layers cannot be told."""
    found = _layer_list(backbone)
    if found is None:
        yield
        return
    parent, name, layers = found
    setattr(parent, name, nn.ModuleList([*layers[: _enough(backbone.config, len(layers))], layers[-1]]))
    try:
        yield
    finally:
        setattr(parent, name, layers)


def _layer_list(backbone: Any) -> tuple[nn.Module, str, nn.ModuleList] | None:
    """The one list of as many modules as the model has layers, by its parent and name."""
    count = getattr(backbone.config, "num_hidden_layers", None)
    lists = [
        (parent, name, child)
        for parent in backbone.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    return lists[0] if len(lists) == 1 and len(lists[0][2]) > 2 else None


def _enough(config: Any, layers: int) -> int:
    """How many of the first layers it takes to have one of each kind, at least one and not the last."""
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return 1
    enough = max(list(kinds).index(kind) for kind in set(kinds)) + 1
    return min(enough, layers - 1)
