"""`maxsimd bench cluster-hits`: documents that are found in caches on Ray, also after deaths and growth."""

import asyncio
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from maxsimd.api.cluster.config import AppConfig, serve_yaml
from maxsimd.api.cluster.session import ray_session, require_ray
from maxsimd.api.fleet.fleet_engine import FleetEngine
from maxsimd.api.fleet.roster import Listed, Roster
from maxsimd.api.fleet.spread import Job, Spreader
from maxsimd.bench.datasets import QUERY, docstring_pairs
from maxsimd.bench.load import processes_titled
from maxsimd.bench.report import Figures, run_and_clean_up

# The scorers' caches in MiB, and documents a request.
_CACHE_MB, _DOCUMENTS = 16, 40
# The size of all documents in caches of one scorer; requests that fill caches, and that count.
_WORKING_SET, _FILLING, _COUNTED = 1.5, 400, 120
# After a change, hits are back once this many requests in a row have this share of those before.
_IN_A_ROW, _BACK = 10, 0.95
_NAME = "hits"
_CHANGE_REQUESTS = 600
_ARGS = {"replicas": 2, "cache_mb": _CACHE_MB, "max_batch_tokens": 512, "dtype": "bfloat16"}


# Between looks at the state of Serve.
_LOOK_SECONDS = 0.2


def deploy(name: str, args: dict[str, Any], replicas: int) -> None:
    """Runs an application of `args` on Serve with so many scorers, or changes their number; returns once they
    run. Other `args` than before replace all replicas."""
    from ray import serve
    from ray.serve.context import _get_global_client as get_global_client
    from ray.serve.schema import ServeDeploySchema

    config = yaml.safe_load(serve_yaml(AppConfig.of(args)))
    [application] = config["applications"]
    application |= {"name": name, "route_prefix": f"/{name}"}
    for deployment in application["deployments"]:
        if deployment["name"] == "Scorer":
            deployment["num_replicas"] = replicas
    get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))
    while (status := serve.status().applications[name]).status != "RUNNING":
        if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise RuntimeError(status.message)
        time.sleep(_LOOK_SECONDS)


class AnywhereSpreader(Spreader):
    """Sends each document to a scorer at random."""

    async def run(self, job: Job, least_tokens: int) -> None:
        job.digests = np.random.default_rng().integers(0, 2**64, len(job.digests), dtype=np.uint64)
        await super().run(job, least_tokens)


@dataclass(slots=True)
class _Traffic:
    """Requests whose documents are drawn by Zipf's law."""

    front: FleetEngine
    documents: list[str]
    rng: np.random.Generator

    async def hits(self) -> float:
        """The share of a request's documents that were cached."""
        weights = 1.0 / np.arange(1, len(self.documents) + 1)
        chosen = self.rng.choice(len(self.documents), _DOCUMENTS, replace=False, p=weights / weights.sum())
        result = await self.front.score(QUERY, [self.documents[i] for i in chosen])
        return result.usage.cached_documents / _DOCUMENTS

    async def mean_hits(self, requests: int) -> float:
        return float(np.mean([await self.hits() for _ in range(requests)]))


def measure_cluster_hits(seed: int) -> Figures:
    """Starts Ray and Serve for `_measure_hits`."""
    require_ray()
    with ray_session(None, num_cpus=5):
        from ray import serve

        serve.start(proxy_location="Disabled")
        figures = run_and_clean_up(_measure_hits(seed))
        serve.shutdown()
    return figures


async def _measure_hits(seed: int) -> dict[str, Any]:
    """Shares of documents that were cached, by owner and anywhere, on two scorers; and requests and seconds
    until hits are back after one is killed, and after a third has come."""
    roster = Roster()
    engine = FleetEngine(roster)
    anywhere = FleetEngine(roster, spreader=AnywhereSpreader(roster, 30.0))
    figures: dict[str, Any] = {}
    await asyncio.to_thread(deploy, _NAME, _ARGS, 2)
    _watch(roster)
    try:
        await _deploy(roster, 2)
        documents = await _working_set(engine)
        figures["documents"] = len(documents)
        for name, front in (("anywhere", anywhere), ("by owner", engine)):
            await front.clear_cache()
            traffic = _Traffic(front, documents, np.random.default_rng(seed))
            await traffic.mean_hits(_FILLING)
            figures[f"hits {name}"] = round(await traffic.mean_hits(_COUNTED), 4)
        misses = [1 - figures[f"hits {name}"] for name in ("by owner", "anywhere")]
        figures["misses by owner / anywhere"] = round(misses[0] / misses[1], 3)
        _kill_one(seed)
        figures |= await _until_back(traffic, figures["hits by owner"], "after a death")
        await _deploy(roster, 3)
        figures |= await _until_back(traffic, figures["hits by owner"], "from 2 to 3")
        figures["hits by owner of 3"] = round(await traffic.mean_hits(_COUNTED), 4)
    finally:
        await engine.stop()
    return figures


async def _working_set(front: FleetEngine) -> list[str]:
    """The documents that 1.5 caches of a scorer hold, by their mean tokens."""
    texts = [pair.document for pair in docstring_pairs() if 200 < len(pair.document) < 1_200]
    result = await front.score(QUERY, texts[:200], cache="bypass")
    tokens = (result.usage.prompt_tokens - result.usage.query_tokens) / 200
    width = front.facts.dims[front.facts.score_task]
    of_one = tokens * width * 2  # bytes, in bfloat16
    count = int(_WORKING_SET * _CACHE_MB * 2**20 / of_one)
    assert count <= len(texts), "there are too few docstrings for such caches"
    return texts[:count]


async def _until_back(traffic: _Traffic, before: float, when: str) -> dict[str, Any]:
    """Requests and seconds until hits are back, and the fewest of a request meanwhile."""
    begun = time.perf_counter()
    latest: list[float] = []
    for number in range(1, _CHANGE_REQUESTS + 1):
        latest.append(await traffic.hits())
        if number >= _IN_A_ROW and np.mean(latest[-_IN_A_ROW:]) >= _BACK * before:
            break
    return {
        f"{when}: requests until hits are back": len(latest),
        f"{when}: seconds until hits are back": round(time.perf_counter() - begun, 1),
        f"{when}: fewest hits of a request": round(min(latest), 3),
    }


async def _deploy(roster: Roster, replicas: int) -> None:
    """Runs the application with so many scorers. Returns once all are reached."""
    await asyncio.to_thread(deploy, _NAME, _ARGS, replicas)
    while len(roster.members) != replicas:
        await roster.until_changed()


def _watch(roster: Roster) -> None:
    """Keeps the roster up to date with the scorers on Serve."""
    from ray import serve

    from maxsimd.api.cluster.serve import watch

    loop = asyncio.get_running_loop()

    def changed(listed: list[Listed]) -> None:
        with suppress(RuntimeError):  # the measurement is over
            loop.call_soon_threadsafe(roster.set_listed, listed)

    watch(serve.get_deployment_handle("Scorer", _NAME), changed)
    roster.start()


def _kill_one(seed: int) -> None:
    scorers = processes_titled(f"ray::ServeReplica:{_NAME}:Scorer")
    os.kill(random.Random(seed).choice(scorers), signal.SIGKILL)
