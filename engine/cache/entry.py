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
# Magic and version, dtype, truncated, tokens, rows, dim, checksum of what follows.
_HEADER = struct.Struct("<4sBBIIII")
_MAGIC = b"mxc1"


@dataclass(frozen=True, slots=True, eq=False)
class CachedEmbedding:
    """`rows` [tokens, dim] in float32, bfloat16 or int8, the last with a scale [tokens] a row, on the CPU.

    `tokens` is how many were run for it, and `truncated` whether the document was cut."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    tokens: int
    truncated: bool

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def to_bytes(self) -> bytes:
        """Self-contained and checked: see `from_bytes`."""
        parts = [self.rows.contiguous().view(torch.uint8).numpy().tobytes()]
        if self.scales is not None:
            parts.append(self.scales.numpy().tobytes())
        payload = b"".join(parts)
        code = _CODES[self.rows.dtype]
        rows, dim = self.rows.shape
        checksum = zlib.crc32(payload)
        return _HEADER.pack(_MAGIC, code, self.truncated, self.tokens, rows, dim, checksum) + payload

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> "CachedEmbedding | None":
        """None for bytes that are torn, changed or of another kind. They are copied."""
        if len(data) < _HEADER.size:
            return None
        magic, code, truncated, tokens, rows, dim, checksum = _HEADER.unpack_from(data)
        payload = data[_HEADER.size :]
        if magic != _MAGIC or code >= len(_DTYPES) or zlib.crc32(payload) != checksum:
            return None
        dtype = list(_DTYPES.values())[code]
        size = rows * dim * dtype.itemsize
        scaled = dtype is torch.int8
        if len(payload) != size + (rows * 4 if scaled else 0):
            return None
        if rows == 0:
            return cls(
                torch.zeros(0, dim, dtype=dtype), torch.zeros(0) if scaled else None, tokens, bool(truncated)
            )
        whole = bytearray(payload)  # torch wants memory that it may write to
        values = torch.frombuffer(whole, dtype=dtype, count=rows * dim).view(rows, dim)
        scales = torch.frombuffer(whole, dtype=torch.float32, count=rows, offset=size) if scaled else None
        return cls(values, scales, tokens, bool(truncated))


def rounded(rows: torch.Tensor, precision: Precision) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [n, dim] in the store's precision, on the device that they are on; int8 with a scale [n] a row, of
    which the largest value is 127 times."""
    if precision != "int8":
        return rows.to(_DTYPES[precision]), None
    rows = rows.float()
    scales = rows.abs().amax(dim=1).clamp(min=1e-12) / 127
    return torch.round(rows / scales[:, None]).to(torch.int8), scales
