"""The ids of a request and of its sequences, and how many tokens the request may have."""

from collections.abc import Iterator
from dataclasses import dataclass

from maxsimd.engine.errors import RequestTooLargeError
from maxsimd.scheduler import ResultSlot


@dataclass(frozen=True, slots=True)
class RequestIds:
    """The ids of one request. All requests take their sequences' ids from the same `sequence_ids`.

    `most_tokens` is how many tokens the request may have."""

    request_id: int
    sequence_ids: Iterator[int]
    most_tokens: int

    def next_sequence_id(self) -> int:
        """Returns an id that no other sequence of the engine has."""
        return next(self.sequence_ids)

    def slot(self, index: int) -> ResultSlot:
        """Returns where value `index` of the request goes."""
        return ResultSlot(self.request_id, index)

    def check_tokens(self, tokens: int) -> None:
        """Raises RequestTooLargeError if a request that is being prepared has too many tokens so far.

        Called while sequences are built, because a few bytes can ask for many tokens."""
        if tokens > self.most_tokens:
            raise RequestTooLargeError(
                f"this request has more than the {self.most_tokens} tokens that one may have; send it in "
                "parts, let texts be cut shorter, or raise max_request_tokens"
            )
