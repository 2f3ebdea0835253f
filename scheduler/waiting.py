"""Waiting work: the parts of each request, and the order in which requests are served."""

import math
import sys
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from maxsimd.scheduler.sequence import CachedBatch, ImageJob, TokenSequence

# A tenant and a priority, which share the device with others.
Share = tuple[str, int]


def share_of(tenant: str, priority: int) -> Share:
    """The share of the device that a request uses. Priorities are limited to -8 to 8."""
    return tenant, max(-8, min(8, priority))


def checked_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """A copy of tenants' weights. Raises ValueError for invalid ones."""
    for tenant, weight in weights.items():
        if not 0 < weight < math.inf:
            raise ValueError(f"the weight of tenant {tenant!r} must be positive and finite, not {weight}")
    return dict(weights)


def part_of(priority: int) -> float:
    """The weight of a priority among its tenant's priorities."""
    return 2.0**-priority


def weight_of(tenant_weight: float, priority: int, together: float) -> float:
    """The weight of a tenant's priority. `together` is the sum of `part_of` for its priorities with work.

    No choice of priority takes from other tenants: a tenant's priorities together weigh at most as much as
    the tenant. They weigh less if all of them are above 0, which lets other tenants pass."""
    return tenant_weight * part_of(priority) / max(1.0, together)


Item = TypeVar("Item")

# Number of next items that are tried for one that fits.
_LOOKED_AT = 64


class BySize(Generic[Item]):
    """Items by size; equal sizes come out first in, first out."""

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
        """Adds all others without a step for each of them."""
        assert isinstance(others, BySize)
        for size, items in others._items.items():
            if size not in self._items:
                self._items[size] = items
                insort(self._sizes, size)
            else:
                self._items[size].extend(items)

    def pop(self, most: int | None = None) -> Item | None:
        """Removes and returns the largest item, of at most the size `most` if given, or None."""
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
    """Items that come out first in, first out. If the first does not fit, one of the next that does."""

    def __init__(self) -> None:
        self._items: deque[tuple[int, Item]] = deque()

    def add(self, item: Item, size: int) -> None:
        self._items.append((size, item))

    def __bool__(self) -> bool:
        return bool(self._items)

    def take_over(self, others: "BySize[Item] | InOrder[Item]") -> None:
        """Adds all others at the end."""
        assert isinstance(others, InOrder)
        self._items.extend(others._items)

    def pop(self, most: int | None = None) -> Item | None:
        """Removes and returns the first item, of at most the size `most` if given, or None."""
        for position, (size, item) in enumerate(islice(self._items, _LOOKED_AT)):
            if most is None or size <= most:
                del self._items[position]
                return item
        return None


