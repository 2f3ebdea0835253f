"""One request's sequences that no step has taken yet.

Documents wait until their query has been scheduled, and sequences that share a prefix until that has been;
what is ready can be asked for by size.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable

from maxsimd.scheduler.sequence import Sequence


class WaitingRequest:
    """The waiting sequences of one request, and what it is owed.

    Owned by the `Scheduler`, which alone may call it. `deficit` is the number of tokens the request may
    still take in its turns (deficit round robin, Shreedhar & Varghese 1995).
    """

    def __init__(self, request: int, weight: float) -> None:
        self.request = request
        self.weight = weight
        self.deficit = 0.0
        self.tokens = 0
        self.count = 0
        self._ready: dict[int, deque[Sequence]] = {}
        self._lengths: list[int] = []
        self._queries: deque[Sequence] = deque()
        self._blocked: dict[int, list[Sequence]] = {}

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Adds sequences; a query must come in the same call as its documents or before them."""
        waiting_queries = {query.sequence_id for query in self._queries}
        for sequence in sequences:
            self.tokens += sequence.num_new_tokens
            self.count += 1
            if sequence.num_consumers:
                self._queries.append(sequence)
                waiting_queries.add(sequence.sequence_id)
            elif sequence.waits_for in waiting_queries:
                self._blocked.setdefault(sequence.waits_for, []).append(sequence)
            else:
                self._make_ready(sequence)

    def take(self, room: int) -> Sequence | None:
        """Removes and returns what best uses `room` tokens, or None when nothing fits.

        The longest ready sequence goes first, so that short ones are left to fill the gaps of later
        steps; a query only when no ready sequence fits, so that few queries are held at a time.
        """
        position = bisect_right(self._lengths, room)
        if position:
            return self._pop(self._lengths[position - 1])
        if self._queries and len(self._queries[0]) <= room:
            query = self._queries.popleft()
            self._account(query)
            self.release(query)
            return query
        return None

    def take_longest(self) -> Sequence | None:
        """Removes and returns the longest ready sequence, else the next query, else None.

        Meant for a sequence that will be cut: the documents of a query wait on until `release`."""
        if self._lengths:
            return self._pop(self._lengths[-1])
        if not self._queries:
            return None
        query = self._queries.popleft()
        self._account(query)
        return query

    def release(self, query: Sequence) -> None:
        """Makes the documents of a query ready, because its last token is in a step."""
        for document in self._blocked.pop(query.sequence_id, ()):
            self._make_ready(document)

    def _make_ready(self, sequence: Sequence) -> None:
        length = sequence.num_new_tokens
        if length not in self._ready:
            self._ready[length] = deque()
            insort(self._lengths, length)
        self._ready[length].append(sequence)

    def _pop(self, length: int) -> Sequence:
        bucket = self._ready[length]
        sequence = bucket.popleft()
        if not bucket:
            del self._ready[length]
            self._lengths.remove(length)
        self._account(sequence)
        return sequence

    def _account(self, sequence: Sequence) -> None:
        self.tokens -= sequence.num_new_tokens
        self.count -= 1
