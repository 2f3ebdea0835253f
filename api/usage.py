"""Usage by tenant, model and day: counted in memory, and kept in an SQLite file that processes may share."""

import asyncio
import csv
import io
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import astuple, dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self, TypeAlias

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from maxsimd.api.config import SetupError
from maxsimd.engine import Usage
from maxsimd.engine.requests import Timings

log = logging.getLogger("maxsimd.usage")

# Day in UTC (2026-01-31), tenant, model.
Key: TypeAlias = tuple[str, str, str]

KEPT_DAYS = 400
# The tenant of keys without a name, whose numbers change.
UNNAMED = "unnamed"
# Tenants with labels of their own in the metrics; the rest are "other".
_MOST_LABELS, _OTHER = 100, "other"
_SECONDS_BETWEEN_WRITES, _LOCK_SECONDS = 5.0, 5.0


@dataclass(slots=True)
class Used:
    """Counts of the requests of one tenant to one model.

    `tokens` include `cached_tokens`, which did not run. `device_seconds` are the requests' shares of their
    steps, by tokens. `refused` requests got a 429 or a 413."""

    requests: int = 0
    documents: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    device_seconds: float = 0.0
    refused: int = 0

    @classmethod
    def of(cls, documents: int, usage: Usage, timings: Timings) -> Self:
        """One answered request."""
        return cls(1, documents, usage.prompt_tokens, usage.cached_tokens, timings.device)

    def add(self, other: "Used") -> None:
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_COUNTS = tuple(field.name for field in fields(Used))
_NAMES = ("day", "tenant", "model", *_COUNTS)
_TYPES = {"device_seconds": "REAL"}
_TABLE = (
    "CREATE TABLE IF NOT EXISTS usage (day TEXT, tenant TEXT, model TEXT, "
    + ", ".join(f"{name} {_TYPES.get(name, 'INTEGER')}" for name in _COUNTS)
    + ", PRIMARY KEY (day, tenant, model)) WITHOUT ROWID"
)
_ADD = f"INSERT INTO usage VALUES ({', '.join('?' * len(_NAMES))}) ON CONFLICT DO UPDATE SET " + ", ".join(
    f"{name} = {name} + excluded.{name}" for name in _COUNTS
)


class UsageLog(Collector):
    """Counts usage. With a file the counts outlive the process; days older than `KEPT_DAYS` are dropped.
    `count` is for one thread. Raises SetupError for a file that cannot be used."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        # Counts that are not in the file, and of this process for the metrics.
        self._new: dict[Key, Used] = {}
        self._totals: dict[tuple[str, str], Used] = {}
        self._lock = threading.Lock()
        self._has_failed = False
        if path is not None:
            try:
                # Only the server's user may read who uses it.
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
                with closing(self._connect(path)) as connection:
                    connection.execute(_TABLE)
                    connection.execute(f"SELECT {', '.join(_NAMES)} FROM usage LIMIT 0")
            except (OSError, sqlite3.Error) as error:
                raise SetupError(
                    f"the usage file {str(path)!r} cannot be used: {error}; name another one (--usage-file)"
                ) from error

    @property
    def is_kept(self) -> bool:
        """Whether usage outlives the process."""
        return self._path is not None

    def count(self, tenant: str, model: str, used: Used) -> None:
        with self._lock:
            self._new.setdefault((_day(), tenant, model), Used()).add(used)
            named = {name for name, _ in self._totals}
            label = tenant if tenant in named or len(named) < _MOST_LABELS else _OTHER
            self._totals.setdefault((label, model), Used()).add(used)

    def rows(self, tenant: str | None) -> list[tuple[Key, Used]]:
        """All counts, or those of a tenant, by day, tenant and model. May wait for the disk."""
        self.flush()
        kept: list[Any] = []
        if self._path is not None:
            try:
                with closing(self._connect(self._path)) as connection:
                    query = f"SELECT {', '.join(_NAMES)} FROM usage WHERE ? IS NULL OR tenant = ?"
                    kept = connection.execute(query, (tenant, tenant)).fetchall()
            except sqlite3.Error as error:
                self._warn(error)
        found = {(day, name, model): Used(*counts) for day, name, model, *counts in kept}
        with self._lock:
            for key, used in self._new.items():
                found.setdefault(key, Used()).add(used)
        return [(key, found[key]) for key in sorted(found) if tenant in (None, key[1])]

    def flush(self) -> None:
        """Writes new counts to the file. If that fails, they stay in memory and are tried again."""
        with self._lock:
            new, self._new = (self._new, {}) if self._path is not None else ({}, self._new)
        if not new or self._path is None:
            return
        try:
            with closing(self._connect(self._path)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany(_ADD, [(*key, *astuple(used)) for key, used in new.items()])
                connection.execute("DELETE FROM usage WHERE day < ?", (_day(KEPT_DAYS),))
                connection.execute("COMMIT")
            self._has_failed = False
        except sqlite3.Error as error:
            with self._lock:
                for key, used in new.items():
                    self._new.setdefault(key, Used()).add(used)
            self._warn(error)

    async def watch(self) -> None:
        """Writes new counts now and then until cancelled, and once more then."""
        try:
            while True:
                await asyncio.sleep(_SECONDS_BETWEEN_WRITES)
                await asyncio.to_thread(self.flush)
        finally:
            self.flush()  # the loop may be about to close

    def collect(self) -> Iterable[Metric]:
        about = (
            "Requests answered", "Documents and texts of answered requests", "Tokens of answered requests",
            "Tokens that did not run", "Seconds in steps, shared by tokens", "Requests that got 429 or 413",
        )  # fmt: skip
        with self._lock:
            totals = [(key, astuple(used)) for key, used in self._totals.items()]
        for i, (name, what) in enumerate(zip(_COUNTS, about, strict=True)):
            family = CounterMetricFamily(f"maxsimd_usage_{name}", what, labels=("tenant", "model"))
            for key, counts in totals:
                family.add_metric(key, counts[i])
            yield family

    def _connect(self, path: Path) -> sqlite3.Connection:
        return sqlite3.connect(path, timeout=_LOCK_SECONDS, isolation_level=None)

    def _warn(self, error: sqlite3.Error) -> None:
        if not self._has_failed:
            self._has_failed = True
            log.warning("usage cannot be read or written: %s; counts stay in memory until it can be", error)


def as_csv(rows: Iterable[tuple[Key, Used]]) -> bytes:
    """A table with a line of names."""

    def lines() -> Iterator[tuple[object, ...]]:
        yield _NAMES
        for key, used in rows:
            yield (*key, *astuple(used))

    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows(lines())
    return written.getvalue().encode()


def _day(ago: int = 0) -> str:
    return (datetime.fromtimestamp(time.time(), UTC) - timedelta(days=ago)).date().isoformat()
