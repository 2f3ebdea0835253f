"""A step's outcome: the numbers that come to the host in one piece go back to the slots that they are for."""

import numpy as np
import pytest
import torch

from maxsimd.engine.scoring.outcome import Output, Releases, RequestFailure, StepOutcome
from maxsimd.pooling.ragged import Ragged
from maxsimd.scheduler import ResultSlot

pytestmark = pytest.mark.fast


def outcome(*outputs: Output) -> StepOutcome:
    flat = [output.items.values.reshape(-1).float() for output in outputs]
    host = torch.cat(flat) if flat else torch.empty(0)
    return StepOutcome(outputs, host, (RequestFailure(9, "why"),), Releases(), (), None)


def slots(request_id: int, count: int) -> tuple[ResultSlot, ...]:
    return tuple(ResultSlot(request_id, i) for i in range(count))


def test_scalars_and_matrices_of_several_outputs_are_told_apart() -> None:
    matrices = Ragged.from_lengths(torch.arange(12.0).reshape(4, 3), [3, 1])
    scores = Ragged(torch.tensor([[0.5], [-2.0]]), (0, 1, 2))
    wide = Ragged.from_lengths(torch.arange(100.0, 110.0).reshape(2, 5), [0, 2])
    results = outcome(
        Output(slots(1, 2), matrices, scalar=False),
        Output(slots(2, 2), scores, scalar=True),
        Output(slots(3, 2), wide, scalar=False),
        Output(slots(4, 2), scores, scalar=True),
    ).results()
    assert [result.slot for result in results] == [slot for i in range(1, 5) for slot in slots(i, 2)]
    values = [result.value for result in results]
    expected = [*matrices, 0.5, -2.0, *wide, 0.5, -2.0]
    for value, wanted in zip(values, expected, strict=True):
        if isinstance(wanted, float):
            assert isinstance(value, float)
            assert value == wanted
        else:
            assert isinstance(value, np.ndarray)
            np.testing.assert_array_equal(value, wanted.numpy())


def test_an_output_needs_a_slot_for_each_item() -> None:
    three = Ragged(torch.zeros(3, 1), (0, 1, 2, 3))
    with pytest.raises(ValueError, match="shorter"):
        outcome(Output(slots(1, 4), three, scalar=True)).results()
    with pytest.raises(ValueError, match="longer"):
        outcome(Output(slots(1, 2), three, scalar=False)).results()
    assert outcome().results() == []
    assert (dict(Releases().queries), Releases().documents) == ({}, frozenset()), "unless it is said"
