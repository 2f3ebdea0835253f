"""The running system: the engine, its actors, checkpoints, packed execution, pre- and post-processing.

The public face is here; nothing of HTTP is.
"""

from maxsimd.engine.config import EngineConfig
from maxsimd.engine.engine import Engine
from maxsimd.engine.errors import (
    EngineDeadError,
    EngineNotReadyError,
    EngineRunningError,
    InvalidRequestError,
    MaxsimdError,
    ModelLoadError,
    QueueFullError,
    RequestFailedError,
    RequestTimeoutError,
)
from maxsimd.engine.requests import (
    CUT_LONG,
    WINDOW_LONG,
    ClassifyResult,
    EmbedResult,
    Progress,
    RankedDocument,
    RerankResult,
    ScoreResult,
    TokenEmbedResult,
    Truncation,
    Usage,
)
from maxsimd.engine.sync import SyncEngine

__all__ = [
    "CUT_LONG",
    "WINDOW_LONG",
    "ClassifyResult",
    "EmbedResult",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineNotReadyError",
    "EngineRunningError",
    "InvalidRequestError",
    "MaxsimdError",
    "ModelLoadError",
    "Progress",
    "QueueFullError",
    "RankedDocument",
    "RequestFailedError",
    "RequestTimeoutError",
    "RerankResult",
    "ScoreResult",
    "SyncEngine",
    "TokenEmbedResult",
    "Truncation",
    "Usage",
]
