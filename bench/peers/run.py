"""The run: which systems, which experiments, and the figures that come of them."""

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch

from maxsimd.bench.maxsim import time_maxsim
from maxsimd.bench.peers import machine
from maxsimd.bench.peers.alone import ALONE
from maxsimd.bench.peers.checkpoints import save_colbert, save_cross_encoder
from maxsimd.bench.peers.experiments import Arena, Contest, Load, Outcome
from maxsimd.bench.peers.names import CROSS_ENCODER, EXPERIMENTS
from maxsimd.bench.peers.systems import SentenceTransformers, System, maxsimd, vllm

OURS = "maxsimd bfloat16"
# The last word of a name is its precision.
BEFORE = "maxsimd before, bfloat16"
QUANTIZED = "maxsimd int8"

DOCUMENTS = (1, 10, 100, 1000)
CONCURRENCY = (1, 2, 4, 8, 16, 32)
# Curves are for the eye: fewer rounds do.
CURVE_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Results:
    """All figures of a run. `limits` are what the machine can do; `products` are the GFLOP that a token costs
    in matrix products, by experiment; `alone` are the experiments in which no peer takes part."""

    limits: dict[str, float]
    products: dict[str, float]
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    maxsim: dict[str, Any] = field(default_factory=dict)
    alone: dict[str, dict[str, Any]] = field(default_factory=dict)


async def run_peers(
    wanted: frozenset[str], rounds: int, vllm_executable: str | None, threads: int, before: str | None
) -> Results:
    """Runs the experiments one after another; `before`, the command of another version, takes the
    place of sentence-transformers. Systems that cannot be started end the run with an error."""
    small, large = _bert_products(6, 384), _bert_products(12, 768)
    results = Results(_limits(), {"cross-encoder": small, "pairs": small, "colbert": large})
    servers: list[System] = [maxsimd(OURS), maxsimd(QUANTIZED, "--quantization", "int8")]
    if before is not None:
        servers.insert(1, maxsimd(BEFORE, executable=before))
    if vllm_executable is None:
        click.echo("vLLM is left out: name its executable with --vllm (see --help)", err=True)
    else:
        servers.append(vllm(vllm_executable, f"0-{threads - 1}"))
    with tempfile.TemporaryDirectory() as folder:
        if wanted & set(CROSS_ENCODER):
            plain = [
                SentenceTransformers(f"sentence-transformers {dtype}", dtype)
                for dtype in ("bfloat16", "float32")
                if before is None
            ]
            checkpoint = save_cross_encoder(Path(folder, "cross-encoder"))
            await _contest([*servers, *plain], checkpoint, wanted & set(CROSS_ENCODER), rounds, results)
        if "colbert" in wanted:
            checkpoint = save_colbert(Path(folder, "colbert"))
            await _contest(servers, checkpoint, frozenset({"colbert"}), rounds, results)
    if "maxsim" in wanted:
        results.maxsim.update(await asyncio.to_thread(time_maxsim, 1000, 128, 25))
    for name, measure in ALONE.items():
        if name in wanted:
            click.echo(f"  {name}", err=True)
            results.alone[name] = await measure(rounds)
    # Again, in case something else was still running at first: a machine is never faster than it is.
    for name, value in _limits().items():
        results.limits[name] = max(value, results.limits[name])
    return results


async def _contest(
    systems: list[System], checkpoint: str, wanted: frozenset[str], rounds: int, results: Results
) -> None:
    arena = Arena(systems)
    try:
        contest = await arena.enter(checkpoint)
        for experiment in EXPERIMENTS:
            if experiment in wanted:
                click.echo(f"  {experiment}", err=True)
                results.outcomes[experiment] = await _run(experiment, contest, systems, rounds)
    finally:
        await arena.close()


async def _run(experiment: str, contest: Contest, systems: list[System], rounds: int) -> list[Outcome]:
    served = frozenset(system.name for system in systems if not isinstance(system, SentenceTransformers))
    if experiment == "cross-encoder":
        return [await contest.run(Load(8, 100, 8), rounds)]
    if experiment == "pairs":
        return [await contest.run(Load(1, 200, 1, paired=True), rounds)]
    if experiment == "colbert":
        return [await contest.run(Load(4, 50, 4), rounds)]
    if experiment == "single":
        return [await contest.run(Load(50, 1, 1), rounds, served)]
    if experiment == "documents":
        loads = [Load(max(1, min(100, 800 // count)), count, 8) for count in DOCUMENTS]
    else:
        loads = [Load(4 * max(4, concurrency), 10, concurrency) for concurrency in CONCURRENCY]
    return [await contest.run(load, CURVE_ROUNDS, served) for load in loads]


def _limits() -> dict[str, float]:
    limits = {
        str(dtype).removeprefix("torch."): machine.product_peak(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.int8)
    }
    return {**limits, "copy": machine.copy_bandwidth()}


def _bert_products(layers: int, width: int) -> float:
    """GFLOP a token in the linear layers of a BERT: four projections and a feed-forward of four times the
    width, two operations a weight. Attention comes on top and is not counted."""
    return 2 * layers * (4 + 8) * width * width / 1e9
