"""Fused layers: whole models with and without them, interpreted."""

from collections.abc import Callable

import pytest

from tests.unit.engine.execution import fused_layer_checks as checks
from tests.unit.engine.ops.interpreted import run_interpreted

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("check", "name"),
    [
        (checks.check_scores, "bert"),
        (checks.check_bfloat16, "bert"),
        *(
            pytest.param(check, name, marks=pytest.mark.exhaustive)
            for check, name in (
                (checks.check_scores, "qwen3"),
                (checks.check_bfloat16, "qwen3"),
                (checks.check_scores_from_the_start, "bert"),
                (checks.check_scores_from_the_start, "qwen3"),
            )
        ),
    ],
)
def test_a_model_with_fused_layers_scores_as_without(check: Callable[[str], None], name: str) -> None:
    run_interpreted(check, name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("bert", "llama", "gemma") else pytest.mark.exhaustive)
        for name in checks.EXPECTED
    ],
)
def test_layers_are_fused_where_they_are_built_as_expected(name: str) -> None:
    run_interpreted(checks.check_modules, name)


@pytest.mark.parametrize(
    "check",
    [
        checks.check_wrong_kernel,
        checks.check_failing_kernel,
        checks.check_mismatch,
        checks.check_others_stay,
        checks.check_pictures,
    ],
)
def test_only_layers_that_give_the_same_are_fused(check: Callable[[], None]) -> None:
    run_interpreted(check)
