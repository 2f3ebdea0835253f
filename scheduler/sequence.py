"""The data of scheduling: token sequences, batches of cached documents, pictures, chunks and steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]


class Role(Enum):
    """The role of a sequence in its request."""

    QUERY = "query"
    DOCUMENT = "document"
    PAIR = "pair"
    TEXT = "text"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class ResultSlot:
    """The place of a result: `index` among those of the request `request_id`."""

    request_id: int
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """A picture within a sequence: its feature i replaces token `positions[i]`, ascending. The vision tower
    reads the `inputs`, whose digest is `digest`."""

    image_id: int
    positions: NDArray[np.int64]
    inputs: Any
    digest: bytes

    def within(self, count: int) -> "PlacedImage":
        """The part of the picture in the first `count` tokens."""
        return replace(self, positions=self.positions[: np.searchsorted(self.positions, count)])


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The model's input: token ids [n] and, if the tokenizer gives them, type ids [n].

    `images` replace some tokens. `position_ids` [3, n] are positions in time, height and width; None for
    those of text. Only the first `attended_len` tokens may be attended to, which leaves out query expansion;
    None for all. `pooled_positions`, ascending, are the tokens that are pooled; None for all. Raises
    ValueError for no token."""

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

    @property
    def pooled_ids(self) -> TokenIds:
        return self.ids if self.pooled_positions is None else self.ids[self.pooled_positions]

    def behind(self, count: int, image_ids: Iterator[int]) -> "Tokens":
        """The same tokens with only the images behind the first `count` of them, under new ids."""
        images = [image for image in self.images if image.positions[0] >= count]
        return replace(self, images=tuple(replace(image, image_id=next(image_ids)) for image in images))

    def first(self, count: int) -> "Tokens":
        """The first tokens, all attended to and pooled, with their part of the images."""
        begun = (image.within(count) for image in self.images if image.positions[0] < count)
        types = None if self.type_ids is None else self.type_ids[:count]
        positions = None if self.position_ids is None else self.position_ids[:, :count]
        return Tokens(self.ids[:count], types, images=tuple(begun), position_ids=positions)


@dataclass(frozen=True, slots=True, eq=False)
class JoinedTokens:
    """`Tokens` that are joined when they are read, so that thousands of sequences share a long query. All are
    attended to and pooled. `types[i]` are the type ids of `parts[i]`, or one for all. Raises ValueError for
    no token."""

    pooled_positions: ClassVar[None] = None
    position_ids: ClassVar[None] = None
    images: ClassVar[tuple[PlacedImage, ...]] = ()

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
        """The first tokens, not copied."""
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
    def pooled_ids(self) -> TokenIds:
        return self.ids


AnyTokens: TypeAlias = Tokens | JoinedTokens


@dataclass(frozen=True, slots=True)
class Window:
    """One of `num_windows` sequences of a long document, which is scored as one. `document_id` is the
    sequence id of its first window."""

    document_id: int
    num_windows: int


@dataclass(frozen=True, slots=True)
class Explained:
    """Data that explain a score: the best matches in each window of `rows` vectors, and `with_map` the
    similarities of all vectors."""

    rows: tuple[int, ...]
    with_map: bool = False


