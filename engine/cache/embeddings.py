"""Cached embeddings: in memory, as bytes, and on their way from the device into the stores."""

import logging
import queue
import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch

from maxsimd.engine.at_exit import close_at_exit, note_closed
from maxsimd.pooling.ragged import Ragged, to_host

log = logging.getLogger(__name__)

Precision = Literal["float32", "bfloat16", "int8"]

_DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
# The bits of a number's exponent, which are all set if it is not finite.
_BFLOAT16_EXPONENT = 0x7F80
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES.values())}
# Magic and version, dtype, truncated, tokens, rows, dim.
_HEADER = struct.Struct("<4sBBIII")
_MAGIC = b"mxc2"
# Follows the header; covers the key, the header and the payload.
_CHECKSUM = struct.Struct("<I")
_START = _HEADER.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True, eq=False)
class CachedEmbedding:
    """`rows` [tokens, dim] in float32, bfloat16 or int8 on the CPU; int8 has a scale [tokens] a row.

    `tokens` is how many tokens were run, and `truncated` whether the document was truncated. An embedding
    that a caller sent has no `key`."""

    rows: torch.Tensor
    scales: torch.Tensor | None
    tokens: int
    truncated: bool
    key: bytes | None = None

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite. In int8, scales tell."""
        numbers = self.rows if self.scales is None else self.scales
        if numbers.dtype is not torch.bfloat16:
            return bool(np.isfinite(numbers.numpy()).all())
        exponents = numbers.view(torch.int16).numpy() & _BFLOAT16_EXPONENT
        return not (exponents == _BFLOAT16_EXPONENT).any()

    def to_bytes(self, key: bytes) -> bytes:
        """Returns self-contained bytes with a checksum that covers the key; see `from_bytes`."""
        rows, dim = self.rows.shape
        header = _HEADER.pack(_MAGIC, _CODES[self.rows.dtype], self.truncated, self.tokens, rows, dim)
        payload = [self.rows.contiguous().view(torch.uint8).numpy().tobytes()]
        if self.scales is not None:
            payload.append(self.scales.numpy().tobytes())
        return b"".join([header, _CHECKSUM.pack(_checksum(key, header, *payload)), *payload])

    @classmethod
    def from_bytes(cls, key: bytes, data: bytes) -> "CachedEmbedding | None":
        """Copies an embedding out of bytes; None if they are damaged, of another kind or of another key."""
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
            none = torch.zeros(0, dim, dtype=dtype), torch.zeros(0, dtype=torch.float32) if scaled else None
            return cls(*none, tokens, bool(truncated), key)
        whole = bytearray(payload)  # torch wants memory that it may write to
        values = torch.frombuffer(whole, dtype=dtype, count=rows * dim).view(rows, dim)
        scales = torch.frombuffer(whole, dtype=torch.float32, count=rows, offset=size) if scaled else None
        return cls(values, scales, tokens, bool(truncated), key)


Entries: TypeAlias = list[tuple[bytes, CachedEmbedding]]


def _checksum(*parts: bytes | memoryview) -> int:
    total = 0
    for part in parts:
        total = zlib.crc32(part, total)
    return total


def rounded(rows: torch.Tensor, precision: Precision) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rounds rows [n, dim] on their device. int8 also has scales [n]: the largest value of a row is 127 times
    its scale."""
    if precision != "int8":
        return rows.to(_DTYPES[precision]), None
    rows = rows.float()
    scales = rows.abs().amax(dim=1).clamp(min=1e-12) / 127
    return torch.round(rows / scales[:, None]).to(torch.int8), scales


@dataclass(frozen=True, slots=True)
class EmbeddingFacts:
    """The fields of a `CachedEmbedding` beside its numbers."""

    key: bytes
    tokens: int
    truncated: bool


