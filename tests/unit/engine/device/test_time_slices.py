"""Threads that wake up soon, threads that sleep while they wait, and memory that goes back to the system."""

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from maxsimd.api.garbage import resident_bytes
from maxsimd.engine import Engine
from maxsimd.engine.device import time_slices
from maxsimd.engine.device.time_slices import take_short_slices
from tests.checkpoints import bi_encoders
from tests.checkpoints.shared import SharedCheckpoints
from tests.forked import Program

LINUX = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


@pytest.mark.skipif(not LINUX, reason="Linux alone has slices of time for each thread")
def test_a_thread_and_those_it_starts_take_short_slices() -> None:
    printed = Program([], module=__name__).run().stdout
    before, own, child, niceness = printed.split()
    assert int(niceness) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3), "as it was given"
    assert own == child
    # Before 6.12 the kernel takes no slices, and reports none.
    assert before == "0" or int(own) < int(before)


@pytest.mark.skipif(not LINUX, reason="Linux alone has policies for each thread")
def test_a_thread_of_another_policy_keeps_its_slices() -> None:
    def batch() -> bool:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return take_short_slices()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(batch).result() is False


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_of_openmp_sleep_unless_told_otherwise(given: dict[str, str], spins: str) -> None:
    script = """
import os, sys
from maxsimd.api.cli import main
assert "torch" not in sys.modules, "too late"
main(["inspect", "--help"], standalone_mode=False)
assert "torch" not in sys.modules, "too late"
print(os.environ.get("GOMP_SPINCOUNT"))
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    shown = subprocess.run(
        [sys.executable, "-c", script], env=environment | given, capture_output=True, text=True, check=True
    ).stdout
    assert shown.splitlines()[-1] == spins


def slice_of() -> int:
    """The calling thread's slice in nanoseconds; 0 where the kernel has none."""
    import ctypes

    _, get_attributes = time_slices._CALLS[platform.machine()]
    buffer = ctypes.create_string_buffer(time_slices._ATTRIBUTES.size)
    assert not ctypes.CDLL(None).syscall(get_attributes, 0, buffer, time_slices._ATTRIBUTES.size, 0)
    return int(time_slices._ATTRIBUTES.unpack(buffer.raw)[time_slices._RUNTIME])


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
async def test_an_engine_that_is_stopped_gives_back_what_is_free(checkpoints: SharedCheckpoints) -> None:
    engine = Engine(model=checkpoints(bi_encoders.bge))
    await engine.start()
    pieces = [bytes(2000) for _ in range(100_000)]
    between = pieces[::1000]
    taken = resident_bytes()
    del pieces
    await engine.stop()
    assert len(between) == 100
    assert resident_bytes() < taken - (100 << 20)


def _print_slices() -> None:
    """Of the thread before and after it takes short ones, and of one that it starts, with its niceness."""
    os.nice(3)
    before = slice_of()
    assert take_short_slices()
    with ThreadPoolExecutor(1) as pool:
        child = pool.submit(slice_of).result()
        niceness = pool.submit(os.getpriority, os.PRIO_PROCESS, 0).result()
    print(before, slice_of(), child, niceness)


if __name__ == "__main__":
    _print_slices()
