"""What the ways to prepare a score request have in common; a model has one of them, chosen when it loads."""

from typing import Protocol

from maxsimd.engine.processors.prepared import Prepared
from maxsimd.engine.processors.request_ids import RequestIds
from maxsimd.engine.requests import ScoreRequest

# A text of one token, or of hardly more.
SHORTEST_TEXT = "a"


class ScoreStrategy(Protocol):
    """Turns score requests into sequences for one model. Thread-safe: holds what is the same for all requests
    (tokenizer, rules, limits, cache) and nothing of any one."""

    def prepare(self, request: ScoreRequest, ids: RequestIds) -> Prepared:
        """The sequences of a request, whose instruction is the one to be used. Raises InvalidRequestError."""
        ...

    def shortest_sequences(self) -> dict[str, int]:
        """How many tokens the shortest sequence of each kind has, by what errors call it."""
        ...
