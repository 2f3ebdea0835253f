"""The nouns of scheduling: a tokenised sequence, a batch of cached documents, a chunk, and a step.

Nothing here decides anything; the policy does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
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


@dataclass(frozen=True, slots=True, eq=False)
class ImageJob:
    """A picture for the vision tower. `image_id` is an id as sequences have them.

    `price` is how many tokens the language model could run in the same time. The features stay on the device
    until the one sequence that has the picture has run, whose result is that of the `slot`. The first picture
    of a sequence has as many `features` as all of them have together, and the others none: who begins with a
    sequence's pictures has room for all. `inputs` are what the tower reads, passed on unread."""

    image_id: int
    request_id: int
    price: int
    features: int
    inputs: Any
    slot: ResultSlot | None = None

    def __post_init__(self) -> None:
        if self.price < 1:
            raise ValueError("a picture needs a price of at least one token")


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """One tokenised text or pair. The scheduler reads all but the payload; made by the named constructors.

    `sequence_id` is unique in the engine. A sequence with `waits_for` is scheduled after the sequence of that
    id: a document after its query, a pair after its prefix, and what has pictures of its own after the last
    of these. The tokens of the prefix `prefix_id` are a pair's own first `shared_prefix_len`, which are not
    run again. `num_consumers` is how many sequences and cached documents use what this one leaves on the
    device, its embedding or its keys and values. Of its `num_tokens`, as many as `num_new_tokens` are run for
    itself. `scoring` is the extra price, in tokens, of a score that takes long; it counts with the
    last token. Its `price` is `num_new_tokens` plus `scoring`.
    """

    sequence_id: int
    request_id: int
    payload: Payload
    waits_for: int | None = None
    num_consumers: int = 0
    shared_prefix_len: int = 0
    prefix_id: int | None = None
    scoring: int = 0
    # Kept because they are read again and again for each of thousands of sequences.
    num_tokens: int = field(init=False)
    num_new_tokens: int = field(init=False)
    price: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", len(self.payload.tokens))
        object.__setattr__(self, "num_new_tokens", self.num_tokens - self.shared_prefix_len)
        object.__setattr__(self, "price", self.num_new_tokens + self.scoring)

    @classmethod
    def text(
        cls, sequence_id: int, slot: ResultSlot, task: str, tokens: AnyTokens, role: Role = Role.TEXT
    ) -> "TokenSequence":
        """A text, or one with pictures, whose pooled output is the result."""
        waits_for = tokens.images[-1].image_id if tokens.images else None
        return cls(sequence_id, slot.request_id, Payload(role, task, tokens, slot), waits_for)

    @classmethod
    def passages(
        cls, sequence_id: int, slot: ResultSlot, task: str, tokens: AnyTokens, passages: NDArray[np.int64]
    ) -> "TokenSequence":
        """A text that is read as a whole, of which the result has a row for each of its passages."""
        payload = Payload(Role.TEXT, task, tokens, slot, passages=passages)
        return cls(sequence_id, slot.request_id, payload)

    @classmethod
    def pair(
        cls,
        sequence_id: int,
        slot: ResultSlot,
        tokens: AnyTokens,
        prefix: "TokenSequence | None" = None,
    ) -> "TokenSequence":
        """A query and a document in one sequence, for a cross-encoder; run behind `prefix` if given, whose
        pictures are not among those of the tokens."""
        payload = Payload(Role.PAIR, "classify", tokens, slot)
        waits_for = tokens.images[-1].image_id if tokens.images else None
        if prefix is None:
            return cls(sequence_id, slot.request_id, payload, waits_for)
        prefix_id = prefix.sequence_id
        waits_for = prefix_id if waits_for is None else waits_for
        return cls(sequence_id, slot.request_id, payload, waits_for, 0, len(prefix), prefix_id)

    @classmethod
    def prefix(
        cls, sequence_id: int, request_id: int, tokens: AnyTokens, num_consumers: int
    ) -> "TokenSequence":
        """The tokens that `num_consumers` pairs begin with: run for their keys and values alone."""
        return cls(sequence_id, request_id, Payload(Role.PREFIX, "", tokens), None, num_consumers)

    @classmethod
    def query(
        cls, sequence_id: int, request_id: int, task: str, tokens: AnyTokens, num_consumers: int
    ) -> "TokenSequence":
        """A query whose embedding `num_consumers` documents (each window counted) are scored against."""
        return cls(sequence_id, request_id, Payload(Role.QUERY, task, tokens), None, num_consumers)

    @classmethod
    def document(
        cls,
        sequence_id: int,
        slot: ResultSlot,
        task: str,
        tokens: AnyTokens,
        document: DocumentPayload,
        scoring: int = 0,
    ) -> "TokenSequence":
        """A document, or a window of one, to be scored against a query of the same request."""
        payload = Payload(Role.DOCUMENT, task, tokens, slot, document)
        waits_for = tokens.images[-1].image_id if tokens.images else document.query_id
        return cls(sequence_id, slot.request_id, payload, waits_for, scoring=scoring)

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def tokens(self) -> AnyTokens:
        """What the model reads."""
        return self.payload.tokens

    @property
    def is_prefix(self) -> bool:
        return self.payload.role is Role.PREFIX


