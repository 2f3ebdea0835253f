"""What one request has waiting: sequences, cached batches, pictures, and the rest of a sequence that is
mid-prefill.

Documents and cached batches wait until their query has been scheduled, and pairs until their prefix has been;
what has pictures waits until these are encoded. What is ready can be asked for by size. Which request comes
next is decided elsewhere.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Generic, TypeVar

from maxsimd.scheduler.image import ImageJob
from maxsimd.scheduler.sequence import CachedBatch, TokenSequence
from maxsimd.scheduler.weights import Share

Item = TypeVar("Item")

# How many items that come next are looked at for one that fits.
_LOOKED_AT = 64


class BySize(Generic[Item]):
    """Items that can be asked for by size; equal ones come out in the order in which they went in."""

    def __init__(self) -> None:
        self._items: dict[int, deque[Item]] = {}
        self._sizes: list[int] = []

    def add(self, item: Item, size: int) -> None:
        if size not in self._items:
            self._items[size] = deque()
            insort(self._sizes, size)
        self._items[size].append(item)

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def take_over(self, others: "BySize[Item] | InOrder[Item]") -> None:
        """Adds all others, in a moment even if they are thousands."""
        assert isinstance(others, BySize)
        for size, items in others._items.items():
            if size not in self._items:
                self._items[size] = items
                insort(self._sizes, size)
            else:
                self._items[size].extend(items)

    def pop(self, most: int | None = None) -> Item | None:
        """Removes and returns the largest item, of those of at most the size `most` if that is given, or
        None where there is none."""
        position = len(self._sizes) if most is None else bisect_right(self._sizes, most)
        if not position:
            return None
        size = self._sizes[position - 1]
        same = self._items[size]
        item = same.popleft()
        if not same:
            del self._items[size]
            del self._sizes[position - 1]
        return item


class InOrder(Generic[Item]):
    """Items that come out in the order in which they went in; where the first does not fit, one of the next
    that does."""

    def __init__(self) -> None:
        self._items: deque[tuple[int, Item]] = deque()

    def add(self, item: Item, size: int) -> None:
        self._items.append((size, item))

    def __bool__(self) -> bool:
        return bool(self._items)

    def take_over(self, others: "BySize[Item] | InOrder[Item]") -> None:
        """Adds all others behind those that are there."""
        assert isinstance(others, InOrder)
        self._items.extend(others._items)

    def pop(self, most: int | None = None) -> Item | None:
        """Removes and returns the first item of at most the size `most` if that is given, or None where none
        of the next is."""
        for position, (size, item) in enumerate(islice(self._items, _LOOKED_AT)):
            if most is None or size <= most:
                del self._items[position]
                return item
        return None


class _Ready:
    """Sequences and cached batches that may be run, or may be once a query is."""

    def __init__(self, in_order: bool) -> None:
        self.sequences: BySize[TokenSequence] | InOrder[TokenSequence] = InOrder() if in_order else BySize()
        self.cached: BySize[CachedBatch] = BySize()

    def add(self, item: TokenSequence | CachedBatch) -> None:
        if isinstance(item, CachedBatch):
            self.cached.add(item, item.price)
        else:
            self.sequences.add(item, item.price)

    def take_over(self, others: "_Ready") -> None:
        self.sequences.take_over(others.sequences)
        self.cached.take_over(others.cached)


class WaitingRequest:
    """The waiting work of one request. Made by anybody, on any thread; once it is in a `Scheduler`, that owns
    it and alone may call it.

    Its sequences are run by size, so that steps are full, or `in_order`: of a request that may be ended
    before it is done, the first count most. `work` is what is left, in tokens: of sequences those that have
    not been scheduled, and the prices of cached batches and pictures. No sequence that was added has more new
    tokens than `longest`. Of its pictures that have been scheduled, those have `features` whose sequences are
    not yet. The scheduler sets `arrival`, which counts requests in the order in which it took them, and
    `due`: how many tokens have been scheduled in all when those are that waited when it came, its own by then
    included.
    """

    def __init__(self, request_id: int, share: Share, in_order: bool = False) -> None:
        self.request_id = request_id
        self.arrival = -1
        self.due = 0
        self.share = share
        self.work = 0
        self.longest = 0
        self.num_sequences = 0
        self.num_cached = 0
        self.features = 0
        self.partial: tuple[TokenSequence, int] | None = None
        self._in_order = in_order
        self._ready = _Ready(in_order)
        # Queries, prefixes and pictures, in the order in which they are scheduled: a picture before the query
        # that has it or after that of its document, and those of one sequence one after the other.
        self._leading: deque[TokenSequence | ImageJob] = deque()
        # By the id of the query, prefix or picture that they wait for.
        self._blocked: dict[int, _Ready] = {}
        # Pictures of the step that is being formed.
        self._encoding: list[ImageJob] = []
        # Of pictures whose sequences are still to be scheduled, by their ids.
        self._features: dict[int, int] = {}

    @property
    def has_sequence(self) -> bool:
        """Whether there is a sequence that waits for nothing."""
        return bool(self._ready.sequences) or self._next_query() is not None

    def add(
        self,
        sequences: Iterable[TokenSequence],
        cached: Iterable[CachedBatch],
        images: Iterable[ImageJob] = (),
    ) -> None:
        """Adds work. What waits for a query, prefix or picture that neither waits here nor comes with it is
        ready. Of what has pictures and waits for a query or prefix as well, that comes first."""
        sequences = list(sequences)
        by_id = {image.image_id: image for image in images}
        for sequence in sequences:
            for image in sequence.tokens.images:
                self._lead(by_id[image.image_id])
            if sequence.num_consumers:
                self._leading.append(sequence)
                self._blocked[sequence.sequence_id] = _Ready(self._in_order)
        for sequence in sequences:
            self.work += sequence.price
            self.longest = max(self.longest, sequence.num_new_tokens)
            self.num_sequences += 1
            if not sequence.num_consumers:
                self._block_or_ready(sequence)
        for batch in cached:
            self.work += batch.price
            self.num_cached += 1
            self._block_or_ready(batch)

    def _lead(self, image: ImageJob) -> None:
        self._leading.append(image)
        self._blocked[image.image_id] = _Ready(self._in_order)
        self.work += image.price

    def take(self, room: int) -> TokenSequence | CachedBatch | None:
        """Removes and returns what best uses `room` tokens, or None when nothing fits.

        The longest ready sequence goes first, so that short ones are left to fill the gaps of later steps, or
        the first where that is the request's order; then the dearest cached batch, which there is first,
        because it costs little; a query or prefix only when nothing else fits, so that few of them are held
        at a time."""
        if self._in_order and (batch := self.take_cached(room)) is not None:
            return batch
        if (sequence := self._ready.sequences.pop(room)) is not None:
            self._account(sequence)
            return sequence
        if (batch := self.take_cached(room)) is not None:
            return batch
        query = self._next_query()
        if query is not None and query.num_new_tokens <= room:
            return self._take_query(query)
        return None

    @property
    def next_features(self) -> int:
        """How many features the pictures have whose turn it is; 0 where it is not."""
        image = self._next_leading()
        return image.features if isinstance(image, ImageJob) else 0

    def take_image(self, room: int | None, most_features: int) -> ImageJob | None:
        """Removes and returns the picture that comes next, if its price fits `room` tokens where that is
        given, and if there is room for its features; else None. What waits for it is ready after
        `end_step`."""
        image = self._next_leading()
        if not isinstance(image, ImageJob):
            return None
        if (room is not None and image.price > room) or image.features > max(0, most_features):
            return None
        self._leading.popleft()
        self._encoding.append(image)
        self._features[image.image_id] = image.features
        self.features += image.features
        self.work -= image.price
        return image

    def end_step(self) -> None:
        """Makes ready what waits for the pictures of a step, once that is formed: it runs in a later one."""
        for image in self._encoding:
            self._release(image.image_id)
        self._encoding.clear()

    def take_cached(self, room: int | None = None) -> CachedBatch | None:
        """Removes and returns the dearest cached batch that is ready, of those that fit `room` tokens if that
        is given; None where there is none."""
        if (batch := self._ready.cached.pop(room)) is not None:
            self._account(batch)
        return batch

    def take_longest(self) -> TokenSequence | None:
        """Removes and returns the longest ready sequence, or the first where that is the order, else the
        next query, else None."""
        if (sequence := self._ready.sequences.pop()) is not None:
            self._account(sequence)
            return sequence
        query = self._next_query()
        return None if query is None else self._take_query(query)

    def start_partial(self) -> bool:
        """Chooses the longest ready sequence, or the first where that is the order, else the next query, as
        the one that is mid-prefill; says whether there was one. It counts as waiting until `advance` has
        brought it to its end."""
        sequence = self._ready.sequences.pop()
        if sequence is None:
            sequence = self._next_query()
            if sequence is None:
                return False
            self._leading.popleft()
        self.partial = (sequence, sequence.shared_prefix_len)
        return True

    def advance(self, tokens: int) -> bool:
        """Notes that more tokens of the sequence that is mid-prefill have been scheduled. Once all of them
        are, returns True, and what waits for it is ready."""
        assert self.partial is not None
        sequence, start = self.partial
        self.work -= tokens
        if start + tokens < len(sequence):
            self.partial = (sequence, start + tokens)
            return False
        self.partial = None
        self.work -= sequence.scoring
        self.num_sequences -= 1
        self._forget_features(sequence)
        self._release(sequence.sequence_id)
        return True

    def _next_leading(self) -> TokenSequence | ImageJob | None:
        """What comes next of that for which others wait. Nothing comes before all of a query that is
        mid-prefill: a document whose pictures are done may wait for that too."""
        if not self._leading or (self.partial is not None and self.partial[0].num_consumers):
            return None
        leading = self._leading[0]
        has_images = isinstance(leading, TokenSequence) and leading.tokens.images
        return None if has_images and self._encoding else leading

    def _next_query(self) -> TokenSequence | None:
        """The query or prefix that comes next, if it is not a picture's turn."""
        leading = self._next_leading()
        return leading if isinstance(leading, TokenSequence) else None

    def _take_query(self, query: TokenSequence) -> TokenSequence:
        self._leading.popleft()
        self._account(query)
        self._release(query.sequence_id)
        return query

    def _release(self, leading_id: int) -> None:
        """Makes ready what waits for a sequence, because its last token is in a step, or for a picture."""
        if (released := self._blocked.pop(leading_id, None)) is not None:
            self._ready.take_over(released)

    def _forget_features(self, sequence: TokenSequence) -> None:
        for image in sequence.tokens.images:
            self.features -= self._features.pop(image.image_id, 0)

    def _block_or_ready(self, item: TokenSequence | CachedBatch) -> None:
        blocked = None if item.waits_for is None else self._blocked.get(item.waits_for)
        (self._ready if blocked is None else blocked).add(item)

    def _account(self, item: TokenSequence | CachedBatch) -> None:
        if isinstance(item, CachedBatch):
            self.work -= item.price
            self.num_cached -= 1
        else:
            self.work -= item.price
            self.num_sequences -= 1
            self._forget_features(item)
