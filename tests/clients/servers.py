"""The servers that clients ask: real ones on free ports of this machine, always stopped."""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from maxsimd.bench.peers.checkpoints import save_cross_encoder

_START_SECONDS, _STOP_SECONDS = 120, 60
# The models that clients ask for, since some take no other names.
MODELS = (
    "all-MiniLM-L6-v2",
    "text-embedding-ada-002",
    "text-embedding-3-small",
    "rerank-v3.5",
    "embed-english-v3.0",
    "jina-reranker-v2-base-multilingual",
    "jina-embeddings-v3",
    "rerank-2.5",
    "voyage-3.5",
)
_PLAIN = ("--dtype", "float32", "--threads", "1", "--log-level", "warning")


@contextmanager
def running() -> Iterator[dict[str, str]]:
    """Four servers; gives the environment variables that hold their base URLs. By late interaction and as a
    bi-encoder they serve the embedded model, as a cross-encoder one with random weights, and one serves two
    models, as docs/rag.md has it."""
    names = [part for name in MODELS for part in ("--served-model-name", name)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cross_encoder = save_cross_encoder(folder / "cross-encoder")
        two = folder / "models.yaml"
        two.write_text(f"models:\n  embed: {{score_type: bi-encoder}}\n  rerank: {cross_encoder}\n")
        kinds = {
            "LATE_INTERACTION_URL": names,
            "BI_ENCODER_URL": ["--score-type", "bi-encoder", *names],
            "CROSS_ENCODER_URL": [cross_encoder, *names],
            "TWO_MODELS_URL": ["--config", str(two)],
        }
        yield {
            kind: stack.enter_context(_server(arguments, folder / f"{kind}.log"))
            for kind, arguments in kinds.items()
        }


@contextmanager
def _server(arguments: Sequence[str], log_file: Path) -> Iterator[str]:
    """The base URL of a server that is ready."""
    port = _free_port()
    listening = ("--host", "127.0.0.1", "--port", str(port))
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "maxsimd", "serve", *arguments, *_PLAIN, *listening],
            stdout=log,
            stderr=log,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url, process, log_file)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log_file: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url + "/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"the server did not become ready:\n{log_file.read_text()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
