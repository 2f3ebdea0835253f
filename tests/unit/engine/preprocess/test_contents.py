"""Contents with pictures are told apart by all that they have, and by its order."""

from itertools import combinations

import numpy as np
import pytest

from maxsimd.engine.media import Picture
from maxsimd.engine.preprocess.pages import OpenContent

pytestmark = pytest.mark.fast


def test_digests_tell_contents_apart() -> None:
    first, second = (Picture(np.full((4, 6, 3), value, dtype=np.uint8)) for value in (1, 2))
    contents = [
        (first,),
        (second,),
        (first, ""),
        ("", first),
        (first, "a"),
        ("a", first),
        (first, "a", "b"),
        (first, "ab"),
        (first, second),
        (second, first),
        (first, "a", second),
        (first, first),
    ]
    digests = [OpenContent(parts).digest for parts in contents]
    for one, other in combinations(range(len(contents)), 2):
        assert digests[one] != digests[other], (contents[one], contents[other])
    assert OpenContent((first, "a")).digest == OpenContent((first, "a")).digest
