"""A check that fails in the interpreting process fails its test, and no other."""

import os

import pytest

from tests.unit.engine.ops.interpreted import run_interpreted


def interprets() -> None:
    from maxsimd.engine.ops.triton.launch import INTERPRETED

    assert INTERPRETED


def fails(expected: str) -> None:
    print("this is not an answer")
    assert expected == "something else"


def dies() -> None:
    os.write(2, b"the last words")
    os._exit(3)


def test_a_check_runs_where_triton_interprets() -> None:
    pytest.importorskip("triton")
    run_interpreted(interprets)


def test_a_check_that_fails_is_reported_and_the_next_one_runs() -> None:
    with pytest.raises(AssertionError, match=r'(?s)in fails.*assert expected == "something else"'):
        run_interpreted(fails, "this")
    run_interpreted(fails, "something else")


def test_the_last_words_of_a_process_are_reported() -> None:
    with pytest.raises(AssertionError, match=r"(?s)the process died.*the last words"):
        run_interpreted(dies)
    run_interpreted(fails, "something else")
