"""A check that fails in the interpreting process fails its test, and no other."""

import os

import pytest

from tests.unit.engine.ops.interpreted import run_interpreted


def fails(expected: str) -> None:
    print("this is not an answer")
    assert expected == "something else"


def dies(how: str) -> None:
    os.write(2, b"the last words")
    os._exit(3)


def test_what_fails_or_dies_is_reported_and_the_next_check_runs() -> None:
    for check, said in (
        (fails, r'(?s)in fails.*assert expected == "something else"'),
        (dies, r"(?s)the process died.*the last words"),
    ):
        with pytest.raises(AssertionError, match=said):
            run_interpreted(check, "this")
        run_interpreted(fails, "something else")
