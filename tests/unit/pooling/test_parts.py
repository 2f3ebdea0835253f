"""Parts of pooling: dispatch by task, states between chunks, ragged rows."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.pooling import methods, ragged
from maxsimd.pooling.dispatch import TOKENS, DispatchPooler, TokenPooling, merging_documents
from maxsimd.pooling.ragged import Ragged
from maxsimd.scheduler import Chunk, DocumentPayload, ResultSlot, Role, Tokens, TokenSequence

pytestmark = pytest.mark.fast


def tokens(length: int, positions: list[int] | None = None) -> Tokens:
    pooled = None if positions is None else np.array(positions, dtype=np.int64)
    return Tokens(np.zeros(length, dtype=np.int32), pooled_positions=pooled)


def text(key: int, length: int, positions: list[int] | None = None, task: str = "all") -> TokenSequence:
    return TokenSequence.text(key, ResultSlot(0, key), task, tokens(length, positions))


def whole(sequence: TokenSequence) -> Chunk:
    return Chunk(sequence, 0, len(sequence))


def as_is(rows: torch.Tensor) -> torch.Tensor:
    return rows


def numbered(rows: int) -> torch.Tensor:
    """Row i is [i, 10 * i]."""
    return torch.arange(float(rows))[:, None] * torch.tensor([1.0, 10.0])


def test_prefixes_are_not_pooled_and_need_no_method() -> None:
    prefix = TokenSequence.prefix(1, 0, tokens(3), 1)
    pair = TokenSequence.pair(2, ResultSlot(0, 0), tokens(5), prefix)
    pooler = DispatchPooler({"classify": methods.LastPool(as_is)})
    [pooled] = pooler.pool(numbered(5), methods.PoolingCursor((whole(prefix), Chunk(pair, 3, 5)), (0, 3)))
    assert (pooled.sequences, pooled.items.values[:, 0].tolist()) == ((pair,), [4])
    assert pooler.pool(numbered(3), methods.PoolingCursor((whole(prefix),), (0,))) == []


def test_states_of_all_methods_count_and_are_freed_one_by_one() -> None:
    tasks = ["all", "cls", "mean", "weighted-mean", "last"]
    pooler = DispatchPooler({task: methods.METHODS[task](as_is) for task in tasks})
    chunks = [Chunk(text(i, 3, task=task), 0, 2) for i, task in enumerate(tasks)]
    assert pooler.pool(numbered(10), methods.PoolingCursor(tuple(chunks), tuple(range(0, 10, 2)))) == []
    counts = [pooler.num_states]
    for i in range(5):
        pooler.free(i)
        pooler.free(99)
        counts.append(pooler.num_states)
    assert counts == [4, 3, 2, 1, 0, 0]


def test_token_embeddings_alone_are_merged_by_role() -> None:
    halves: Any = SimpleNamespace(pool_one=lambda rows: rows[::2])
    for task, roles, lengths in (
        (TOKENS, {Role.DOCUMENT}, [4, 3]), (TOKENS, {Role.QUERY}, [2, 5]),
        (TOKENS, {Role.QUERY, Role.DOCUMENT}, [2, 3]), (TOKENS, set(), [4, 5]),
        ("all", {Role.QUERY, Role.DOCUMENT}, [4, 5]),
    ):  # fmt: skip
        query = TokenSequence.query(1, 0, task, tokens(4), 1)
        document = TokenSequence.document(2, ResultSlot(0, 0), task, tokens(5), DocumentPayload(1))
        pooler = DispatchPooler({task: methods.AllPool(as_is)}, TokenPooling(halves, frozenset(roles)))
        [pooled] = pooler.pool(numbered(9), methods.PoolingCursor((whole(query), whole(document)), (0, 4)))
        assert pooled.items.lengths == lengths
        assert pooled.items[0][:, 0].tolist() == list(range(0, 4, 4 // lengths[0]))
        assert pooled.items[1][:, 0].tolist() == list(range(4, 9, 1 if lengths[1] == 5 else 2))


def test_first_tokens_stay_where_all_others_are_merged() -> None:
    alike = torch.nn.functional.normalize(torch.arange(16.0).view(8, 2) + 100, dim=-1)
    for count in (0, 1, 3):
        merged = merging_documents(8, count).method.pool_one(alike)
        assert (len(merged), merged[:count].tolist()) == (count + 1, alike[:count].tolist())


@pytest.mark.parametrize("name", ["all", "cls-after-prompt", *methods.MODES.values()])
def test_what_is_held_between_chunks_is_a_copy(name: str) -> None:
    """The step's tensor may be written over by the next step."""
    sequence, hidden = text(1, 4), numbered(4)
    expected = methods.METHODS[name](as_is).pool(numbered(4), methods.PoolingCursor((whole(sequence),), (0,)))
    method = methods.METHODS[name](as_is)
    method.pool(hidden[:2], methods.PoolingCursor((Chunk(sequence, 0, 2),), (0,)))
    hidden[:2] = torch.nan
    items = method.pool(hidden[2:], methods.PoolingCursor((Chunk(sequence, 2, 4),), (0,)))
    torch.testing.assert_close(items.values, expected.values)


