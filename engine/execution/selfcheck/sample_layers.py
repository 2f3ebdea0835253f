"""A backbone with few of its layers for a while: one of each kind, and the last.

The layers of a model differ in their weights and perhaps in kind, so what is proven of these is taken to be
so of all, in a fraction of the time and memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# How modules call their own place among the layers, which makes no other kind of them.
_PLACES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index"})


@contextmanager
def sample_layers(backbone: Any) -> Iterator[None]:
    """Leaves the backbone with the first of its layers of each kind, and its last. All of them where its list
    of layers cannot be told."""
    found = _layer_list(backbone)
    if found is None:
        yield
        return
    parent, name, layers = found
    setattr(parent, name, nn.ModuleList(_one_of_each_kind(layers, backbone.config)))
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


def _one_of_each_kind(layers: nn.ModuleList, config: Any) -> list[nn.Module]:
    """All layers up to the first of the kind that comes last, and the last. Layers keep their places, because
    models look kinds up by them."""
    *others, last = layers
    named = getattr(config, "layer_types", None) or [None] * len(layers)
    kinds = [(_kind(layer), name) for layer, name in zip(others, named, strict=False)]
    enough = max(kinds.index(kind) for kind in set(kinds)) + 1
    return [*others[:enough], last]


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """What tells kinds of layers apart: the types, shapes and plain settings of all that they are made of."""
    kind: list[object] = [(name, tuple(tensor.shape)) for name, tensor in layer.named_parameters()]
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | type(None)) and key not in _PLACES
        }
        kind.append((name, type(module), tuple(sorted(settings.items(), key=repr))))
    return tuple(kind)
