"""What scoring a step comes to: a frozen record. Nothing has happened yet when it is made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from maxsimd.engine.cache import Arriving
from maxsimd.engine.requests import Value
from maxsimd.pooling.ragged import Ragged
from maxsimd.scheduler import ResultSlot


class Result(NamedTuple):
    """The value for one slot of a request's results. Made by the thousand: a tuple takes half as long as a
    dataclass."""

    slot: ResultSlot
    value: Value


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A request that cannot be completed, and why: it lacks the values of `indexes`, or any."""

    request_id: int
    reason: str
    indexes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """Item i of `items` is for `slots[i]`: as a number if `scalar`, else as an array."""

    slots: tuple[ResultSlot, ...]
    items: Ragged
    scalar: bool


@dataclass(frozen=True, slots=True, eq=False)
class Releases:
    """What a step has used up: how many consumers of each query, by its sequence id, have been scored, and
    which documents that were read through windows are complete."""

    queries: Mapping[int, int] = field(default_factory=dict)
    documents: frozenset[int] = frozenset()


class Arrival(Protocol):
    """A moment in the device's work (a CUDA event)."""

    def synchronize(self) -> None:
        """Waits until the device has come to it; blocks the thread."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StepOutcome:
    """Scores, failures, what may be released, and what may be cached.

    `host` holds the outputs' numbers end to end, float32 [n], once the device has come to `arrival`; at once
    where that is None."""

    outputs: tuple[Output, ...]
    host: torch.Tensor
    failures: tuple[RequestFailure, ...]
    releases: Releases
    new_embeddings: tuple[Arriving, ...]
    arrival: Arrival | None

    def results(self) -> list[Result]:
        """The values for all slots. To be called once the numbers have arrived.

        Values are copied out of pinned memory, so that a block of it can be used again once its step is done:
        a view that a caller keeps would hold the block of the whole step, and torch never gives pinned memory
        back."""
        flat = self.host.numpy()
        is_pinned = self.host.is_pinned()
        results: list[Result] = []
        position = 0
        for output in self.outputs:
            count, dim = output.items.values.numel(), output.items.values.shape[-1]
            part = flat[position : position + count]
            position += count
            if output.scalar:
                values: list[Value] = part.tolist()
            else:
                rows = part.reshape(-1, dim)
                parts = (rows[start:stop] for start, stop in pairwise(output.items.offsets.tolist()))
                values = [part.copy() if is_pinned else part for part in parts]
            results += map(Result._make, zip(output.slots, values, strict=True))
        return results
