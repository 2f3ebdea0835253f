"""Types of bodies may be decoded for the first time by several threads at once."""

import subprocess
import sys

import pytest

_PROGRAM = """
import sys, threading
import msgspec
from maxsimd.api import wire
from maxsimd.api.handlers import routes

sys.setswitchinterval(1e-6)
together = threading.Barrier(8)

def decode():
    together.wait()
    try:
        body = b'{"query": "q", "documents": ["a"]}'
        msgspec.json.decode(body, type=getattr(wire, sys.argv[1]), strict=False)
    except msgspec.ValidationError:
        pass

threads = [threading.Thread(target=decode) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize("kind", ["ScoreRequest", "PoolingRequest", "EmbeddingsRequest"])
def test_threads_that_decode_at_once_do_not_crash(kind: str) -> None:
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", _PROGRAM, kind], capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
