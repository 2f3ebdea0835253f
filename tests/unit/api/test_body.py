"""Bodies: how they are decompressed, what their JSON has by Python's own reader, and their memory."""

import asyncio
import gzip
import json
import sys
import time
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxsimd.api.answer import ApiError, error_answer
from maxsimd.api.handlers import bodies
from maxsimd.api.handlers.bodies import JsonShape
from maxsimd.api.handlers.rerank import RerankRequest
from maxsimd.api.state import BodyBudget, HeldBytes

NOTHING = JsonShape(0, 0, 0)


def _shape(value: Any) -> JsonShape:
    """The shape of a value, by Python's own means."""
    if isinstance(value, str):
        return JsonShape(0, 1, 0)
    if not isinstance(value, dict | list):
        return NOTHING
    inner = [_shape(child) for child in ([*value, *value.values()] if isinstance(value, dict) else value)]
    return JsonShape(
        1 + sum(shape.containers for shape in inner),
        sum(shape.strings for shape in inner),
        max(0, len(value) - 1) + sum(shape.commas for shape in inner),
    )


TEXT = st.text(st.sampled_from('{}[],:"\\ a\nü'), max_size=12)
VALUES = st.recursive(
    TEXT | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=30,
)


@given(value=VALUES, block=st.integers(1, 40), is_ascii=st.booleans())
def test_what_there_is_is_counted_and_what_texts_say_is_not(value: Any, block: int, is_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    shape = _shape(value)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("maxsimd.api.handlers.bodies.BLOCK", block)
        assert bodies.shape_of(body, NOTHING) == shape or shape == NOTHING
        assert bodies.shape_of(body, shape).is_within(shape)
        patched.setattr("maxsimd.api.handlers.bodies._DEEPEST_LARGE", 100)
        assert bodies.decode_in_parts(b'{"a": %b }' % body, dict[str, Any]) == {"a": value}


def _longest_call(function: Callable[[], object]) -> float:
    """The CPU seconds of the longest call of C code, the least of three tries. It may hold Python's lock."""
    longest = []
    for _ in range(3):
        times = [time.thread_time()]
        sys.setprofile(lambda *event, times=times: times.append(time.thread_time()))
        try:
            function()
        finally:
            sys.setprofile(None)
        longest.append(max(later - earlier for earlier, later in pairwise(times)))
    return min(longest)


@pytest.mark.parametrize(("text", "count"), [(b"1e-320", 50_000), (b"1" * 4000, 2_000), (b"1234", 5_000_000)])
def test_no_call_holds_the_lock_for_long(text: bytes, count: int) -> None:
    kind = msgspec.defstruct("Kind", [("a", Any, None), ("timeout", float, 0)])
    numbers, timeouts = (text + b",") * count, b'"timeout": 1e308,' * 20_000
    body = b'{"a": [{"b": [%b 1]}], %b "timeout": 1}' % (numbers, timeouts)
    whole = _longest_call(lambda: msgspec.json.decode(body, type=kind))
    assert _longest_call(lambda: bodies.decode_in_parts(body, kind)) < whole / 4


@pytest.mark.parametrize("text", [b"a" * (16 << 20), b"\\" * (16 << 20), rb"\ud83d" * 100_000])
def test_nor_does_one_that_finds_halves_of_characters(text: bytes) -> None:
    body = bytearray(rb'{"query": "a", "documents": ["%b\ud83d"], "on_error": "report"}   ' % text)
    # A few passes over a string of that length, not one for each of its characters.
    a_few = 8 * _longest_call(lambda: json.loads(bytes(body)))
    assert _longest_call(lambda: bodies.decode_with_halves(body, RerankRequest)) < a_few
    assert _longest_call(lambda: bodies.shape_of(body, NOTHING)) < a_few


def test_a_small_text_is_counted_with_its_strings_contents() -> None:
    body = json.dumps(["a, b [c]" + " " * 1000]).encode()
    assert bodies.shape_of(body, JsonShape(2, 1, 1)) == JsonShape(2, 1, 1)
    for most in (JsonShape(1, 1, 1), JsonShape(2, 0, 1), JsonShape(2, 1, 0)):
        assert bodies.shape_of(body, most) == JsonShape(1, 1, 0)
    for no_json in (b"", b"[" * 5, b'"[[[', b"\\", b'"\\', b"]]]]{{"):
        assert bodies.shape_of(no_json, JsonShape(10, 10, 10)).is_within(JsonShape(10, 10, 10))


def test_memory_is_no_less_than_python_takes() -> None:
    """Compared with what a list of many takes, as `tracemalloc` measures it."""
    for many in (*([small] * 10_000 for small in ([], {}, "", "a", 300, 0.5)), dict.fromkeys(range(10_000))):
        body = json.dumps(many).encode()
        tracemalloc.start()
        decoded = msgspec.json.decode(body)
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(decoded) == 10_000
        assert taken <= bodies.shape_of(body, NOTHING).memory + len(body)


def test_bodies_together_hold_at_most_the_budget() -> None:
    budget = BodyBudget(100)
    with HeldBytes(budget) as one, HeldBytes(budget) as two:
        one.add(60)
        two.add(40)
        with pytest.raises(ApiError) as refused:
            two.add(1)
        assert (refused.value.status, refused.value.kind) == (429, "QueueFullError")
        assert (refused.value.headers, budget.bytes) == ({"Retry-After": "1"}, 100)
    assert budget.bytes == 0
    with HeldBytes(budget) as one, HeldBytes(budget) as two:
        one.add(101)
        one.add(1)  # alone it may be larger
        with pytest.raises(ApiError):
            two.add(1)
    with pytest.raises(KeyError), HeldBytes(budget) as one:  # noqa: PT012 (both are needed)
        one.add(60)
        raise KeyError
    assert budget.bytes == 0, "what a failed request held is free again"


async def _chunks(body: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


async def _pieces(body: bytes, encoding: bodies.Encoding, size: int) -> list[bytes]:
    return [piece async for piece in bodies.decompressed(_chunks(body, size), encoding)]


def _compressed(text: bytes, kind: str) -> tuple[bytes, bodies.Encoding]:
    half = len(text) // 2
    kinds: dict[str, tuple[bytes, bodies.Encoding]] = {
        "gzip": (gzip.compress(text), "gzip"),
        "two files": (gzip.compress(text[:half]) + gzip.compress(text[half:]), "gzip"),
        "zlib": (zlib.compress(text), "deflate"),
        "raw": (zlib.compress(text, wbits=-15), "deflate"),
    }
    return kinds[kind]


KINDS = st.sampled_from(["gzip", "two files", "zlib", "raw"])


@given(st.binary(max_size=300), KINDS, st.integers(1, 400), st.data())
async def test_a_compressed_body_comes_back_whole(text: bytes, kind: str, size: int, data: Any) -> None:
    body, encoding = _compressed(text, kind)
    assert b"".join(await _pieces(body, encoding, size)) == text
    if kind == "two files":
        # Between two files it is whole.
        body = body[len(gzip.compress(text[: len(text) // 2])) :]
    end = data.draw(st.integers(1, len(body) - 1))
    with pytest.raises(ApiError) as refused:
        await _pieces(body[:end], encoding, size)
    assert refused.value.status == 400


async def test_few_bytes_that_become_very_many_come_in_pieces() -> None:
    text = bytes(10 * bodies._PIECE + 1)
    for kind in ("gzip", "zlib"):
        body, encoding = _compressed(text, kind)
        pieces = await _pieces(body, encoding, len(body))
        assert (max(map(len, pieces)), b"".join(pieces)) == (bodies._PIECE, text)


async def test_files_in_a_row_let_others_run_and_are_counted() -> None:
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.timeout(600):
        other = asyncio.create_task(take_turns())
        empty = gzip.compress(b"")
        assert await _pieces(empty * 500, "gzip", 1 << 20) == []
        assert turns >= 500
        with pytest.raises(ApiError, match="10000 compressed files in a row"):
            await _pieces(empty * 10_001, "gzip", 1 << 16)
        other.cancel()


def test_headers_tell_how_a_body_is_compressed_or_refused() -> None:
    for named, encoding in (("", None), ("Identity", None), (" GZIP ", "gzip"), ("x-gzip", "gzip")):
        assert bodies.encoding_of({"content-encoding": named}) == encoding
    for named, length, status in (
        *((named, "1", 415) for named in ("gzip, gzip", "br", "x-deflate")),
        *(("", "10", None), ("", "11", 413), ("identity", "11", 413), ("gzip", "11", None)),
    ):
        refused = bodies.refusal({"content-length": length, "content-encoding": named}, 10)
        assert (refused and refused.status) == status
        if refused is not None and status == 415:
            assert error_answer(refused).headers["Accept-Encoding"] == "gzip, deflate"
