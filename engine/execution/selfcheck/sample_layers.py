"""A backbone with a sample of its layers for the time of a proof: one of each kind, and the last.

The layers of a model differ in their weights and perhaps in kind, so what is proven for these holds for all,
in a fraction of the time and memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# Where a tower names the layers whose outputs it hands on beside the last one's (DeepStack).
_DEEP = "deepstack_visual_indexes"
# What configs call the kinds of layers, by which models look up masks.
_KINDS = "layer_types"
# The names by which modules hold their own index among the layers, which says nothing about their kind.
_INDEX_NAMES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index"})


@contextmanager
def sample_layers(backbone: Any) -> Iterator[None]:
    """Leaves the backbone with the first of its layers of each kind, and its last; with all of them if its
    list of layers is not found. A tower whose layers have outputs for several layers of the language model
    has these outputs of the ones that are left."""
    found = _layer_list(backbone)
    if found is None:
        yield
        return
    parent, name, layers = found
    indices = _one_of_each_kind(layers, backbone.config)
    sample = nn.ModuleList(layers[i] for i in indices)
    setattr(parent, name, sample)
    named = _kinds_named(backbone.config, len(layers))
    if named:
        setattr(backbone.config, _KINDS, [named[i] for i in indices])
    deep = getattr(backbone, _DEEP, None)
    if deep is not None:
        setattr(backbone, _DEEP, list(range(min(len(deep), len(sample)))))
    try:
        yield
    finally:
        setattr(parent, name, layers)
        if named:
            setattr(backbone.config, _KINDS, named)
        if deep is not None:
            setattr(backbone, _DEEP, deep)


def _layer_list(backbone: Any) -> tuple[nn.Module, str, nn.ModuleList] | None:
    """The only list that has as many modules as the model has layers, with its parent and name."""
    config = getattr(backbone, "config", None)
    # Towers that encode pictures call it depth.
    count = getattr(config, "num_hidden_layers", None) or getattr(config, "depth", None)
    if count is None:
        return None
    lists = [
        (parent, name, child)
        for parent in backbone.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    return lists[0] if len(lists) == 1 and len(lists[0][2]) > 2 else None


def _kinds_named(config: Any, count: int) -> list[Any] | None:
    """What a config calls the kind of each of its `count` layers, if it says so in a field of its own."""
    named = vars(config).get(_KINDS)
    return named if isinstance(named, list) and len(named) == count else None


def _one_of_each_kind(layers: nn.ModuleList, config: Any) -> list[int]:
    """The indices of the shortest run of first layers that has all kinds, and of the last layer."""
    others = list(layers)[:-1]
    named = _kinds_named(config, len(layers)) or [None] * len(layers)
    kinds = [(_kind(layer), name) for layer, name in zip(others, named, strict=False)]
    enough = max(kinds.index(kind) for kind in set(kinds)) + 1
    return [*range(enough), len(layers) - 1]


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """What distinguishes kinds of layers: the types, shapes and plain settings of all their modules."""
    kind: list[object] = [(name, tuple(tensor.shape)) for name, tensor in layer.named_parameters()]
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | type(None)) and key not in _INDEX_NAMES
        }
        kind.append((name, type(module), tuple(sorted(settings.items(), key=repr))))
    return tuple(kind)
