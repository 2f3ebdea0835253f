"""The file from which an interrupted run goes on."""

from pathlib import Path

import click
import pytest

from maxsimd.api.commands.journal import Journal, digest_of

DIGEST = digest_of(["a", "b"])


def _journal(path: Path, digest: str = DIGEST, resume: bool = True) -> Journal:
    return Journal(path, digest, resume)


def test_what_was_added_is_there_in_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "out.part"
    with _journal(path) as journal:
        journal.add({0: 1.5, 2: 0.1}, {1: "too long"})
    again = _journal(path)
    assert (again.scores, again.errors, again.done) == ({0: 1.5, 2: 0.1}, {1: "too long"}, 3)
    with again:
        again.add({3: 2.0}, {})
    assert _journal(path).done == 4


def test_another_run_and_an_unasked_one_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.part"
    with _journal(path):
        pass
    with pytest.raises(click.ClickException, match="is of another run"):
        _journal(path, digest_of(["ab"]))
    with pytest.raises(click.ClickException, match="go on with --resume"):
        _journal(path, resume=False)


@pytest.mark.parametrize("rest", ["", '{"maxsimd"', "[7, 0."])
def test_a_run_that_ended_while_it_wrote_goes_on(rest: str, tmp_path: Path) -> None:
    path = tmp_path / "out.part"
    if rest.startswith("["):
        with _journal(path) as journal:
            journal.add({0: 1.0}, {})
    with path.open("a") as file:
        file.write(rest)
    with _journal(path) as journal:
        assert journal.done == (1 if rest.startswith("[") else 0)
        journal.add({5: 3.0}, {})
    assert _journal(path).scores[5] == 3.0


def test_what_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.part"
    path.write_text("a letter\nto somebody\n")
    with pytest.raises(click.ClickException, match="is no file of scores"):
        _journal(path)
    assert path.read_text() == "a letter\nto somebody\n"