class PendingEmbeddings:
    """A step's new embeddings, copied to the host together. They may be read once the device has done the
    work that was launched before."""

    def __init__(self, facts: list[EmbeddingFacts], embeddings: Ragged) -> None:
        if len(facts) != len(embeddings):
            raise ValueError(f"{len(embeddings)} embeddings cannot go by {len(facts)} keys")
        self._facts = facts
        scales = None if embeddings.scales is None else to_host(embeddings.scales)
        self._on_host = Ragged(to_host(embeddings.values), embeddings.offsets, scales)

    def __len__(self) -> int:
        return len(self._facts)

    @property
    def keys(self) -> list[bytes]:
        return [facts.key for facts in self._facts]

    @property
    def nbytes(self) -> int:
        scales = self._on_host.scales
        return self._on_host.values.nbytes + (0 if scales is None else scales.nbytes)

    def entry(self, index: int) -> CachedEmbedding:
        """Copies one embedding, so that it does not keep the whole step's in memory."""
        host, facts = self._on_host, self._facts[index]
        scales = None
        if host.scales is not None:
            scales = _copy(host.scales[int(host.offsets[index]) : int(host.offsets[index + 1])])
        return CachedEmbedding(_copy(host[index]), scales, facts.tokens, facts.truncated, facts.key)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copies without torch, which would start OpenMP threads for each thread that copies. With more threads
    than cores, those of the device thread sleep between operations instead of spinning: MaxSim then takes
    twice as long, and a forward pass a tenth longer."""
    if tensor.numel() == 0:  # an empty tensor cannot be viewed as bytes
        return torch.empty_like(tensor)
    bytes_ = tensor.view(torch.uint8).numpy().copy()
    return torch.from_numpy(bytes_).view(tensor.dtype)


class CacheWriter:
    """Writes new embeddings in a thread of its own, so that no step waits for a disk. Thread-safe.

    Staged embeddings can be found before `write` gets them. Those with a number that is not finite are left
    out: what is cached is used without a check. They take at most `limit` bytes; what comes when it is full
    is not cached."""

    def __init__(self, write: Callable[[Entries], None], limit: int) -> None:
        self._write = write
        self._limit = limit
        self._batches: list[PendingEmbeddings] = []
        self._staged: dict[bytes, tuple[PendingEmbeddings, int]] = {}
        self._lock = threading.Lock()
        self._writing = threading.RLock()
        self._queue: queue.SimpleQueue[PendingEmbeddings | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self.skipped = 0
        self._thread = threading.Thread(target=self._run, name="maxsimd-cache-writer", daemon=True)
        self._thread.start()
        close_at_exit(self)

    def stage(self, embeddings: PendingEmbeddings) -> None:
        """Makes embeddings findable and has them written soon. If it raises, nothing is staged."""
        with self._lock:
            if sum(batch.nbytes for batch in self._batches) + embeddings.nbytes > self._limit:
                self.skipped += len(embeddings)
                return
            try:
                self._batches.append(embeddings)
                self._staged |= {key: (embeddings, index) for index, key in enumerate(embeddings.keys)}
                self._idle.clear()
                self._queue.put(embeddings)
            except BaseException:
                self._forget(embeddings)
                raise

    def get(self, key: bytes) -> CachedEmbedding | None:
        with self._lock:
            staged = self._staged.get(key)
        entry = None if staged is None else staged[0].entry(staged[1])
        return entry if entry is not None and entry.is_finite else None

    def drop(self, key: bytes) -> None:
        """Keeps a staged embedding from being written; waits for one that is being written."""
        with self._writing, self._lock:
            self._staged.pop(key, None)

    def clear(self) -> None:
        """Keeps all staged embeddings from being written; waits for those that are being written."""
        with self._writing, self._lock:
            self._staged.clear()

    @property
    def num_staged(self) -> int:
        return len(self._staged)

    def flush(self, seconds: float | None = None) -> bool:
        """Waits at most `seconds` until all is written; returns whether it is."""
        return self._idle.wait(seconds)

    def close(self, seconds: float | None = None) -> None:
        """Writes what is staged and ends the thread; waits for that at most `seconds`."""
        note_closed(self)
        self._queue.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (embeddings := self._queue.get()) is not None:
            with self._writing:
                try:
                    self._write(self._still_wanted(embeddings))
                except Exception:
                    log.exception("embeddings of %d documents are not cached", len(embeddings))
                with self._lock:
                    self._forget(embeddings)

    def _still_wanted(self, embeddings: PendingEmbeddings) -> Entries:
        with self._lock:
            wanted = [
                (key, index)
                for index, key in enumerate(embeddings.keys)
                if self._staged.get(key) == (embeddings, index)
            ]
        entries = [(key, embeddings.entry(index)) for key, index in wanted]
        return [(key, entry) for key, entry in entries if entry.is_finite]

    def _forget(self, embeddings: PendingEmbeddings) -> None:
        self._batches = [batch for batch in self._batches if batch is not embeddings]
        for index, key in enumerate(embeddings.keys):
            if self._staged.get(key) == (embeddings, index):
                del self._staged[key]
        if not self._batches:
            self._idle.set()
