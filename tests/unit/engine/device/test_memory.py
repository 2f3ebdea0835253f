"""How much memory a cache takes by default, by what the kernel says is free."""

import logging
from pathlib import Path

import pytest

from maxsimd.engine import EngineConfig
from maxsimd.engine.device import open_cache
from maxsimd.engine.device.memory import free_memory
from tests.unit.engine.device.test_cores import V1, V2, machine

GIB = 1024**3
MEMINFO = "MemTotal:       16777216 kB\nMemFree:          100000 kB\nMemAvailable:    8388608 kB\n"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        ({"proc/meminfo": MEMINFO}, 8 * GIB),
        ({"proc/meminfo": "nonsense\n"}, None),
        ({"proc/meminfo": MEMINFO, "sys/fs/cgroup/a/b/memory.max": "max\n"}, 8 * GIB),
        (
            {
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/a/memory.max": f"{3 * GIB}\n",
                "sys/fs/cgroup/a/memory.current": f"{GIB}\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": f"{GIB}\n",
            },
            2 * GIB,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/a/b/memory.max": "10\n",
                "sys/fs/cgroup/a/b/memory.current": "20\n",
            },
            0,
        ),
    ],
)
def test_free_is_the_least_of_machine_and_groups(
    tmp_path: Path, files: dict[str, str], free: int | None
) -> None:
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
