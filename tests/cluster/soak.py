"""Kills scorers on Ray under clients, and actors of `maxsimd cluster score`; each row must come out once.
`python -m tests.cluster.soak --out FILE` writes both tables."""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from maxsimd.engine import EngineConfig, SyncEngine
from tests.clients_under_load import DOCUMENTS, Clients, right_scores
from tests.cluster import on_ray
from tests.processes import Process, descendants
from tests.server.conftest import installed_command
from tests.waiting import wait_for


def kill_scorers(name: str, url: str, right: Mapping[str, float], kills: int, seed: int = 0) -> Clients:
    """Kills one of two scorers again and again, and says what clients were answered meanwhile."""
    clients = Clients(url, right)
    rng = random.Random(seed)
    with clients.asking():
        for _ in range(kills):
            time.sleep(rng.uniform(0.5, 2.0))
            scorers = on_ray.replicas(name, "Scorer")
            assert len(scorers) == 2
            on_ray.kill(rng.choice(scorers))
            wait_for(lambda before={*scorers}: bool({*on_ray.replicas(name, "Scorer")} - before), 120)
            wait_for(lambda: on_ray.num_ready(url) == 2, on_ray.READY_SECONDS)
    return clients


def soak_scorers(kills: int, seed: int) -> tuple[str, bool]:
    """A table of what clients were answered while scorers were killed, and whether all of it was right."""
    with on_ray.ray_session() as cluster:
        url = on_ray.deploy("soak", cluster)
        right = right_scores(url, DOCUMENTS)
        begun = time.monotonic()
        clients = kill_scorers("soak", url, right, kills, seed)
        seconds = time.monotonic() - begun
    counts = f"{clients.answered:,} | {len(clients.wrong)} | {len(clients.failed)}"
    head = "scorers killed | clients | seconds | requests answered | wrong, lost or doubled | failed"
    table = _table(head, f"{kills} | 8 | {seconds:.0f} | {counts}")
    return table, clients.answered > 0 and not clients.wrong and not clients.failed


def _table(head: str, row: str) -> str:
    return f"| {head} |\n|{' --- |' * (head.count('|') + 1)}\n| {row} |"


CONFIG = EngineConfig(dtype="float32", score_type="late-interaction")
_OPTIONS = ("--dtype", "float32", "--score-type", "late-interaction", "--replicas", "2", "--resume")
# Processes to kill, each once this part of the output is there.
KILLS = (("actor", 0.2), ("command", 0.5), ("actor", 0.7))
# How far a score may be off: rows are run in other steps, so that sums are rounded elsewhere.
TOLERANCE = 1e-6


def pairs(count: int) -> pa.Table:
    numbers = range(count)
    queries = [f"which train calls at {i % 997}" for i in numbers]
    documents = [f"train {i % 1009} leaves at {i % 1439}" for i in numbers]
    return pa.table({"id": [f"row {i}" for i in numbers], "query": queries, "document": documents})


def direct_scores(rows: pa.Table) -> list[float]:
    queries, documents = rows["query"].to_pylist(), rows["document"].to_pylist()
    scores: list[float] = []
    with SyncEngine(CONFIG, progress=False) as engine:
        for i in range(0, len(queries), 10_000):
            scores += engine.score(queries[i : i + 10_000], documents[i : i + 10_000]).scores
    return scores


