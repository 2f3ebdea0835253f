"""Two models in one process: their memory beside that of each alone, and what each has of the device."""

import asyncio
import gc
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from safetensors import safe_open

from maxsimd.api.process import resident_bytes
from maxsimd.bench.datasets import docstring_pairs
from maxsimd.bench.text_models import SHAPES
from maxsimd.engine import EngineConfig, Engines
from maxsimd.engine.device.host import give_back_memory

_MIB = 1 << 20
_NAMES = ("first", "second")
_SHAPES, _LAYERS = ("mpnet-base", "deberta-v3-base"), 12
# Enough requests at a time that each model always has a step waiting, and steps so small that there are many
# in the time that is measured.
_CLIENTS, _DOCUMENTS, _STEP_TOKENS = 8, 20, 256
_CHARACTERS = 600  # so that each document fits into a step
_WARM_UP_SECONDS = 2.0


@contextmanager
def at_hand(models: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The two models that were named, or random ones."""
    if models:
        first, second = models
        yield first, second
        return
    with tempfile.TemporaryDirectory() as folder:
        first, second = (SHAPES[shape](Path(folder) / shape, _LAYERS) for shape in _SHAPES)
        yield first, second


def measure_memory(models: tuple[str, str], dtype: Any, threads: int | None) -> dict[str, float]:
    """In MiB, each in a process of its own: of each model alone and of both, above a process without any that
    has the libraries."""
    first, second = (EngineConfig(model=model, dtype=dtype, threads=threads) for model in models)
    found = {}
    for name, configs in (
        ("nothing", {}),
        ("first", {"first": first}),
        ("second", {"second": second}),
        ("both", {"first": first, "second": second}),
    ):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            found[name] = process.submit(_resident, configs).result()
    above = {name: resident - found["nothing"] for name, resident in found.items()}
    weights = sum(_weights(Path(model), 2 if dtype == "bfloat16" else 4) for model in models)
    return {
        "process_without_models_mib": round(found["nothing"] / _MIB, 1),
        "first_alone_mib": round(above["first"] / _MIB, 1),
        "second_alone_mib": round(above["second"] / _MIB, 1),
        "both_mib": round(above["both"] / _MIB, 1),
        "weights_of_both_mib": round(weights / _MIB, 1),
        "both_over_weights": round(above["both"] / weights, 3),
        "both_over_each_alone": round(above["both"] / (above["first"] + above["second"]), 3),
    }


def _weights(folder: Path, bytes_each: int) -> int:
    """The bytes of the weights in a folder's safetensors files."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total * bytes_each


def _resident(configs: dict[str, EngineConfig]) -> int:
    """The bytes of this process once all models have scored. It has loaded and dropped the default model
    before, and so has the libraries that models need."""

    async def run() -> int:
        query, documents = _workload()
        async with Engines({"default": EngineConfig()}) as engines:
            await engines["default"].score(query, documents[0], cache="bypass")
        async with Engines(configs) as engines:
            for name in engines.names:
                await engines[name].score(query, documents[0], cache="bypass")
            gc.collect()
            give_back_memory()
            return resident_bytes()

    return asyncio.run(run())


async def measure_shares(
    models: tuple[str, str], weights: tuple[float, float], seconds: float, dtype: Any, threads: int | None
) -> dict[str, float]:
    """What each has of the time on the device while both always have work."""
    configs = {
        name: EngineConfig(model=model, dtype=dtype, threads=threads, max_batch_tokens=_STEP_TOKENS)
        for name, model in zip(_NAMES, models, strict=True)
    }
    query, documents = _workload()
    async with Engines(configs, weights=dict(zip(_NAMES, weights, strict=True))) as engines:

        async def ask(name: str) -> None:
            for i in count():
                await engines[name].score(query, documents[i % len(documents)], cache="bypass")

        clients = [asyncio.create_task(ask(name)) for name in _NAMES for _ in range(_CLIENTS)]
        await asyncio.sleep(_WARM_UP_SECONDS)
        before = [engines.device_seconds(name) for name in _NAMES]
        started = time.perf_counter()
        await asyncio.sleep(seconds)
        passed = time.perf_counter() - started
        used = [engines.device_seconds(name) - before[i] for i, name in enumerate(_NAMES)]
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    due = weights[0] / sum(weights)
    return {
        "first_device_s": round(used[0], 2),
        "second_device_s": round(used[1], 2),
        "device_used": round(sum(used) / passed, 3),
        "first_share": round(used[0] / sum(used), 3),
        "first_share_due": round(due, 3),
        "first_share_over_due": round(used[0] / sum(used) / due, 3),
    }


def _workload() -> tuple[str, list[list[str]]]:
    pairs = docstring_pairs()
    documents = [pair.document[:_CHARACTERS] for pair in pairs]
    return pairs[0].query, [documents[i : i + _DOCUMENTS] for i in range(0, 400, _DOCUMENTS)]
