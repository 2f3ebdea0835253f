"""What is worked out anew whenever an engine starts, remembered for the engines of one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from tokenizers import Tokenizer

from maxsimd.engine.preprocess import tokenization
from maxsimd.engine.preprocess.breaks import Breaks
from maxsimd.engine.preprocess.pieces import proven_breaks


@contextmanager
def breaks_found_once() -> Iterator[None]:
    """Finding where a tokenizer's texts can be cut takes half a second, and hundreds of engines ask."""
    found: dict[str, Breaks | None] = {}

    def remembered(tokenizer: Tokenizer) -> Breaks | None:
        described = tokenizer.to_str()
        if described not in found:
            found[described] = proven_breaks(tokenizer)
        return found[described]

    with mock.patch.object(tokenization, "proven_breaks", remembered):
        yield
