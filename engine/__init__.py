"""The engine, without HTTP. Names are imported on first use, so that `maxsimd.engine.config` loads no
torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maxsimd.engine.config import EngineConfig as EngineConfig
    from maxsimd.engine.engine import Engine as Engine
    from maxsimd.engine.errors import EngineDeadError as EngineDeadError
    from maxsimd.engine.errors import EngineNotReadyError as EngineNotReadyError
    from maxsimd.engine.errors import EngineRunningError as EngineRunningError
    from maxsimd.engine.errors import InvalidRequestError as InvalidRequestError
    from maxsimd.engine.errors import MaxsimdError as MaxsimdError
    from maxsimd.engine.errors import ModelDroppedError as ModelDroppedError
    from maxsimd.engine.errors import ModelFailedError as ModelFailedError
    from maxsimd.engine.errors import ModelLoadError as ModelLoadError
    from maxsimd.engine.errors import QueueFullError as QueueFullError
    from maxsimd.engine.errors import RequestFailedError as RequestFailedError
    from maxsimd.engine.errors import RequestTimeoutError as RequestTimeoutError
    from maxsimd.engine.errors import RequestTooLargeError as RequestTooLargeError
    from maxsimd.engine.errors import UnknownDocumentsError as UnknownDocumentsError
    from maxsimd.engine.errors import UnknownModelError as UnknownModelError
    from maxsimd.engine.media import Content as Content
    from maxsimd.engine.media import Picture as Picture
    from maxsimd.engine.media import PictureFile as PictureFile
    from maxsimd.engine.requests import CUT_LONG as CUT_LONG
    from maxsimd.engine.requests import WINDOW_LONG as WINDOW_LONG
    from maxsimd.engine.requests import AddedDocuments as AddedDocuments
    from maxsimd.engine.requests import ClassifyResult as ClassifyResult
    from maxsimd.engine.requests import DocumentDigest as DocumentDigest
    from maxsimd.engine.requests import EmbedResult as EmbedResult
    from maxsimd.engine.requests import LabelScores as LabelScores
    from maxsimd.engine.requests import Progress as Progress
    from maxsimd.engine.requests import RankedDocument as RankedDocument
    from maxsimd.engine.requests import RerankResult as RerankResult
    from maxsimd.engine.requests import ScoreResult as ScoreResult
    from maxsimd.engine.requests import SparseEmbedResult as SparseEmbedResult
    from maxsimd.engine.requests import SparseVector as SparseVector
    from maxsimd.engine.requests import TokenClassifyResult as TokenClassifyResult
    from maxsimd.engine.requests import TokenEmbedResult as TokenEmbedResult
    from maxsimd.engine.requests import TokenEntity as TokenEntity
    from maxsimd.engine.requests import TokenizedText as TokenizedText
    from maxsimd.engine.requests import Truncation as Truncation
    from maxsimd.engine.requests import Usage as Usage
    from maxsimd.engine.several.cascade import CascadeDocument as CascadeDocument
    from maxsimd.engine.several.cascade import CascadeResult as CascadeResult
    from maxsimd.engine.several.cascade import Stage as Stage
    from maxsimd.engine.several.cascade import StageResult as StageResult
    from maxsimd.engine.several.engines import Engines as Engines
    from maxsimd.engine.sync import SyncEngine as SyncEngine
    from maxsimd.engine.tenants import Tenant as Tenant
    from maxsimd.pooling.muvera import Muvera as Muvera
    from maxsimd.pooling.query_rows import QueryRows as QueryRows
    from maxsimd.pooling.vectors import Vectors as Vectors

_NAMES = {
    "engine.config": "EngineConfig",
    "engine.engine": "Engine",
    "engine.errors": "EngineDeadError EngineNotReadyError EngineRunningError InvalidRequestError "
    "MaxsimdError ModelDroppedError ModelFailedError ModelLoadError QueueFullError RequestFailedError "
    "RequestTimeoutError RequestTooLargeError UnknownDocumentsError UnknownModelError",
    "engine.media": "Content Picture PictureFile",
    "engine.requests": "CUT_LONG WINDOW_LONG AddedDocuments ClassifyResult DocumentDigest EmbedResult "
    "LabelScores Progress RankedDocument RerankResult ScoreResult SparseEmbedResult SparseVector "
    "TokenClassifyResult "
    "TokenEmbedResult TokenEntity TokenizedText Truncation Usage",
    "engine.several.cascade": "CascadeDocument CascadeResult Stage StageResult",
    "engine.several.engines": "Engines",
    "engine.sync": "SyncEngine",
    "engine.tenants": "Tenant",
    "pooling.muvera": "Muvera",
    "pooling.query_rows": "QueryRows",
    "pooling.vectors": "Vectors",
}
_MODULES = {name: f"maxsimd.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__all__":  # as a constant, it would hide the names above from type checkers
        return [*_MODULES]
    if name not in _MODULES:
        raise AttributeError(f"module 'maxsimd.engine' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
