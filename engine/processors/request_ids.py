"""By which numbers the engine names a request, its sequences and its results; and how large it may become."""

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
        """An id that no other sequence of the engine has."""
        return next(self.sequence_ids)

    def slot(self, index: int) -> ResultSlot:
        """Where result `index` of the request goes."""
        return ResultSlot(self.request_id, index)

    def check_tokens(self, tokens: int) -> None:
        """For work that is being prepared and has that many tokens so far: what few bytes ask for is refused
        before all of it has been made. Raises RequestTooLargeError."""
        if tokens > self.most_tokens:
            raise RequestTooLargeError(
                f"this request has more than the {self.most_tokens} tokens that one may have; send it in "
                "parts, let texts be cut shorter, or raise max_request_tokens"
            )
