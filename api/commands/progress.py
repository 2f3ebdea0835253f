"""How far a command has come, on standard error: one line that changes in a terminal, else a line now and
then."""

import sys
import time
from typing import TextIO

# Between two lines, in a terminal and elsewhere, in seconds.
_IN_TERMINAL, _ELSEWHERE = 0.1, 5.0
# How far back the speed is looked at.
_WINDOW = 10.0


class Progress:
    """Used from one thread. `note` says what is being done before there is anything to count."""

    def __init__(self, total: int, unit: str, out: TextIO | None = None) -> None:
        self.total = total
        self._unit = unit
        self._out = sys.stderr if out is None else out
        self._is_terminal = self._out.isatty()
        self._last = 0.0
        self._marks: list[tuple[float, int, int]] = []
        self._width = 0

    def note(self, text: str) -> None:
        self._write(text)

    def update(self, done: int, tokens: int, is_last: bool = False) -> None:
        """Says that `done` of all are done and `tokens` were read for them, unless it was said just now."""
        now = time.monotonic()
        self._marks.append((now, done, tokens))
        while len(self._marks) > 2 and now - self._marks[0][0] > _WINDOW:
            del self._marks[0]
        pause = _IN_TERMINAL if self._is_terminal else _ELSEWHERE
        # How it begins, and that something has come, is said at once.
        if is_last or len(self._marks) <= 2 or now - self._last >= pause:
            self._last = now
            self._write(self._line(done))

    def end(self) -> None:
        """Leaves the last line as it is."""
        if self._is_terminal and self._width:
            self._out.write("\n")
            self._out.flush()
            self._width = 0

    def _line(self, done: int) -> str:
        first, last = self._marks[0], self._marks[-1]
        seconds = last[0] - first[0]
        line = f"{done:,} of {self.total:,} {self._unit}"
        if seconds > 0.2 and done > first[1]:
            line += f", {(last[2] - first[2]) / seconds:,.0f} tokens/s"
            left = (self.total - done) * seconds / (done - first[1])
            if done < self.total:
                line += f", {_duration(left)} left"
        return line

    def _write(self, text: str) -> None:
        if self._is_terminal:
            self._out.write(f"\r{text.ljust(self._width)}")
            self._width = len(text)
        else:
            self._out.write(f"{text}\n")
        self._out.flush()


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
