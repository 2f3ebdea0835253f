"""What pooling is made of: the cursor, the rows that are taken, the way to the device, dispatch by task."""

from typing import Any

import numpy as np
import pytest
import torch

from maxsimd.pooling import methods
from maxsimd.pooling.cursor import PoolingCursor, take_rows
from maxsimd.pooling.dispatch import TOKENS, DispatchPooler, Pooled
from maxsimd.pooling.methods import (
    METHODS,
    AllPool,
    ClsPool,
    GatheringHead,
    LastPool,
    MeanPool,
    WeightedMeanPool,
)
from maxsimd.pooling.ragged import Ragged
from maxsimd.pooling.token_pooling import TokenPooling, merging_documents
from maxsimd.pooling.transfer import to_device, to_host
from maxsimd.scheduler import Chunk, DocumentPayload, ResultSlot, Role, Sequence, Tokens

pytestmark = pytest.mark.fast


def tokens(length: int, positions: list[int] | None = None) -> Tokens:
    pooled = None if positions is None else np.array(positions, dtype=np.int64)
    return Tokens(np.zeros(length, dtype=np.int32), pooled_positions=pooled)


def text(key: int, length: int, positions: list[int] | None = None, task: str = "all") -> Sequence:
    return Sequence.text(key, ResultSlot(0, key), task, tokens(length, positions))


def whole(sequence: Sequence) -> Chunk:
    return Chunk(sequence, 0, len(sequence))


def as_is(rows: torch.Tensor) -> torch.Tensor:
    return rows


def numbered(rows: int) -> torch.Tensor:
    """Row i is [i, 10 * i]."""
    return torch.arange(float(rows))[:, None] * torch.tensor([1.0, 10.0])


def test_the_pooled_rows_of_a_chunk_are_its_part_of_them() -> None:
    some = text(1, 10, [0, 3, 4, 5, 8])
    cursor = PoolingCursor((Chunk(some, 3, 8), whole(text(2, 2)), Chunk(some, 0, 3)), (5, 20, 30))
    rows, lengths = cursor.pooled_rows()
    assert rows.tolist() == [5, 6, 7, 20, 21, 30]
    assert lengths == [3, 2, 1]
    rows, lengths = PoolingCursor((Chunk(text(1, 4, [3]), 0, 3), whole(text(2, 1))), (0, 3)).pooled_rows()
    assert (rows.tolist(), lengths) == ([3], [0, 1]), "a chunk without a pooled token has none"
    rows, lengths = PoolingCursor((), ()).pooled_rows()
    assert (rows.dtype, len(rows), lengths) == (np.int64, 0, [])


def test_rows_are_taken_in_their_order_as_float32() -> None:
    every = [[2, 3, 4], [0], [5], [0, 1, 2, 3, 4, 5], [1, 3], [3, 2, 4], [0, 2, 2, 3], [4, 4], [2, 1], []]
    for rows in every:
        for dtype in (torch.float32, torch.bfloat16):
            taken = take_rows(numbered(6).to(dtype), np.array(rows, dtype=np.int64))
            assert taken.dtype is torch.float32
            assert taken.shape == (len(rows), 2)
            assert taken[:, 0].tolist() == rows
    hidden = numbered(6)
    assert take_rows(hidden, np.array([2, 3])).data_ptr() == hidden[2].data_ptr(), "a view"
    assert take_rows(hidden, np.array([2, 4])).data_ptr() != hidden[2].data_ptr()


def test_numbers_for_the_cpu_are_the_numbers_themselves() -> None:
    numbers = np.arange(4)
    tensor = to_device(numbers, torch.device("cpu"))
    numbers[0] = 9
    assert tensor.tolist() == [9, 1, 2, 3]
    assert to_device(tensor, torch.device("cpu")) is tensor
    assert to_host(tensor) is tensor
    assert to_device(numbers, torch.device("meta")).device.type == "meta"


