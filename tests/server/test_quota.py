"""A server that may use one core of several."""

from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import StartServer


def _join(group: Path) -> None:
    (group / "cgroup.procs").write_text("0")


@pytest.mark.parametrize("threads", [None, 2])
def test_a_server_has_as_many_threads_as_its_quota_unless_told_otherwise(
    start_server: StartServer, group_of_one_core: Path, threads: int | None
) -> None:
    options = [] if threads is None else ["--threads", str(threads)]
    server = start_server("--dtype", "float32", *options, before=partial(_join, group_of_one_core))
    assert httpx.post(server.url + "/rerank", json={"query": "a", "documents": ["b"]}).status_code == 200
    assert ("threads for computing: 1 (" in server.log) == (threads is None)
    assert server.terminate() == 0
