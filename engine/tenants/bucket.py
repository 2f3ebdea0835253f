"""A rate a minute, held as a token bucket. It has no clock: whoever asks says what time it is."""

# Nobody is sent away for less; it also covers what rounding makes of a time that was waited exactly.
_SHORTEST_WAIT = 0.001


class Bucket:
    """Holds at most a minute's worth, is full at first, and fills up steadily.

    Nothing has to fit into it: what is charged beyond its level makes debt, which is filled up first. So over
    any time no more is charged than the rate gives, a minute's worth and one charge."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._seen = now

    def seconds_until(self, amount: float, now: float) -> float:
        """How long it takes until the bucket holds an amount, or is full; 0 where that is so."""
        missing = min(amount, self.per_minute) - self._filled(now)
        seconds = missing * 60 / self.per_minute
        return seconds if seconds >= _SHORTEST_WAIT else 0.0

    def charge(self, amount: float, now: float) -> None:
        """Takes an amount out, or puts a negative one back."""
        self._level = min(self._filled(now) - amount, self.per_minute)
        self._seen = max(now, self._seen)

    def change_rate(self, per_minute: int, now: float) -> None:
        """Goes on at another rate, with what the bucket holds or owes."""
        self._level = min(self._filled(now), per_minute)
        self._seen = max(now, self._seen)
        self.per_minute = per_minute

    def _filled(self, now: float) -> float:
        """The level at a time."""
        filled = self._level + max(0.0, now - self._seen) * self.per_minute / 60
        return min(filled, self.per_minute)
