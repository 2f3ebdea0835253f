"""From what a request says to the model that answers it, and what it is told where that does not."""

from collections.abc import Iterator
from contextlib import contextmanager

from maxsimd.api.failures import (
    ApiError,
    model_has_failed,
    model_is_ambiguous,
    model_is_dropped,
    model_is_loading,
    model_is_undecided,
    model_was_dropped_meanwhile,
    no_such_model,
)
from maxsimd.api.models.choice import UndecidedError, Wanted, first_for
from maxsimd.api.models.several import DROPPED, LOADING, SeveralModels
from maxsimd.engine import EngineDeadError, EngineNotReadyError


def chosen(models: SeveralModels, name: str | None, wanted: Wanted) -> str:
    """The name of the model that a request goes to, whether it is served now or not. Raises ApiError."""
    if name:
        return named(models, name)
    try:
        return first_for(wanted, models.choosable())
    except UndecidedError as error:
        raise model_is_undecided(error.name, served(models)) from None


def named(models: SeveralModels, name: str) -> str:
    """The model of this name, or the only one that is so called itself: of those that are not dropped, if
    there are such. Raises ApiError."""
    if name in models.names:
        return name
    called = [each for each in models.names if name in _own_names(models, each)]
    called = [each for each in called if models.state(each) != DROPPED] or called
    if not called:
        raise no_such_model(name, served(models))
    if len(called) > 1:
        raise model_is_ambiguous(name, called)
    return called[0]


def _own_names(models: SeveralModels, name: str) -> tuple[str, ...]:
    facts, given = models.facts_of(name), models.setup_of(name).engine.model
    return tuple(each for each in (given, None if facts is None else facts.name) if each)


def served(models: SeveralModels) -> tuple[str, ...]:
    """The names of those that take requests."""
    return tuple(name for name in models.names if models.engine(name) is not None)


def not_served(models: SeveralModels, name: str) -> ApiError:
    """What a request is told whose model takes none."""
    state = models.state(name)
    if state == LOADING:
        return model_is_loading(name)
    if state == DROPPED:
        return model_is_dropped(name, served(models))
    return model_has_failed(name, state.removeprefix("failed: "), served(models))


@contextmanager
def told_of(models: SeveralModels | None, name: str) -> Iterator[None]:
    """A request whose model fails, or is dropped, while it is worked on, is told so: the others serve."""
    try:
        yield
    except (EngineDeadError, EngineNotReadyError) as error:
        if models is None or not name or models.engine(name) is not None:
            raise
        if models.state(name) == DROPPED:
            raise model_was_dropped_meanwhile(name) from error
        raise not_served(models, name) from error