def score_with_kills(source: Path, out: Path, batch_size: int, kills: Any, seed: int = 0) -> list[Any]:
    """Runs the command until it ends by itself; says what was killed, and after how many rows."""
    shards = -(-parquet.read_metadata(source).num_rows // batch_size)
    options = (*_OPTIONS, "--batch-size", str(batch_size))
    left, killed, choose = list(kills), [], random.Random(seed)
    # The names of Ray's sockets must be short.
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as temporary:
        status: int | None = -signal.SIGKILL
        while status == -signal.SIGKILL:
            with _run(source, out, options, temporary) as (process, family):
                while left and process.poll() is None:
                    what, part = left[0]
                    wait_for(lambda: process.poll() is not None or _written(out) >= part * shards, 900)  # noqa: B023
                    family |= set(descendants(process.pid))
                    actors = sorted(each.pid for each in family if _is_actor(each) and each.is_there)
                    victims = actors if what == "actor" else [process.pid]
                    if victims:  # else they are just being started again
                        os.kill(choose.choice(victims), signal.SIGKILL)
                        killed.append((what, _written(out) * batch_size))
                        del left[0]
                        if what == "command":
                            process.wait()
                status = process.wait()
        if status != 0:
            raise RuntimeError(f"the command has ended with {status}")
    return killed


@contextmanager
def _run(source: Path, out: Path, options: Sequence[str], temporary: str) -> Iterator[Any]:
    """The command, and a set for what it has started, which is killed in the end."""
    family: set[Process] = set()
    process = subprocess.Popen(
        [installed_command(), "cluster", "score", str(source), str(out), *options],
        env={**os.environ, "TMPDIR": temporary},
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process, family
    finally:
        process.kill()
        family |= set(descendants(process.pid))
        process.wait()
        wait_for(lambda: not any(each.is_there for each in family if _is_actor(each)), 60)
        for each in family:
            # Ray's agents look only now and then whether what they belong to is there.
            if each.is_there:
                os.kill(each.pid, signal.SIGKILL)


def _written(out: Path) -> int:
    return len(list(out.glob("part-*.parquet")))


def _is_actor(process: Process) -> bool:
    """Ray names an actor's process by what it runs."""
    return process.title.startswith("ray::MapWorker(MapBatches(ScoreShards))")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Rows that are not in the output, that are there more than once, and that have another score or none."""

    missing: int
    doubled: int
    wrong: int
    is_in_order: bool


def compare(rows: pa.Table, out: Path, scores: Sequence[float]) -> Verdict:
    """`scores` are those of the rows, in their order."""
    found = parquet.read_table(out)
    ids = found["id"].to_pylist()
    times = Counter(ids)
    expected = dict(zip(rows["id"].to_pylist(), scores, strict=True))
    given = list(zip(ids, found["score"].to_pylist(), strict=True))

    def is_wrong(score: float | None, right: float) -> bool:
        return score is None or abs(score - right) > TOLERANCE * max(1, abs(right))

    wrong = sum(is_wrong(score, expected[id_]) for id_, score in given)
    doubled = sum(count - 1 for count in times.values())
    return Verdict(len(expected.keys() - times.keys()), doubled, wrong, is_in_order=ids == list(expected))


def soak_rows(count: int, batch_size: int, seed: int) -> tuple[str, bool]:
    """A table of rows scored while actors and the command are killed, and whether all are right."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "in.parquet"), Path(folder, "out")
        rows = pairs(count)
        parquet.write_table(rows, source)
        start = time.monotonic()
        killed = score_with_kills(source, out, batch_size, KILLS, seed)
        seconds = time.monotonic() - start
        verdict = compare(rows, out, direct_scores(rows))
        tokens = sum(parquet.read_table(out)["prompt_tokens"].to_pylist())
    deaths = ", ".join(f"{what} at {rows:,}" for what, rows in killed)
    numbers = f"{verdict.missing} | {verdict.doubled} | {verdict.wrong}"
    head = "rows | tokens | seconds | killed | missing | doubled | wrong"
    table = _table(head, f"{count:,} | {tokens:,} | {seconds:.0f} | {deaths} | {numbers}")
    return table, not (verdict.missing or verdict.doubled or verdict.wrong)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(os.devnull), help="A Markdown file.")
    options = parser.parse_args()
    of_kills, kills_are_right = soak_scorers(options.kills, options.seed)
    print(of_kills, flush=True)
    of_rows, rows_are_right = soak_rows(options.rows, 1_000, options.seed)
    print(of_rows)
    options.out.write_text(
        "# What was lost while processes were killed, on Ray\n\n"
        f"`make soak-cluster`, seed {options.seed}: late interaction, the embedded model, float32.\n\n"
        "`maxsimd cluster serve`, two scorers, eight clients with requests of up to 24 documents:\n\n"
        f"{of_kills}\n\n`maxsimd cluster score`, two actors:\n\n{of_rows}\n"
    )
    return int(not (kills_are_right and rows_are_right))


if __name__ == "__main__":
    sys.exit(main())
