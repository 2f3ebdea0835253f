"""MaxSim alone: our CPU backend beside the package maxsim-cpu, where it is installed, in turns."""

import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np
import torch

from maxsimd.bench.report import write_json
from maxsimd.pooling.maxsim import maxsim_cpu, maxsim_reference
from maxsimd.pooling.ragged import Ragged


def measure_maxsim(documents: int, dim: int, rounds: int, json_file: str | None) -> None:
    """One query of 32 tokens against ragged documents of 20 to 340; medians of `rounds` turns."""
    torch.manual_seed(0)
    lengths = np.random.default_rng(0).integers(20, 341, documents).tolist()
    rows = torch.nn.functional.normalize(torch.randn(sum(lengths), dim), dim=-1)
    query = torch.nn.functional.normalize(torch.randn(32, dim), dim=-1)
    pairs = [(0, i) for i in range(documents)]
    exact = maxsim_reference(Ragged(query, (0, 32)), Ragged.from_lengths(rows, lengths), pairs)

    def ours(dtype: torch.dtype) -> Callable[[], Any]:
        queries = Ragged(query.to(dtype), (0, 32))
        packed = Ragged.from_lengths(rows.to(dtype), lengths)
        return lambda: maxsim_cpu(queries, packed, pairs)

    contenders = {"maxsimd bfloat16": ours(torch.bfloat16), "maxsimd float32": ours(torch.float32)}
    try:
        peer: Any = importlib.import_module("maxsim_cpu")
    except ImportError:
        click.echo("maxsim-cpu is not installed and is left out (pip install --no-deps maxsim-cpu)")
    else:
        separate, plain = [part.numpy() for part in rows.split(lengths)], query.numpy()
        contenders["maxsim-cpu float32"] = lambda: peer.maxsim_scores_variable(plain, separate)

    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    figures: dict[str, Any] = {"tokens": sum(lengths)}
    for name, run in contenders.items():
        error = float(np.abs(np.asarray(run()) - exact.numpy()).max())
        figures[name] = {"ms": round(statistics.median(seconds[name][1:]) * 1e3, 2), "largest_error": error}
        click.echo(f"  {name:<22}{figures[name]['ms']:>10} ms   largest error {error:.1e}")
    if "maxsim-cpu float32" in figures:
        base = figures["maxsim-cpu float32"]["ms"]
        for name in ("maxsimd bfloat16", "maxsimd float32"):
            click.echo(f"  {base / figures[name]['ms']:.2f} times maxsim-cpu: {name}")
    if json_file:
        write_json(json_file, {"settings": {"documents": documents, "dim": dim}, "figures": figures})
