"""What one request has waiting: sequences, cached batches, pictures, and the rest of a sequence that is
mid-prefill.

Documents and cached batches wait until their query has been scheduled, and pairs until their prefix has been;
what has pictures waits until these are encoded. What is ready can be asked for by size. Which request comes
next is decided elsewhere.
"""

import math
import sys
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Generic, TypeVar

from maxsimd.scheduler.sequence import CachedBatch, ImageJob, TokenSequence

# A tenant and a priority: who shares the device with whom.
Share = tuple[str, int]


def share_of(tenant: str, priority: int) -> Share:
    """Whose share of the device a request uses; priorities are cut to -8 to 8."""
    return tenant, max(-8, min(8, priority))


def checked_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """A copy of tenants' weights. Raises ValueError for one that means nothing."""
    for tenant, weight in weights.items():
        if not 0 < weight < math.inf:
            raise ValueError(f"the weight of tenant {tenant!r} must be positive and finite, not {weight}")
    return dict(weights)


def part_of(priority: int) -> float:
    """What a priority weighs beside the other priorities of its tenant."""
    return 2.0**-priority


def weight_of(tenant_weight: float, priority: int, together: float) -> float:
    """What a priority of a tenant weighs; `together` is the sum of the parts of those that have work.

    No tenant takes from another by its choice of priority: all its priorities together weigh at most as much
    as the tenant. They weigh less where none of them is 0 or below: what can wait lets other tenants pass."""
    return tenant_weight * part_of(priority) / max(1.0, together)


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


class HeldFeatures:
    """The requests with pictures that have been scheduled, and sequences of these that have not. Together
    they hold at most as many features as the `limit`, or those of one sequence."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._requests: dict[int, WaitingRequest] = {}
        self._reserved: WaitingRequest | None = None

    @property
    def number(self) -> int:
        return sum(request.features for request in self._requests.values())

    def take(
        self, request: WaitingRequest, room: int | None, oldest: WaitingRequest | None
    ) -> ImageJob | None:
        """Takes a request's next picture for the step that is being formed, if its price fits `room` and its
        features may be held; else None. Where the `oldest` request finds no room for features, nobody else
        takes any until it has: newer ones would use up what becomes free."""
        # The further pictures of a sequence have none of their own.
        if self._reserved is not None and self._reserved is not request and request.next_features:
            return None
        held = self.number
        most = self._limit - held if held else sys.maxsize
        image = request.take_image(room, most)
        if image is not None:
            if self._reserved is request:
                self._reserved = None
            self._requests[request.request_id] = request
        elif request is oldest and request.next_features > most:
            self._reserved = request
        return image

    def take_last(
        self, request: WaitingRequest, most: int, oldest: WaitingRequest | None
    ) -> Iterator[ImageJob]:
        """Takes what pictures a request has left, if all that it has costs at most `most`: two short passes
        of a tower take longer than one."""
        if request.work <= most:
            while (image := self.take(request, None, oldest)) is not None:
                yield image

    def end_step(self) -> None:
        """Lets what waits for a step's pictures into the next one."""
        for request in [*self._requests.values()]:
            request.end_step()
            if not request.features:
                del self._requests[request.request_id]

    def forget(self, request: WaitingRequest) -> None:
        """Forgets a request that no longer waits."""
        self._requests.pop(request.request_id, None)
        if self._reserved is request:
            self._reserved = None


# A group can be ahead of the others by at most what its weight would give it in this number of steps.
_MAX_STEPS_AHEAD = 4


