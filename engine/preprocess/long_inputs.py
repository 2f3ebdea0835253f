"""What is done with inputs that are too long: refused, cut, or read through overlapping windows."""

from dataclasses import dataclass
from typing import Generic

from numpy.typing import NDArray

from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.preprocess.tokenization import IdType, Side, cut
from maxsimd.engine.requests import Truncation


@dataclass(frozen=True, slots=True, eq=False)
class Fitted(Generic[IdType]):
    """A text that fits, and whether the request or the model's maximum has cut it to that. What the
    checkpoint itself sets as the length of a query or document is how it is meant to be read: reading that
    much of it is no truncation."""

    tokens: NDArray[IdType]
    truncated: bool = False


class LongInputs:
    """One request's wishes, applied text by text. Nothing in it changes.

    `longest` is the most tokens that can be run in one sequence and `limit` the most of this request's.
    """

    def __init__(self, truncation: Truncation, longest: int, overlap: int) -> None:
        self._truncation = truncation
        self._overlap = overlap if truncation.window_overlap is None else truncation.window_overlap
        self.limit = _limit(truncation, longest)

    @property
    def signature(self) -> str:
        """All that decides how a document is read, beside the document and the checkpoint."""
        given = self._truncation
        cuts = (given.max_tokens is not None, given.side, given.max_document_tokens)
        return repr(("as asked", self.limit, cuts, given.windows and self._overlap))

    @property
    def uses_windows(self) -> bool:
        return self._truncation.windows

    @property
    def max_query_tokens(self) -> int | None:
        return self._truncation.max_query_tokens

    @property
    def max_document_tokens(self) -> int | None:
        return self._truncation.max_document_tokens

    def query(self, text: NDArray[IdType]) -> Fitted[IdType]:
        """A query within `max_query_tokens`."""
        return self.within(text, self.max_query_tokens)

    def document(self, text: NDArray[IdType]) -> Fitted[IdType]:
        """A document within `max_document_tokens`."""
        return self.within(text, self.max_document_tokens)

    def within(self, text: NDArray[IdType], most: int | None) -> Fitted[IdType]:
        """A text within `most` tokens, where the request names a number."""
        if most is None or len(text) <= most:
            return Fitted(text)
        return Fitted(cut(text, most, self.side), truncated=True)

    def fit(
        self,
        text: NDArray[IdType],
        room: int,
        around: int,
        param: str,
        index: int,
        own: int | None = None,
        most: int | None = None,
    ) -> Fitted[IdType]:
        """A text within `room` tokens beside `around` others, if the request allows to cut it.

        `own` is how much of a text the checkpoint reads in this role, whatever the request says, and `most`
        how much of one the request wants. Raises InvalidRequestError for a text that may not be cut."""
        meant = len(text) if own is None else min(len(text), own)
        wanted = meant if most is None else min(meant, most)
        if wanted > room:
            if not self.cuts:
                raise too_long(param, index, len(text) + around, room + around)
            if room < 1:
                raise InvalidRequestError(
                    f"{around} tokens stand around {param}[{index}] and leave no room for it; shorten the "
                    "query",
                    "queries",
                )
            wanted = room
        return Fitted(cut(text, wanted, self.side), truncated=wanted < meant)

    def windows(
        self, text: NDArray[IdType], room: int, around: int, param: str, index: int
    ) -> list[Fitted[IdType]]:
        """A document as windows of at most `room` tokens, neighbours sharing as many as the overlap says; as
        one text, fitted, for a request that wants no windows."""
        if len(text) <= room or not self.uses_windows:
            return [self.fit(text, room, around, param, index)]
        stride = room - self._overlap
        if stride < 1:
            raise InvalidRequestError(
                f"{param}[{index}] is to be read through windows of {max(0, room)} tokens that share "
                f"{self._overlap}; shorten the query or let windows share fewer",
                param,
            )
        starts = range(0, len(text) - self._overlap, stride)
        return [Fitted(text[start : start + room]) for start in starts]

    @property
    def cuts(self) -> bool:
        return self._truncation.max_tokens is not None

    @property
    def side(self) -> Side:
        return self._truncation.side

    @property
    def limits_documents(self) -> bool:
        return self._truncation.max_document_tokens is not None


def _limit(truncation: Truncation, longest: int) -> int:
    """The longest sequence a request allows. Raises InvalidRequestError for a limit that makes no sense."""
    asked = truncation.max_tokens
    if asked is None or asked == -1:
        return longest
    if asked > longest:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is {asked}, more than the {longest} tokens that this model takes; ask "
            "for less, or for -1",
            "truncate_prompt_tokens",
        )
    return asked


def too_long(param: str, index: int, length: int, limit: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param}[{index}] has {length} tokens, but at most {limit} can be run; shorten it, or let it be cut "
        "with truncate_prompt_tokens (-1 cuts to the maximum)",
        param,
    )


def no_room(limit: int, special_tokens: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{limit} tokens leave no room beside {special_tokens} special tokens", "truncate_prompt_tokens"
    )