class Pinned(torch.Tensor):
    """Host numbers that note how they are copied to a GPU, of which there is none."""

    pinned = False
    copied: Any = None

    def pin_memory(self, device: Any = None) -> "Pinned":
        pinned = self.clone().as_subclass(Pinned)
        pinned.pinned = True
        return pinned

    def to(self, *where: Any, **options: Any) -> "Pinned":
        self.copied = (where, options)
        return self


def test_numbers_for_a_gpu_are_copied_from_pinned_memory() -> None:
    gpu = torch.device("cuda")
    copied = to_device(torch.arange(3).as_subclass(Pinned), gpu)
    assert isinstance(copied, Pinned)
    assert copied.pinned
    assert copied.copied == ((gpu,), {"non_blocking": True})


class OnGpu(torch.Tensor):
    """Numbers that say that they are on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


def test_numbers_from_a_gpu_are_copied_to_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    host = torch.zeros(2, 3, dtype=torch.int8)

    class Host:
        def copy_(self, numbers: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
            assert non_blocking
            return host.copy_(numbers.as_subclass(torch.Tensor))

    def empty(shape: torch.Size, **options: Any) -> Host:
        made.append((tuple(shape), options))
        return Host()

    numbers = torch.arange(6, dtype=torch.int8).reshape(2, 3)
    monkeypatch.setattr(torch, "empty", empty)
    assert to_host(numbers.as_subclass(OnGpu)) is host
    monkeypatch.undo()
    assert made == [((2, 3), {"dtype": torch.int8, "pin_memory": True})]
    assert torch.equal(host, numbers)


def test_sequences_of_mixed_tasks_come_back_by_task() -> None:
    pooler = DispatchPooler({"last": LastPool(as_is), "cls": ClsPool(as_is), "mean": MeanPool(as_is)})
    sequences = [text(1, 2, task="last"), text(2, 3, task="cls"), text(3, 4, task="last")]
    unfinished = text(4, 5, task="mean")
    cursor = PoolingCursor((*map(whole, sequences), Chunk(unfinished, 0, 1)), (0, 2, 5, 9))
    last, cls = pooler.pool(numbered(10), cursor)
    assert (last.task, cls.task) == ("last", "cls")
    assert [(s.sequence_id, item[:, 0].tolist()) for s, item in last] == [(1, [1]), (3, [8])]
    assert [(s.sequence_id, item[:, 0].tolist()) for s, item in cls] == [(2, [2])]
    assert pooler.num_states == 1


def test_prefixes_are_not_pooled_and_need_no_method() -> None:
    prefix = Sequence.prefix(1, 0, tokens(3), 1)
    pair = Sequence.pair(2, ResultSlot(0, 0), tokens(5), prefix)
    pooler = DispatchPooler({"classify": LastPool(as_is)})
    [pooled] = pooler.pool(numbered(5), PoolingCursor((whole(prefix), Chunk(pair, 3, 5)), (0, 3)))
    assert pooled.sequences == (pair,)
    assert pooled.items.values[:, 0].tolist() == [4]
    assert pooler.pool(numbered(3), PoolingCursor((whole(prefix),), (0,))) == []


def test_states_of_all_methods_count_and_are_freed_one_by_one() -> None:
    tasks = ["all", "cls", "mean", "weighted-mean", "last"]
    pooler = DispatchPooler({task: METHODS[task](as_is) for task in tasks})
    chunks = [Chunk(text(i, 3, task=task), 0, 2) for i, task in enumerate(tasks)]
    cursor = PoolingCursor(tuple(chunks), tuple(range(0, 10, 2)))
    assert pooler.pool(numbered(10), cursor) == []
    counts = [pooler.num_states]
    for i in range(5):
        pooler.free(i)
        pooler.free(99)
        counts.append(pooler.num_states)
    assert counts == [4, 3, 2, 1, 0, 0]


def _merging(roles: set[Role]) -> TokenPooling:
    class Halves:
        def pool_one(self, rows: torch.Tensor) -> torch.Tensor:
            return rows[::2]

    return TokenPooling(Halves(), frozenset(roles))  # type: ignore[arg-type]


def _two_roles(task: str) -> PoolingCursor:
    query = Sequence.query(1, 0, task, tokens(4), 1)
    document = Sequence.document(2, ResultSlot(0, 0), task, tokens(5), DocumentPayload(1))
    return PoolingCursor((whole(query), whole(document)), (0, 4))


def test_token_embeddings_alone_are_merged_by_role() -> None:
    for roles, lengths in (
        ({Role.DOCUMENT}, [4, 3]),
        ({Role.QUERY}, [2, 5]),
        ({Role.QUERY, Role.DOCUMENT}, [2, 3]),
        (set(), [4, 5]),
    ):
        pooler = DispatchPooler({TOKENS: AllPool(as_is)}, _merging(roles))
        [pooled] = pooler.pool(numbered(9), _two_roles(TOKENS))
        assert pooled.items.lengths == lengths
        assert pooled.items[0][:, 0].tolist() == list(range(0, 4, 4 // lengths[0]))
        assert pooled.items[1][:, 0].tolist() == list(range(4, 9, 1 if lengths[1] == 5 else 2))
    pooler = DispatchPooler({"all": AllPool(as_is)}, _merging({Role.QUERY, Role.DOCUMENT}))
    [pooled] = pooler.pool(numbered(9), _two_roles("all"))
    assert pooled.items.lengths == [4, 5]


def test_a_document_is_merged_to_a_vector_for_every_few_tokens() -> None:
    pooling = merging_documents(2)
    assert pooling.roles == {Role.DOCUMENT}
    random = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(21, 8, generator=random), dim=-1)
    pooler = DispatchPooler({TOKENS: AllPool(as_is)}, pooling)
    query = Sequence.query(1, 0, TOKENS, tokens(10), 1)
    document = Sequence.document(2, ResultSlot(0, 0), TOKENS, tokens(11), DocumentPayload(1))
    [pooled] = pooler.pool(rows, PoolingCursor((whole(query), whole(document)), (0, 10)))
    assert torch.equal(pooled.items[0], rows[:10])
    merged = pooled.items[1]
    assert 5 <= len(merged) <= 7
    torch.testing.assert_close(merged[0], rows[10])


def test_an_unfinished_step_has_an_empty_result_of_its_width() -> None:
    def wider(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows, rows], dim=1)

    for name, method in METHODS.items():
        made = method(wider)
        items = made.pool(numbered(3), PoolingCursor((Chunk(text(1, 4), 0, 3),), (0,)))
        assert (items.values.shape, items.offsets) == ((0, 4), (0,)), name
        assert made.num_states == (name != "last")


@pytest.mark.parametrize("name", METHODS)
def test_what_is_held_between_chunks_is_a_copy(name: str) -> None:
    """The step's tensor may be written over by the next step."""
    sequence = text(1, 4)
    method = METHODS[name](as_is)
    hidden = numbered(4)
    method.pool(hidden[:2], PoolingCursor((Chunk(sequence, 0, 2),), (0,)))
    alone = METHODS[name](as_is)
    expected = alone.pool(numbered(4), PoolingCursor((whole(sequence),), (0,)))
    assert alone.num_states == 0, "whole sequences leave no state"
    hidden[:2] = torch.nan
    items = method.pool(hidden[2:], PoolingCursor((Chunk(sequence, 2, 4),), (0,)))
    torch.testing.assert_close(items.values, expected.values)


