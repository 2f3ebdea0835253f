"""What may become of one of several models: it is loaded, serves, fails, or is dropped."""

from dataclasses import dataclass
from typing import TypeAlias

from maxsimd.engine.engine import Engine
from maxsimd.engine.errors import EngineNotReadyError, ModelDroppedError, ModelFailedError


@dataclass(frozen=True, slots=True, eq=False)
class Loading:
    """Its checkpoint is being read and proven."""

    def __str__(self) -> str:
        return "loading"


@dataclass(frozen=True, slots=True, eq=False)
class Serving:
    """Its engine takes requests."""

    engine: Engine

    def __str__(self) -> str:
        return "ok"


@dataclass(frozen=True, slots=True, eq=False)
class Failed:
    """It could not be loaded, or its engine has died; nothing of it is in memory."""

    reason: str

    def __str__(self) -> str:
        return f"failed: {self.reason}"


@dataclass(frozen=True, slots=True, eq=False)
class Dropped:
    """It was served and is not any more."""

    def __str__(self) -> str:
        return "dropped"


State: TypeAlias = Loading | Serving | Failed | Dropped


def engine_of(name: str, state: State) -> Engine:
    """The engine of a model in this state. Raises EngineNotReadyError, ModelFailedError or ModelDroppedError
    where there is none."""
    match state:
        case Serving(engine):
            return engine
        case Failed(reason):
            raise ModelFailedError(f"the model {name!r} has failed: {reason}")
        case Dropped():
            raise ModelDroppedError(f"the model {name!r} has been dropped")
        case Loading():
            raise EngineNotReadyError(f"the model {name!r} is being loaded")
