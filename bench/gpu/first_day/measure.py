"""The measuring steps of a day on a GPU: `python -m maxsimd.bench.gpu.first_day.measure STEP`."""

import dataclasses
import importlib.metadata
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import torch

from maxsimd.bench.gpu import kernels
from maxsimd.bench.gpu.first_day.processes import Value, show, show_all
from maxsimd.bench.gpu.kernels import OURS, MaxSimShape
from maxsimd.bench.gpu.serving import WORKLOADS, Shape, Workload, busy_share, measure_serving, save_colbert
from maxsimd.bench.report import machine, run_and_clean_up
from maxsimd.engine import EngineConfig
from maxsimd.engine.device.load import DeviceModel, load_device_model
from maxsimd.engine.execution.self_check.proof import step_of
from maxsimd.scheduler import ResultSlot, Step, Tokens, TokenSequence


@click.group()
def main() -> None:
    """The measuring steps of a day on a GPU."""


# jina-colbert-v2; a ColBERT on XLM-RoBERTa large, as bge-m3 is; GTE-ModernColBERT.
JINA = Shape()
XLM_ROBERTA = Shape(family="xlm-roberta")
MODERNBERT = Shape("modernbert", layers=22, hidden=768, heads=12, intermediate=1152, vocabulary=50_368)
# Small enough for a CPU.
SMALL = Shape(layers=2, hidden=32, heads=2, intermediate=64, vocabulary=30_600, dim=16)


def checkpoint(shape: Shape) -> str:
    """The path of the model, which is saved once. Processes may ask at the same time."""
    name = f"maxsimd-first-day-{os.getuid()}-{shape.family}-{shape.layers}x{shape.hidden}"
    folder = Path(tempfile.gettempdir()) / name
    if not folder.exists():
        made = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        save_colbert(made, shape)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return str(folder / "saved")


@main.command("models")
def _models() -> None:
    """Saves all models, while the first steps run."""
    for each in (JINA, XLM_ROBERTA, MODERNBERT):
        checkpoint(each)


_PACKAGES = (
    "torch", "triton", "transformers", "sentence-transformers", "aiohttp", "msgspec", "flash-maxsim",
    "late-interaction-kernels", "flash-attn",
)  # fmt: skip
_PROGRAMS = ("nvidia-smi", "gcc")


@main.command("machine")
@click.option("--dry", is_flag=True, help="Without a GPU.")
def _machine(dry: bool) -> None:
    """The hardware and libraries that decide which kernels run and how fast."""
    for name, value in machine().items():
        show(name, value)
    for package in _PACKAGES:
        _fact(package, partial(importlib.metadata.version, package))
    for program in _PROGRAMS:
        show(program, shutil.which(program))
    if dry:
        return
    properties = torch.cuda.get_device_properties(0)
    for name in (
        "multi_processor_count", "L2_cache_size", "shared_memory_per_block_optin",
        "shared_memory_per_multiprocessor", "regs_per_multiprocessor", "total_memory", "clock_rate",
    ):  # fmt: skip
        show(name, getattr(properties, name, None))


def _fact(name: str, find: Callable[[], Value]) -> None:
    try:
        show(name, find())
    except Exception as error:
        show(name, f"none: {type(error).__name__}: {error}")


_DRY_MAXSIM = (MaxSimShape("few", 4, 5, (9, 9), 16, rounded=True),)


@main.command("kernels")
@click.option("--dry", is_flag=True, help="Small, on the CPU.")
@click.option("--rounds", default=20, show_default=True)
@torch.inference_mode()
def _kernels_beside_others(dry: bool, rounds: int) -> None:
    """MaxSim beside plain torch and other packages. Exits with 1 where ours failed."""
    device = torch.device("cpu" if dry else "cuda")
    limits = kernels.measure_limits(device)
    show_all({"limits": limits.figures()})
    setting = kernels.Setting(device, 1 if dry else rounds, limits)
    are_right = True
    for shape in _DRY_MAXSIM if dry else (*kernels.MAXSIM_SHAPES, *kernels.PUBLISHED_SHAPES):
        figures = kernels.measure_maxsim(shape, setting)
        show_all(figures)
        are_right &= not any("maxsimd_failed" in values for values in figures.values())
    if not are_right:
        raise SystemExit(1)


_DRY_WORKLOADS = (Workload("few", 6, 1, 64, 0.5, 3),)


@main.command("serving")
@click.option("--requests", type=int, help="No more requests of the first workload, and no other workload.")
@click.option("--dry", is_flag=True, help="A tiny model on the CPU.")
def _serving(requests: int | None, dry: bool) -> None:
    """The published workloads on a server with default options."""
    workloads = WORKLOADS if requests is None else (dataclasses.replace(WORKLOADS[0], requests=requests),)
    model, device = checkpoint(SMALL if dry else JINA), "cpu" if dry else "cuda"
    show_all(run_and_clean_up(measure_serving(model, device, _DRY_WORKLOADS if dry else workloads)))


_MODELS = {"jina": JINA, "xlm-roberta": XLM_ROBERTA, "modernbert": MODERNBERT}
_STEPS = ((128, 128), (32, 512), (16, 1024), (8, 2048), (1, 512), (2, 1024))
_DRY = ((2, 8), (1, 16))
_LONGEST_NAMES = 90


