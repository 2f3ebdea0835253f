"""What is cached of a document: its embedding in the store's precision, and what the forward pass counted."""

import struct
import zlib
from dataclasses import dataclass
from typing import Literal

import torch

Precision = Literal["float32", "bfloat16", "int8"]

_DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES.values())}
# Magic and version, dtype, truncated, tokens, rows, dim.
_HEADER = struct.Struct("<4sBBIII")
_MAGIC = b"mxc2"
# It follows the header and covers the key, the header and the payload.
_CHECKSUM = struct.Struct("<I")
_START = _HEADER.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True, eq=False)
class CachedEmbedding:
    """`rows` [tokens, dim] in float32, bfloat16 or int8, the last with a scale [tokens] a row, on the CPU.

    `tokens` is how many were run for it, and `truncated` whether the document was cut. It is cached under
    `key`; a caller's own embedding has none."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    tokens: int
    truncated: bool
    key: bytes | None = None

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def to_bytes(self, key: bytes) -> bytes:
        """Self-contained, and checked with the key that it is stored under: see `from_bytes`."""
        rows, dim = self.rows.shape
        header = _HEADER.pack(_MAGIC, _CODES[self.rows.dtype], self.truncated, self.tokens, rows, dim)
        payload = [self.rows.contiguous().view(torch.uint8).numpy().tobytes()]
        if self.scales is not None:
            payload.append(self.scales.numpy().tobytes())
        return b"".join([header, _CHECKSUM.pack(_checksum(key, header, *payload)), *payload])

    @classmethod
    def from_bytes(cls, key: bytes, data: bytes) -> "CachedEmbedding | None":
        """None for bytes that are torn, changed, of another kind or of another key. They are copied."""
        if len(data) < _START:
            return None
        view = memoryview(data)
        header, payload = view[: _HEADER.size], view[_START:]
        magic, code, truncated, tokens, rows, dim = _HEADER.unpack(header)
        if magic != _MAGIC or code >= len(_DTYPES) or dim == 0:
            return None
        dtype = list(_DTYPES.values())[code]
        size = rows * dim * dtype.itemsize
        scaled = dtype is torch.int8
        if len(payload) != size + (rows * 4 if scaled else 0):
            return None
        if _checksum(key, header, payload) != _CHECKSUM.unpack_from(data, _HEADER.size)[0]:
            return None
        if rows == 0:
            none = torch.zeros(0, dim, dtype=dtype), torch.zeros(0) if scaled else None
            return cls(*none, tokens, bool(truncated), key)
        whole = bytearray(payload)  # torch wants memory that it may write to
        values = torch.frombuffer(whole, dtype=dtype, count=rows * dim).view(rows, dim)
        scales = torch.frombuffer(whole, dtype=torch.float32, count=rows, offset=size) if scaled else None
        return cls(values, scales, tokens, bool(truncated), key)


def _checksum(*parts: bytes | memoryview) -> int:
    """One sum over all parts in their order."""
    total = 0
    for part in parts:
        total = zlib.crc32(part, total)
    return total


def rounded(rows: torch.Tensor, precision: Precision) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [n, dim] in the store's precision, on the device that they are on; int8 with a scale [n] a row, of
    which the largest value is 127 times."""
    if precision != "int8":
        return rows.to(_DTYPES[precision]), None
    rows = rows.float()
    scales = rows.abs().amax(dim=1).clamp(min=1e-12) / 127
    return torch.round(rows / scales[:, None]).to(torch.int8), scales
