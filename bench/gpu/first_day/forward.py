"""Times the model's forward pass on steps of given sizes, with and without what makes it faster, in turns."""

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest import mock

import click
import numpy as np
import torch

from maxsimd.bench.gpu.first_day.found import show
from maxsimd.bench.gpu.first_day.model import JINA, MODERNBERT, SMALL, XLM_ROBERTA, checkpoint
from maxsimd.bench.gpu.trace import busy_share
from maxsimd.bench.timing import timings
from maxsimd.engine import EngineConfig
from maxsimd.engine.device.load import DeviceModel, load_device_model
from maxsimd.engine.execution.fused_layers import linears
from maxsimd.engine.execution.selfcheck.proof import step_of
from maxsimd.scheduler import ResultSlot, Sequence, Step, Tokens

_MODELS = {"jina": JINA, "xlm-roberta": XLM_ROBERTA, "modernbert": MODERNBERT}
_STEPS = ((128, 128), (32, 512), (16, 1024), (8, 2048), (1, 512), (2, 1024))
_DRY = ((2, 8), (1, 16))
_LONGEST_NAMES = 90
# The module; the package offers its function by the same name.
_PREPARE = "maxsimd.engine.execution.prepare"


@click.command()
@click.argument("model", type=click.Choice(list(_MODELS)))
@click.argument("variants", nargs=-1)
@click.option("--rounds", default=8, show_default=True)
@click.option("--dry", is_flag=True, help="A tiny model on the CPU.")
def main(model: str, variants: tuple[str, ...], rounds: int, dry: bool) -> None:
    """Prints, of each of the VARIANTS (by default the model as it is), tokens a second, milliseconds of the
    device and of the host that launches, and the longest kernels."""
    shape = SMALL if dry else _MODELS[model]
    config = EngineConfig(model=checkpoint(shape), device="cpu" if dry else "cuda")
    loaded = {name: _loaded(model, name, config) for name in variants or ("as it is",)}
    device = next(iter(loaded.values())).device
    for count, tokens in _DRY if dry else _STEPS:
        of_step = f"{count} x {tokens:,} tokens"
        step = _step(next(iter(loaded.values())), count, tokens)
        runs = {name: partial(each.prepared.runner.forward, step) for name, each in loaded.items()}
        for name, taken in timings(runs, device, 1 if dry else rounds).items():
            title = f"forward, {model}, {name}, {of_step}"
            show(f"{title}: ms", round(taken.streamed * 1e3, 4))
            show(f"{title}: alone_ms", round(taken.alone * 1e3, 4))
            show(f"{title}: tokens_per_s", round(count * tokens / taken.streamed))
            if device.type == "cuda":
                show(f"{title}: host_ms", round(_host_seconds(runs[name]) * 1e3, 4))
                for figure, value in _kernels(runs[name], shape.layers):
                    show(f"{title}: {figure}", value)


def _loaded(model: str, variant: str, config: EngineConfig) -> DeviceModel:
    started = time.perf_counter()
    with VARIANTS[variant]():
        loaded = load_device_model(config)
    title = f"forward, {model}, {variant}"
    show(f"{title}: seconds to load", round(time.perf_counter() - started, 2))
    show(f"{title}: attention", loaded.prepared.attention)
    show(f"{title}: runner", type(loaded.prepared.runner).__name__)
    return loaded


def _unfused() -> AbstractContextManager[object]:
    return mock.patch.object(importlib.import_module(_PREPARE), "_may_fuse", return_value=False)


def _gelu_apart() -> AbstractContextManager[object]:
    return mock.patch.object(linears, "joins_gelu", return_value=False)


# How a model is loaded otherwise than as it is, by name.
VARIANTS: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "as it is": nullcontext,
    "unfused": _unfused,
    "without GELU in products": _gelu_apart,
}


def _step(model: DeviceModel, count: int, tokens: int) -> Step:
    """A step of whole sequences of random tokens."""
    random = np.random.default_rng(0)
    ids = random.integers(1000, 20_000, (count, tokens)).astype(np.int32)
    sequences = [
        Sequence.text(i, ResultSlot(0, i), model.model.score_task, Tokens(row, np.zeros_like(row)))
        for i, row in enumerate(ids)
    ]
    return step_of(sequences)


def _host_seconds(run: Callable[[], object]) -> float:
    """Median seconds until the host has launched a step."""
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return statistics.median(seconds)


def _kernels(run: Callable[[], object], layers: int) -> Iterator[tuple[str, float]]:
    """Prints the kernels that take longest; yields milliseconds of all in a step, launches, and the gaps
    between them."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    spans = []
    for event in profiler.events() or ():
        if str(event.device_type) == "DeviceType.CUDA":
            times.setdefault(event.name, []).append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:14]:
        print(f"  {sum(each) / 3e3:8.3f} ms  {len(each) // 3:5d} x  {name[:_LONGEST_NAMES]}")
    yield "kernels_ms", round(sum(map(sum, times.values())) / 3e3, 4)
    launches = sum(len(each) for name, each in times.items() if not name.startswith(("Memcpy", "Memset")))
    yield "launches_a_layer", round(launches / 3 / layers, 1)
    gaps = busy_share(spans)
    for figure in ("gap_median_us", "longest_gap_us"):
        if figure in gaps:
            yield figure, gaps[figure]


if __name__ == "__main__":
    main()
