"""Scores that a command has so far, in a file beside its output: an interrupted run goes on from it."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import click

_VERSION = 2


def digest_of(parts: Iterable[str]) -> str:
    """What tells one run from another: the model with its options, the query, the documents."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


class Journal:
    """A line for each document that is scored: its index, its score and the number that it is ranked by, or
    null and why it has none. The first line has the run's digest. Used as a context manager; without a path
    nothing is written."""

    def __init__(self, path: Path | None, digest: str, resume: bool) -> None:
        """Raises click.ClickException for a file that another run has left, and where there is one though
        nobody said that it goes on."""
        self._path = path
        self._digest = digest
        self.scores: dict[int, float] = {}
        self.ranking_scores: dict[int, float] = {}
        self.errors: dict[int, str] = {}
        self._is_new = True
        if path is not None and path.exists():
            if not resume:
                raise click.ClickException(
                    f"{path} holds the scores of an interrupted run; go on with --resume, or remove it"
                )
            self._is_new = not self._read(path)

    def __enter__(self) -> Self:
        self._file = None if self._path is None else self._path.open("a", encoding="utf-8")
        if self._is_new:
            self._write({"maxsimd": _VERSION, "digest": self._digest})
            if self._file is not None:
                self._file.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, scores: Mapping[int, tuple[float, float]], errors: Mapping[int, str]) -> None:
        """Notes by the documents' indexes their scores, each with what it is ranked by, and errors, so that
        they outlive this process."""
        self.errors |= errors
        for index, (score, by) in scores.items():
            self.scores[index], self.ranking_scores[index] = score, by
            self._write([index, score, by])
        for index, reason in errors.items():
            self._write([index, None, reason])
        if self._file is not None:
            self._file.flush()

    @property
    def done(self) -> int:
        return len(self.scores) + len(self.errors)

    def _write(self, line: object) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")

    def _read(self, path: Path) -> bool:
        """Reads what there is; False where that is nothing."""
        try:
            whole, _, broken = path.read_text(encoding="utf-8").rpartition("\n")
            lines = [json.loads(line) for line in whole.split("\n") if line]
        except ValueError as error:
            raise click.ClickException(f"{path} is no file of scores; remove it ({error})") from error
        if not lines:
            path.write_text("", encoding="utf-8")
            return False
        if lines[0] != {"maxsimd": _VERSION, "digest": self._digest}:
            raise click.ClickException(
                f"{path} is of another run: of another model, query, documents or options; remove it, or "
                "write to another file"
            )
        for index, score, last in lines[1:]:
            if score is None:
                self.errors[index] = last
            else:
                self.scores[index], self.ranking_scores[index] = score, last
        if broken:  # the process ended while it wrote
            path.write_text(whole + "\n", encoding="utf-8")
        return True
