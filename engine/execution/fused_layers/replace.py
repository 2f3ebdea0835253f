"""Finds the modules of a backbone that fused ones may take the position of, tries each, and replaces it."""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

from torch import nn

from maxsimd.engine.execution.fused_layers.bert import (
    FusedIntermediate,
    FusedSelfAttention,
    fused_intermediate,
    fused_output,
    fused_self_attention,
)
from maxsimd.engine.execution.fused_layers.linears import has_hooks
from maxsimd.engine.execution.fused_layers.rotary_layers import FusedRotaryLayer, fused_rotary_layer
from maxsimd.engine.ops import triton

log = logging.getLogger(__name__)

_Maker: TypeAlias = Callable[[Any], nn.Module | None]
_MAKERS: tuple[_Maker, ...] = (fused_rotary_layer, fused_self_attention, fused_intermediate, fused_output)
# On a CPU, layers built as BERT's are all run in one call.
_MAKERS_ON_CPU: tuple[_Maker, ...] = (fused_rotary_layer,)


# A module's type and that of the module which has taken its position.
Fused: TypeAlias = tuple[type[nn.Module], type[nn.Module]]


def fuse(backbone: nn.Module, known: Collection[Fused] | None = None) -> list[Fused]:
    """Replaces the modules of a backbone that fused ones can stand for, and returns a pair of types for each.
    The backbone must run packed, and be on its device and in its precision. A module stays if it is not built
    as expected, if its results differ, or if its pair is not among the `known` ones, where these are given: a
    trial in float32 notices more than one in 16 bits.

    One module after the other, so that only one has its weights twice in memory."""
    replaced: list[Fused] = []
    failures: set[str] = set()
    makers = _MAKERS if triton.runs_on(next(backbone.parameters()).device) else _MAKERS_ON_CPU
    for name in [name for name, _ in backbone.named_modules() if name]:
        owner, _, attribute = name.rpartition(".")
        try:
            parent = backbone.get_submodule(owner)
            module: Any = parent._modules[attribute]
        except (AttributeError, KeyError):
            continue  # it was part of a module that is replaced by now
        fused = _fused(module, makers, failures)
        if fused is None:
            continue
        kind = (type(module), type(fused))
        # GELU is part of a product in bfloat16 alone, and is compared with the exact one.
        if known is None or kind in known or isinstance(fused, FusedIntermediate):
            setattr(parent, attribute, fused)
            _release(fused)
            replaced.append(kind)
    for failure in sorted(failures):
        log.warning("layers are left as they are, which is slower: %s", failure)
    return replaced


def _fused(module: Any, makers: Sequence[_Maker], failures: set[str]) -> nn.Module | None:
    """What may take a module's position; None if there is nothing that does the same. Adds to `failures`
    what failed with modules that are built as expected."""
    if has_hooks(module):
        return None
    for make in makers:
        try:
            fused = make(module)
        except Exception as error:  # its forward takes other arguments, or the kernels failed
            failures.add(f"{type(module).__name__}: {type(error).__name__}: {error}")
            continue
        if fused is not None:
            return fused
    return None


def _release(fused: nn.Module) -> None:
    """Frees the layers whose weights a fused module has copies of; attention modules live on without them."""
    if isinstance(fused, FusedSelfAttention):
        fused._replaced[0]._modules.clear()
    elif isinstance(fused, FusedRotaryLayer):
        fused._attention[0]._modules.clear()