@dataclass(frozen=True, slots=True, eq=False)
class CachedBatch:
    """Documents of one query whose embeddings are cached: nothing of them is run, but scoring takes time.

    `price` is how many tokens the device could run in that time. Scored in the step of the query
    `waits_for`, or in a later one; in any, where the request brought the query's embedding, `given_query`.
    For a part of a long query, `query_part` is its first row and the row after its last, or None for all that
    are left. The scheduler passes on these and the `documents` unread."""

    request_id: int
    waits_for: int
    price: int
    documents: Any
    given_query: Any = None
    query_part: tuple[int, int | None] | None = None

    def __post_init__(self) -> None:
        if self.price < 1 or not len(self.documents):
            raise ValueError("a cached batch needs a price of at least one token and a document")


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The tokens `start` to `stop` of a sequence, to be run in one step."""

    sequence: TokenSequence
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def scoring(self) -> int:
        """What scoring costs that comes with it, in tokens."""
        scoring = self.sequence.scoring
        return scoring if scoring and self.is_last else 0

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.sequence)

    @property
    def is_whole(self) -> bool:
        return self.is_first and self.is_last

    @property
    def is_prefix(self) -> bool:
        """Whether its keys and values are for other sequences."""
        return self.sequence.is_prefix

    @property
    def is_all_after_prefix(self) -> bool:
        """Whether it is all of a sequence but what that shares with others."""
        start = self.sequence.shared_prefix_len
        return start > 0 and self.start == start and self.is_last


# Cached batches that are run and delivered together: some ten milliseconds of scoring.
_BATCHES_TOGETHER = 4


@dataclass(frozen=True, eq=False)
class Step:
    """One forward pass, the cached documents scored after it, and then pictures to encode for later steps;
    before all that, the sequences and cached documents of the requests that are run `first`, by themselves.
    `step_id` counts steps; a step that is split keeps its id in all parts."""

    step_id: int
    chunks: tuple[Chunk, ...]
    cached: tuple[CachedBatch, ...] = ()
    images: tuple[ImageJob, ...] = ()
    first: frozenset[int] = frozenset()

    @cached_property
    def num_tokens(self) -> int:
        """Tokens to be run."""
        return sum(len(chunk) for chunk in self.chunks)

    @property
    def others(self) -> tuple[CachedBatch | ImageJob, ...]:
        """Its cached batches and pictures."""
        return (*self.cached, *self.images)

    @property
    def other_price(self) -> int:
        """What cached batches, pictures and scoring that takes long cost, in tokens."""
        return sum(part.price for part in self.others) + sum(chunk.scoring for chunk in self.chunks)

    @property
    def num_parts(self) -> int:
        """Into how many steps it can be split: chunks, cached batches and pictures."""
        return len(self.chunks) + len(self.cached) + len(self.images)

    @property
    def request_ids(self) -> set[int]:
        """Whose parts these are."""
        of_chunks = {part.sequence.request_id for part in self.chunks}
        return of_chunks | {part.request_id for part in self.others}

    def stages(self) -> list["Step"]:
        """What is run and delivered one after the other: the chunks, then some cached batches at a time, so
        that the results of a forward pass do not wait for other requests' cached documents, and of neither
        for pictures; first of all those of the requests that are run first."""
        stages = []
        for is_first in (True, False) if self.first else (False,):
            chunks = [chunk for chunk in self.chunks if (chunk.sequence.request_id in self.first) is is_first]
            cached = [batch for batch in self.cached if (batch.request_id in self.first) is is_first]
            if chunks:
                stages.append(Step(self.step_id, tuple(chunks)))
            for start in range(0, len(cached), _BATCHES_TOGETHER):
                together = tuple(cached[start : start + _BATCHES_TOGETHER])
                stages.append(Step(self.step_id, (), together))
        if self.images:
            stages.append(Step(self.step_id, (), (), self.images))
        return stages

    def halves(self) -> tuple["Step", "Step"]:
        """The two halves of a step that failed as a whole; needs at least two parts. Chunks stay before
        cached batches, so that a query comes before what is scored against it, and pictures come last."""
        middle = self.num_parts // 2
        cut = max(0, middle - len(self.chunks))
        last = max(0, cut - len(self.cached))
        first = Step(self.step_id, self.chunks[:middle], self.cached[:cut], self.images[:last])
        return first, Step(self.step_id, self.chunks[middle:], self.cached[cut:], self.images[last:])
