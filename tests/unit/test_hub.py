"""Loading from a hub that hangs, refuses, or has no such model: its messages, and that it asks once."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from maxsimd.engine.checkpoint import files as hub_files
from maxsimd.engine.checkpoint.files import find_file, warn_of_unknown_modules
from maxsimd.engine.errors import ModelLoadError
from tests.server.conftest import QuietHandler, web_server

FILES = ("config.json", "modules.json", "tokenizer.json")


@contextmanager
def hub(status: int | None, headers: dict[str, str] | None = None) -> Iterator[tuple[str, list[str]]]:
    """A hub that answers every request with a status, or never; and the paths it was asked for."""
    asked: list[str] = []
    over = threading.Event()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            # The client also asks about itself.
            if "/no-such/model" in self.path or "/some/model" in self.path:
                asked.append(self.path)
            if status is None:
                over.wait()
                return
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

    with web_server(Handler) as url:
        try:
            yield url, asked
        finally:
            over.set()
            for each in threading.enumerate():
                if each.name == "maxsimd-hub":  # it was left behind
                    each.join()


Found = Callable[..., str]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Found:
    """Reads three files as a load does that asks the hub at a URL: their paths, or the error."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def find(url: str, model: str = "no-such/model", offline: bool = False) -> str:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(hub_files, "_answers", {})
        monkeypatch.setattr(hub_files, "_went_offline", False)
        try:
            return " ".join(str(find_file(model, name, None)) for name in FILES)
        except ModelLoadError as error:
            return str(error)

    return find


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        pytest.param(None, {}, "cannot be reached", marks=pytest.mark.exhaustive),
        (500, {}, "answers with an error"),
        (401, {"X-Error-Code": "RepoNotFound"}, "has no such model or it is private"),
        (403, {"X-Error-Code": "GatedRepo"}, "is gated on"),
    ],
)
def test_a_hub_is_asked_once(status: int | None, headers: dict[str, str], said: str, found: Found) -> None:
    with hub(status, headers) as (url, asked):
        message = found(url)
    assert all(part in message for part in (said, url, "'no-such/model'")), message
    assert "offline=True" in message or "gated" in message
    assert asked == ["/api/models/no-such/model"]


def test_a_hub_that_refuses_connections_or_is_not_asked(found: Found) -> None:
    message = found("http://127.0.0.1:9")
    assert all(part in message for part in ("http://127.0.0.1:9 cannot be reached", "offline=True")), message
    with hub(404) as (url, asked):
        assert "no hub is asked" in found(url, offline=True)
    assert asked == []


@pytest.mark.parametrize(("status", "said"), [(None, "reached (no answer within"), (500, "answers")])
def test_a_cached_model_is_read_without_its_hub(
    status: Any, said: str, tmp_path: Path, found: Found, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(hub_files, "_MOST_ASKING_SECONDS", 2.0 if status is None else 60.0)
    folder = tmp_path / "hub" / "models--some--model"
    snapshot = folder / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(snapshot.name)
    (snapshot / "config.json").write_text("{}")
    with hub(status) as (url, asked):
        message = found(url, "some/model")
    assert (message.split(), len(asked)) == ([str(snapshot / "config.json"), "None", "None"], 1)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("maxsimd.")]
    assert said in line
    assert line.endswith("some/model is read from the local cache. With offline=True no hub is asked")
    for known in ("other.json", "modules.json"):
        (folder / ".no_exist" / snapshot.name).mkdir(parents=True, exist_ok=True)
        (folder / ".no_exist" / snapshot.name / known).touch()
        warn_of_unknown_modules("some/model", None)
        assert caplog.text.count("some/model is pooled by default") == 1, known
