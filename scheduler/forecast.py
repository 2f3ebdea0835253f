"""When waiting work will be done: estimates, by which those at the door decide whether more may come in.

Nothing here changes what is run, or in which order.
"""

from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from maxsimd.scheduler.waiting import Share, part_of, size_class, weight_of

# The longer all takes, the more the oldest get meanwhile: how often that is worked out anew at most.
_ROUNDS = 100
# After this many seconds (of steps, for a rate) a measurement counts half.
_HALF_LIFE = 10.0
# By how many of the latest steps it is judged how long another may take.
_LATEST_STEPS = 16
# This many seconds of waits are taken to have been as forecast, beside those that were seen; and a wait is
# never taken to be more than this many times as long.
_TRUSTED_SECONDS, _MOST_TIMES = 2.0, 4.0


def work_ahead(
    tokens: int,
    share: Share,
    waiting: Iterable[tuple[Share, int]],
    weights: Mapping[str, float],
    oldest_share: float,
    budget: int,
) -> int:
    """How many tokens are run, by about, before the last of a request of `tokens` that came now.

    `waiting` has each waiting request's share and what it has left, in tokens, the oldest first. Of the same
    tenant and priority all of the same class of size (`size_class`) or a lower one goes before. Others run
    beside it, as their weights allow. An `oldest_share` of all goes to one request after the other, the
    oldest first; what the larger ones of the same tenant and priority get of it is taken from that tenant and
    priority.
    """
    own_class = size_class(tokens, budget)
    own, beside = tokens, dict[Share, int]()
    # How much has gone to larger ones of the same group once the oldest requests have had all they need.
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
    """How many tokens a second the device runs when it has enough to do: an average of steps, in which newer
    ones count more. A step of less than half of `budget` tokens says nothing of it."""

    def __init__(self, budget: int) -> None:
        self._least = budget / 2
        self._tokens = 0.0
        self._seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Notes a step."""
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
        """How long the device takes for that many tokens; None where that is not known yet."""
        rate = self.tokens_per_second
        return None if rate is None else tokens / rate


class WaitErrors:
    """How many times as long as forecast requests have waited, by their class of size. A forecast knows only
    what waits already: smaller requests that come later go before large ones, and not every step is full. Of
    what was seen, newer counts more; with nothing seen for long, forecasts are trusted again."""

    def __init__(self) -> None:
        # By class of size: seconds that were forecast, seconds that it took, and when (in seconds) that was.
        self._seen: dict[int, tuple[float, float, float]] = {}

    def observe(self, tokens: int, forecast: float, waited: float, now: float) -> None:
        """Notes how many seconds a request of that many tokens has waited."""
        before = self._since(tokens, now)
        self._seen[tokens.bit_length()] = before[0] + forecast, before[1] + max(0.0, waited), now

    def factor(self, tokens: int, now: float) -> float:
        """By how much the forecast for a request of that many tokens is to be multiplied: at least 1."""
        forecast, waited = self._since(tokens, now)
        times = (waited + _TRUSTED_SECONDS) / (forecast + _TRUSTED_SECONDS)
        return max(1.0, min(_MOST_TIMES, times))

    def _since(self, tokens: int, now: float) -> tuple[float, float]:
        forecast, waited, seen = self._seen.get(tokens.bit_length(), (0.0, 0.0, now))
        remaining = 0.5 ** (max(0.0, now - seen) / _HALF_LIFE)
        return forecast * remaining, waited * remaining


class StepTimes:
    """How long another step may take, by the latest ones: each says that it is no longer than it was itself
    for as many tokens or fewer, and in proportion for more. Small steps say so too, if less exactly."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, float]] = deque(maxlen=_LATEST_STEPS)

    def observe(self, tokens: int, seconds: float) -> None:
        """Notes a step of at least one token."""
        self._latest.append((tokens, seconds))

    def most_seconds(self, tokens: int) -> float | None:
        """How long a step of that many tokens takes at most; None before the first."""
        return min((seconds * max(1.0, tokens / each) for each, seconds in self._latest), default=None)