def test_chunks_are_put_together_by_where_they_start() -> None:
    sequence = text(1, 6)
    method = methods.AllPool(as_is)
    for start in (2, 0, 2):
        cursor = methods.PoolingCursor((Chunk(sequence, start, start + 2),), (0,))
        method.pool(numbered(6)[start : start + 2], cursor)
    items = method.pool(numbered(6), methods.PoolingCursor((Chunk(sequence, 4, 6),), (4,)))
    assert items.values[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_means_are_of_the_pooled_rows_in_float32() -> None:
    sequences = [text(1, 3, [0, 2]), text(2, 2, []), text(3, 2), text(4, 1)]
    cursor = methods.PoolingCursor(tuple(map(whole, sequences)), (0, 3, 6, 5))
    plain = methods.MeanPool(as_is).pool(numbered(8), cursor)
    assert plain.values[:, 0].tolist() == pytest.approx([1, 0, 6.5, 5])
    weighted = methods.WeightedMeanPool(as_is).pool(numbered(8), cursor)
    assert weighted.values[:, 0].tolist() == pytest.approx([(0 * 1 + 2 * 3) / 4, 0, (6 * 1 + 7 * 2) / 3, 5])
    alone = methods.PoolingCursor((whole(sequences[1]),), (0,))
    assert methods.WeightedMeanPool(as_is).pool(numbered(8), alone).values.tolist() == [[0, 0]]
    rows = torch.full((1000, 2), 1.0, dtype=torch.bfloat16)
    rows[0] = 257
    items = methods.MeanPool(as_is).pool(rows, methods.PoolingCursor((whole(text(1, 1000)),), (0,)))
    assert items.values.dtype is torch.float32
    assert items.values[0].tolist() == pytest.approx([(256 + 999) / 1000] * 2)


def test_a_head_that_gathers_takes_the_rows_itself() -> None:
    class Gathering(methods.GatheringHead):
        def __call__(self, rows: torch.Tensor) -> torch.Tensor:
            raise AssertionError("rows are not taken for it")

        def gather(self, hidden: torch.Tensor, rows: Any) -> torch.Tensor:
            return hidden[torch.from_numpy(rows)] + 100

    cursor = methods.PoolingCursor((whole(text(1, 3, [0, 2])), whole(text(2, 1))), (0, 3))
    items = methods.AllPool(Gathering()).pool(numbered(4), cursor)
    assert [item[:, 0].tolist() for item in items] == [[100, 102], [103]]


LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def _scaled(lengths: list[int]) -> Ragged:
    random = torch.Generator().manual_seed(sum(lengths))
    values = torch.randint(-127, 128, (sum(lengths), 3), generator=random, dtype=torch.int8)
    offsets = Ragged.from_lengths(values, lengths).offsets
    return Ragged(values, offsets, torch.rand(sum(lengths), generator=random) + 0.1)


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 7), st.sampled_from([torch.float32, torch.bfloat16]))
def test_int8_rows_are_decoded_by_scales(lengths: list[int], together: int, dtype: torch.dtype) -> None:
    items = _scaled(lengths)
    assert items.scales is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "_DECODED_TOGETHER", together)
        decoded = items.decoded(dtype)
    assert (decoded.scales, decoded.lengths, decoded.values.dtype) == (None, lengths, dtype)
    torch.testing.assert_close(decoded.values, (items.values * items.scales[:, None]).to(dtype))


@settings(max_examples=40)
@given(LENGTHS, LENGTHS, st.data(), st.booleans())
def test_items_stay_in_order(first: list[int], second: list[int], data: st.DataObject, scaled: bool) -> None:
    parts = [_scaled(lengths) for lengths in (first, second)]
    if not scaled:
        parts = [Ragged(part.values, part.offsets) for part in parts]
    joined = Ragged.join(parts)
    assert torch.equal(joined.values, torch.cat([part.values for part in parts]))
    assert (joined.lengths, joined.scales is not None) == (first + second, scaled)
    exact = [item for part in parts for item in part.decoded(torch.float32)]
    wanted = data.draw(st.lists(st.integers(0, len(exact) - 1), max_size=8))
    for items, numbers in ((joined, range(len(exact))), (joined.take(wanted), wanted)):
        assert items.lengths == [len(exact[i]) for i in numbers]
        for i, (item, number) in enumerate(zip(items.decoded(torch.float32), numbers, strict=True)):
            assert torch.equal(item, exact[number])
            assert torch.equal(items.item(i).decoded(torch.float32).values, item), "with its own scales"


def test_two_methods_cannot_have_one_name() -> None:
    with pytest.raises(ValueError, match="there are two pooling methods 'max-words'"):
        type("Another", (methods.AllPool,), {}, name="max-words")