def test_chunks_are_put_together_by_where_they_start() -> None:
    """A step that was retried may have stored its chunks in another order."""
    sequence = text(1, 6)
    method = AllPool(as_is)
    for start in (2, 0, 2):
        method.pool(numbered(6)[start : start + 2], PoolingCursor((Chunk(sequence, start, start + 2),), (0,)))
    items = method.pool(numbered(6), PoolingCursor((Chunk(sequence, 4, 6),), (4,)))
    assert items.values[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_means_are_of_the_pooled_rows_and_of_none_they_are_zero() -> None:
    sequences = [text(1, 3, [0, 2]), text(2, 2, []), text(3, 2), text(4, 1)]
    cursor = PoolingCursor(tuple(map(whole, sequences)), (0, 3, 6, 5))
    plain = MeanPool(as_is).pool(numbered(8), cursor)
    assert plain.values[:, 0].tolist() == pytest.approx([1, 0, 6.5, 5])
    weighted = WeightedMeanPool(as_is).pool(numbered(8), cursor)
    assert weighted.values[:, 0].tolist() == pytest.approx([(0 * 1 + 2 * 3) / 4, 0, (6 * 1 + 7 * 2) / 3, 5])
    alone = PoolingCursor((whole(sequences[1]),), (0,))
    assert WeightedMeanPool(as_is).pool(numbered(8), alone).values.tolist() == [[0, 0]]


def test_half_precision_is_summed_in_float32() -> None:
    rows = torch.full((1000, 2), 1.0, dtype=torch.bfloat16)
    rows[0] = 257
    items = MeanPool(as_is).pool(rows, PoolingCursor((whole(text(1, 1000)),), (0,)))
    assert items.values.dtype is torch.float32
    assert items.values[0].tolist() == pytest.approx([(256 + 999) / 1000] * 2)


def test_the_head_is_applied_tile_by_tile_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "TILE", 3)
    seen: list[int] = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return rows

    for count, calls in ((2, [2]), (3, [3]), (4, [3, 1]), (7, [3, 3, 1])):
        seen.clear()
        cursor = PoolingCursor((whole(text(1, count)),), (0,))
        items = AllPool(head).pool(numbered(count), cursor)
        assert seen == calls
        assert torch.equal(items.values, numbered(count))
        seen.clear()
        AllPool(head).pool(numbered(count).to("meta"), cursor)
        assert seen == [count], "on another device at once"