class _Ready:
    """Sequences and cached batches that may run, or may once a query has."""

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
    """The waiting work of one request. Created on any thread; a `Scheduler` that has taken it owns it.

    Documents and cached batches wait until their query has been scheduled, pairs until their prefix has been,
    and sequences with pictures until these are encoded. Sequences run by size, so that steps are full, or
    `in_order`, for requests that may be ended early.

    `work` is the unscheduled work in tokens, with the prices of cached batches and pictures. `longest` is the
    most new tokens of a sequence. `features` are those of scheduled pictures whose sequences are not
    scheduled yet. The scheduler sets `arrival`, the request's number in order of arrival, and `due`: the
    count of scheduled tokens at which everything that waited when it came, and itself, could have been
    scheduled.
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
        # Queries, prefixes and pictures, in the order of scheduling: a query's pictures before it, a
        # document's after its query, and those of one sequence together.
        self._leading: deque[TokenSequence | ImageJob] = deque()
        # By the id of the query, prefix or picture that the items wait for.
        self._blocked: dict[int, _Ready] = {}
        # The pictures in the step that is being formed.
        self._encoding: list[ImageJob] = []
        # By the id of a scheduled picture whose sequence is not scheduled yet.
        self._features: dict[int, int] = {}

    @property
    def has_sequence(self) -> bool:
        return bool(self._ready.sequences) or self._next_query() is not None

    def add(
        self,
        sequences: Iterable[TokenSequence],
        cached: Iterable[CachedBatch],
        images: Iterable[ImageJob] = (),
    ) -> None:
        """Adds work. An item is ready if the query, prefix or picture that it waits for neither waits here
        nor comes with it. A document's query or prefix comes before its pictures."""
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
        """Removes and returns the item that best uses `room` tokens, or None.

        The longest ready sequence goes first, so that short ones fill the gaps of later steps; then the most
        expensive cached batch; then a query or prefix, so that few of them are held at a time. Requests
        `in_order` take cached batches, which cost little, and then the first sequence."""
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
        """The features of the picture that comes next; 0 if something else does."""
        image = self._next_leading()
        return image.features if isinstance(image, ImageJob) else 0

    def take_image(self, room: int | None, most_features: int) -> ImageJob | None:
        """Removes and returns the picture that comes next, if its price fits `room` (if given) and its
        features fit `most_features`, or None. Items that wait for it are ready after `end_step`."""
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
        """Makes the items ready that wait for the step's pictures: they run in a later step."""
        for image in self._encoding:
            self._release(image.image_id)
        self._encoding.clear()

    def take_cached(self, room: int | None = None) -> CachedBatch | None:
        """Removes and returns the most expensive ready cached batch that fits `room` (if given), or None."""
        if (batch := self._ready.cached.pop(room)) is not None:
            self._account(batch)
        return batch

    def take_longest(self) -> TokenSequence | None:
        """Removes and returns the longest ready sequence (or the first), else the next query, or None."""
        if (sequence := self._ready.sequences.pop()) is not None:
            self._account(sequence)
            return sequence
        query = self._next_query()
        return None if query is None else self._take_query(query)

    def start_partial(self) -> bool:
        """Starts to prefill the sequence that `take_longest` would return. Returns whether there is one. It
        counts as waiting until `advance` completes it."""
        sequence = self._ready.sequences.pop()
        if sequence is None:
            sequence = self._next_query()
            if sequence is None:
                return False
            self._leading.popleft()
        self.partial = (sequence, sequence.shared_prefix_len)
        return True

    def advance(self, tokens: int) -> bool:
        """Counts scheduled tokens of the sequence that is mid-prefill. Returns True once it is complete;
        items that wait for it are then ready."""
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
        """The next query, prefix or picture. None while a query is mid-prefill: a document whose pictures are
        done may wait for it too."""
        if not self._leading or (self.partial is not None and self.partial[0].num_consumers):
            return None
        leading = self._leading[0]
        has_images = isinstance(leading, TokenSequence) and leading.tokens.images
        return None if has_images and self._encoding else leading

    def _next_query(self) -> TokenSequence | None:
        """The next query or prefix, unless a picture comes first."""
        leading = self._next_leading()
        return leading if isinstance(leading, TokenSequence) else None

    def _take_query(self, query: TokenSequence) -> TokenSequence:
        self._leading.popleft()
        self._account(query)
        self._release(query.sequence_id)
        return query

    def _release(self, leading_id: int) -> None:
        """Makes the items ready that wait for a completely scheduled sequence or picture."""
        if (released := self._blocked.pop(leading_id, None)) is not None:
            self._ready.take_over(released)

    def _forget_features(self, sequence: TokenSequence) -> None:
        for image in sequence.tokens.images:
            self.features -= self._features.pop(image.image_id, 0)

    def _block_or_ready(self, item: TokenSequence | CachedBatch) -> None:
        blocked = None if item.waits_for is None else self._blocked.get(item.waits_for)
        (self._ready if blocked is None else blocked).add(item)

    def _account(self, item: TokenSequence | CachedBatch) -> None:
        self.work -= item.price
        if isinstance(item, CachedBatch):
            self.num_cached -= 1
        else:
            self.num_sequences -= 1
            self._forget_features(item)


class HeldFeatures:
    """Requests with scheduled pictures whose sequences are not scheduled yet. Together they hold at most
    `limit` features, or those of one sequence."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._requests: dict[int, WaitingRequest] = {}
        self._reserved: WaitingRequest | None = None

    @property
    def number(self) -> int:
        return sum(request.features for request in self._requests.values())

    def holders(self) -> list[WaitingRequest]:
        """The requests that hold features, and the one that they are kept free for."""
        return [*self._requests.values(), *([] if self._reserved is None else [self._reserved])]

    def take(
        self, request: WaitingRequest, room: int | None, oldest: WaitingRequest | None
    ) -> ImageJob | None:
        """Takes a request's next picture for the step, if its price fits `room` and its features may be held,
        or None. If the `oldest` request finds no room for features, no other takes any until it has: newer
        ones would use up the room that becomes free."""
        # Only the first picture of a sequence counts features.
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

    def end_step(self) -> None:
        """Makes the items ready that wait for the step's pictures."""
        for request in [*self._requests.values()]:
            request.end_step()
            if not request.features:
                del self._requests[request.request_id]

    def forget(self, request: WaitingRequest) -> None:
        self._requests.pop(request.request_id, None)
        if self._reserved is request:
            self._reserved = None


