"""Scorers on Ray that are killed at random moments under eight clients. `python -m tests.cluster.kills` kills
50 of them and prints a table."""

import argparse
import random
import sys
import time
from collections.abc import Mapping

from maxsimd.bench.datasets import docstring_pairs
from tests.clients_under_load import Clients, right_scores
from tests.cluster import on_ray
from tests.waiting import wait_for

# More than one step, so that requests are spread.
DOCUMENTS = [pair.document for pair in docstring_pairs() if len(pair.document) > 200][:60]


def kill_scorers(name: str, url: str, right: Mapping[str, float], kills: int, seed: int = 0) -> Clients:
    """Kills one of two scorers of an application, that many times, and waits each time until there are two
    again; the clients say what they were answered meanwhile."""
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


def soak(kills: int, seed: int) -> tuple[str, bool]:
    """A table of what clients were answered while scorers were killed, and whether all of it was right."""
    with on_ray.ray_session() as cluster:
        url = on_ray.deploy("soak", cluster)
        right = right_scores(url, DOCUMENTS)
        begun = time.monotonic()
        clients = kill_scorers("soak", url, right, kills, seed)
        seconds = time.monotonic() - begun
    counts = f"{clients.answered:,} | {len(clients.wrong)} | {len(clients.failed)}"
    table = (
        "| scorers killed | clients | seconds | requests answered | wrong, lost or doubled | failed |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        f"| {kills} | 8 | {seconds:.0f} | {counts} |"
    )
    return table, clients.answered > 0 and not clients.wrong and not clients.failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    table, is_right = soak(options.kills, options.seed)
    print(table)
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
