"""API keys: which are accepted, whose they are, and what becomes of a file of them that changes."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from maxsimd.api.config import ServerConfig, SetupError
from maxsimd.api.http.app import build_app
from maxsimd.api.keys import ApiKeys, digest_of, read_keys
from maxsimd.api.state import ServerState
from maxsimd.engine import Engine, Tenant
from tests.waiting import until

SECRET = "sk-3cr3t"


class Keys:
    def __init__(self, file: Path, content: str | bytes, *given: str) -> None:
        self.file = file
        self.tenants: list[Mapping[str, Tenant]] = []
        self._write(content)
        self.keys = ApiKeys(ServerConfig(api_key=given, api_key_file=str(file)), self.tenants.append)

    def rewrite(self, content: str | bytes) -> None:
        self._write(content)
        self.keys.reload()

    def _write(self, content: str | bytes) -> None:
        self.file.write_bytes(content if isinstance(content, bytes) else content.encode())

    def owner(self, key: str) -> str | None:
        return self.keys.accept(f"Bearer {key}")


def test_keys_come_from_options_and_a_file(tmp_path: Path) -> None:
    assert not ApiKeys(ServerConfig()).are_asked_for
    content = b"\xef\xbb\xbftwo\r\n  three \n\n   \nfo ur\n"
    keys = Keys(tmp_path / "keys", content, " one ", "schlüssel")
    assert keys.keys.are_asked_for
    for key in ("one", "schlüssel", "two", " three ", "fo ur"):
        assert keys.owner(key), key
    for key in ("", "o", "on", "fo", "five", "two three", "\udcff"):
        assert keys.owner(key) is None, key
    for header in ("bearer two", "BEARER  one "):
        assert keys.keys.accept(header)
    for header in ("", "Bearer", "Basic one", "one Bearer", "one"):
        assert not keys.keys.accept(header), header
    file = tmp_path / "none"
    for content, reason in (
        (None, "No such file or directory"), (b" \n\n", "it holds no key"), (b"\xff\xfe", "it is not UTF-8"),
        (b"x\n" * 600_000, "it is larger than 1 MiB"),
    ):  # fmt: skip
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(SetupError) as refused:
            ServerState(Engine(), ServerConfig(api_key=("one",), api_key_file=str(file)))
        expected = f"cannot read keys from '{file}': {reason}; give a readable file with one key per line"
        assert str(refused.value) == expected


def test_a_file_that_changes_is_read_again_within_a_second(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys", "one\n", "fixed")
    keys.file.write_text("two\nthree\n")
    assert keys.owner("one"), "not each request looks at the file"
    keys.keys.reload()
    assert [key for key in ("one", "two", "three", "fixed") if keys.owner(key)] == ["two", "three", "fixed"]
    # As a secret that is mounted changes: another file under the same name, as long and as old.
    status = keys.file.stat()
    other = tmp_path / "other"
    other.write_text("for\nfives\n")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(keys.file)
    keys.keys.reload()
    assert [key for key in ("for", "two") if keys.owner(key)] == ["for"]
    keys = Keys(tmp_path / "keys", "one name=a weight=3\n")
    keys.rewrite("one name=a weight=5\n")
    assert [keys.owner("one") for _ in range(2)] == ["a", "a"]
    assert keys.tenants == [{"a": Tenant(weight=3)}, {"a": Tenant(weight=5)}], "once for each change"


def test_an_unusable_file_leaves_the_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="maxsimd.keys")
    keys = Keys(tmp_path / "keys", f"one\n{SECRET}\n")
    for content in (b"", b"\xff\xfe", None, f"{SECRET} weight=none\n".encode()):
        caplog.clear()
        keys.file.unlink(missing_ok=True)
        if content is not None:
            keys.file.write_bytes(content)
        for _ in range(3):
            keys.keys.reload()
            assert keys.owner("one")
        (message,) = caplog.messages
        assert ("the keys read before stay in use" in message, SECRET in message) == (True, False), message
    assert len(keys.tenants) == 1
    keys.rewrite("two\n")
    assert [key for key in ("one", "two") if keys.owner(key)] == ["two"]


def test_caches_by_tenant_need_a_name_for_each_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, engine = tmp_path / "keys", Engine(cache_by_tenant=True)
    file.write_text("one name=a\ntwo\n")
    for config in (ServerConfig(), ServerConfig(api_key=("one",)), ServerConfig(api_key_file=str(file))):
        with pytest.raises(SetupError, match=r"cache_by_tenant.*name="):
            ServerState(engine, config)
    file.write_text("one name=a\ntwo name=b\n")
    with pytest.raises(SetupError, match="none by --api-key or MAXSIMD_API_KEY"):
        ServerState(engine, ServerConfig(api_key=("three",), api_key_file=str(file)))
    keys = ApiKeys(ServerConfig(api_key_file=str(file)), must_be_named=True)
    file.write_text("one name=a\nfour\n")
    keys.reload()
    assert [keys.accept(f"Bearer {key}") for key in ("one", "two", "four")] == ["a", "b", None]
    assert "the keys read before stay in use" in caplog.text


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"one\n")
    os.close(writing)
    keys = ApiKeys(ServerConfig(api_key_file=f"/dev/fd/{reading}"))
    keys.reload()
    assert keys.accept("Bearer one")
    os.close(reading)


def test_a_line_names_a_tenant_and_what_it_may_use() -> None:
    table = read_keys(
        b"one name=search weight=3 requests_per_minute=600 tokens_per_minute=2_000_000\n"
        b"  two\tname=nightly  priority=batch max_queued_tokens=500000 max_request_tokens=70\n"
        b"three\n"
        b"fo ur weight=0.5\n"
    )
    assert table.tenants == {
        "search": Tenant(weight=3, requests_per_minute=600, tokens_per_minute=2_000_000),
        "nightly": Tenant(priority="batch", max_queued_tokens=500_000, max_request_tokens=70),
    }
    assert table.names == {
        digest_of("one"): "search", digest_of("two"): "nightly", digest_of("three"): None,
        digest_of("fo ur"): None,
    }  # fmt: skip
    assert table.nameless == {digest_of("three"): Tenant(), digest_of("fo ur"): Tenant(weight=0.5)}
    table = read_keys(b"old name=a weight=3\nnew name=a\nnext name=a max_queued_tokens=7 weight=3")
    assert (table.tenants, set(table.names.values())) == ({"a": Tenant(weight=3, max_queued_tokens=7)}, {"a"})
    # A key may end with equals signs and stand twice.
    table = read_keys(b"c2VjcmV0==\nx=y name=a\nc2VjcmV0==\n")
    assert table.names == {digest_of("c2VjcmV0=="): None, digest_of("x=y"): "a"}


def test_only_keys_that_say_so_are_admins(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys", "one name=a admin=yes\ntwo name=a\nthree admin=no\n", "given")
    assert keys.keys.has_admins
    admins = [key for key in ("one", "two", "three", "given", "") if keys.keys.is_admin(f"Bearer {key}")]
    assert (admins, keys.keys.is_admin("Basic one")) == (["one"], False)
    keys.rewrite("one name=a\ntwo name=a admin=yes\n")
    assert (keys.owner("one"), keys.keys.is_admin("Bearer one")) == ("a", False)
    assert keys.keys.is_admin("Bearer two")


WRONG = [
    ("wait=3", "line 2 has something behind its key that is no attribute; these are name=, weight="),
    ("weight = 3", "line 2 has something behind its key that is no attribute; these are name=, weight="),
    ("weight=heavy", "line 2: weight must be a number"),
    ("weight=0", "line 2: weight must be from 0.001 to 1000"),
    ("weight=3 weight=3", "line 2 has weight twice"),
    ("priority=4", "line 2: priority must be interactive or batch"),
    ("requests_per_minute=0", "line 2: requests_per_minute must be at least 1"),
    ("requests_per_minute=1.5", "line 2: requests_per_minute must be a whole number"),
    ("tokens_per_minute=" + "9" * 400, "line 2: tokens_per_minute must be a whole number"),
    ("admin=true", "line 2: admin must be yes or no"),
    (f"admin=yes\n{SECRET} admin=no", "lines 2 and 3 have the same key with other attributes"),
    ("name=süd", "line 2: name must be 1 to 64 letters, digits, dots, hyphens and underscores (ASCII)"),
    ("name=other", "line 2: name must not be other, unnamed, nor key- and a number: those are taken"),
    ("name=key-1", "line 2: name must not be other, unnamed, nor key- and a number: those are taken"),
    (f"name=a\n{SECRET} name=b", "lines 2 and 3 have the same key with other attributes"),
    ("name=a weight=3\nx name=a weight=2", "lines 2 and 3 have the same name with another weight"),
    ("\nweight=3", "line 3 begins with an attribute; put the key before it"),
]


def test_what_is_wrong_is_told_by_its_line_and_without_the_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for behind, message in WRONG:
        file.write_text(f"first name=first\n{SECRET} {behind}\n")
        with pytest.raises(SetupError) as refused:
            ApiKeys(ServerConfig(api_key_file=str(file)))
        assert str(refused.value).startswith(f"cannot read keys from '{file}': {message}")
        assert SECRET not in str(refused.value)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_no_message_repeats_what_stands_in_the_file(behind: str) -> None:
    with pytest.raises(ValueError, match=r"^line") as refused:
        read_keys(f"{SECRET} a={SECRET} {behind}".encode())
    assert SECRET not in str(refused.value)


async def test_processes_agree_on_tenants_without_requests(tmp_path: Path) -> None:
    file, engine, fleet = tmp_path / "keys", Engine(), cast("Any", SimpleNamespace(secret=b"of all fronts"))
    file.write_text("one\ntwo weight=2\n")
    told: list[Mapping[str, Tenant]] = []
    engine.set_tenants = told.append  # type: ignore[method-assign]
    config = ServerConfig(api_key_file=str(file))
    runner = web.AppRunner(build_app(engine, config, fleet))
    await runner.setup()
    file.write_text("two weight=2\nthree weight=3\n")
    await until(lambda: len(told) == 2)
    await runner.cleanup()
    started_later = ApiKeys(config, set_tenants=told.append, secret=fleet.secret)
    first, second, third = told
    assert second == third == {**first, started_later.accept("Bearer three"): Tenant(weight=3)}


def test_each_key_says_whose_it_is_and_stays_so(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys", "one name=search\ntwo name=search\nthree\nfour weight=2\n", "five", "one")
    owners = {key: keys.owner(key) for key in ("one", "two", "three", "four", "five", "six")}
    numbered = {"three": "key-2", "four": "key-3", "five": "key-1"}
    assert owners == {"one": "search", "two": "search", "six": None} | numbered
    assert keys.tenants == [{"search": Tenant(), "key-3": Tenant(weight=2)}]
    keys = Keys(tmp_path / "keys", "one\ntwo\n", "given")
    before = {key: keys.owner(key) for key in ("given", "one", "two")}
    assert set(before.values()) == {"key-1", "key-2", "key-3"}
    keys.rewrite("zero\ntwo weight=2\n")
    assert [keys.owner(key) for key in ("given", "two", "zero")] == [before["given"], before["two"], "key-4"]
    keys.rewrite("one\ntwo name=key-ring\n")
    assert (keys.owner("one"), keys.owner("two")) == ("key-5", "key-ring"), "no number is given again"
    keys.rewrite("two\n")
    assert keys.owner("two") == "key-6", "without a name it is not that tenant any more"