def test_on_another_device_vectors_are_made_there() -> None:
    cursor = PoolingCursor((whole(text(1, 4)), whole(text(2, 3))), (0, 4))
    for name in ("mean", "weighted-mean", "last", "cls"):
        items = METHODS[name](as_is).pool(numbered(7).to("meta"), cursor)
        assert (items.values.device.type, items.values.shape) == ("meta", (2, 2))


@pytest.mark.parametrize("name", METHODS)
def test_every_chunk_needs_a_start(name: str) -> None:
    for starts in ((0,), (0, 2, 4)):
        cursor = PoolingCursor((whole(text(1, 2)), whole(text(2, 2))), starts)
        with pytest.raises(ValueError, match="argument 2 is"):
            METHODS[name](as_is).pool(numbered(6), cursor)


def test_every_sequence_needs_an_item() -> None:
    items = Ragged.from_items([numbered(2)])
    sequences = (text(1, 2), text(2, 2))
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        list(Pooled("all", sequences, items))
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        _merging({Role.TEXT}).pool(items, sequences)


def test_a_head_that_gathers_takes_the_rows_itself() -> None:
    class Gathering(GatheringHead):
        def __call__(self, rows: torch.Tensor) -> torch.Tensor:
            raise AssertionError("rows are not taken for it")

        def gather(self, hidden: torch.Tensor, rows: Any) -> torch.Tensor:
            return hidden[torch.from_numpy(rows)] + 100

    cursor = PoolingCursor((whole(text(1, 3, [0, 2])), whole(text(2, 1))), (0, 3))
    items = AllPool(Gathering()).pool(numbered(4), cursor)
    assert [item[:, 0].tolist() for item in items] == [[100, 102], [103]]
