"""API keys: which are accepted, and what becomes of a file of them that changes."""

import os
from pathlib import Path

import pytest

from maxsimd.api.config import ServerConfig, SetupError
from maxsimd.api.keys import ApiKeys
from maxsimd.api.state import ServerState
from maxsimd.engine import Engine


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _keys(*given: str, file: Path | None = None, clock: Clock | None = None) -> ApiKeys:
    path = None if file is None else str(file)
    return ApiKeys(ServerConfig(api_key=given, api_key_file=path), clock or Clock())


def test_without_keys_none_is_asked_for_and_none_accepted() -> None:
    keys = _keys()
    assert not keys.are_asked_for
    for header in ("", "Bearer", "Bearer ", "Bearer one"):
        assert not keys.accept(header)


def test_keys_come_from_options_and_from_a_file_with_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbftwo\r\n  three \n\n   \nfo ur\n")
    keys = _keys(" one ", file=file)
    assert keys.are_asked_for
    for key in ("one", "two", "three", "fo ur"):
        assert keys.accept(f"Bearer {key}"), key
    for key in ("", "o", "on", "fo", "five", "two three"):
        assert not keys.accept(f"Bearer {key}"), key


def test_keys_may_hold_any_character() -> None:
    keys = _keys("schlüssel", "o ne")
    assert keys.accept("Bearer schlüssel")
    assert keys.accept("Bearer o ne")
    assert not keys.accept("Bearer \udcff")


@pytest.mark.parametrize("header", ["Bearer one", "bearer two", "BEARER  one "])
def test_the_scheme_may_be_in_any_case_with_any_number_of_spaces(header: str) -> None:
    assert _keys("one", "two").accept(header)
    assert not _keys("three").accept(header)


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Bearer one two", "Basic one", "one Bearer", "one"]
)
def test_nothing_but_a_bearer_token_is_a_key(header: str) -> None:
    assert not _keys("one", "two").accept(header)


def _make(file: Path, content: bytes | None) -> None:
    file.mkdir() if content is None else file.write_bytes(content)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it holds no key"),
        (b" \n\n", "it holds no key"),
        (b"\xff\xfe", "it is not UTF-8"),
        (b"x\n" * 600_000, "it is larger than 1 MiB"),
        (None, "Is a directory"),
    ],
)
def test_a_file_that_holds_no_keys_is_refused_in_one_line(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    file = tmp_path / "keys"
    _make(file, content)
    with pytest.raises(SetupError) as refused:
        ServerState(Engine(), ServerConfig(api_key=("one",), api_key_file=str(file)))
    expected = f"cannot read keys from '{file}': {reason}; give a readable file with one key a line"
    assert str(refused.value) == expected


def test_a_file_that_is_not_there_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="No such file or directory; give a readable file"):
        _keys(file=tmp_path / "keys")


def test_a_file_that_changes_is_read_again_within_a_second(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys", Clock()
    file.write_text("one\n")
    keys = _keys("fixed", file=file, clock=clock)
    file.write_text("two\nthree\n")
    clock.now = 0.9
    assert keys.accept("Bearer one"), "not each request looks at the file"
    clock.now = 1.0
    assert not keys.accept("Bearer one")
    for key in ("two", "three", "fixed"):
        assert keys.accept(f"Bearer {key}")
    # As a secret that is mounted changes: another file under the same name, as long and as old.
    status = file.stat()
    other = tmp_path / "other"
    other.write_text("for\nfives\n")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(file)
    clock.now = 2.0
    assert keys.accept("Bearer for")
    assert not keys.accept("Bearer two")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", None])
def test_a_file_that_becomes_unusable_leaves_the_keys_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    file, clock = tmp_path / "keys", Clock()
    file.write_text("one\n")
    keys = _keys(file=file, clock=clock)
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    for clock.now in (1.0, 2.0, 3.0):
        assert keys.accept("Bearer one")
        assert not keys.accept("Bearer")
    (record,) = caplog.records
    assert "the keys read before stay in use" in record.getMessage()
    assert "one\n" not in record.getMessage()
    file.unlink(missing_ok=True)
    file.write_text("two\n")
    clock.now = 4.0
    assert keys.accept("Bearer two")
    assert not keys.accept("Bearer one")


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"one\n")
    os.close(writing)
    clock = Clock()
    keys = _keys(file=Path(f"/dev/fd/{reading}"), clock=clock)
    clock.now = 1.0
    assert keys.accept("Bearer one")
    os.close(reading)
