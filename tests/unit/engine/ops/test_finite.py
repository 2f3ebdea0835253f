"""The compiled search for numbers that are not finite, beside torch's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maxsimd.engine.ops import cpu as kernels
from maxsimd.engine.ops.cpu.finite import first_not_finite

pytestmark = [
    pytest.mark.fast,
    pytest.mark.skipif(not kernels.is_available(), reason="this processor cannot run the kernel"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WRONG = [float("nan"), -float("nan"), float("inf"), -float("inf")]


@st.composite
def arrays(draw: st.DrawFn) -> list[torch.Tensor]:
    """The greatest numbers that there are, and a wrong one anywhere in some of them."""
    made = []
    for length, dtype in draw(st.lists(st.tuples(st.integers(1, 150), st.sampled_from(DTYPES)), max_size=5)):
        array = torch.randn(length).sign().to(dtype) * torch.finfo(dtype).max
        if draw(st.integers(0, 3)) == 0:
            array[draw(st.integers(0, length - 1))] = draw(st.sampled_from(WRONG))
        made.append(array)
    return made


@given(arrays())
def test_the_first_with_a_wrong_number_is_found(arrays: list[torch.Tensor]) -> None:
    wrong = [i for i, array in enumerate(arrays) if not array.isfinite().all()]
    assert first_not_finite(arrays) == (wrong[0] if wrong else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", WRONG)
def test_every_lane_and_every_rest_is_looked_at(dtype: torch.dtype, wrong: float) -> None:
    for length in (1, 15, 16, 17, 31, 32, 33, 64, 95):
        for position in range(length):
            array = torch.zeros(length, dtype=dtype)
            array[position] = wrong
            assert first_not_finite([torch.ones(3, dtype=dtype), array]) == 1