@main.command("forward")
@click.argument("model", type=click.Choice(list(_MODELS)))
@click.option("--rounds", default=8, show_default=True)
@click.option("--dry", is_flag=True, help="A tiny model on the CPU.")
def _forward(model: str, rounds: int, dry: bool) -> None:
    """Prints tokens a second, milliseconds of the device and of the host that launches, and the longest
    kernels."""
    shape = SMALL if dry else _MODELS[model]
    config = EngineConfig(model=checkpoint(shape), device="cpu" if dry else "cuda")
    loaded = _loaded(model, config)
    device = loaded.device
    for count, tokens in _DRY if dry else _STEPS:
        run = partial(loaded.runner.forward, _step(loaded, count, tokens))
        taken = kernels.timings({model: run}, device, 1 if dry else rounds)[model]
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


_SHAPES = (
    MaxSimShape("32 query tokens", 32, 10_000, (180, 180)),
    MaxSimShape("64 query tokens", 64, 10_000, (180, 180)),
    MaxSimShape("128 query tokens", 128, 2000, (512, 512)),
    MaxSimShape("1,024 query tokens", 1024, 500, (1024, 1024)),
    MaxSimShape("32 query tokens, documents in int8", 32, 10_000, (180, 180), rounded=True),
    MaxSimShape("64 query tokens, documents in int8", 64, 10_000, (180, 180), rounded=True),
    MaxSimShape("1,024 query tokens, documents in int8", 1024, 500, (1024, 1024), rounded=True),
)

# (query tokens, document tokens, warps, stages, fold) of a tile.
Variant = tuple[int, int, int, int, int]

_SHORT: tuple[Variant, ...] = ((32, 64, 4, 2, 2), (32, 64, 4, 3, 2), (32, 128, 4, 2, 2))
_MIDDLE: tuple[Variant, ...] = ((64, 64, 4, 2, 2), (64, 64, 4, 3, 2), (64, 128, 4, 2, 2))
_LONG: tuple[Variant, ...] = ((128, 64, 4, 2, 2), (128, 64, 4, 3, 2))
_PAGES: tuple[Variant, ...] = ((256, 64, 4, 2, 2), (256, 64, 4, 3, 2), (128, 64, 4, 3, 2))
_SHORT_INT8 = _SHORT[:2]
_MIDDLE_INT8 = _MIDDLE[:2]
_PAGES_INT8 = _LONG
# Tiles of documents in 16 bits, and in int8: any of them may become the table's.
VARIANTS = dict.fromkeys((*_SHORT, *_MIDDLE, *_LONG, *_PAGES))
INT8_VARIANTS = dict.fromkeys((*_SHORT_INT8, *_MIDDLE_INT8, *_PAGES_INT8))
_TILES = (_SHORT, _MIDDLE, _LONG, _PAGES, _SHORT_INT8, _MIDDLE_INT8, _PAGES_INT8)

_DRY_TILES = (
    MaxSimShape("few", 4, 3, (9, 9), 16),
    MaxSimShape("few, in int8", 4, 3, (9, 9), 16, rounded=True),
)
_DRY_TILE_VARIANTS: tuple[tuple[Variant, ...], ...] = (((16, 16, 4, 2, 1), (16, 32, 4, 2, 2)),) * 2


@main.command("tiles")
@click.option("--dry", is_flag=True, help="Small, on the CPU.")
@click.option("--rounds", default=10, show_default=True)
@torch.inference_mode()
def _tiles(dry: bool, rounds: int) -> None:
    """Times MaxSim with other tiles than those of its table. Exits with 1 if no tile of a shape runs."""
    device = torch.device("cpu" if dry else "cuda")
    shapes = zip(_DRY_TILES if dry else _SHAPES, _DRY_TILE_VARIANTS if dry else _TILES, strict=True)
    for shape, tiles in shapes:
        milliseconds = dict(_times(shape, tiles, device, 1 if dry else rounds))
        if not milliseconds:
            raise SystemExit(1)
        best = min(milliseconds, key=milliseconds.__getitem__)
        show(f"tiles for {shape.name}: best", best)
        show(f"tiles for {shape.name}: best_ms", milliseconds[best])


def _times(
    shape: MaxSimShape, tiles: tuple[Variant, ...], device: torch.device, rounds: int
) -> Iterator[tuple[str, float]]:
    """The name of each tile that runs and is right, with its milliseconds. Prints the reason of others."""
    first = kernels.draw(shape, device, 0)
    copies = min(8, kernels.copies_beyond_cache(first.nbytes, device))
    scored = [first, *(kernels.draw(shape, device, seed) for seed in range(1, copies))]
    if shape.rounded:
        scored = [each.rounded() for each in scored]
    exact = scored[0].exact(20)
    ours = {OURS: kernels.contenders(shape, device, shape.rounded)[OURS]}
    for variant in tiles:
        name = name_of(variant)
        with tiled(variant):
            ready = kernels.prepared(ours, scored, exact)
            if OURS in ready.failures:
                show(f"tiles for {shape.name}: {name}", ready.failures[OURS][:200])
                continue
            taken = round(kernels.medians(ready.runs, device, rounds)[OURS] * 1e3, 4)
        show(f"tiles for {shape.name}: {name}_ms", taken)
        yield name, taken


def name_of(variant: Variant) -> str:
    query, document, warps, stages, fold = variant
    return f"{query} x {document}, {warps} warps, {stages} stages, fold {fold}"


def tiled(variant: Variant) -> AbstractContextManager[Any]:
    """MaxSim by these tiles instead of the table's, with the table's dimensions."""
    from maxsimd.engine.ops.triton import maxsim

    names = ("query", "document", "warps", "stages", "fold")
    wanted = dict(zip(names, variant, strict=True))
    table = vars(maxsim)["tiles_for"]
    return mock.patch.object(maxsim, "tiles_for", lambda *asked: dataclasses.replace(table(*asked), **wanted))


if __name__ == "__main__":
    main()
