"""The nouns of scheduling: a tokenised sequence, a chunk of one, and a step of chunks.

Nothing here decides anything; the policy does.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

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


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """One tokenised text or pair, complete with all that later stages need to know about it.

    `key` is unique in the engine, `request` names the owner and `index` this sequence's place among the
    request's results. A document that is scored against a query names that query's key in `query`; a query
    says in `uses` how many documents will. A document that is read through `windows` sequences, and scored
    as one, has the first one's key as `document` in each. A document whose embedding is to be kept has a
    `cache_key`, and is marked as `truncated` when it was cut. A sequence whose first `shared` tokens are
    those of the sequence with key `prefix`, which has the role of one, is run from there on.
    """

    key: int
    request: int
    index: int
    role: Role
    task: str
    token_ids: TokenIds
    type_ids: TokenIds | None = None
    # Tokens that may be attended to: fewer than all when query expansion is not attended.
    attended: int = -1
    # Rows that take part in pooling, ascending; None for all of them.
    kept: NDArray[np.int64] | None = None
    query: int | None = None
    uses: int = 0
    document: int | None = None
    windows: int = 1
    cache_key: bytes | None = None
    truncated: bool = False
    prefix: int | None = None
    shared: int = 0

    def __post_init__(self) -> None:
        if len(self.token_ids) == 0:
            raise ValueError("a sequence needs at least one token")
        if self.attended < 0:
            object.__setattr__(self, "attended", len(self.token_ids))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def to_run(self) -> int:
        """How many of its tokens are run for itself."""
        return len(self.token_ids) - self.shared

    @property
    def waits_for(self) -> int | None:
        """The key of the sequence that must be scheduled before it."""
        return self.query if self.prefix is None else self.prefix


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The tokens `start` to `stop` of a sequence, to be run in one step."""

    sequence: Sequence
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

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
        return self.sequence.role is Role.PREFIX

    @property
    def is_all_after_prefix(self) -> bool:
        """Whether it is all of a sequence but what that shares with others."""
        return self.sequence.prefix is not None and self.start == self.sequence.shared and self.is_last


@dataclass(frozen=True, eq=False)
class Step:
    """One forward pass. `id` counts steps; a step split after a failure keeps its id in both halves."""

    id: int
    chunks: tuple[Chunk, ...]

    @cached_property
    def num_tokens(self) -> int:
        return sum(len(chunk) for chunk in self.chunks)

    def halves(self) -> tuple["Step", "Step"]:
        """The two halves of a step that failed as a whole; needs at least two chunks."""
        middle = len(self.chunks) // 2
        return Step(self.id, self.chunks[:middle]), Step(self.id, self.chunks[middle:])
