"""Processes of clients under load, seen from outside: they are started, stopped and resumed, and what
became of their requests is collected."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from tests.chaos.client import Record
from tests.chaos.running import ROOT
from tests.chaos.traffic import Outcome

# For how long after a client went on something may still be wrong with its connections.
_RECOVERY_SECONDS = 1.0


class Crowd:
    """Several processes, and all that they have reported so far."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.processes: list[asyncio.subprocess.Process] = []
        # By process, when it stood still: from, to.
        self._stops: list[list[tuple[float, float]]] = []

    async def start(self, url: str, pool: Path, *options: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.client", url, str(pool), *options),
            *("--seed", str(len(self.processes))),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        self.processes.append(process)
        self._stops.append([])

    async def collect(self, number: int) -> None:
        """Reads what a process reports until it ends."""
        reported = self.processes[number].stdout
        assert reported is not None
        async for line in reported:
            self.records.append(replace(Record(**json.loads(line)), client=number))

    async def stand_still(self, number: int, seconds: float) -> None:
        """Stops a process for a while, as a machine does that is overloaded or a notebook that is closed."""
        begun = asyncio.get_running_loop().time()
        self.processes[number].send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.processes[number].send_signal(signal.SIGCONT)
        self._stops[number].append((begun, asyncio.get_running_loop().time()))

    def end(self) -> None:
        """Has all clients finish what they are at, and leave."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()

    def judged(self) -> list[Record]:
        """The records, where what a client lost because it stood still counts as abandoned."""
        return [self._judged(record) for record in self.records]

    def _judged(self, record: Record) -> Record:
        is_cut = record.outcome == Outcome.LOST.value or record.status == 408
        if is_cut and self._was_disturbed(record):
            return replace(record, outcome=Outcome.ABANDONED.value)
        return record

    def _was_disturbed(self, record: Record) -> bool:
        return any(
            record.sent < end + _RECOVERY_SECONDS and begun < record.done
            for begun, end in self._stops[record.client]
        )


@asynccontextmanager
async def crowd(url: str, pool: Path, processes: int, *options: str) -> AsyncIterator[Crowd]:
    """Under load from here on; in the end all clients have finished."""
    crowd = Crowd()
    try:
        for _ in range(processes):
            await crowd.start(url, pool, *options)
        async with asyncio.TaskGroup() as group:
            for number in range(processes):
                group.create_task(crowd.collect(number))
            yield crowd
            crowd.end()
        for process in crowd.processes:
            await process.wait()
    finally:
        for process in crowd.processes:
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                await process.wait()
