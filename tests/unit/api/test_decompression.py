"""Compressed bodies, however they are cut into chunks."""

import gzip
import zlib
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxsimd.api.body_headers import Encoding, encoding_of, refusal
from maxsimd.api.decompression import _PIECE, decompressed
from maxsimd.api.failures import ApiError, error_answer


async def _chunks(body: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


async def _pieces(body: bytes, encoding: Encoding, size: int) -> list[bytes]:
    return [piece async for piece in decompressed(_chunks(body, size), encoding)]


def _compressed(text: bytes, kind: str) -> tuple[bytes, Encoding]:
    half = len(text) // 2
    match kind:
        case "gzip":
            return gzip.compress(text), "gzip"
        case "two files":
            return gzip.compress(text[:half]) + gzip.compress(text[half:]), "gzip"
        case "zlib":
            return zlib.compress(text), "deflate"
    return zlib.compress(text, wbits=-15), "deflate"


KINDS = st.sampled_from(["gzip", "two files", "zlib", "raw"])


@given(st.binary(max_size=300), KINDS, st.integers(1, 400))
async def test_what_was_compressed_comes_back(text: bytes, kind: str, size: int) -> None:
    body, encoding = _compressed(text, kind)
    assert b"".join(await _pieces(body, encoding, size)) == text


@given(st.binary(min_size=1, max_size=300), KINDS, st.integers(1, 400), st.data())
async def test_a_body_that_breaks_off_is_refused(
    text: bytes, kind: str, size: int, data: st.DataObject
) -> None:
    body, encoding = _compressed(text, kind)
    if kind == "two files":
        # Between two files it is whole.
        body = body[len(gzip.compress(text[: len(text) // 2])) :]
    end = data.draw(st.integers(1, len(body) - 1))
    with pytest.raises(ApiError) as refused:
        await _pieces(body[:end], encoding, size)
    assert refused.value.status == 400


async def test_few_bytes_that_become_very_many_come_in_pieces() -> None:
    text = bytes(10 * _PIECE + 1)
    for kind in ("gzip", "zlib"):
        body, encoding = _compressed(text, kind)
        pieces = await _pieces(body, encoding, len(body))
        assert max(map(len, pieces)) == _PIECE
        assert b"".join(pieces) == text


def test_headers_say_how_a_body_is_compressed_and_what_is_refused() -> None:
    for named, encoding in (("", None), ("Identity", None), (" GZIP ", "gzip"), ("x-gzip", "gzip")):
        assert encoding_of({"content-encoding": named}) == encoding
    for named, length, status in (
        *((named, "1", 415) for named in ("gzip, gzip", "br", "x-deflate")),
        *(("", "10", None), ("", "11", 413), ("identity", "11", 413), ("gzip", "11", None)),
    ):
        refused = refusal({"content-length": length, "content-encoding": named}, 10)
        assert (refused and refused.status) == status
        if refused is not None and status == 415:
            assert error_answer(refused).headers["Accept-Encoding"] == "gzip, deflate"