@dataclass(frozen=True, slots=True)
class DocumentPayload:
    """A document that is scored against the query with the sequence id `query_id`, or a `given_query`.

    With a `cache_key` its embedding is cached, marked as `truncated` if the text was. `window` is None for a
    document in one sequence. `explained` is for documents whose scores are explained."""

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
    """The content of a sequence, for the stages after the scheduler.

    `task` names the pooling method. `slot` is the place of the result; queries and prefixes have none.
    `document` says what a document is scored against. `passages`, int64 [passages, 2], are the first pooled
    token of each passage and the one after its last, for texts that are pooled by passage."""

    role: Role
    task: str
    tokens: AnyTokens
    slot: ResultSlot | None = None
    document: DocumentPayload | None = None
    passages: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ImageJob:
    """A picture for the vision tower. `image_id` is from the ids of sequences; the tower reads `inputs`.

    `price` is the number of tokens that the language model runs in the same time. The features stay on the
    device until the picture's sequence, whose result is that of `slot`, has run. The first picture of a
    sequence counts the `features` of all its pictures, so that they all fit once the first one does."""

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
    """One tokenized text or pair. The scheduler does not read the payload. Use the named constructors.

    `sequence_id` is unique in the engine. A sequence is scheduled after the one it `waits_for`: a document
    after its query, a pair after its prefix, and a sequence with pictures of its own after the last of these.
    A pair's first `shared_prefix_len` tokens are those of the prefix `prefix_id` and do not run again.
    `num_consumers` sequences and cached documents use this one's embedding, or its keys and values, on the
    device. `scoring` is the extra price, in tokens, of a score that takes long; it counts with the last
    token. `num_new_tokens` are run, and `price` is that plus `scoring`.
    """

    sequence_id: int
    request_id: int
    payload: Payload
    waits_for: int | None = None
    num_consumers: int = 0
    shared_prefix_len: int = 0
    prefix_id: int | None = None
    scoring: int = 0
    # Stored because they are read often, for thousands of sequences.
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
        """A text, perhaps with pictures, whose pooled output is the result."""
        waits_for = tokens.images[-1].image_id if tokens.images else None
        return cls(sequence_id, slot.request_id, Payload(role, task, tokens, slot), waits_for)

    @classmethod
    def passages(
        cls, sequence_id: int, slot: ResultSlot, task: str, tokens: AnyTokens, passages: NDArray[np.int64]
    ) -> "TokenSequence":
        """A text that is read as a whole. The result has a row per passage."""
        payload = Payload(Role.TEXT, task, tokens, slot, passages=passages)
        return cls(sequence_id, slot.request_id, payload)

    @classmethod
    def pair(
        cls,
        sequence_id: int,
        slot: ResultSlot,
        tokens: AnyTokens,
        prefix: "TokenSequence | None" = None,
        task: str = "classify",
    ) -> "TokenSequence":
        """A query and a document in one sequence. With a `prefix` it runs behind that, whose pictures are
        not among the tokens'."""
        payload = Payload(Role.PAIR, task, tokens, slot)
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
        """The tokens that `num_consumers` pairs start with, run for their keys and values alone."""
        return cls(sequence_id, request_id, Payload(Role.PREFIX, "", tokens), None, num_consumers)

    @classmethod
    def query(
        cls, sequence_id: int, request_id: int, task: str, tokens: AnyTokens, num_consumers: int
    ) -> "TokenSequence":
        """A query against whose embedding `num_consumers` documents, counted in windows, are scored."""
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
        """A document, or a window of one, that is scored against a query of the same request."""
        payload = Payload(Role.DOCUMENT, task, tokens, slot, document)
        waits_for = tokens.images[-1].image_id if tokens.images else document.query_id
        return cls(sequence_id, slot.request_id, payload, waits_for, scoring=scoring)

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def tokens(self) -> AnyTokens:
        return self.payload.tokens

    @property
    def is_prefix(self) -> bool:
        return self.payload.role is Role.PREFIX


@dataclass(frozen=True, slots=True, eq=False)
class CachedBatch:
    """Cached documents of one query, which are only scored.

    `price` is the number of tokens that the device runs in the same time. They are scored in the step of the
    query `waits_for` or later, or in any step against `given_query`, the embedding that the request brought.
    `query_part` is the part of a long query: its first row and the row after its last."""

    request_id: int
    waits_for: int
    price: int
    documents: Any
    given_query: Any = None
    query_part: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.price < 1 or not len(self.documents):
            raise ValueError("a cached batch needs a price of at least one token and a document")


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The tokens `start` to `stop` of a sequence, which run in one step."""

    sequence: TokenSequence
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def scoring(self) -> int:
        """The price of scoring that comes with it, in tokens."""
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
        return self.sequence.is_prefix

    @property
    def is_all_after_prefix(self) -> bool:
        """Whether it is all of a sequence except its shared prefix."""
        start = self.sequence.shared_prefix_len
        return start > 0 and self.start == start and self.is_last


# Cached batches that are scored and delivered together: some ten milliseconds of scoring.
_BATCHES_TOGETHER = 4


@dataclass(frozen=True, eq=False)
class Step:
    """A forward pass, then cached documents to score, then pictures to encode for later steps. Requests in
    `first` run before the others, in a pass of their own; all pictures come last. The parts of a split step
    keep its `step_id`."""

    step_id: int
    chunks: tuple[Chunk, ...]
    cached: tuple[CachedBatch, ...] = ()
    images: tuple[ImageJob, ...] = ()
    first: frozenset[int] = frozenset()

    @cached_property
    def num_tokens(self) -> int:
        return sum(len(chunk) for chunk in self.chunks)

    @property
    def others(self) -> tuple[CachedBatch | ImageJob, ...]:
        return (*self.cached, *self.images)

    @property
    def other_price(self) -> int:
        """The price of cached batches, pictures and long scoring, in tokens."""
        return sum(part.price for part in self.others) + sum(chunk.scoring for chunk in self.chunks)

    @property
    def num_parts(self) -> int:
        return len(self.chunks) + len(self.cached) + len(self.images)

    @property
    def request_ids(self) -> set[int]:
        of_chunks = {part.sequence.request_id for part in self.chunks}
        return of_chunks | {part.request_id for part in self.others}

    def stages(self) -> list["Step"]:
        """The parts that run and are delivered one after the other: the chunks, then a few cached batches at
        a time, for the requests in `first` before the others; then all pictures. So results of a forward pass
        do not wait for other requests' cached documents."""
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
        """The two halves of a failed step with at least two parts. Chunks come before cached batches, so that
        a query comes before its documents, and pictures come last."""
        i = self.num_parts // 2
        j = max(0, i - len(self.chunks))
        k = max(0, j - len(self.cached))
        first = Step(self.step_id, self.chunks[:i], self.cached[:j], self.images[:k])
        return first, Step(self.step_id, self.chunks[i:], self.cached[j:], self.images[k:])
