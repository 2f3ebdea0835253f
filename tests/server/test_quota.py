"""A server that may use one core of several."""

from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import StartServer, installed_command


def _join(group: Path) -> None:
    (group / "cgroup.procs").write_text("0")


@pytest.mark.exhaustive  # tests/unit/engine/device/test_machine.py has a real quota, too
@pytest.mark.one_process  # several engines share them, and do not say so
def test_a_server_has_as_many_threads_as_its_quota(
    group_of_one_core: Path, start_server: StartServer, bert_cross_encoder: str
) -> None:
    # This test's own process may have been told how many threads to use.
    program = ("env", "-u", "OMP_NUM_THREADS", installed_command())
    join = partial(_join, group_of_one_core)
    server = start_server(bert_cross_encoder, "--log-level", "debug", program=program, before=join)
    assert httpx.post(server.url + "/rerank", json={"query": "a", "documents": ["b"]}).status_code == 200
    assert "threads for computing: 1 (" in server.log
