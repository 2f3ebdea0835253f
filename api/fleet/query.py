"""The query of a request that is spread: one engine encodes it, and each part brings its embedding along, so
that all documents meet the same vectors."""

from typing import cast

import numpy as np
from numpy.typing import NDArray

from maxsimd.api.fleet.items import sent_item
from maxsimd.api.fleet.messages import Answer, EncodedQuery, EncodeQuery, Run, SentItem
from maxsimd.api.fleet.spread import Job, estimated_tokens
from maxsimd.engine.requests import Item, ScoreOptions, as_truncation
from maxsimd.scheduler.fleet import Split

_DEADLY = "three engines died while they encoded the query; send another one"


class SharedQuery:
    """The one query of a request, as it is sent in each part: as it came, until it is encoded. `size` is
    about how many characters it has."""

    def __init__(self, query: Item, size: int, options: ScoreOptions) -> None:
        self._query = query
        self._size = size
        self._options = options
        self._sent: SentItem = sent_item(query)
        self._is_encoded = False

    @property
    def sent(self) -> SentItem:
        return self._sent

    @property
    def instruction(self) -> str | None:
        """The request's, until the query is encoded, of which it becomes a part."""
        return None if self._is_encoded else self._options["instruction"]

    def job(self) -> Job:
        """Has the query encoded."""
        return Job(
            np.zeros(1, dtype=np.uint64),
            estimated_tokens([self._size]),
            Split.NEVER,
            self._options["timeout"],
            False,
            self._question,
            self._commit,
            deadly=_DEADLY,
        )

    def _question(self, indices: NDArray[np.int64], left: float | None) -> EncodeQuery:
        options = self._options
        run = Run(as_truncation(options["truncation"]), options["priority"], options["tenant"], left)
        return EncodeQuery(query=sent_item(self._query), run=run, instruction=options["instruction"])

    def _commit(self, indices: NDArray[np.int64], answer: Answer) -> None:
        self._sent = cast("EncodedQuery", answer).query
        self._is_encoded = True
