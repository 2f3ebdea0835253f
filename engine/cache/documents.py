"""Texts of documents that requests name by their digests, of each tenant apart: in memory, and on disk."""

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from maxsimd.engine.cache.disk import EntryStore

# About what a text takes in memory beside its characters.
_ENTRY_BYTES = 256
_FILE = "maxsimd-documents-{}.sqlite3"
_FILES = re.compile(r"maxsimd-documents-[0-9a-f]{32}(\.damaged)?\.sqlite3(-journal)?")
# Tenants whose files are open; the texts of others stay on disk.
_MOST_TENANTS = 256


@dataclass(frozen=True, slots=True)
class KeptText:
    """A document's text in UTF-8, under its SHA-256."""

    encoded: bytes

    @property
    def nbytes(self) -> int:
        return len(self.encoded) + _ENTRY_BYTES

    def to_bytes(self, key: bytes) -> bytes:
        return self.encoded

    @classmethod
    def from_bytes(cls, key: bytes, data: bytes) -> Self | None:
        return cls(data) if hashlib.sha256(data).digest() == key else None


class TenantTexts:
    """One tenant's texts in at most `limit` bytes of memory, and as many of a file. The least recently used
    leave memory first, and the oldest the file. Thread-safe."""

    def __init__(self, limit: int, path: Path | None) -> None:
        self._limit = limit
        self._texts: OrderedDict[bytes, KeptText] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0
        self.disk = None if path is None else EntryStore(path, limit, KeptText, "text")

    def __len__(self) -> int:
        return max(len(self._texts), 0 if self.disk is None else len(self.disk))

    def get(self, digest: bytes) -> str | None:
        with self._lock:
            found = self._texts.get(digest)
            if found is not None:
                self._texts.move_to_end(digest)
        if found is None and self.disk is not None:
            found = self.disk.get(digest)
            if found is not None:
                self._keep(digest, found)
        return None if found is None else found.encoded.decode("utf-8", "surrogatepass")

    def put(self, texts: Iterable[tuple[bytes, str]]) -> None:
        """Keeps texts by their digests, unless one exceeds the limit alone."""
        entries = [(digest, KeptText(text.encode("utf-8", "surrogatepass"))) for digest, text in texts]
        for digest, entry in entries:
            self._keep(digest, entry)
        if self.disk is not None:
            self.disk.put(entries)

    def _keep(self, digest: bytes, entry: KeptText) -> None:
        if entry.nbytes > self._limit:
            return
        with self._lock:
            if (before := self._texts.pop(digest, None)) is not None:
                self.nbytes -= before.nbytes
            self._texts[digest] = entry
            self.nbytes += entry.nbytes
            while self.nbytes > self._limit:
                _, oldest = self._texts.popitem(last=False)
                self.nbytes -= oldest.nbytes


class DocumentTexts:
    """The texts of all tenants, each in at most `limit` bytes; in a `folder` they outlive the process.
    Thread-safe."""

    def __init__(self, limit: int, folder: Path | None) -> None:
        self.limit = limit
        self._folder = folder
        self._lock = threading.Lock()
        self._tenants: OrderedDict[str, TenantTexts] = OrderedDict()

    def of(self, tenant: str) -> TenantTexts:
        with self._lock:
            if tenant not in self._tenants:
                self._tenants[tenant] = TenantTexts(self.limit, self._path(tenant))
            self._tenants.move_to_end(tenant)
            while self._folder is not None and len(self._tenants) > _MOST_TENANTS:
                _, idle = self._tenants.popitem(last=False)
                if idle.disk is not None:
                    idle.disk.close()
            return self._tenants[tenant]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._all())

    def __len__(self) -> int:
        return sum(map(len, self._all()))

    def clear(self) -> None:
        """Forgets all texts, on disk as well."""
        with self._lock:
            tenants, self._tenants = [*self._tenants.values()], OrderedDict()
            for tenant in tenants:
                if tenant.disk is not None:
                    tenant.disk.clear()
                    tenant.disk.close()
            for path in self._files():
                path.unlink(missing_ok=True)

    def close(self) -> None:
        with self._lock:
            for tenant in self._tenants.values():
                if tenant.disk is not None:
                    tenant.disk.close()

    def _all(self) -> list[TenantTexts]:
        with self._lock:
            return [*self._tenants.values()]

    def _path(self, tenant: str) -> Path | None:
        """The tenant's file. Its name does not tell the tenant's."""
        if self._folder is None:
            return None
        return self._folder / _FILE.format(hashlib.sha256(tenant.encode()).hexdigest()[:32])

    def _files(self) -> Iterator[Path]:
        if self._folder is not None and self._folder.is_dir():
            yield from (path for path in self._folder.iterdir() if _FILES.fullmatch(path.name))
