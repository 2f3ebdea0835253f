"""A request that waits for values: those that have come, why others never will, and who is told.

Owned by `SchedulerActor`, which alone may call it.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterable

import numpy as np

from maxsimd.engine.actors.messages import Admit
from maxsimd.engine.errors import InvalidRequestError, RequestFailedError
from maxsimd.engine.requests import Timings, Value, Values

log = logging.getLogger(__name__)


class OpenRequest:
    """One request's values by index, as they come. `errors` says of indexes why they have no value."""

    def __init__(self, admitted: Admit) -> None:
        self.request_id = admitted.request.request_id
        self._options = admitted.options
        self._future = admitted.values
        self._arrived = admitted.arrived
        self._refusal_of = admitted.refusal_of
        self._values: list[Value | None] = [None] * admitted.num_results
        self._errors: dict[int, str] = {}
        self._missing = admitted.num_results
        self._queued = time.perf_counter()
        self._begun: float | None = None
        self._score_seconds = 0.0

    @property
    def tenant(self) -> str:
        return self._options.tenant

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is to come."""
        return self._missing == 0

    @property
    def has_errors(self) -> bool:
        return bool(self._errors)

    def begin(self) -> None:
        """Notes that a step with a part of it goes to the device."""
        if self._begun is None:
            self._begun = time.perf_counter()

    def store(self, index: int, value: Value) -> bool:
        """Takes a value, if it is finite; says whether it is."""
        if not _is_finite(value):
            return False
        if self._values[index] is None:
            self._missing -= index not in self._errors
        self._values[index] = value
        return True

    def refusal_of(self, index: int) -> InvalidRequestError | None:
        """Why a value is not finite, where that is due to what the caller has sent."""
        return None if self._refusal_of is None else self._refusal_of(index)

    def give_up(self, indexes: Iterable[int], reason: str) -> bool:
        """Does without some values, if the caller wants to be told rather than to have no result at all; says
        whether it does."""
        if self._options.on_error == "fail":
            return False
        for index in indexes:
            if self._values[index] is None and index not in self._errors:
                self._errors[index] = reason
                self._missing -= 1
        return True

    def add_score_seconds(self, seconds: float) -> None:
        """Notes how long scoring took in a step that brought values."""
        self._score_seconds += seconds

    def tell_progress(self) -> BaseException | None:
        """Tells the caller how many values have come; returns what the caller's function raised."""
        if self._future.done():
            return None
        if self._arrived is not None:
            self._arrived(self._values)
        if self._options.progress is None:
            return None
        total = len(self._values)
        try:
            self._options.progress(total - self._missing, total)
        except (Exception, asyncio.CancelledError) as error:
            return error
        return None

    def finish(self) -> None:
        """Hands over what has come."""
        if self._future.done():
            return
        now = time.perf_counter()
        begun = now if self._begun is None else self._begun
        model = max(0.0, now - begun - self._score_seconds)
        timings = Timings(queue=begun - self._queued, model=model, score=self._score_seconds)
        self._future.set_result(Values(self._values, self._errors, timings))

    def fail(self, reason: str, cause: BaseException | None, value: int | None = None) -> None:
        """Ends the request without a result; `value` is the one that is not finite, if that is why."""
        log.error("request %d failed: %s", self.request_id, reason)
        if not self._future.done():
            error = RequestFailedError(reason, value)
            error.__cause__ = cause
            self._future.set_exception(error)

    def refuse(self, error: InvalidRequestError) -> None:
        """Ends the request without a result, because of what is in it."""
        if not self._future.done():
            self._future.set_exception(error)


def _is_finite(value: Value) -> bool:
    return math.isfinite(value) if isinstance(value, float) else bool(np.isfinite(value).all())
