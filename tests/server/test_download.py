"""Checkpoints from a stand-in for the hub into a folder, and servers that reach no hub."""

import hashlib
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants

from maxsimd.api.cli import main
from maxsimd.api.cli.download import wanted
from tests.server.conftest import QuietHandler, Server, StartServer, web_server

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "somebody/a-reranker"
# Weights of other frameworks, or of no use beside others.
OTHERS = ("onnx/model.onnx", "tf_model.h5", "pytorch_model.bin")
NO_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9"}


@dataclass
class Hub:
    url: str = ""
    asked: list[str] = field(default_factory=list)
    files: dict[str, Path] = field(default_factory=dict)


@pytest.fixture
def hub(bert_cross_encoder: str) -> Iterator[Hub]:
    folder = Path(bert_cross_encoder)
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    made = Hub(files=files)

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            made.asked.append(self.path)
            path = self.path.partition("?")[0]
            if path in (f"/api/models/{MODEL}", f"/api/models/{MODEL}/revision/main"):
                siblings = [{"rfilename": name, "size": file.stat().st_size} for name, file in files.items()]
                siblings += [{"rfilename": name, "size": 10**12} for name in OTHERS]
                self._send(json.dumps({"id": MODEL, "sha": COMMIT, "siblings": siblings}).encode())
                return
            name = path.removeprefix(f"/{MODEL}/resolve/{COMMIT}/")
            if name not in files:
                self.send_error(404)
                return
            self._send(files[name].read_bytes())

        do_HEAD = do_GET

        def _send(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("etag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("x-repo-commit", COMMIT)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    with web_server(Handler) as made.url:
        yield made


Download = Callable[..., Result]


@pytest.fixture
def download(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Download:
    asks_at(hub.url, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    def run(*arguments: str, status: int = 0) -> Result:
        ran = CliRunner().invoke(main, ["download", *arguments])
        assert ran.exit_code == status, ran.output
        assert status == 0 or isinstance(ran.exception, SystemExit), "there is no traceback"
        return ran

    return run


def asks_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", file)


def test_a_downloaded_checkpoint_is_served_without_a_hub(
    hub: Hub, download: Download, tmp_path: Path, start_server: StartServer, cross_encoder_server: Server
) -> None:
    folder = tmp_path / "model"
    assert "file 1 of" in download(MODEL, "--to", str(folder)).stderr
    assert not [path for path in hub.asked if path.endswith(OTHERS)]
    dense, pickle = ["2_Dense/pytorch_model.bin", "config.json"], "pytorch_model.bin"
    assert wanted([*dense, pickle]) == [*dense, pickle]
    assert wanted([*dense, pickle, "model.safetensors"]) == [*dense, "model.safetensors"]
    for name, path in hub.files.items():
        assert (folder / name).read_bytes() == path.read_bytes()
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
    number = len(hub.asked)
    assert "files are what SHA256SUMS says" in download(MODEL, "--to", str(folder), "--check").stdout
    assert len(hub.asked) == number, "a comparison asks no hub"

    server = start_server(str(folder), "--offline", "--dtype", "float32", environment=NO_HUB)
    body = {"queries": "q", "documents": ["a", "b"]}
    answers = [httpx.post(each.url + "/score", json=body) for each in (server, cross_encoder_server)]
    assert all(answer.is_success for answer in answers), [answer.text for answer in answers]
    ours, theirs = (answer.json()["data"] for answer in answers)
    # Each server lays out its weights as it found fastest, which rounds differently.
    assert [each["score"] for each in ours] == pytest.approx([each["score"] for each in theirs], abs=1e-5)


@pytest.mark.not_on_ray
def test_a_changed_download_is_named(download: Download, tmp_path: Path, start_server: StartServer) -> None:
    folder = tmp_path / "model"
    download(MODEL, "--to", str(folder))
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    server = start_server(str(folder), "--offline", ready=False, environment=NO_HUB)
    assert server.process.wait(timeout=600) == 1
    assert f"{weights} is" in server.log
    assert "download the checkpoint again" in server.log
    assert "Traceback" not in server.log
    assert f"{weights} is" in download(MODEL, "--to", str(folder), "--check", status=1).stderr


def test_instructors_leave_prompts_out(
    hub: Hub, download: Download, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maxsimd.engine.checkpoint.files.INSTRUCTORS", {MODEL})
    pooling, folder = "1_Pooling/config.json", tmp_path / "model"
    hub.files[pooling] = tmp_path / "pooling"
    hub.files[pooling].write_text('{"pooling_mode_mean_tokens": true}')
    for _ in range(2):  # again where it is there
        download(MODEL, "--to", str(folder))
        settings = json.loads((folder / pooling).read_text())
        assert settings == {"pooling_mode_mean_tokens": True, "include_prompt": False}
    download(MODEL, "--to", str(folder), "--check")


def test_what_the_hub_does_not_have_is_told_in_one_line(
    hub: Hub, download: Download, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "model")
    assert "there is no SHA256SUMS" in download(MODEL, "--to", folder, "--check", status=1).stderr
    for url, model in ((hub.url, "somebody/else"), ("http://127.0.0.1:9", MODEL)):
        asks_at(url, monkeypatch)
        assert f"Error: {model} cannot be downloaded" in download(model, "--to", folder, status=1).stderr
