"""What scoring holds between steps: queries until their last consumer, windows until a document is whole."""

import numpy as np
import pytest
import torch

from maxsimd.engine.scoring.query_store import QueryStore
from maxsimd.engine.scoring.window_store import WindowStore
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


def test_a_document_is_whole_with_its_last_window_in_order() -> None:
    store = WindowStore()
    window = Window(5, 3)
    assert store.put(_window(7, window), window, torch.full((2, 4), 7.0)) is None
    assert store.put(_window(5, window), window, torch.full((1, 4), 5.0)) is None
    whole = store.put(_window(6, window), window, torch.full((3, 4), 6.0))
    assert whole is not None
    assert whole[:, 0].tolist() == [5, 6, 6, 6, 7, 7]


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


def test_documents_are_released_one_by_one() -> None:
    store = WindowStore()
    for document_id in (1, 2):
        window = Window(document_id, 2)
        store.put(_window(document_id, window, length=9), window, torch.ones(1, 4))
    assert len(store) == 2
    store.release(1)
    assert len(store) == 1
    assert store.tokens(2) == 9
    store.release(1)
    store.release(2)
    assert len(store) == 0


def test_dropping_a_request_drops_all_of_it_and_no_other() -> None:
    queries, windows = QueryStore(), WindowStore()
    for sequence_id, request_id in [(1, 7), (2, 8), (3, 7)]:
        queries.put(_query(sequence_id, 9, request_id), torch.full((2, 4), float(sequence_id)))
        window = Window(sequence_id, 2)
        windows.put(_window(sequence_id, window, request_id), window, torch.ones(1, 4))
    queries.drop_request(7)
    windows.drop_request(7)
    assert (len(queries), len(windows)) == (1, 1)
    assert torch.equal(queries.get(2), torch.full((2, 4), 2.0))
    assert windows.tokens(2) == 2
