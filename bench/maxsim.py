"""MaxSim alone: our backend beside the package maxsim-cpu, where it is installed, in turns."""

import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np
import torch

from maxsimd.bench.report import write_json
from maxsimd.engine.scoring.maxsim import choose_maxsim, maxsim_reference
from maxsimd.pooling.ragged import Ragged

PEER = "maxsim-cpu float32"


def measure_maxsim(documents: int, dim: int, rounds: int, json_file: str | None) -> None:
    """Prints what `time_maxsim` finds."""
    figures = time_maxsim(documents, dim, rounds)
    for name, figure in figures["contenders"].items():
        click.echo(f"  {name:<22}{figure['ms']:>10} ms   largest error {figure['largest_error']:.1e}")
    if PEER not in figures["contenders"]:
        click.echo("maxsim-cpu is not installed and is left out (pip install --no-deps maxsim-cpu)")
    for name, ratio in figures["ratios"].items():
        click.echo(f"  {ratio:.2f} times maxsim-cpu: {name}")
    if json_file:
        write_json(json_file, {"settings": {"documents": documents, "dim": dim}, "figures": figures})


def time_maxsim(documents: int, dim: int, rounds: int) -> dict[str, Any]:
    """One query of 32 tokens against ragged documents of 20 to 340; medians of `rounds` turns, and of the
    ratios to maxsim-cpu turn by turn."""
    torch.manual_seed(0)
    lengths = np.random.default_rng(0).integers(20, 341, documents).tolist()
    rows = torch.nn.functional.normalize(torch.randn(sum(lengths), dim), dim=-1)
    query = torch.nn.functional.normalize(torch.randn(32, dim), dim=-1)
    pairs = np.column_stack([np.zeros(documents, dtype=np.int64), np.arange(documents)])
    exact = maxsim_reference(Ragged(query, (0, 32)), Ragged.from_lengths(rows, lengths), pairs)

    def ours(dtype: torch.dtype) -> Callable[[], Any]:
        _, maxsim = choose_maxsim("auto", torch.device("cpu"))
        queries = Ragged(query.to(dtype), (0, 32))
        packed = Ragged.from_lengths(rows.to(dtype), lengths)
        return lambda: maxsim(queries, packed, pairs)

    contenders = {"maxsimd bfloat16": ours(torch.bfloat16), "maxsimd float32": ours(torch.float32)}
    try:
        peer: Any = importlib.import_module("maxsim_cpu")
    except ImportError:
        pass
    else:
        separate, plain = [part.numpy() for part in rows.split(lengths)], query.numpy()
        contenders[PEER] = lambda: peer.maxsim_scores_variable(plain, separate)

    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            if turn:  # the first warms up
                seconds[name].append(time.perf_counter() - started)
    figures = {
        name: {
            "ms": round(statistics.median(seconds[name]) * 1e3, 2),
            "largest_error": float(np.abs(np.asarray(run()) - exact.numpy()).max()),
        }
        for name, run in contenders.items()
    }
    ratios = {}
    if PEER in contenders:
        for name in contenders.keys() - {PEER}:
            by_turn = (theirs / ours for theirs, ours in zip(seconds[PEER], seconds[name], strict=True))
            ratios[name] = round(statistics.median(by_turn), 2)
    return {"tokens": sum(lengths), "contenders": figures, "ratios": dict(sorted(ratios.items()))}
