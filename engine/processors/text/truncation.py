"""Inputs that are too long: refused, truncated, or read through overlapping windows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from numpy.typing import NDArray

from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.processors.request_ids import RequestIds
from maxsimd.engine.processors.text.tokenization import IdType, Side, truncate
from maxsimd.engine.requests import Truncation

# At least one in eight of a window's tokens is the document's. Neighbors share at most half of these, so a
# document costs at most 16 times its own tokens.
_SMALLEST_SHARE = 8


@dataclass(frozen=True, slots=True, eq=False)
class Fitted(Generic[IdType]):
    """A text that fits, and whether the request or the model's maximum has truncated it.

    The length that the checkpoint itself sets for a query or document is how it is meant to be read: reading
    that much of it is no truncation."""

    tokens: NDArray[IdType]
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class InputName:
    """The name of a text in errors: text `index` of the request's field `param`."""

    param: str
    index: int

    def __str__(self) -> str:
        return f"{self.param}[{self.index}]"


@dataclass(frozen=True, slots=True)
class Room:
    """A sequence with room for `tokens` of a text beside `others` that it has anyway: special tokens, the
    prompt, the query."""

    tokens: int
    others: int


class LongInputs:
    """Truncates the texts of one request, or divides them into windows. Nothing in it changes.

    `longest` is the most tokens that can be run in one sequence and `limit` the most of this request's.
    `overlap` is how many tokens windows share if the request does not say, but at most half of each.
    `own_side` is the end at which texts are truncated if the request does not say.
    `check_tokens` raises RequestTooLargeError for more tokens than the request may have.
    """

    def __init__(
        self,
        truncation: Truncation,
        longest: int,
        overlap: int,
        check_tokens: Callable[[int], None] = lambda tokens: None,
        own_side: Side = "right",
    ) -> None:
        self._truncation = truncation
        self._check_tokens = check_tokens
        self._overlap = overlap if truncation.window_overlap is None else truncation.window_overlap
        self.limit = _limit(truncation, longest)
        # The end at which texts are truncated.
        self.side: Side = own_side if truncation.side is None else truncation.side
        self.truncates_as_usual = self.side == own_side and not truncation.windows

    @property
    def signature(self) -> str:
        """All that decides how a document is read, beside the document and the checkpoint."""
        given = self._truncation
        truncates = (given.max_tokens is not None, self.side, given.max_document_tokens)
        # Part of the keys of caches on disk.
        read = ("as asked", self.limit, truncates, given.windows and ("at most half", self._overlap))
        return repr((*read, "refuse") if given.refuse else read)

    @property
    def may_truncate(self) -> bool:
        """Whether a text that is too long is truncated rather than refused."""
        return self._truncation.max_tokens is not None and not self._truncation.refuse

    @property
    def uses_windows(self) -> bool:
        return self._truncation.windows

    @property
    def max_query_tokens(self) -> int | None:
        return self._truncation.max_query_tokens

    @property
    def max_document_tokens(self) -> int | None:
        return self._truncation.max_document_tokens

    def most_of_text(self, room: int, own_length: int | None, max_tokens: int | None) -> int | None:
        """Returns how many tokens of a text must be read to know what `fit` makes of it; None for all.

        That is one more than are kept, unless the text is refused by its length."""
        limits = [limit for limit in (own_length, max_tokens) if limit is not None]
        if self.may_truncate:
            limits.append(room)
        elif limits and min(limits) > room:
            return None
        return max(0, min(limits)) + 1 if limits else None

    def most_of_document(self, room: int) -> int | None:
        """Returns how many tokens of a document must be read to know what is kept of it within
        `max_document_tokens` and, if it is truncated, within its room; None for all."""
        limits = [] if self.max_document_tokens is None else [self.max_document_tokens]
        if self.may_truncate and not self.uses_windows:
            limits.append(room)
        return max(0, min(limits)) + 1 if limits else None

    def query(self, text: NDArray[IdType], name: InputName) -> Fitted[IdType]:
        """A query within `max_query_tokens`."""
        return self.within(text, self.max_query_tokens, name)

    def document(self, text: NDArray[IdType], name: InputName) -> Fitted[IdType]:
        """A document within `max_document_tokens`."""
        return self.within(text, self.max_document_tokens, name)

    def within(self, text: NDArray[IdType], max_tokens: int | None, name: InputName) -> Fitted[IdType]:
        """A text within `max_tokens`, which the request may have left open. Raises InvalidRequestError for a
        longer one where the request wants these refused."""
        if max_tokens is None or len(text) <= max_tokens:
            return Fitted(text)
        self._check_own_limit(len(text), max_tokens, name)
        return Fitted(truncate(text, max_tokens, self.side), truncated=True)

    def _check_own_limit(self, length: int, max_tokens: int, name: InputName) -> None:
        if self._truncation.refuse and length > max_tokens:
            limit = "max_tokens_per_query" if name.param == "queries" else "max_tokens_per_doc"
            raise InvalidRequestError(
                f"{name} has more than {max_tokens} tokens, and the request refuses longer texts; shorten "
                f"it, raise {limit}, or let it be cut",
                name.param,
            )

    def fit(
        self,
        text: NDArray[IdType],
        room: Room,
        name: InputName,
        own_length: int | None = None,
        max_tokens: int | None = None,
    ) -> Fitted[IdType]:
        """Returns a text truncated to its room, if the request allows that.

        `own_length` is how much of a text the checkpoint reads in this role, which refuses no text, and
        `max_tokens` how much of one the request wants. Raises InvalidRequestError for a text that is too long
        for its room or for the request, and may not be truncated."""
        meant = len(text) if own_length is None else min(len(text), own_length)
        length = meant
        if max_tokens is not None:
            self._check_own_limit(meant, max_tokens, name)
            length = min(meant, max_tokens)
        if length > room.tokens:
            if not self.may_truncate:
                raise too_long(name, len(text) + room.others, room.tokens + room.others)
            if room.tokens < 1:
                raise InvalidRequestError(
                    f"{room.others} tokens stand around {name} and leave no room for it; shorten the query",
                    "queries",
                )
            length = room.tokens
        return Fitted(truncate(text, length, self.side), truncated=length < meant)

    def windows(self, text: NDArray[IdType], room: Room, name: InputName) -> list[Fitted[IdType]]:
        """A document as windows of at most `room.tokens` tokens, of which neighbours share as many as the
        overlap says. For a request that wants no windows: the one text, fitted. Raises RequestTooLargeError
        before any is made where they would be too much."""
        if len(text) <= room.tokens or not self.uses_windows:
            return [self.fit(text, room, name)]
        overlap = self._shared(room, name)
        starts = range(0, len(text) - overlap, room.tokens - overlap)
        # All but the last are full. There may be as many as the text has tokens.
        self._check_tokens((len(starts) - 1) * (room.tokens + room.others))
        return [Fitted(text[start : start + room.tokens]) for start in starts]

    def _shared(self, room: Room, name: InputName) -> int:
        """How many tokens neighbouring windows share. Raises InvalidRequestError where a document would
        become many times the tokens that it has: windows that repeat more than they read."""
        if room.tokens * _SMALLEST_SHARE < room.tokens + room.others:
            raise InvalidRequestError(
                f"{name} is to be read through windows of {max(0, room.tokens)} tokens beside {room.others} "
                f"others; shorten the query, so that at least one in {_SMALLEST_SHARE} is the document's",
                name.param,
            )
        asked, most = self._truncation.window_overlap, room.tokens // 2
        if asked is not None and asked > most:
            raise InvalidRequestError(
                f"window_overlap is {asked}, but windows of {name} have {room.tokens} tokens and may share "
                f"at most {most}; ask for no more, or shorten the query",
                "window_overlap",
            )
        return min(self._overlap, most)


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """The lengths that the engine can run: at most `longest_sequence` tokens in one sequence.

    The windows of a long document share `window_overlap` tokens if the request names no number, and texts are
    truncated at `side` if it names none. A query or document sent as vectors has at most `most_vectors`, and
    every pair at most the square of that in comparisons; None for no limit."""

    longest_sequence: int
    window_overlap: int
    side: Side = "right"
    most_vectors: int | None = None

    def applied_to(self, truncation: Truncation, ids: RequestIds) -> LongInputs:
        """Applies these limits to a request with this truncation. Raises InvalidRequestError for a request
        that asks for more than can be run."""
        return LongInputs(truncation, self.longest_sequence, self.window_overlap, ids.check_tokens, self.side)


def _limit(truncation: Truncation, longest: int) -> int:
    """The longest sequence a request allows. Raises InvalidRequestError for one longer than can be run."""
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


def too_long(name: InputName, length: int, limit: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} has {length} tokens, but at most {limit} can be run; shorten it, or let it be cut "
        "with truncate_prompt_tokens (-1 cuts to the maximum)",
        name.param,
    )


def no_room(limit: int, special_tokens: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{limit} tokens leave no room beside {special_tokens} special tokens", "truncate_prompt_tokens"
    )
