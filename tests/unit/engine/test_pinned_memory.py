"""Results that callers keep hold no pinned memory: torch never gives it back."""

import asyncio
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import maxsimd.engine.actors.scoring as scoring_module
from maxsimd.engine import Engine, EngineConfig
from maxsimd.engine.scoring.outcome import Output, Releases, StepOutcome
from maxsimd.pooling.ragged import Ragged
from maxsimd.scheduler import ResultSlot


class Pinned:
    """Blocks in the place of pinned ones, and how many there were at a time."""

    def __init__(self) -> None:
        self.blocks: list[weakref.ref[NDArray[np.float32]]] = []
        self.made = self.most = 0

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        block = tensor.numpy().copy()
        self.blocks.append(weakref.ref(block))
        self.made += 1
        self.most = max(self.most, self.alive)
        return torch.from_numpy(block)

    @property
    def alive(self) -> int:
        """How many are held by anyone."""
        return sum(block() is not None for block in self.blocks)


class Arrival:
    def synchronize(self) -> None:
        """The block is there already."""


def outcome(host: torch.Tensor) -> StepOutcome:
    """An outcome with two embeddings and two scores."""
    items = Ragged.from_lengths(torch.zeros(5, 2), (3, 2))
    scores = Ragged.from_lengths(torch.zeros(2, 1), (1, 1))
    slots = (ResultSlot(0, 0), ResultSlot(0, 1))
    outputs = (Output(slots, items, scalar=False), Output(slots, scores, scalar=True))
    return StepOutcome(outputs, host, (), Releases(), (), None)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_values_are_copies_of_pinned_memory_alone(monkeypatch: pytest.MonkeyPatch, is_pinned: bool) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: is_pinned)
    host = torch.arange(12, dtype=torch.float32)
    values = [result.value for result in outcome(host).results()]
    np.testing.assert_array_equal(values[0], [[0, 1], [2, 3], [4, 5]])
    np.testing.assert_array_equal(values[1], [[6, 7], [8, 9]])
    assert values[2:] == [10.0, 11.0]
    for value in values[:2]:
        assert np.shares_memory(value, host.numpy()) is not is_pinned
        assert isinstance(value, np.ndarray)
        assert (value.base is None) is is_pinned, "nor does one hold the others"


async def test_there_are_no_more_pinned_blocks_than_steps_in_flight(
    monkeypatch: pytest.MonkeyPatch, qwen3_embedding: str
) -> None:
    """However many results are kept."""
    pinned = Pinned()
    monkeypatch.setattr(scoring_module, "to_host", pinned.to_host)
    monkeypatch.setattr(scoring_module, "record_arrival", lambda device: Arrival())
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    config = EngineConfig(model=qwen3_embedding, dtype="float32", max_batch_tokens=64, cache_mb=0)
    async with Engine(config) as engine:
        calls: list[Any] = [engine.embed_tokens([f"{number} " + "word " * 20]) for number in range(40)]
        kept = await asyncio.gather(*calls)
        assert pinned.made >= 20
        assert pinned.most <= config.steps_in_flight
    assert sum(len(result.embeddings) for result in kept) == 40
    assert pinned.alive == 0
