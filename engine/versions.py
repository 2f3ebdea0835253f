"""Versions of installed packages, ours among them."""

from collections.abc import Iterable
from functools import cache
from importlib import metadata


def versions_of(packages: Iterable[str]) -> list[str]:
    """The version of each package."""
    return [version(package) for package in packages]


@cache
def version(package: str) -> str:
    """The version of a package; "0+unknown" for one on the path that is not installed, as ours may be."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "0+unknown"
