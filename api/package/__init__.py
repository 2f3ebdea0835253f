"""maxsimd: relevance scores for queries and documents, by an async engine and a server.

Names are imported when they are first used, so that `import maxsimd` is quick and loads neither torch nor a
model library.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maxsimd.engine import Engine, EngineConfig, Engines, Stage, SyncEngine

__all__ = ["Engine", "EngineConfig", "Engines", "Stage", "SyncEngine", "__version__"]

try:
    __version__ = version("maxsimd")
except PackageNotFoundError:  # the folder lies on the path without being installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("maxsimd.engine"), name)
    raise AttributeError(f"module 'maxsimd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
