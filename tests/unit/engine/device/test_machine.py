"""How many cores and how much memory a process may use, by what the kernel shows."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from maxsimd.engine import EngineConfig
from maxsimd.engine.device import open_cache
from maxsimd.engine.device.cores import Cores, cpu_quota, tokenizer_threads
from maxsimd.engine.device.memory import free_memory

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


@pytest.mark.parametrize(
    ("maxima", "quota"),
    [
        (["200000 100000\n"], 2.0),
        (["50000 100000\n"], 0.5),
        (["max 100000\n"], None),
        (["max 100000\n", "150000 100000\n"], 1.5),
        (["300000 100000\n", "max 100000\n"], 3.0),
        (["300000 100000\n", "100000 50000\n", "max 100000\n"], 2.0),
        ([], None),
        (["nonsense"], None),
    ],
)
def test_version_2_has_the_least_quota_of_all_groups_around(
    tmp_path: Path, maxima: list[str], quota: float | None
) -> None:
    folder, files = "sys/fs/cgroup", {}
    for maximum in maxima:
        folder += "/group"
        files[f"{folder}/cpu.max"] = maximum
    groups = "0::/" + "/".join(["group"] * len(maxima)) + "\n"
    assert cpu_quota(machine(tmp_path, V2.format(root="/"), groups, files)) == quota


@pytest.mark.parametrize(
    ("quotas", "quota"),
    [
        ([("200000", "100000")], 2.0),
        ([("-1", "100000")], None),
        ([("-1", "100000"), ("25000", "50000")], 0.5),
    ],
)
def test_version_1_has_quota_and_period_in_files(
    tmp_path: Path, quotas: list[tuple[str, str]], quota: float | None
) -> None:
    folder, files = "sys/fs/cgroup/cpu,cpuacct", {}
    for us, period in quotas:
        folder += "/group"
        files |= {f"{folder}/cpu.cfs_quota_us": us, f"{folder}/cpu.cfs_period_us": period}
    path = "/" + "/".join(["group"] * len(quotas))
    groups = f"9:name=systemd:/other\n4:cpu,cpuacct:{path}\n0::/\n"
    assert cpu_quota(machine(tmp_path, V1.format(root="/"), groups, files)) == quota


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/inner", "/elsewhere", "/../x"])
def test_a_container_may_have_a_part_of_the_hosts_groups_mounted(tmp_path: Path, path: str) -> None:
    files = {"sys/fs/cgroup/cpu.max": "300000 100000\n", "sys/fs/cgroup/inner/cpu.max": "200000 100000\n"}
    root = machine(tmp_path, V2.format(root="/docker/abc"), f"0::{path}\n", files)
    assert cpu_quota(root) == (2.0 if path.endswith("inner") else 3.0)


def test_there_are_as_many_threads_as_can_always_run() -> None:
    for affinity, quota, threads in ((4, None, 4), (4, 2.0, 2), (4, 1.9, 1), (4, 0.2, 1), (2, 64.0, 2)):
        assert Cores(affinity, quota).threads == threads


@pytest.mark.parametrize(
    ("device", "threads", "expected"), [("cpu", 64, 2), ("cuda", 64, 32), ("cuda", 2, 2), ("xpu", 13, 6)]
)
def test_beside_a_gpu_half_of_the_threads_tokenize(device: str, threads: int, expected: int) -> None:
    assert tokenizer_threads(device, threads) == expected


def test_a_real_quota_is_found(group_of_one_core: Path) -> None:
    program = (
        f"import os; open({str(group_of_one_core / 'cgroup.procs')!r}, 'w').write(str(os.getpid()));"
        "from maxsimd.engine.device.cores import usable_cores; print(usable_cores().quota)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(ran.stdout) == 1.0


GIB = 1024**3
MEMINFO = "MemTotal:       16777216 kB\nMemFree:          100000 kB\nMemAvailable:    8388608 kB\n"


@pytest.mark.parametrize(
    ("meminfo", "groups", "free"),
    [
        (None, {}, None),
        (MEMINFO, {}, 8 * GIB),
        ("nonsense\n", {}, None),
        (MEMINFO, {"a/b": ("max", GIB)}, 8 * GIB),
        (MEMINFO, {"a": (3 * GIB, GIB), "a/b": ("max", GIB)}, 2 * GIB),
        (MEMINFO, {"a/b": (10, 20)}, 0),
    ],
)
def test_free_is_the_least_of_machine_and_groups(
    tmp_path: Path, meminfo: str | None, groups: dict[str, tuple[object, int]], free: int | None
) -> None:
    files = {} if meminfo is None else {"proc/meminfo": meminfo}
    for group, (most, current) in groups.items():
        folder = f"sys/fs/cgroup/{group}/memory"
        files |= {f"{folder}.max": f"{most}\n", f"{folder}.current": f"{current}\n"}
    assert free_memory(machine(tmp_path, V2.format(root="/"), "0::/a/b\n", files)) == free


def test_version_1_has_other_files(tmp_path: Path) -> None:
    mount = V1.format(root="/").replace("cpu,cpuacct", "memory")
    files = {
        "proc/meminfo": MEMINFO,
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{5 * GIB}\n",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    }
    assert free_memory(machine(tmp_path, mount, "4:memory:/a\n0::/\n", files)) == 4 * GIB


@pytest.mark.parametrize(
    ("free", "limit"), [(None, 64), (0, 64), (512 << 20, 64), (16 << 30, 1024), (1 << 40, 4096)]
)
def test_the_default_is_a_part_of_what_is_free(
    free: int | None, limit: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(open_cache, "free_memory", lambda: free)
    with caplog.at_level(logging.DEBUG):
        assert open_cache.memory_limit(EngineConfig()) == limit << 20
    assert f"{limit} MiB" in caplog.text
    assert open_cache.memory_limit(EngineConfig(cache_mb=7)) == 7 << 20
