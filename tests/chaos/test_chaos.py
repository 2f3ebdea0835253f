"""Short versions of the programs, each against a real server: what is promised holds, whatever the speed."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from tests.chaos.disconnects import disconnect
from tests.chaos.faults import disturb
from tests.chaos.fuzz import Strange, _ask
from tests.chaos.poisoned import poison
from tests.chaos.running import Running, running
from tests.chaos.stops import stop
from tests.chaos.traffic import Outcome, Pool, Texts


@pytest.fixture(scope="module")
def server(stanford_colbert: str) -> Iterator[Running]:
    with running(stanford_colbert, "--log-level", "error", "--grace-seconds", "60") as server:
        yield server


@pytest.fixture(scope="module")
def pool(server: Running) -> Pool:
    return Pool.ask(Texts.draw(0, queries=6, documents=100), server.url)


@pytest.mark.exhaustive
async def test_nothing_is_lost_or_wrong_while_things_go_wrong(stanford_colbert: str, pool: Pool) -> None:
    report = await disturb(stanford_colbert, pool, 6, processes=2, pause=0.1)
    assert not report.broken()
    assert report.count(Outcome.RIGHT) > 10
    assert report.count(Outcome.FAILED) > 0
    assert len(report.recoveries()) > 3
    assert report.samples


async def test_exactly_the_poisoned_sequences_fail(server: Running, pool: Pool) -> None:
    found = await poison(server, pool, 500, 8)
    assert not found.broken, str(found)


async def test_a_server_is_as_before_when_clients_have_left(server: Running, pool: Pool) -> None:
    # Memory is measured by the program itself, after thousands of clients.
    found = await disconnect(server, pool, 100, most_growth=1.0)
    assert not found.broken, str(found)


async def test_what_was_accepted_is_answered_when_the_server_stops(server: Running, pool: Pool) -> None:
    ended = await stop(server, pool, 1)
    assert not ended.broken, server.log
    assert any(request.status == 200 for request in ended.requests)


@pytest.mark.parametrize(("sent", "status"), [(b"HTTP/1.1 431 x\r\n\r\n", 431), (b"", 0)])
async def test_the_fuzzer_gets_an_answer_that_came_before_a_reset(sent: bytes, status: int) -> None:
    def answer(listening: socket.socket) -> None:
        with listening, listening.accept()[0] as client:
            client.recv(9)
            client.sendall(sent)  # closing with unread bytes resets the connection

    listening = socket.create_server(("127.0.0.1", 0))
    asking = _ask(listening.getsockname()[1], Strange(b"x" * 9_000_000, complete=True))
    found, _ = await asyncio.gather(asking, asyncio.to_thread(answer, listening))
    assert (found.status, "the connection ended" in found.lost) == (status, not status)
