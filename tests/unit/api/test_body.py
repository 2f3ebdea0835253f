"""Bodies: how they are decompressed, what their JSON has by Python's own reader, and their memory."""

import asyncio
import gzip
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxsimd.api.answer import ApiError, error_answer
from maxsimd.api.handlers import route
from maxsimd.api.state import BodyBudget

NOTHING = route.JsonShape(0, 0, 0)


def _shape(value: Any) -> route.JsonShape:
    """The shape of a value, by Python's own means."""
    if isinstance(value, str):
        return route.JsonShape(0, 1, 0)
    if not isinstance(value, dict | list):
        return NOTHING
    children = [*value, *value.values()] if isinstance(value, dict) else value
    inner = [_shape(child) for child in children]
    return route.JsonShape(
        1 + sum(shape.containers for shape in inner),
        sum(shape.strings for shape in inner),
        max(0, len(value) - 1) + sum(shape.commas for shape in inner),
    )


TEXT = st.text(st.sampled_from('{}[],:"\\ a\nü'), max_size=12)
VALUES = st.recursive(
    TEXT | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=30,
)


@given(value=VALUES, block=st.integers(1, 40), is_ascii=st.booleans())
def test_what_there_is_is_counted_and_what_texts_say_is_not(value: Any, block: int, is_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    shape = _shape(value)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("maxsimd.api.handlers.route._BLOCK", block)
        assert route.shape_of(body, NOTHING) == shape or shape == NOTHING
        assert route.shape_of(body, shape).is_within(shape)


def test_a_small_text_is_counted_with_its_strings_contents() -> None:
    body = json.dumps(["a, b [c]" + " " * 1000]).encode()
    assert route.shape_of(body, route.JsonShape(2, 1, 1)) == route.JsonShape(2, 1, 1)
    for most in (route.JsonShape(1, 1, 1), route.JsonShape(2, 0, 1), route.JsonShape(2, 1, 0)):
        assert route.shape_of(body, most) == route.JsonShape(1, 1, 0)
    for no_json in (b"", b"[" * 5, b'"[[[', b"\\", b'"\\', b"]]]]{{"):
        assert route.shape_of(no_json, route.JsonShape(10, 10, 10)).is_within(route.JsonShape(10, 10, 10))


def test_memory_is_no_less_than_python_takes() -> None:
    """Compared with what a list of many takes, as `tracemalloc` measures it."""
    for small in ([], {}, "", "a", 300, 0.5, {"a": 0}):
        if isinstance(small, dict) and small:
            # Each name is another, as the names of an object are.
            body = json.dumps({f"{i:x}": 0 for i in range(10_000)}).encode()
        else:
            body = json.dumps([small] * 10_000).encode()
        tracemalloc.start()
        decoded = msgspec.json.decode(body)
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(decoded) == 10_000
        assert taken <= route.shape_of(body, NOTHING).memory + len(body)


def test_bodies_together_hold_at_most_the_budget() -> None:
    budget = BodyBudget(100)
    with budget.hold() as one, budget.hold() as two:
        one.add(60)
        two.add(40)
        with pytest.raises(ApiError) as refused:
            two.add(1)
        assert (refused.value.status, refused.value.kind) == (429, "QueueFullError")
        assert refused.value.retry_after == 1
        assert budget.bytes == 100
    assert budget.bytes == 0
    with budget.hold() as one, budget.hold() as two:
        one.add(101)
        one.add(1)  # alone it may be larger
        with pytest.raises(ApiError):
            two.add(1)
    with pytest.raises(KeyError), budget.hold() as one:  # noqa: PT012 (both are needed)
        one.add(60)
        raise KeyError
    assert budget.bytes == 0, "what a failed request held is free again"


async def _chunks(body: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


async def _pieces(body: bytes, encoding: route.Encoding, size: int) -> list[bytes]:
    return [piece async for piece in route.decompressed(_chunks(body, size), encoding)]


def _compressed(text: bytes, kind: str) -> tuple[bytes, route.Encoding]:
    half = len(text) // 2
    files = gzip.compress(text[:half]) + gzip.compress(text[half:])
    kinds: dict[str, tuple[bytes, route.Encoding]] = {
        "gzip": (gzip.compress(text), "gzip"),
        "two files": (files, "gzip"),
        "zlib": (zlib.compress(text), "deflate"),
        "raw": (zlib.compress(text, wbits=-15), "deflate"),
    }
    return kinds[kind]


KINDS = st.sampled_from(["gzip", "two files", "zlib", "raw"])


@given(st.binary(max_size=300), KINDS, st.integers(1, 400))
async def test_what_was_compressed_comes_back(text: bytes, kind: str, size: int) -> None:
    body, encoding = _compressed(text, kind)
    assert b"".join(await _pieces(body, encoding, size)) == text


@given(st.binary(min_size=1, max_size=300), KINDS, st.integers(1, 400), st.data())
async def test_a_truncated_body_is_refused(text: bytes, kind: str, size: int, data: st.DataObject) -> None:
    body, encoding = _compressed(text, kind)
    if kind == "two files":
        # Between two files it is whole.
        body = body[len(gzip.compress(text[: len(text) // 2])) :]
    end = data.draw(st.integers(1, len(body) - 1))
    with pytest.raises(ApiError) as refused:
        await _pieces(body[:end], encoding, size)
    assert refused.value.status == 400


async def test_few_bytes_that_become_very_many_come_in_pieces() -> None:
    text = bytes(10 * route._PIECE + 1)
    for kind in ("gzip", "zlib"):
        body, encoding = _compressed(text, kind)
        pieces = await _pieces(body, encoding, len(body))
        assert max(map(len, pieces)) == route._PIECE
        assert b"".join(pieces) == text


async def test_files_in_a_row_let_others_run_and_are_counted() -> None:
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.timeout(60):
        other = asyncio.create_task(take_turns())
        empty = gzip.compress(b"")
        assert await _pieces(empty * 500, "gzip", 1 << 20) == []
        assert turns >= 500
        with pytest.raises(ApiError, match="10000 compressed files in a row"):
            await _pieces(empty * 10_001, "gzip", 1 << 16)
        other.cancel()


def test_headers_tell_how_a_body_is_compressed_or_refused() -> None:
    for named, encoding in (("", None), ("Identity", None), (" GZIP ", "gzip"), ("x-gzip", "gzip")):
        assert route.encoding_of({"content-encoding": named}) == encoding
    for named, length, status in (
        *((named, "1", 415) for named in ("gzip, gzip", "br", "x-deflate")),
        *(("", "10", None), ("", "11", 413), ("identity", "11", 413), ("gzip", "11", None)),
    ):
        refused = route.refusal({"content-length": length, "content-encoding": named}, 10)
        assert (refused and refused.status) == status
        if refused is not None and status == 415:
            assert error_answer(refused).headers["Accept-Encoding"] == "gzip, deflate"
