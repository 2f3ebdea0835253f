"""Estimates of when waiting work will be done, for admission."""

from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from maxsimd.scheduler.waiting import Share, part_of, size_class, weight_of

# The most rounds of the estimate: the longer everything takes, the more the oldest requests get meanwhile.
_ROUNDS = 100
# After this many seconds (of steps, for a rate) a measurement counts half.
_HALF_LIFE = 10.0
# The number of latest steps that tell how long another may take.
_LATEST_STEPS = 16
# This many seconds of waits count as exactly forecast, beside those that were seen. Forecasts are corrected
# at most by this factor.
_TRUSTED_SECONDS, _MOST_TIMES = 2.0, 4.0


def work_ahead(
    tokens: int,
    share: Share,
    waiting: Iterable[tuple[Share, int]],
    weights: Mapping[str, float],
    oldest_share: float,
    budget: int,
) -> int:
    """About how many tokens run before the last one of a request of `tokens` that comes now.

    `waiting` has each waiting request's share and remaining tokens, oldest first. Requests of the same share
    and the same or a lower size class (`size_class`) run before it. Other shares run beside it by weight. The
    requests get `oldest_share` of everything in turn, oldest first; the part that goes to larger requests of
    the same share delays it.
    """
    own_class = size_class(tokens, budget)
    own, beside = tokens, dict[Share, int]()
    # The tokens given to the oldest requests, and how many of them to larger ones of the same share.
    given, to_larger = [0], [0]
    for each, work in waiting:
        is_larger = each == share and size_class(work, budget) > own_class
        if each != share:
            beside[each] = beside.get(each, 0) + work
        elif not is_larger:
            own += work
        given.append(given[-1] + work)
        to_larger.append(to_larger[-1] + work * is_larger)
    weight = _weights({share, *beside}, weights)
    larger, total = 0.0, 0.0
    for _ in range(_ROUNDS):
        group = own + larger
        others = sum(min(work, group * weight[each] / weight[share]) for each, work in beside.items())
        before, total = total, group + others
        larger = float(np.interp(total * oldest_share, given, to_larger))
        if total - before < 1:
            break
    return round(total) - tokens


def _weights(shares: set[Share], tenants: Mapping[str, float]) -> dict[Share, float]:
    together: dict[str, float] = {}
    for tenant, priority in shares:
        together[tenant] = together.get(tenant, 0.0) + part_of(priority)
    return {
        (tenant, priority): weight_of(tenants.get(tenant, 1.0), priority, together[tenant])
        for tenant, priority in shares
    }


class ServiceRate:
    """The tokens per second of a device with enough work: an average over steps, in which newer ones count
    more. Steps of less than half of `budget` tokens do not count."""

    def __init__(self, budget: int) -> None:
        self._least = budget / 2
        self._tokens = 0.0
        self._seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        if tokens < self._least or seconds <= 0:
            return
        remaining = 0.5 ** (seconds / _HALF_LIFE)
        self._tokens = self._tokens * remaining + tokens
        self._seconds = self._seconds * remaining + seconds

    @property
    def tokens_per_second(self) -> float | None:
        """None until a step was at least half full."""
        return self._tokens / self._seconds if self._seconds else None

    def seconds(self, tokens: int) -> float | None:
        """The time for that many tokens; None until the rate is known."""
        rate = self.tokens_per_second
        return None if rate is None else tokens / rate


class WaitErrors:
    """By how much waits exceed their forecasts, by size class. A forecast knows only the work that already
    waits: smaller requests that come later pass large ones, and not every step is full. Newer waits count
    more, and without new ones forecasts are trusted again."""

    def __init__(self) -> None:
        # By size class: seconds forecast, seconds waited, and the time of the last wait.
        self._seen: dict[int, tuple[float, float, float]] = {}

    def observe(self, tokens: int, forecast: float, waited: float, now: float) -> None:
        before = self._since(tokens, now)
        self._seen[tokens.bit_length()] = before[0] + forecast, before[1] + max(0.0, waited), now

    def factor(self, tokens: int, now: float) -> float:
        """The factor that corrects a forecast for a request of `tokens`: at least 1."""
        forecast, waited = self._since(tokens, now)
        times = (waited + _TRUSTED_SECONDS) / (forecast + _TRUSTED_SECONDS)
        return max(1.0, min(_MOST_TIMES, times))

    def _since(self, tokens: int, now: float) -> tuple[float, float]:
        forecast, waited, seen = self._seen.get(tokens.bit_length(), (0.0, 0.0, now))
        remaining = 0.5 ** (max(0.0, now - seen) / _HALF_LIFE)
        return forecast * remaining, waited * remaining


class StepTimes:
    """An upper bound of a step's time, from the latest steps: no longer than any of them for as many tokens
    or fewer, and in proportion for more."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, float]] = deque(maxlen=_LATEST_STEPS)

    def observe(self, tokens: int, seconds: float) -> None:
        self._latest.append((tokens, seconds))

    def most_seconds(self, tokens: int) -> float | None:
        """The longest time for a step of `tokens`; None before the first step."""
        return min((seconds * max(1.0, tokens / each) for each, seconds in self._latest), default=None)
