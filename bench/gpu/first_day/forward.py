"""Times the model's forward pass on steps of given sizes: on the device, and on the host that launches it."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import click
import numpy as np
import torch

from maxsimd.bench.gpu.first_day.found import NOT_HERE, show
from maxsimd.bench.gpu.first_day.model import LARGE, SMALL, checkpoint
from maxsimd.engine import EngineConfig
from maxsimd.engine.device.load import DeviceModel, load_device_model
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution.selfcheck.proof import step_of
from maxsimd.scheduler import ResultSlot, Sequence, Step, Tokens

_FULL = ((128, 128), (32, 512), (16, 1024), (8, 2048))
# Steps in which launching takes longer than what is launched.
_SMALL_STEPS = ((1, 512), (1, 1024), (2, 1024), (4, 1024))
_DRY = ((2, 8), (1, 16))
_LONGEST_NAMES = 90


@click.command()
@click.option("--attention", default="auto", show_default=True)
@click.option("--graphs", type=click.Choice(["auto", "off"]), default="auto", show_default=True)
@click.option("--small-steps", is_flag=True, help="Steps of 512 to 4,096 tokens instead of 16,384.")
@click.option("--rounds", default=20, show_default=True)
@click.option("--dry", is_flag=True, help="A tiny model on the CPU.")
def main(attention: str, graphs: str, small_steps: bool, rounds: int, dry: bool) -> None:
    """Prints tokens a second, milliseconds of device and host, and the longest kernels."""
    shape = SMALL if dry else LARGE
    config = EngineConfig(
        model=checkpoint(shape),
        device="cpu" if dry else "cuda",
        attention=attention,  # type: ignore[arg-type]
        cuda_graphs=graphs,  # type: ignore[arg-type]
    )
    started = time.perf_counter()
    try:
        model = load_device_model(config)
    except ModelLoadError as error:
        print(error)
        raise SystemExit(NOT_HERE if "cannot run on this" in str(error) else 1) from error
    name = "without graphs" if graphs == "off" else attention
    load = f"{name}, small steps" if small_steps else name
    show(f"forward, {load}: seconds to load", round(time.perf_counter() - started, 2))
    show(f"forward, {load}: attention", model.prepared.attention)
    show(f"forward, {load}: runner", type(model.prepared.runner).__name__)
    for count, tokens in _DRY if dry else _SMALL_STEPS if small_steps else _FULL:
        step = _step(model, count, tokens)
        taken = _measure(partial(model.prepared.runner.forward, step), model.device, 1 if dry else rounds)
        of_step = f"forward, {name}, {count} x {tokens:,} tokens"
        show(f"{of_step}: ms", round(taken.streamed * 1e3, 4))
        show(f"{of_step}: host_ms", round(taken.host * 1e3, 4))
        show(f"{of_step}: host_share", round(taken.host / taken.streamed, 3))
        show(f"{of_step}: tokens_per_s", round(count * tokens / taken.streamed))
        if model.device.type == "cuda":
            for figure, value in _kernels(model, step, shape.layers):
                show(f"{of_step}: {figure}", value)


def _step(model: DeviceModel, count: int, tokens: int) -> Step:
    """A step of whole sequences of random tokens."""
    random = np.random.default_rng(0)
    ids = random.integers(1000, 20_000, (count, tokens)).astype(np.int32)
    sequences = [
        Sequence.text(i, ResultSlot(0, i), model.model.score_task, Tokens(row, np.zeros_like(row)))
        for i, row in enumerate(ids)
    ]
    return step_of(sequences)


@dataclass(frozen=True, slots=True)
class _Taken:
    """Median seconds: of a step among others without a gap, and until the host has launched one."""

    streamed: float
    host: float


def _measure(run: Callable[[], object], device: torch.device, rounds: int) -> _Taken:
    wait = torch.cuda.synchronize if device.type == "cuda" else _no_wait
    for _ in range(3):
        run()
    host, streamed = [], []
    for _ in range(rounds):
        wait()
        started = time.perf_counter()
        run()
        host.append(time.perf_counter() - started)
    for _ in range(max(1, rounds // 4)):
        wait()
        started = time.perf_counter()
        for _ in range(4):
            run()
        wait()
        streamed.append((time.perf_counter() - started) / 4)
    return _Taken(statistics.median(streamed), statistics.median(host))


def _no_wait() -> None:
    """A CPU is done when the call returns."""


def _kernels(model: DeviceModel, step: Step, layers: int) -> Iterator[tuple[str, float]]:
    """Prints the kernels that take longest; yields milliseconds of all in a step, and launches."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            model.prepared.runner.forward(step)
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profiler.events() or ():
        if str(event.device_type) == "DeviceType.CUDA":
            times.setdefault(event.name, []).append(event.time_range.elapsed_us())
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:20]:
        print(f"  {sum(each) / 3e3:8.3f} ms  {len(each) // 3:5d} x  {name[:_LONGEST_NAMES]}")
    yield "kernels_ms", round(sum(map(sum, times.values())) / 3e3, 4)
    launches = sum(len(each) for name, each in times.items() if not name.startswith(("Memcpy", "Memset")))
    yield "launches", launches / 3
    yield "launches_a_layer", round(launches / 3 / layers, 1)


if __name__ == "__main__":
    main()
