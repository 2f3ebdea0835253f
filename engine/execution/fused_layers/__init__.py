"""Replaces modules of a packed model by fused ones in few launches: found by structure, tried before use. On
a CPU, layers with rotary positions alone; layers built as BERT's run in one call there.

A layer built as BERT's takes eight launches in place of twelve, or seven if the first product of its
feed-forward computes the GELU."""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from maxsimd.engine.execution.fused_layers.parts import (
    ROWS,
    GeluLinear,
    agrees,
    has_hooks,
    is_plain,
    joined_linear,
    joins_gelu,
    random_like,
    record_attention,
    same_attention_inputs,
)
from maxsimd.engine.execution.fused_layers.rotary_layers import FusedRotaryLayer, fused_rotary_layer
from maxsimd.engine.execution.linear import children_of, is_exact_gelu, is_layer_norm
from maxsimd.engine.execution.runner import attend
from maxsimd.engine.ops import elementwise, triton
from maxsimd.engine.ops.qkv import QKV
from maxsimd.engine.workers import give_back_memory

log = logging.getLogger(__name__)


class FusedSelfAttention(nn.Module):
    """Queries, keys and values as one product, and packed attention, which tells layers apart by the replaced
    module."""

    def __init__(self, replaced: Any, asked: QKV) -> None:
        super().__init__()
        self.product = joined_linear([replaced.query, replaced.key, replaced.value])
        self.heads, _, self.head_dim = asked.query.shape
        self.scaling, self.window = asked.scaling, asked.window
        self.replaced_attention = (replaced,)  # out of the module tree

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """[1, rows, hidden] to [1, rows, hidden]."""
        rows = hidden_states.shape[1]
        qkv = self.product(hidden_states[0]).view(rows, 3, self.heads, self.head_dim)
        query, key, value = qkv.permute(1, 2, 0, 3)[:, None].unbind()  # [1, heads, rows, head_dim] each
        out, _ = attend(
            self.replaced_attention[0],
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            sliding_window=self.window,
            **kwargs,
        )
        return out.reshape(1, rows, -1), None


class FusedIntermediate(GeluLinear):
    """The first product of a feed-forward with its GELU."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[1, rows, hidden] to [1, rows, intermediate]."""
        return super().forward(hidden_states[0])[None]


class FusedOutput(nn.Module):
    """A linear layer, and one kernel for the residual sum and layer norm after it."""

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        self.dense, self.LayerNorm = replaced.dense, replaced.LayerNorm

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        norm = self.LayerNorm
        made, of_norm = self.dense(hidden_states[0]), (norm.weight, norm.bias, norm.eps)
        return elementwise.norm(made, *of_norm, input_tensor[0], is_centered=True)[None]


def fused_self_attention(module: Any) -> FusedSelfAttention | None:
    """Replaces a self-attention built as BERT's; None for any other module."""
    if children_of(module) != {"query", "key", "value", "dropout"} or type(module.dropout) is not nn.Dropout:
        return None
    layers = (module.query, module.key, module.value)
    if not all(is_plain(layer) for layer in layers) or len({layer.weight.shape for layer in layers}) != 1:
        return None
    x = random_like((1, ROWS, module.query.in_features), module.query.weight)
    theirs = record_attention(lambda attention: module(x, step_attention=attention)[0])
    if theirs is None:
        return None
    fused = FusedSelfAttention(module, theirs[0])
    ours = record_attention(lambda attention: fused(x, step_attention=attention)[0])
    right = ours is not None and same_attention_inputs(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    return fused if right else None


def fused_intermediate(module: Any) -> FusedIntermediate | None:
    """Replaces the beginning of a feed-forward built as BERT's with exact GELU; None for any other module, or
    if that is slower or less exact."""
    if children_of(module) != {"dense", "intermediate_act_fn"} or not is_plain(module.dense):
        return None
    if not is_exact_gelu(module.intermediate_act_fn) or not joins_gelu(module.dense):
        return None
    fused = FusedIntermediate(module.dense)
    return fused if _give_the_same(fused, module, (module.dense.in_features,)) else None


def fused_output(module: Any) -> FusedOutput | None:
    """Replaces the end of an attention or a feed-forward built as BERT's; None for any other module."""
    if children_of(module) != {"dense", "LayerNorm", "dropout"} or not is_plain(module.dense):
        return None
    norm, width = module.LayerNorm, module.dense.out_features
    if not is_layer_norm(norm) or norm.normalized_shape != (width,) or width > elementwise.LARGEST_WIDTH:
        return None
    fused = FusedOutput(module)
    return fused if _give_the_same(fused, module, (module.dense.in_features, width)) else None


def _give_the_same(fused: nn.Module, module: Any, widths: tuple[int, ...]) -> bool:
    """Whether two modules give the same for random rows of these widths."""
    rows = [random_like((1, ROWS, width), module.dense.weight, seed) for seed, width in enumerate(widths)]
    with torch.inference_mode():
        return agrees(fused(*rows), module(*rows))


_Maker: TypeAlias = Callable[[Any], nn.Module | None]
_MAKERS: tuple[_Maker, ...] = (fused_rotary_layer, fused_self_attention, fused_intermediate, fused_output)
_MAKERS_ON_CPU: tuple[_Maker, ...] = (fused_rotary_layer,)
# The types of a module and of its replacement.
Fused: TypeAlias = tuple[type[nn.Module], type[nn.Module]]


def fuse(backbone: nn.Module, known: Collection[Fused] | None = None) -> list[Fused]:
    """Replaces modules of a backbone by fused ones; returns a pair of types for each. The backbone must run
    packed, on its device and in its precision.

    A module stays if its structure is unknown, if its results differ, or if its pair is not `known`: a trial
    in float32 notices more than one in 16 bits. Only one module at a time has its weights twice in memory."""
    give_back_memory()  # trials take as much as two layers
    replaced: list[Fused] = []
    failures: set[str] = set()
    makers = _MAKERS if triton.runs_on(next(backbone.parameters()).device) else _MAKERS_ON_CPU
    for name in [name for name, _ in backbone.named_modules() if name]:
        owner, _, attribute = name.rpartition(".")
        try:
            parent = backbone.get_submodule(owner)
            module: Any = parent._modules[attribute]
        except (AttributeError, KeyError):
            continue  # part of a module that has been replaced
        fused = _fused(module, makers, failures)
        if fused is None:
            continue
        kind = (type(module), type(fused))
        # GELU is fused in bfloat16 alone, and compared with the exact one.
        if known is None or kind in known or isinstance(fused, FusedIntermediate):
            setattr(parent, attribute, fused)
            if isinstance(fused, FusedSelfAttention | FusedRotaryLayer):
                fused.replaced_attention[0]._modules.clear()  # which it has a copy of
            replaced.append(kind)
            give_back_memory()
    for failure in sorted(failures):
        log.warning("layers are left as they are, which is slower: %s", failure)
    return replaced


def _fused(module: Any, makers: Sequence[_Maker], failures: set[str]) -> nn.Module | None:
    """The fused module for a module; None if none gives the same. Adds errors to `failures`."""
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


__all__ = ["Fused", "fuse"]