def size_class(tokens: int, budget: int) -> int:
    """The size class of a request with `tokens` left: 0 for those of less than half the `budget` of a step, 1
    for less than a whole step, 2 for less than two, 3 for less than four, and so on. A step runs several of
    the smallest: if some of them passed the others, these would be late and nobody much earlier."""
    return (2 * tokens // max(1, budget)).bit_length()


class _Group:
    """The waiting requests of one tenant and priority, in the order in which they are served.

    `virtual_time` is what they have been given, in tokens divided by their weight."""

    def __init__(self, share: tuple[str, int], number: int, virtual_time: float) -> None:
        self.share = share
        self.number = number
        self.virtual_time = virtual_time
        self.num_requests = 0
        self.ranked: list[tuple[int, int, WaitingRequest]] = []


class Shares:
    """Ranks the waiting requests. Owned by the `Scheduler`, which alone may call it.

    The group that has been given least for its weight is served first: start-time fair queueing (Goyal, Vin &
    Cheng 1996). So shares hold only between groups that have work, and none is saved up without work. A
    tenant's weight is divided among its priorities that have work, 2**-priority to each: no tenant takes from
    another by its choice of `priority`. One that has only priorities above 0 lets others pass: it weighs no
    more than these parts together. Within a group, requests are ranked by the class of what they have left,
    then by arrival: shortest remaining processing time (Schrage 1968), the order with the least mean
    latency, but with classes (`size_class`), so that like requests are served one after the other.

    Every change costs a binary search and an insertion into a list.
    """

    def __init__(self, weights: Mapping[str, float], tokens: int) -> None:
        self.weights = checked_weights(weights)
        self._most_ahead = _MAX_STEPS_AHEAD * tokens
        self._budget = tokens
        self._now = 0.0
        self._numbered = 0
        self._groups: dict[tuple[str, int], _Group] = {}
        self._order: list[tuple[float, int, _Group]] = []
        # What those priorities of a tenant that have work weigh together.
        self._priorities: dict[str, float] = {}
        # The virtual times of groups that ran out of work while they were ahead of the others.
        self._ahead: dict[tuple[str, int], float] = {}
        self._classes: dict[int, int] = {}
        self._aside: dict[int, WaitingRequest] = {}

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Changes what tenants weigh from now on. What each has been given ahead of the others stays as many
        tokens as it was. Raises ValueError, and changes nothing, for a weight that means nothing."""
        before, self.weights = self.weights, checked_weights(weights)

        def scaled(share: tuple[str, int], virtual_time: float) -> float:
            ratio = before.get(share[0], 1.0) / self.weights.get(share[0], 1.0)
            return self._now + (virtual_time - self._now) * ratio

        for share, group in self._groups.items():
            self._move(group, scaled(share, group.virtual_time))
        self._ahead = {share: scaled(share, time) for share, time in self._ahead.items()}

    def join(self, request: WaitingRequest) -> None:
        """Takes in a request that has work."""
        group = self._groups.get(request.share)
        if group is None:
            self._advance()
            tenant, priority = request.share
            start = max(self._now, self._ahead.pop(request.share, 0.0))
            group = self._groups[request.share] = _Group(request.share, self._numbered, start)
            self._numbered += 1
            self._priorities[tenant] = self._priorities.get(tenant, 0.0) + part_of(priority)
        group.num_requests += 1
        self._rank(group, request)

    def leave(self, request: WaitingRequest) -> None:
        """Forgets a request."""
        group = self._groups[request.share]
        if self._aside.pop(request.request_id, None) is None:
            self._unrank(group, request)
        group.num_requests -= 1
        if group.num_requests:
            return
        del self._groups[request.share]
        tenant, priority = request.share
        self._priorities[tenant] -= part_of(priority)
        if not self._priorities[tenant]:
            del self._priorities[tenant]
        self._ahead[request.share] = group.virtual_time
        if not self._groups:
            self._ahead.clear()
            self._now = 0.0

    def first(self) -> WaitingRequest | None:
        """The request to serve next: the first of its group, in the group that has had least."""
        return self._order[0][2].ranked[0][2] if self._order else None

    def part(self, request: WaitingRequest) -> float:
        """The part of the device that the request's tenant and priority are due by their weight, beside all
        others that have work."""
        together = sum(self._weight(group) for group in self._groups.values())
        return self._weight(self._groups[request.share]) / together

    def charge(self, request: WaitingRequest, tokens: int) -> None:
        """Notes that a request was given tokens, or with 0 that what it has left has changed."""
        group = self._groups[request.share]
        is_ranked = request.request_id not in self._aside
        if is_ranked and self._classes[request.request_id] != self._class_of(request):
            self._unrank(group, request)
            self._rank(group, request)
        weight = self._weight(group)
        later = min(group.virtual_time + tokens / weight, self._now + self._most_ahead / weight)
        if later > group.virtual_time:
            self._move(group, later)

    def set_aside(self, request: WaitingRequest) -> None:
        """Leaves a request out of the order until `restore`: nothing of it fits the step."""
        self._unrank(self._groups[request.share], request)
        self._aside[request.request_id] = request

    def restore(self) -> None:
        """Brings back, at the end of a step, what was set aside."""
        for request in self._aside.values():
            self._rank(self._groups[request.share], request)
        self._aside.clear()
        self._advance()

    def _advance(self) -> None:
        """Moves the present to the group that has been given least; who was ahead of the others until then,
        and has no work, is even with them."""
        if self._order:
            self._now = max(self._now, self._order[0][0])
        if self._ahead:
            self._ahead = {share: time for share, time in self._ahead.items() if time > self._now}

    def _weight(self, group: _Group) -> float:
        tenant, priority = group.share
        return weight_of(self.weights.get(tenant, 1.0), priority, self._priorities[tenant])

    def _class_of(self, request: WaitingRequest) -> int:
        return size_class(request.work, self._budget)

    def _rank(self, group: _Group, request: WaitingRequest) -> None:
        if not group.ranked:
            insort(self._order, (group.virtual_time, group.number, group))
        size_class = self._classes[request.request_id] = self._class_of(request)
        insort(group.ranked, (size_class, request.arrival, request))

    def _unrank(self, group: _Group, request: WaitingRequest) -> None:
        size_class = self._classes.pop(request.request_id)
        del group.ranked[bisect_left(group.ranked, (size_class, request.arrival))]
        if not group.ranked:
            del self._order[bisect_left(self._order, (group.virtual_time, group.number))]

    def _move(self, group: _Group, virtual_time: float) -> None:
        if group.ranked:
            del self._order[bisect_left(self._order, (group.virtual_time, group.number))]
            insort(self._order, (virtual_time, group.number, group))
        group.virtual_time = virtual_time
