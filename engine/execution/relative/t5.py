"""T5's encoders, packed. Their layers hand on a bias that the first of them makes of all pairs of tokens; it
makes one by distance here, which attention gets through transformers' interface."""

from collections.abc import Callable
from typing import Any

from torch import nn

from maxsimd.engine.execution.attention.interface import StepAttention
from maxsimd.engine.execution.relative.encoder import distances, reach_of
from maxsimd.engine.ops.relative import PositionBias


def share_bias(stack: nn.Module) -> Callable[[], None]:
    """Has the first layer of a `T5Stack` make its bias by distance in packed steps. Returns what undoes
    it."""
    blocks: Any = stack.block
    bias = _BiasOfStep(blocks[0].layer[0].SelfAttention)
    hook = stack.register_forward_pre_hook(bias.take_attention, with_kwargs=True)

    def undo() -> None:
        hook.remove()
        bias.restore()

    return undo


class _BiasOfStep:
    """Replaces `compute_bias` of an attention module: the bias by distance for the step that its stack was
    last called with, or the module's own outside of packed steps."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        self._own = attention.compute_bias
        self._step: StepAttention[Any] | None = None
        attention.compute_bias = self

    def take_attention(self, stack: nn.Module, arguments: object, options: dict[str, Any]) -> None:
        """A hook for the stack's calls."""
        self._step = options.get("step_attention")

    def restore(self) -> None:
        del self._attention.compute_bias

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self._step is None:
            return self._own(*arguments, **options)
        attention = self._attention
        weight = attention.relative_attention_bias.weight  # [buckets, heads]
        buckets = attention._relative_position_bucket(
            distances(reach_of(self._step.metadata.layout), weight.device),
            bidirectional=True,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )
        return PositionBias(weight[buckets].t().float().contiguous())
