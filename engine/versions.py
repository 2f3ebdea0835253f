"""Versions of installed packages, ours among them."""

from collections.abc import Iterable
from functools import cache
from importlib import metadata


def versions_of(packages: Iterable[str]) -> list[str]:
    """The version of each package. One whose folder lies on the path without being installed, as ours may,
    is "0+unknown"."""
    return [version(package) for package in packages]


@cache
def version(package: str) -> str:
    """The version of a package. Cached, because it searches every folder of the path."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "0+unknown"
