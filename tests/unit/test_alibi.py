"""ALiBi as a bias by distance, which attention takes as it takes T5's."""

import pytest
import torch

from maxsimd.engine.models.alibi import bias_for, slopes_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("tokens", [1, 64, 65, 66, 129, 130, 1_000])
def test_the_bias_is_the_slope_times_the_distance(tokens: int) -> None:
    query = torch.zeros(1, 4, tokens, 8)
    found = bias_for(4, tokens, CPU).terms(query, query, 1.0)
    apart = (torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]).abs()
    expected = torch.stack([-slope * apart for slope in slopes_of(4)])
    torch.testing.assert_close(found, expected)


def test_one_table_serves_many_lengths() -> None:
    assert bias_for(4, 3, CPU) is bias_for(4, 65, CPU)
    assert bias_for(4, 66, CPU) is bias_for(4, 129, CPU)
    assert bias_for(4, 66, CPU) is not bias_for(4, 65, CPU)
