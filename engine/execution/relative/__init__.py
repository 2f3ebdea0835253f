"""Runs encoders with relative positions packed: each sequence has its own positions, through the step's
attention, where transformers makes a matrix of all pairs of a step's tokens."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from maxsimd.engine.execution.layout import Layout
from maxsimd.engine.execution.runner import StepAttention
from maxsimd.engine.ops.qkv import PositionBias

# The least reach of tables of positions, doubled whenever it is not enough.
_LEAST_REACH = 64
_PACKED = frozenset({"DebertaV2Encoder", "MPNetEncoder"})
_STACKS = frozenset({"T5Stack", "MT5Stack"})
# Our own models, which give any attention their bias.
_BIASED = frozenset({"JinaBertEncoder"})


def has_relative_positions(backbone: nn.Module) -> bool:
    """Whether a backbone asks attention for relative positions."""
    known = _PACKED | _BIASED
    return any(type(each).__name__ in known or _is_stack(each) for each in backbone.modules())


def install(backbone: Any, attention: str) -> Callable[[], None]:
    """Runs the encoder of a backbone with relative positions packed; does nothing to other backbones. An
    encoder without an attention interface counts as one that attends by the name `attention`, for which
    transformers makes no masks. Returns a function that undoes it."""
    undo = ExitStack()
    encoder = getattr(backbone, "encoder", None)
    name = type(encoder).__name__
    if name in _PACKED:
        from maxsimd.engine.execution.relative import encoders  # which imports transformers

        packed = encoders.PACKED[name](encoder)
        undo.callback(setattr, backbone, "encoder", encoder)
        undo.callback(setattr, backbone.config, "_attn_implementation", backbone.config._attn_implementation)
        backbone.encoder, backbone.config._attn_implementation = packed, attention
        undo.callback(backbone.register_forward_pre_hook(packed.take_attention, with_kwargs=True).remove)
        return undo.close
    for stack in backbone.modules():
        if _is_stack(stack):
            # The other layers use the bias that the first makes.
            bias = _StepBias(stack.block[0].layer[0].SelfAttention)
            undo.callback(delattr, bias.attention, "compute_bias")
            undo.callback(stack.register_forward_pre_hook(bias.take_attention, with_kwargs=True).remove)
    return undo.close


def _is_stack(module: nn.Module) -> bool:
    return type(module).__name__ in _STACKS and not getattr(module, "is_decoder", False)


class PackedEncoder(nn.Module):
    """Replaces the encoder `inner` and runs its layers over packed rows [1, rows, hidden] with the attention
    of the step that the backbone was last called with."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self._step: StepAttention | None = None

    @property
    def layer(self) -> Any:
        """The layers, which others may replace."""
        return self.inner.layer

    def take_attention(
        self, backbone: nn.Module, arguments: Any, options: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """A hook for the backbone's calls."""
        self._step = options.get("step_attention")
        return arguments, options

    @property
    def step(self) -> StepAttention:
        if self._step is None:
            raise RuntimeError("packed attention was called outside of a packed step")
        return self._step


def reach_of(layout: Layout) -> int:
    """The reach of tables of positions for a step, rounded up so that they are seldom made anew."""
    reach = _LEAST_REACH
    while reach + 1 < layout.longest:
        reach *= 2
    return reach


def distances(reach: int, device: torch.device) -> torch.Tensor:
    """The positions of keys relative to a query, int64 [2 * reach + 1]."""
    return torch.arange(-reach, reach + 1, device=device)


def in_heads(projected: torch.Tensor, heads: int) -> torch.Tensor:
    """A projection [1, rows, heads * head_dim] as [heads, rows, head_dim]."""
    separate: torch.Tensor = projected[0].unflatten(-1, (heads, -1))  # [rows, heads, head_dim]
    return separate.transpose(0, 1)


class _StepBias:
    """Replaces `compute_bias` of a T5 attention module: a bias by distance for the step that its stack was
    last called with, or the module's own outside of packed steps."""

    def __init__(self, attention: Any) -> None:
        self.attention = attention
        self._own = attention.compute_bias
        self._step: StepAttention | None = None
        attention.compute_bias = self

    def take_attention(self, stack: nn.Module, arguments: object, options: dict[str, Any]) -> None:
        """A hook for the stack's calls."""
        self._step = options.get("step_attention")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self._step is None:
            return self._own(*arguments, **options)
        attention = self.attention
        weight = attention.relative_attention_bias.weight  # [buckets, heads]
        buckets = attention._relative_position_bucket(
            distances(reach_of(self._step.metadata.layout), weight.device),
            bidirectional=True,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )
        return PositionBias(weight[buckets].t().float().contiguous())
