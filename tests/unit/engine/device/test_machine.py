"""Cores and memory that a process may use, slices and waits of threads, and memory that goes back."""

import logging
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from maxsimd.api.process import resident_bytes
from maxsimd.engine import Engine, EngineConfig, workers
from maxsimd.engine.device import stores
from maxsimd.engine.device.host import Cores, available_memory, cpu_quota, tokenizer_threads
from maxsimd.engine.workers import take_short_slices
from tests.forked import Program

V1 = "31 23 0:28 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:5 - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "31 23 0:28 {root} /sys/fs/cgroup rw,relatime shared:5 - cgroup2 cgroup rw,nsdelegate\n"
OTHERS = (
    "23 1 0:21 / /proc rw - proc proc rw\n33 31 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
)


def machine(tmp_path: Path, mounts: str, groups: str, files: dict[str, str]) -> Path:
    for path, text in {"proc/self/mountinfo": OTHERS + mounts, "proc/self/cgroup": groups, **files}.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def groups_of(folder: str, files: list[dict[str, str]]) -> tuple[str, dict[str, str]]:
    """The innermost of groups that lie in each other, and their files."""
    made = {}
    for depth, each in enumerate(files, 1):
        made |= {f"{folder}{'/group' * depth}/{name}": text for name, text in each.items()}
    return "/" + "/".join(["group"] * len(files)), made


def test_version_2_has_the_least_quota_of_all_groups_around(tmp_path: Path) -> None:
    cases: Any = (
        (["200000 100000\n"], 2.0), (["50000 100000\n"], 0.5), (["max 100000\n"], None),
        (["max 100000\n", "150000 100000\n"], 1.5), (["300000 100000\n", "max 100000\n"], 3.0),
        (["300000 100000\n", "100000 50000\n", "max 100000\n"], 2.0), ([], None), (["nonsense"], None),
    )  # fmt: skip
    for i, (maxima, quota) in enumerate(cases):
        group, files = groups_of("sys/fs/cgroup", [{"cpu.max": maximum} for maximum in maxima])
        assert cpu_quota(machine(tmp_path / str(i), V2.format(root="/"), f"0::{group}\n", files)) == quota


def test_version_1_has_quota_and_period_in_files(tmp_path: Path) -> None:
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    given = [([("200000", "100000")], 2.0), ([("-1", "100000")], None)]
    for i, (quotas, quota) in enumerate([*given, ([("-1", "100000"), ("25000", "50000")], 0.5)]):
        files = [dict(zip(names, each, strict=True)) for each in quotas]
        path, made = groups_of("sys/fs/cgroup/cpu,cpuacct", files)
        groups = f"9:name=systemd:/other\n4:cpu,cpuacct:{path}\n0::/\n"
        assert cpu_quota(machine(tmp_path / str(i), V1.format(root="/"), groups, made)) == quota


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/inner", "/elsewhere", "/../x"])
def test_a_container_may_have_a_part_of_the_hosts_groups_mounted(tmp_path: Path, path: str) -> None:
    files = {"sys/fs/cgroup/cpu.max": "300000 100000\n", "sys/fs/cgroup/inner/cpu.max": "200000 100000\n"}
    root = machine(tmp_path, V2.format(root="/docker/abc"), f"0::{path}\n", files)
    assert cpu_quota(root) == (2.0 if path.endswith("inner") else 3.0)


def test_there_are_as_many_threads_as_can_always_run() -> None:
    for affinity, quota, threads in ((4, None, 4), (4, 2.0, 2), (4, 1.9, 1), (4, 0.2, 1), (2, 64.0, 2)):
        assert Cores(affinity, quota).threads == threads
    # Beside a GPU half of them tokenize.
    for device, threads, expected in (("cpu", 64, 2), ("cuda", 64, 32), ("cuda", 2, 2), ("xpu", 13, 6)):
        assert tokenizer_threads(device, threads) == expected


def test_a_real_quota_is_found(group_of_one_core: Path) -> None:
    program = (
        f"import os; open({str(group_of_one_core / 'cgroup.procs')!r}, 'w').write(str(os.getpid()));"
        "from maxsimd.engine.device.host import usable_cores; print(usable_cores().quota)"
    )
    assert float(subprocess.check_output([sys.executable, "-c", program], text=True)) == 1.0


