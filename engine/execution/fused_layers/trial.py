"""The trial of a module that is to take another's position: both run on the same random rows, and must call
attention with the same queries, keys and values, and give the same."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from maxsimd.engine.ops.qkv import QKV

ROWS = 5

# Of the largest number, how far two ways of rounding may be apart after a few layers' sums.
_SHARE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass(slots=True, eq=False)
class RecordedAttention:
    """Takes the position of a step's attention: records what a layer asks of it, and gives random numbers,
    the same each time."""

    asked: list[QKV] = field(default_factory=list)

    def of_layer(self, module: Any, qkv: QKV) -> torch.Tensor:
        copies = {name: getattr(qkv, name).clone() for name in ("query", "key", "value")}
        self.asked.append(replace(qkv, **copies))
        like = qkv.new_output()
        return random_like(like.shape, like, seed=1)


def random_like(shape: torch.Size | tuple[int, ...], like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Normally distributed numbers in the precision and on the device of `like`."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random).to(like.device, like.dtype)


@torch.inference_mode()
def recorded(call: Callable[[RecordedAttention], torch.Tensor]) -> tuple[QKV, torch.Tensor] | None:
    """What a layer asks of attention, and gives; None if it does not ask exactly once, or gives no tensor."""
    attention = RecordedAttention()
    given = call(attention)
    if len(attention.asked) != 1 or not isinstance(given, torch.Tensor):
        return None
    return attention.asked[0], given


def asks_the_same(ours: QKV, theirs: QKV) -> bool:
    """Whether two calls of attention are the same but for rounding."""
    if (ours.scaling, ours.window) != (theirs.scaling, theirs.window) or ours.relative is not theirs.relative:
        return False
    pairs = zip((ours.query, ours.key, ours.value), (theirs.query, theirs.key, theirs.value), strict=True)
    return all(agrees(found, expected) for found, expected in pairs)


def agrees(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two results are the same but for rounding. NaN is not."""
    if found.shape != expected.shape or found.dtype is not expected.dtype:
        return False
    allowed = _SHARE[expected.dtype] * float(expected.float().abs().max())
    return float((found.float() - expected.float()).abs().max()) <= allowed
