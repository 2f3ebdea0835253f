"""The heaps of the C library: threads share them."""

import os
import subprocess
import sys

import pytest

from maxsimd.api import heaps
from maxsimd.api.heaps import share_heaps

# Prints how many heaps there are once 12 threads have allocated at the same time.
_PROGRAM = """
import ctypes, re, sys, tempfile, threading
from maxsimd.api.heaps import share_heaps
share_heaps(int(sys.argv[1]))
c = ctypes.CDLL(None)
c.malloc.restype, c.fopen.restype = ctypes.c_void_p, ctypes.c_void_p
together = threading.Barrier(13)
def allocate():
    together.wait()
    for _ in range(2000):
        c.malloc(600)
    together.wait()
for _ in range(12):
    threading.Thread(target=allocate).start()
together.wait(); together.wait()
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(c.fopen(file.name.encode(), b"w"))
    c.malloc_info(0, stream)
    c.fclose(stream)
    print(len(re.findall(rb"<heap nr", file.read())))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="these are glibc's")
@pytest.mark.parametrize(
    ("threads", "environment", "most"),
    [(1, {}, 2), (2, {}, 2), (4, {}, 4), (1, {"MALLOC_ARENA_MAX": "5"}, 5)],
)
def test_there_are_no_more_heaps_than_threads_that_can_run(
    threads: int, environment: dict[str, str], most: int
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(threads)],
        env={name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(ran.stdout) == most


def test_where_the_c_library_cannot_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heaps.ctypes, "CDLL", lambda name: object())
    share_heaps(2)
