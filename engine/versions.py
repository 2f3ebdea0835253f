"""Versions of installed packages, ours among them."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def versions_of(packages: Iterable[str]) -> list[str]:
    """The version of each package. One whose folder lies on the path without being installed, as ours may,
    is "0+unknown"."""
    return [_version_of(package) for package in packages]


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "0+unknown"
