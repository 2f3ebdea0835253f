"""How much work each member has, as one front knows it."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from maxsimd.scheduler.fleet.owners import Member


class Loads:
    """Estimated tokens at each member: those that this front has sent and that are not answered, and what
    each reply said waits there beside them, from other fronts. For one thread."""

    def __init__(self) -> None:
        self._sent: dict[str, int] = {}
        self._others: dict[str, int] = {}

    def sent(self, member: Member, tokens: int) -> None:
        """Tokens go to a member."""
        self._sent[member.name] = self._sent.get(member.name, 0) + tokens

    def answered(self, member: Member, tokens: int, queued_tokens: int | None) -> None:
        """They are answered, or lost; a reply says how many are queued at the member by then."""
        left = self._sent.get(member.name, 0) - tokens
        self._sent[member.name] = max(0, left)
        if queued_tokens is not None:
            self._others[member.name] = max(0, queued_tokens - max(0, left))

    def forget_queued(self) -> None:
        """Forgets what replies have said, which is old: those who said it would else not be asked again."""
        self._others.clear()

    def forget_others(self, members: Iterable[Member]) -> None:
        """Forgets all other members."""
        names = {member.name for member in members}
        for counts in (self._sent, self._others):
            for name in counts.keys() - names:
                del counts[name]

    def of(self, members: Sequence[Member]) -> NDArray[np.int64]:
        """Tokens at each member."""
        return np.array(
            [self._sent.get(member.name, 0) + self._others.get(member.name, 0) for member in members],
            dtype=np.int64,
        )
