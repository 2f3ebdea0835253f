"""What travels with a sequence for the stages after the scheduler, which passes it on unread."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]


class Role(Enum):
    """What a sequence is to its request."""

    QUERY = "query"
    DOCUMENT = "document"
    PAIR = "pair"
    TEXT = "text"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class ResultSlot:
    """Result `index` of the request `request_id`."""

    request_id: int
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """A picture within a sequence: its feature i stands in place of token `positions[i]`, ascending. `inputs`
    are what the vision tower reads, passed on unread, and `digest` tells them from those of other
    pictures."""

    image_id: int
    positions: NDArray[np.int64]
    inputs: Any
    digest: bytes

    def within(self, count: int) -> "PlacedImage":
        """What the first `count` tokens of the sequence have of the picture."""
        return replace(self, positions=self.positions[: np.searchsorted(self.positions, count)])


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """What the model reads: token ids [n] and, where the tokeniser gives them, type ids [n].

    In place of some stand the `images`. `position_ids` [3, n] are those in time, height and width, where they
    are not those of text (None). Only the first `attended_len` tokens may be attended to (fewer than
    all where query expansion is not attended; None for all). `pooled_positions`, ascending, are the tokens
    that take part in pooling (None for all). Raises ValueError for no token."""

    ids: TokenIds
    type_ids: TokenIds | None = None
    attended_len: int | None = None
    pooled_positions: NDArray[np.int64] | None = None
    images: tuple[PlacedImage, ...] = ()
    position_ids: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if len(self.ids) == 0:
            raise ValueError("a sequence needs at least one token")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_attended(self) -> int:
        return len(self.ids) if self.attended_len is None else self.attended_len

    @property
    def last_id(self) -> int:
        return int(self.ids[-1])

    def behind(self, count: int, image_ids: Iterator[int]) -> "Tokens":
        """The same, with those images alone that stand behind the first `count` tokens, under new ids."""
        images = [image for image in self.images if image.positions[0] >= count]
        return replace(self, images=tuple(replace(image, image_id=next(image_ids)) for image in images))

    def first(self, count: int) -> "Tokens":
        """The first tokens, all attended to and pooled, and what they have of the images."""
        begun = (image.within(count) for image in self.images if image.positions[0] < count)
        types = None if self.type_ids is None else self.type_ids[:count]
        positions = None if self.position_ids is None else self.position_ids[:, :count]
        return Tokens(self.ids[:count], types, images=tuple(begun), position_ids=positions)


@dataclass(frozen=True, slots=True, eq=False)
class JoinedTokens:
    """`Tokens` that are put together when they are read, so that what thousands of sequences have in common,
    a long query say, is held once. All are attended to and pooled.

    `types[i]` is the type ids of `parts[i]`, or the one that all its tokens have. Raises ValueError for no
    token."""

    parts: tuple[TokenIds, ...]
    types: tuple[TokenIds | int, ...]
    length: int

    @classmethod
    def of(cls, parts: Sequence[TokenIds], types: Sequence[TokenIds | int]) -> "JoinedTokens":
        length = sum(map(len, parts))
        if length == 0:
            raise ValueError("a sequence needs at least one token")
        return cls(tuple(parts), tuple(types), length)

    def __len__(self) -> int:
        return self.length

    @property
    def ids(self) -> TokenIds:
        return np.concatenate(self.parts)

    @property
    def type_ids(self) -> TokenIds:
        made, start = np.empty(self.length, dtype=np.int32), 0
        for part, types in zip(self.parts, self.types, strict=True):
            made[start : start + len(part)] = types
            start += len(part)
        return made

    @property
    def last_id(self) -> int:
        return next(int(part[-1]) for part in reversed(self.parts) if len(part))

    def first(self, count: int) -> "JoinedTokens":
        """The first tokens, which are not copied."""
        parts: list[TokenIds] = []
        types: list[TokenIds | int] = []
        for part, of_part in zip(self.parts, self.types, strict=True):
            parts.append(part[:count])
            types.append(of_part if isinstance(of_part, int) else of_part[:count])
            count -= len(parts[-1])
        return JoinedTokens.of(parts, types)

    @property
    def num_attended(self) -> int:
        return self.length

    @property
    def pooled_positions(self) -> None:
        return None

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        return ()

    @property
    def position_ids(self) -> None:
        return None


AnyTokens: TypeAlias = Tokens | JoinedTokens


@dataclass(frozen=True, slots=True)
class Window:
    """One of `num_windows` sequences through which a document is read and then scored as one. The document
    goes by the sequence id of its first window."""

    document_id: int
    num_windows: int


@dataclass(frozen=True, slots=True)
class Explained:
    """How a score is to be explained: by the best matches in each window of the document, which have `rows`
    vectors each, and `with_map` also by the similarities of all its vectors."""

    rows: tuple[int, ...]
    with_map: bool = False


@dataclass(frozen=True, slots=True)
class DocumentPayload:
    """A document that is scored against the query with the sequence id `query_id`.

    With a `cache_key` its embedding is cached, marked as `truncated` where the text was cut. `window` is None
    for a document that is one sequence. A query that came as its embedding is not run, but is the
    `given_query`. A document whose score is to be explained says how it is `explained`."""

    query_id: int
    cache_key: bytes | None = None
    truncated: bool = False
    window: Window | None = None
    given_query: Any = None
    explained: Explained | None = None

    @property
    def num_windows(self) -> int:
        return 1 if self.window is None else self.window.num_windows


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """`task` names the pooling method; `slot` is where the result goes, None for queries and prefixes, which
    serve other sequences. `document` says what a document of a two-stage request is scored against. Of a text
    that is read as a whole and pooled in `passages`, these are which of its pooled tokens each has, counted
    from 0: the first, and the one after the last, int64 [passages, 2]."""

    role: Role
    task: str
    tokens: AnyTokens
    slot: ResultSlot | None = None
    document: DocumentPayload | None = None
    passages: NDArray[np.int64] | None = None
