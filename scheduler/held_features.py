"""How many features of pictures are held for sequences that have not been scheduled."""

import sys
from collections.abc import Iterator

from maxsimd.scheduler.image import ImageJob
from maxsimd.scheduler.waiting import WaitingRequest


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
