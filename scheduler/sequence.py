"""The nouns of scheduling: a tokenised sequence, a batch of cached documents, a chunk, and a step.

Nothing here decides anything; the policy does.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maxsimd.scheduler.image import ImageJob
from maxsimd.scheduler.payload import AnyTokens, DocumentPayload, Payload, ResultSlot, Role


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
