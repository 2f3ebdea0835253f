"""The token budget of the next step."""


class StepBudget:
    """As many `tokens`, or for a while a part of them, after the device ran out of memory."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._divisor = 1
        self._steps = 0

    def halve(self, steps: int) -> None:
        """Halves it for the next `steps` steps; again if it is halved already, down to a 64th."""
        self._divisor = min(self._divisor * 2, 64)
        self._steps = steps

    def next_step(self) -> int:
        if self._steps == 0:
            self._divisor = 1
            return self._tokens
        self._steps -= 1
        return max(1, self._tokens // self._divisor)
