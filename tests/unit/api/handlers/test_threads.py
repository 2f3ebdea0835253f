"""Types of bodies may be decoded for the first time by several threads at once."""

import subprocess
import sys

import msgspec
import pytest

from maxsimd.api import wire
from maxsimd.api.answer import Answer
from maxsimd.api.handlers.route import post

_PROGRAM = """
import sys, threading
import msgspec
from maxsimd.api import wire
from maxsimd.api.handlers import routes

sys.setswitchinterval(1e-6)

def decode(kind, together):
    together.wait()
    try:
        msgspec.json.decode(b'{"query": "q", "documents": ["a"]}', type=kind, strict=False)
    except msgspec.ValidationError:
        pass

for kind in (wire.ScoreRequest, wire.PoolingRequest, wire.EmbeddingsRequest):
    together = threading.Barrier(8)
    threads = [threading.Thread(target=decode, args=(kind, together)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_a_route_learns_its_type_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    learnt: list[type] = []
    decoder = msgspec.json.Decoder

    def learn(kind: type) -> object:
        learnt.append(kind)
        return decoder(kind)

    async def handler(state: object, request: object) -> Answer:
        return Answer(200)

    monkeypatch.setattr(msgspec.json, "Decoder", learn)
    post("/new", wire.ScoreRequest, handler)
    assert learnt == [wire.ScoreRequest]


@pytest.mark.exhaustive
def test_threads_that_decode_at_once_do_not_crash() -> None:
    for _ in range(2):
        ran = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
