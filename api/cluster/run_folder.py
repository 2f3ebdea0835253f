"""The folder that a run of `maxsimd cluster score` writes, from which an interrupted run goes on."""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import click

from maxsimd.api.cluster.shards import TEMPORARY, Shard, remove_unfinished

_VERSION = 1
# Readers of folders of Parquet pass over names that begin so.
_RUN = "_run.json"


class RunFolder:
    """Owns the folder while it is used as a context manager: no other run on this machine can write it
    then."""

    def __init__(self, path: Path, digest: str, ending: str, resume: bool) -> None:
        """`digest` tells runs apart; `ending` is that of the shards' files. Raises click.ClickException for a
        folder with anything else in it, for one of another run, and for one of this run unless it is to
        `resume`."""
        self.path = path
        self._ending = ending
        self._digest = digest
        if path.exists() and not path.is_dir():
            raise click.ClickException(f"{path} is no folder")
        path.mkdir(parents=True, exist_ok=True)
        if (path / _RUN).exists():
            self._check(resume)
        elif any(not each.name.startswith(TEMPORARY) for each in path.iterdir()):
            raise click.ClickException(f"{path} is not empty; name a folder that is, or that is not there")

    def __enter__(self) -> Self:
        """Raises click.ClickException where another run is writing the folder."""
        self._lock = _locked(self.path)
        remove_unfinished(self.path)
        if not (self.path / _RUN).exists():
            temporary = self.path / f"{TEMPORARY}{_RUN}"
            temporary.write_text(
                json.dumps({"maxsimd": _VERSION, "digest": self._digest}) + "\n", encoding="utf-8"
            )
            temporary.replace(self.path / _RUN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        remove_unfinished(self.path)
        os.close(self._lock)

    def left(self, shards: list[Shard]) -> list[Shard]:
        """Those that are not written yet."""
        written = {path.name for path in self.path.iterdir()}
        return [shard for shard in shards if shard.name(self._ending) not in written]

    def _check(self, resume: bool) -> None:
        try:
            found = json.loads((self.path / _RUN).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise click.ClickException(f"{self.path / _RUN} cannot be read: {error}") from error
        if found != {"maxsimd": _VERSION, "digest": self._digest}:
            raise click.ClickException(
                f"{self.path} is of another run: of another model, input, query or options; "
                "remove it, or name another folder"
            )
        if not resume:
            raise click.ClickException(
                f"{self.path} has rows of such a run; go on with --resume, or name another folder"
            )


def _locked(path: Path) -> int:
    """A descriptor that holds the folder's lock until it is closed, or the process ends."""
    import fcntl

    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise click.ClickException(f"{path} is being written by another run") from error
    return descriptor
