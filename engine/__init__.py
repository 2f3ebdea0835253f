"""The engine, without HTTP. Names are imported on first use, so that `maxsimd.engine.config` loads no
torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maxsimd.engine.config import EngineConfig
    from maxsimd.engine.engine import Engine
    from maxsimd.engine.errors import (
        EngineDeadError,
        EngineNotReadyError,
        EngineRunningError,
        InvalidRequestError,
        MaxsimdError,
        ModelDroppedError,
        ModelFailedError,
        ModelLoadError,
        QueueFullError,
        RequestFailedError,
        RequestTimeoutError,
        RequestTooLargeError,
        UnknownModelError,
    )
    from maxsimd.engine.media import Content, Picture, PictureFile
    from maxsimd.engine.requests import (
        CUT_LONG,
        WINDOW_LONG,
        ClassifyResult,
        EmbedResult,
        Progress,
        RankedDocument,
        RerankResult,
        ScoreResult,
        SparseEmbedResult,
        SparseVector,
        TokenEmbedResult,
        TokenizedText,
        Truncation,
        Usage,
    )
    from maxsimd.engine.several.cascade import CascadeDocument, CascadeResult, Stage, StageResult
    from maxsimd.engine.several.engines import Engines
    from maxsimd.engine.sync import SyncEngine
    from maxsimd.engine.tenants import Tenant
    from maxsimd.pooling.muvera import Muvera
    from maxsimd.pooling.query_rows import QueryRows
    from maxsimd.pooling.vectors import Vectors

__all__ = [
    "CUT_LONG",
    "WINDOW_LONG",
    "CascadeDocument",
    "CascadeResult",
    "ClassifyResult",
    "Content",
    "EmbedResult",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineNotReadyError",
    "EngineRunningError",
    "Engines",
    "InvalidRequestError",
    "MaxsimdError",
    "ModelDroppedError",
    "ModelFailedError",
    "ModelLoadError",
    "Muvera",
    "Picture",
    "PictureFile",
    "Progress",
    "QueryRows",
    "QueueFullError",
    "RankedDocument",
    "RequestFailedError",
    "RequestTimeoutError",
    "RequestTooLargeError",
    "RerankResult",
    "ScoreResult",
    "SparseEmbedResult",
    "SparseVector",
    "Stage",
    "StageResult",
    "SyncEngine",
    "Tenant",
    "TokenEmbedResult",
    "TokenizedText",
    "Truncation",
    "UnknownModelError",
    "Usage",
    "Vectors",
]


_HOME = {
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "Engines": "engine.several.engines",
    "CascadeDocument": "engine.several.cascade",
    "CascadeResult": "engine.several.cascade",
    "Stage": "engine.several.cascade",
    "StageResult": "engine.several.cascade",
    "SyncEngine": "engine.sync",
    "Content": "engine.media",
    "Picture": "engine.media",
    "PictureFile": "engine.media",
    "Tenant": "engine.tenants",
    "Muvera": "pooling.muvera",
    "QueryRows": "pooling.query_rows",
    "Vectors": "pooling.vectors",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'maxsimd.engine' has no attribute {name!r}")
    home = _HOME.get(name) or ("engine.errors" if name.endswith("Error") else "engine.requests")
    return getattr(import_module(f"maxsimd.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
