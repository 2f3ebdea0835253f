"""Digests of a checkpoint's files, as `sha256sum` writes and checks them, and loading without a hub."""

import hashlib
import os
from pathlib import Path

from maxsimd.engine.errors import ModelLoadError

NAME = "SHA256SUMS"
_AT_ONCE = 1 << 20


def write_digests(folder: Path) -> int:
    """Writes the digest of each file under a folder, but for hidden ones; returns how many there are."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not _is_hidden(path, folder))
    lines = [f"{_digest(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / NAME).write_text("".join(lines), encoding="utf-8")
    return len(lines)


def check_digests(folder: Path) -> int | None:
    """How many files were compared with their digests; None where there are no digests. Raises
    ModelLoadError, with its name, for a file that is missing or has changed."""
    digests = folder / NAME
    if not digests.is_file():
        return None
    lines = digests.read_text(encoding="utf-8").splitlines()
    for line in lines:
        expected, _, name = line.partition("  ")
        path = folder / name
        if not path.is_file():
            raise ModelLoadError(f"{path} is missing, but {NAME} names it; download the checkpoint again")
        if _digest(path) != expected:
            raise ModelLoadError(f"{path} is not what {NAME} says; download the checkpoint again")
    return len(lines)


def stay_offline() -> None:
    """Has the libraries ask no hub for anything, in this process and those that it starts."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True


def _is_hidden(path: Path, folder: Path) -> bool:
    parts = path.relative_to(folder).parts
    return any(part.startswith(".") for part in parts) or parts == (NAME,)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_AT_ONCE):
            digest.update(part)
    return digest.hexdigest()
