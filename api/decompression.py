"""Compressed bodies, decompressed as they arrive and a piece at a time: few bytes may become very many."""

import asyncio
import zlib
from collections.abc import AsyncIterable, AsyncIterator

from maxsimd.api.body_headers import Encoding
from maxsimd.api.failures import unreadable_body

# The most bytes that are made at a time, before others have their turn.
_PIECE = 64 * 1024
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
# The method that the first byte of zlib's format names (RFC 1950).
_DEFLATED = 8


async def decompressed(chunks: AsyncIterable[bytes], encoding: Encoding) -> AsyncIterator[bytes]:
    """The body in pieces. Raises ApiError (400) where it is not of that encoding, or ends too early."""
    decompressor = None
    async for left in chunks:
        piece = b""
        # What has been read may be more than a piece even where nothing is left.
        while left or len(piece) == _PIECE:
            if decompressor is None or (decompressor.eof and encoding == "gzip" and left):
                # Compressed files one behind the other are one file (RFC 1952).
                decompressor = _decompressor(encoding, left[0])
            try:
                piece = decompressor.decompress(left, _PIECE)
            except zlib.error as error:
                raise unreadable_body() from error
            left = decompressor.unconsumed_tail or decompressor.unused_data
            if piece:
                yield piece
                await asyncio.sleep(0)
            if decompressor.eof and left and encoding != "gzip":
                raise unreadable_body()
    if decompressor is not None and not decompressor.eof:
        raise unreadable_body()


def _decompressor(encoding: Encoding, first: int) -> "zlib._Decompress":
    if encoding == "gzip":
        return zlib.decompressobj(_GZIP)
    # Some clients send what the format holds without the format.
    return zlib.decompressobj(_ZLIB if first & 0x0F == _DEFLATED else _RAW)
