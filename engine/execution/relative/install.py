"""Finds encoders with relative positions by their classes in transformers, and has them run packed."""

from collections.abc import Callable
from typing import Any

from torch import nn

from maxsimd.engine.execution.relative.encoder import PackedEncoder
from maxsimd.engine.execution.relative.t5 import share_bias

_PACKED = frozenset({"DebertaV2Encoder", "MPNetEncoder"})
_STACKS = frozenset({"T5Stack", "MT5Stack"})
# Models of ours, which hand their bias to any attention by themselves.
_BIASED = frozenset({"JinaBertEncoder"})


def has_relative_positions(backbone: nn.Module) -> bool:
    """Whether attention of a backbone is asked for relative positions."""
    return any(
        type(module).__name__ in _PACKED | _BIASED or _is_stack(module) for module in backbone.modules()
    )


def install(backbone: Any, attention: str) -> Callable[[], None]:
    """Has the encoder of a backbone run packed, for steps with their attention; does nothing to one without
    relative positions. A backbone whose attention has no interface counts as one that attends by the name
    `attention`, for which transformers makes no masks. Returns what undoes it."""
    encoder = getattr(backbone, "encoder", None)
    packed = _packed_class(type(encoder).__name__)
    if packed is None:
        return _undoing([share_bias(module) for module in backbone.modules() if _is_stack(module)])
    replacement, before = packed(encoder), backbone.config._attn_implementation
    backbone.encoder = replacement
    backbone.config._attn_implementation = attention
    hook = backbone.register_forward_pre_hook(replacement.take_attention, with_kwargs=True)

    def restore() -> None:
        backbone.encoder = encoder
        backbone.config._attn_implementation = before

    return _undoing([hook.remove, restore])


def _packed_class(name: str) -> type[PackedEncoder] | None:
    """What replaces an encoder of this class. Imported here because it imports transformers."""
    if name == "DebertaV2Encoder":
        from maxsimd.engine.execution.relative.deberta_v2 import PackedDebertaV2

        return PackedDebertaV2
    if name == "MPNetEncoder":
        from maxsimd.engine.execution.relative.mpnet import PackedMPNet

        return PackedMPNet
    return None


def _is_stack(module: nn.Module) -> bool:
    return type(module).__name__ in _STACKS and not getattr(module, "is_decoder", False)


def _undoing(steps: list[Callable[[], None]]) -> Callable[[], None]:
    def undo() -> None:
        for step in steps:
            step()

    return undo