GIB = 1024**3
MEMINFO = "MemTotal:       16777216 kB\nMemFree:          100000 kB\nMemAvailable:    8388608 kB\n"


def test_free_is_the_least_of_machine_and_groups(tmp_path: Path) -> None:
    cases: Any = (
        (None, {}, None), (MEMINFO, {}, 8 * GIB), ("nonsense\n", {}, None),
        (MEMINFO, {"a/b": ("max", GIB)}, 8 * GIB),
        (MEMINFO, {"a": (3 * GIB, GIB), "a/b": ("max", GIB)}, 2 * GIB), (MEMINFO, {"a/b": (10, 20)}, 0),
        # Files that were read once make way.
        (MEMINFO, {"a": (3 * GIB, 3 * GIB, f"anon 9\ninactive_file {GIB}\n")}, GIB),
    )  # fmt: skip
    for i, (meminfo, groups, free) in enumerate(cases):
        files = {} if meminfo is None else {"proc/meminfo": meminfo}
        for group, (most, current, *stat) in groups.items():
            folder = f"sys/fs/cgroup/{group}/memory"
            files |= {f"{folder}.max": f"{most}\n", f"{folder}.current": f"{current}\n"}
            files |= {f"{folder}.stat": each for each in stat}
        assert available_memory(machine(tmp_path / str(i), V2.format(root="/"), "0::/a/b\n", files)) == free
    mount = V1.format(root="/").replace("cpu,cpuacct", "memory")
    files = {
        "proc/meminfo": MEMINFO,
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{5 * GIB}\n",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    }
    assert available_memory(machine(tmp_path, mount, "4:memory:/a\n0::/\n", files)) == 4 * GIB


def test_the_default_is_a_share(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for free, limit in ((None, 64), (0, 64), (512 << 20, 64), (16 << 30, 1024), (1 << 40, 4096)):
        monkeypatch.setattr(stores, "available_memory", lambda free=free: free)
        caplog.clear()
        with caplog.at_level(logging.DEBUG):
            assert stores.memory_limit(EngineConfig()) == limit << 20
        assert f"{limit} MiB" in caplog.text
        assert stores.memory_limit(EngineConfig(cache_mb=7)) == 7 << 20


# Threads


LINUX = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


@pytest.mark.skipif(not LINUX, reason="Linux alone has slices of time for each thread")
def test_a_thread_and_those_it_starts_take_short_slices() -> None:
    before, own, child, niceness = Program([], module=__name__).run().stdout.split()
    assert int(niceness) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3), "as it was given"
    assert own == child
    # Before 6.12 the kernel takes no slices, and reports none.
    assert before == "0" or int(own) < int(before)


@pytest.mark.skipif(not LINUX, reason="Linux alone has policies for each thread")
def test_a_thread_of_another_policy_keeps_its_slices() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(os.sched_setscheduler, 0, os.SCHED_BATCH, os.sched_param(0)).result()
        assert pool.submit(take_short_slices).result() is False


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
    shown = subprocess.check_output([sys.executable, "-c", script], env=environment | given, text=True)
    assert shown.splitlines()[-1] == spins


def slice_of() -> int:
    """The calling thread's slice in nanoseconds; 0 where the kernel has none."""
    import ctypes

    _, get_attributes = workers._CALLS[platform.machine()]
    buffer = ctypes.create_string_buffer(workers._ATTRIBUTES.size)
    assert not ctypes.CDLL(None).syscall(get_attributes, 0, buffer, workers._ATTRIBUTES.size, 0)
    return int(workers._ATTRIBUTES.unpack(buffer.raw)[workers._RUNTIME])


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
async def test_an_engine_that_is_stopped_gives_back_what_is_free(bge: str) -> None:
    engine = Engine(model=bge)
    await engine.start()
    pieces = [bytes(2000) for _ in range(100_000)]
    between = pieces[::1000]
    taken = resident_bytes()
    del pieces
    await engine.stop()
    assert len(between) == 100
    assert resident_bytes() < taken - (100 << 20)


# Slices of a thread before and after it takes short ones, and of one that it starts; its niceness.
if __name__ == "__main__":
    os.nice(3)
    before = slice_of()
    assert take_short_slices()
    with ThreadPoolExecutor(1) as pool:
        child = pool.submit(slice_of).result()
        niceness = pool.submit(os.getpriority, os.PRIO_PROCESS, 0).result()
    print(before, slice_of(), child, niceness)
