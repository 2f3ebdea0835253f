"""What scoring holds between steps: queries until their last consumer, windows until a document is whole. A
step's numbers come to the host in one piece and go back to the slots that they are for."""

import numpy as np
import pytest
import torch

from maxsimd.engine.scoring.outcome import Output, Releases, StepOutcome
from maxsimd.engine.scoring.query_store import QueryStore
from maxsimd.engine.scoring.window_store import WindowStore
from maxsimd.pooling.ragged import Ragged
from maxsimd.scheduler import DocumentPayload, ResultSlot, Sequence, Tokens, Window

pytestmark = pytest.mark.fast


def _query(sequence_id: int, num_consumers: int, request_id: int = 0) -> Sequence:
    tokens = Tokens(np.zeros(2, dtype=np.int32))
    return Sequence.query(sequence_id, request_id, "token_embed", tokens, num_consumers)


def _window(sequence_id: int, window: Window, request_id: int = 0, length: int = 2) -> Sequence:
    tokens = Tokens(np.zeros(length, dtype=np.int32))
    payload = DocumentPayload(0, None, False, window)
    return Sequence.document(sequence_id, ResultSlot(request_id, 0), "token_embed", tokens, payload)


def test_a_query_is_a_copy_and_goes_with_its_last_consumer() -> None:
    store = QueryStore()
    step = torch.ones(6, 4)
    store.put(_query(1, 3), step[2:4])
    store.put(_query(2, 1), torch.ones(2, 4))
    step.zero_()
    store.release(1)
    store.release(1)
    store.release(3)
    assert len(store) == 2
    assert torch.equal(store.get(1), torch.ones(2, 4))
    store.release(1)
    assert len(store) == 1
    with pytest.raises(KeyError):
        store.get(1)
    store.release(2, consumers=5)
    assert len(store) == 0
    # Put again, it has all its consumers and its latest embedding.
    store.put(_query(1, 2), torch.zeros(2, 4))
    store.release(1)
    store.put(_query(1, 2), torch.ones(2, 4))
    store.release(1)
    assert torch.equal(store.get(1), torch.ones(2, 4))


def test_a_window_put_twice_counts_once_and_is_a_copy() -> None:
    store = WindowStore()
    window = Window(5, 2)
    step = torch.ones(2, 4)
    for _ in range(2):
        assert store.put(_window(5, window, length=3), window, step) is None
    step.zero_()
    assert store.tokens(5) == 3
    whole = store.put(_window(6, window, length=4), window, torch.zeros(1, 4))
    assert whole is not None
    assert whole[:, 0].tolist() == [1, 1, 0]
    assert store.tokens(5) == 7


def test_windows_that_are_forgotten_must_come_again() -> None:
    store = WindowStore()
    first, second = Window(1, 2), Window(5, 2)
    store.put(_window(1, first), first, torch.ones(1, 4))
    store.put(_window(2, first), first, torch.ones(1, 4))
    store.put(_window(5, second, length=7), second, torch.full((1, 4), 5.0))
    store.put(_window(6, second), second, torch.ones(1, 4))
    store.forget({1, 2, 6, 99})
    assert len(store) == 1, "of the first document nothing is left"
    assert store.tokens(5) == 7
    whole = store.put(_window(6, second), second, torch.full((2, 4), 6.0))
    assert whole is not None
    assert whole[:, 0].tolist() == [5, 6, 6]
    assert store.put(_window(1, first), first, torch.ones(1, 4)) is None


def test_scalars_and_matrices_of_several_outputs_are_told_apart() -> None:
    matrices = Ragged.from_lengths(torch.arange(12.0).reshape(4, 3), [3, 1])
    scores = Ragged(torch.tensor([[0.5], [-2.0]]), (0, 1, 2))
    wide = Ragged.from_lengths(torch.arange(100.0, 110.0).reshape(2, 5), [0, 2])
    all_items = [matrices, scores, wide, scores]
    outputs = [
        Output((ResultSlot(i, 0), ResultSlot(i, 1)), items, scalar=items is scores)
        for i, items in enumerate(all_items)
    ]
    host = torch.cat([items.values.reshape(-1) for items in all_items])
    results = StepOutcome(tuple(outputs), host, (), Releases(), (), None).results()
    assert [result.slot for result in results] == [slot for output in outputs for slot in output.slots]
    expected = [*matrices, 0.5, -2.0, *wide, 0.5, -2.0]
    for result, wanted in zip(results, expected, strict=True):
        assert isinstance(result.value, float if isinstance(wanted, float) else np.ndarray)
        np.testing.assert_array_equal(result.value, wanted)
