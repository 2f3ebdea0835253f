"""How much may be tried again, so that a fleet that loses members does not drown in retries."""


class RetryBudget:
    """Tries that may follow others: a `share` of all parts that were sent lately, and `spare` beyond.
    For one thread."""

    def __init__(self, share: float = 0.1, spare: float = 20.0) -> None:
        self._share = share
        self._most = self._left = spare

    def sent(self) -> None:
        """A part was sent for the first time."""
        self._left = min(self._most, self._left + self._share)

    def take(self) -> bool:
        """Whether one may be sent again, which then counts."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