# A group can be ahead of the others by at most what its weight would give it in this number of steps.
_MAX_STEPS_AHEAD = 4


def size_class(tokens: int, budget: int) -> int:
    """The size class of a request with `tokens` left: 0 below half the `budget` of a step, 1 below a whole
    step, 2 below two, 3 below four, and so on. A step runs several of the smallest, so ordering these would
    delay some and hurry none."""
    return (2 * tokens // max(1, budget)).bit_length()


@dataclass(slots=True, eq=False)
class _Group:
    """The waiting requests of one tenant and priority, in order. `virtual_time` is the tokens given to them
    divided by their weight."""

    share: Share
    number: int
    virtual_time: float
    num_requests: int = 0
    ranked: list[tuple[int, int, WaitingRequest]] = field(default_factory=list)


class Shares:
    """Ranks the waiting requests. Owned by the `Scheduler`.

    The next group is the one that has been given least for its weight: start-time fair queueing (Goyal, Vin &
    Cheng 1996). Shares hold between groups that have work, and nothing is saved up without work. A tenant's
    weight is divided among its priorities with work (`weight_of`). Within a group, requests are ranked by the
    class of their remaining work (`size_class`), then by arrival: shortest remaining processing time (Schrage
    1968), the order with the least mean latency, in classes, so that like requests are served in order of
    arrival.

    Every change costs a binary search and an insertion into a list.
    """

    def __init__(self, weights: Mapping[str, float], tokens: int) -> None:
        self.weights = checked_weights(weights)
        self._most_ahead = _MAX_STEPS_AHEAD * tokens
        self._budget = tokens
        self._now = 0.0
        self._numbered = 0
        self._groups: dict[Share, _Group] = {}
        self._order: list[tuple[float, int, _Group]] = []
        # By tenant: the sum of `part_of` for its priorities with work.
        self._priorities: dict[str, float] = {}
        # The virtual times of groups that ran out of work while ahead of the others.
        self._ahead: dict[Share, float] = {}
        self._classes: dict[int, int] = {}
        self._hidden: dict[int, WaitingRequest] = {}

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Changes the tenants' weights; what each is ahead stays. Raises ValueError, and changes nothing."""
        before, self.weights = self.weights, checked_weights(weights)

        def scaled(share: Share, virtual_time: float) -> float:
            ratio = before.get(share[0], 1.0) / self.weights.get(share[0], 1.0)
            return self._now + (virtual_time - self._now) * ratio

        for share, group in self._groups.items():
            self._move(group, scaled(share, group.virtual_time))
        self._ahead = {share: scaled(share, time) for share, time in self._ahead.items()}

    def weights_of(self, shares: Iterable[Share]) -> dict[Share, float]:
        """The weight of each share if these have work."""
        together: dict[str, float] = {}
        for tenant, priority in shares:
            together[tenant] = together.get(tenant, 0.0) + part_of(priority)
        return {
            (tenant, priority): weight_of(self.weights.get(tenant, 1.0), priority, together[tenant])
            for tenant, priority in shares
        }

    def join(self, request: WaitingRequest) -> None:
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
        group = self._groups[request.share]
        if self._hidden.pop(request.request_id, None) is None:
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
        """The request to serve next."""
        return self._order[0][2].ranked[0][2] if self._order else None

    def part(self, request: WaitingRequest) -> float:
        """The part of the device that the request's group is due by its weight."""
        together = sum(self._weight(group) for group in self._groups.values())
        return self._weight(self._groups[request.share]) / together

    def charge(self, request: WaitingRequest, tokens: int) -> None:
        """Counts tokens given to a request; 0 if only its remaining work has changed."""
        group = self._groups[request.share]
        is_ranked = request.request_id not in self._hidden
        if is_ranked and self._classes[request.request_id] != self._class_of(request):
            self._unrank(group, request)
            self._rank(group, request)
        weight = self._weight(group)
        later = min(group.virtual_time + tokens / weight, self._now + self._most_ahead / weight)
        if later > group.virtual_time:
            self._move(group, later)

    def hide(self, request: WaitingRequest) -> None:
        """Leaves a request that does not fit the step out of the order until `restore`."""
        self._unrank(self._groups[request.share], request)
        self._hidden[request.request_id] = request

    def restore(self) -> None:
        """Brings hidden requests back, at the end of a step."""
        for request in self._hidden.values():
            self._rank(self._groups[request.share], request)
        self._hidden.clear()
        self._advance()

    def _advance(self) -> None:
        """Moves the virtual present to the group given least, and forgets groups no longer ahead."""
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
