"""Models that elsewhere run in padded batches: packed by the engine, padded by it, and by
sentence-transformers."""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from maxsimd.bench.datasets import Pair, docstring_pairs
from maxsimd.bench.text_models import SHAPES
from maxsimd.engine import CUT_LONG, Engine, EngineConfig

# As sentence-transformers has it; it sorts texts by length.
_BATCH = 32

_Run = Callable[[list[Pair]], Awaitable[tuple[int, np.ndarray[Any, np.dtype[np.float32]]]]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: `count` texts in `rounds` rounds, by models of `layers` layers, with the engine's
    `settings`."""

    count: int
    layers: int
    rounds: int
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Taken:
    """What a run took: on the clock, and of all processor cores together, in which busy neighbours count
    less."""

    seconds: float
    processor_seconds: float


def texts_of(mix: str, count: int) -> list[Pair]:
    """Real English of different lengths: docstrings without their first sentence, or mixed with as many first
    sentences, as short and long documents come together to a reranker. Each has a query of its own."""
    pairs = docstring_pairs()
    if mix == "docstrings":
        return pairs[:count]
    half = pairs[: (count + 1) // 2]
    both = [each for pair in half for each in (pair, Pair(pair.query, pair.query))]
    return both[:count]


async def measure_all(
    shapes: Sequence[str], dtypes: Sequence[str], mix: str, plan: Plan, figures: dict[str, Any]
) -> None:
    """Adds the figures of `measure_packed` for each shape in each precision, and prints them as they come."""
    for shape in shapes:
        for dtype in dtypes:
            found = await measure_packed(shape, dtype, texts_of(mix, plan.count), plan)
            click.echo(f"{shape}, {dtype}: {found}", err=True)
            figures[f"{shape}, {dtype}"] = found


async def measure_packed(shape: str, dtype: str, pairs: list[Pair], plan: Plan) -> dict[str, float]:
    """Medians of the plan's rounds for the pairs, or their documents alone, all in turns."""
    settings = plan.settings | {"dtype": dtype}
    with tempfile.TemporaryDirectory() as folder:
        model = SHAPES[shape](Path(folder) / "model", plan.layers)
        async with contextlib.AsyncExitStack() as stack:
            engines = {
                name: await stack.enter_async_context(_engine(model, packing, settings))
                for name, packing in (("packed", "auto"), ("padded", "off"))
            }
            _refuse_other_ways(engines)
            runs = {name: _by_engine(engine) for name, engine in engines.items()}
            if settings.get("quantization", "none") == "none":
                runs["sentence_transformers"] = _by_sentence_transformers(model, dtype)
            return await _in_turns(runs, pairs, plan.rounds)


def _refuse_other_ways(engines: dict[str, Engine]) -> None:
    """Raises RuntimeError for an engine that does not run its model as its name says."""
    for name, engine in engines.items():
        if engine.device_model.execution != name:
            raise RuntimeError(f"this model is not run {name}, but {engine.device_model.execution}")


async def _in_turns(runs: dict[str, _Run], pairs: list[Pair], rounds: int) -> dict[str, float]:
    taken: dict[str, list[_Taken]] = {name: [] for name in runs}
    outputs = {}
    tokens = 0
    for run in runs.values():
        await run(pairs[:8])
    for _ in range(rounds):
        for name, run in runs.items():
            started, on_processor = time.perf_counter(), time.process_time()
            counted, outputs[name] = await run(pairs)
            both = time.perf_counter() - started, time.process_time() - on_processor
            taken[name].append(_Taken(*both))
            tokens = counted or tokens
    figures = {"texts": float(len(pairs)), "tokens": float(tokens)}
    seconds = {name: statistics.median(each.seconds for each in some) for name, some in taken.items()}
    processor = {
        name: statistics.median(each.processor_seconds for each in some) for name, some in taken.items()
    }
    for name in runs:
        figures[f"{name}_s"] = round(seconds[name], 3)
        figures[f"{name}_processor_s"] = round(processor[name], 3)
        if name != "packed":
            figures[f"{name}_over_packed"] = round(seconds[name] / seconds["packed"], 2)
            figures[f"{name}_over_packed_processor"] = round(processor[name] / processor["packed"], 2)
            figures[f"{name}_differs_by"] = float(np.abs(outputs[name] - outputs["packed"]).max())
    return figures


def _engine(model: str, packing: Any, settings: dict[str, Any]) -> Engine:
    return Engine(EngineConfig(model=model, packing=packing, **settings))


def _by_engine(engine: Engine) -> _Run:
    async def run(pairs: list[Pair]) -> tuple[int, Any]:
        documents = [pair.document for pair in pairs]
        if engine.model.score_task == "classify":
            queries = [pair.query for pair in pairs]
            scored = await engine.score(queries, documents, cache="bypass", truncation=CUT_LONG)
            return scored.usage.prompt_tokens, np.array(scored.scores)
        embedded = await engine.embed(documents, truncation=CUT_LONG)
        await engine.clear_cache()
        return embedded.usage.prompt_tokens, np.array(embedded.embeddings)

    return run


def _by_sentence_transformers(model: str, dtype: str) -> _Run:
    import torch
    from sentence_transformers import CrossEncoder, SentenceTransformer

    options: dict[str, Any] = {"device": "cpu", "model_kwargs": {"dtype": getattr(torch, dtype)}}
    is_classifier = "Classification" in Path(model, "config.json").read_text(encoding="utf-8")
    library: Any = (CrossEncoder if is_classifier else SentenceTransformer)(model, **options)

    async def run(pairs: list[Pair]) -> tuple[int, Any]:
        if is_classifier:
            texts = [(pair.query, pair.document) for pair in pairs]
            return 0, library.predict(texts, batch_size=_BATCH, show_progress_bar=False)
        documents = [pair.document for pair in pairs]
        return 0, library.encode(documents, batch_size=_BATCH, show_progress_bar=False)

    return run
