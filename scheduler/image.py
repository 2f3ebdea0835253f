"""Pictures that are to be encoded before the sequences that have them."""

from dataclasses import dataclass
from typing import Any

from maxsimd.scheduler.payload import ResultSlot


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
