"""Times the model's forward pass on steps of given sizes."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import click
import numpy as np
import torch

from maxsimd.bench.gpu.first_day.found import show
from maxsimd.bench.gpu.first_day.model import JINA, MODERNBERT, SMALL, XLM_ROBERTA, checkpoint
from maxsimd.bench.gpu.trace import busy_share
from maxsimd.bench.timing import timings
from maxsimd.engine import EngineConfig
from maxsimd.engine.device.load import DeviceModel, load_device_model
from maxsimd.engine.execution.self_check.proof import step_of
from maxsimd.scheduler import ResultSlot, Step, Tokens, TokenSequence

_MODELS = {"jina": JINA, "xlm-roberta": XLM_ROBERTA, "modernbert": MODERNBERT}
_STEPS = ((128, 128), (32, 512), (16, 1024), (8, 2048), (1, 512), (2, 1024))
_DRY = ((2, 8), (1, 16))
_LONGEST_NAMES = 90


@click.command()
@click.argument("model", type=click.Choice(list(_MODELS)))
@click.option("--rounds", default=8, show_default=True)
@click.option("--dry", is_flag=True, help="A tiny model on the CPU.")
def main(model: str, rounds: int, dry: bool) -> None:
    """Prints tokens a second, milliseconds of the device and of the host that launches, and the longest
    kernels."""
    shape = SMALL if dry else _MODELS[model]
    config = EngineConfig(model=checkpoint(shape), device="cpu" if dry else "cuda")
    loaded = _loaded(model, config)
    device = loaded.device
    for count, tokens in _DRY if dry else _STEPS:
        run = partial(loaded.runner.forward, _step(loaded, count, tokens))
        taken = timings({model: run}, device, 1 if dry else rounds)[model]
        title = f"forward, {model}, as it is, {count} x {tokens:,} tokens"
        show(f"{title}: ms", round(taken.streamed * 1e3, 4))
        show(f"{title}: alone_ms", round(taken.alone * 1e3, 4))
        show(f"{title}: tokens_per_s", round(count * tokens / taken.streamed))
        if device.type == "cuda":
            show(f"{title}: host_ms", round(_host_seconds(run) * 1e3, 4))
            for figure, value in _kernels(run, shape.layers):
                show(f"{title}: {figure}", value)


def _loaded(model: str, config: EngineConfig) -> DeviceModel:
    started = time.perf_counter()
    loaded = load_device_model(config)
    title = f"forward, {model}"
    show(f"{title}: seconds to load", round(time.perf_counter() - started, 2))
    show(f"{title}: attention", loaded.attention)
    show(f"{title}: runner", type(loaded.runner).__name__)
    return loaded


def _step(model: DeviceModel, count: int, tokens: int) -> Step:
    """A step of whole sequences of random tokens."""
    random = np.random.default_rng(0)
    ids = random.integers(1000, 20_000, (count, tokens)).astype(np.int32)
    sequences = [
        TokenSequence.text(i, ResultSlot(0, i), model.model.score_task, Tokens(row, np.zeros_like(row)))
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
