"""A lone request with all layers in one call of the library and layer by layer, in turns in one process."""

import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from maxsimd.bench.datasets import Request, random_requests
from maxsimd.bench.text_models import minilm_l6
from maxsimd.engine import Engine, EngineConfig

# Tokens of a pair of query and document.
_PAIR = 100
# Documents of a request whose step is too large for one call.
_MANY = 40
# One of these is measured for as many requests of one document.
_SHARE_OF_MANY = 10
# Requests in a row to one engine: after the first few its weights are in the processor's caches, as in a server
# with one model.
_TURN = 10


async def measure_single(model: str | None, settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Medians of `rounds` requests of one document and a tenth of that of 40, with random words, and how
    often both ways gave the same scores. Without a model, one as MiniLM-L6 cross-encoders are, with random
    weights. Raises ClickException where the engine runs all steps layer by layer: there is nothing to compare."""
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(model=model or minilm_l6(Path(folder) / "model"), device="cpu", **settings)
        async with contextlib.AsyncExitStack() as stack:
            one_call = await stack.enter_async_context(Engine(config))
            if not _runs_in_one_call(one_call):
                raise click.ClickException(
                    "this processor, or this model, runs all steps layer by layer; the log says why"
                )
            with _layer_by_layer():
                plain = await stack.enter_async_context(Engine(config))
            engines = {"one_call": one_call, "layer_by_layer": plain}
            figures: dict[str, Any] = {}
            for documents, count in ((1, rounds), (_MANY, max(1, rounds // _SHARE_OF_MANY))):
                requests = random_requests(count, documents, _PAIR, 0.0, False, seed=0)
                figures |= await _in_turns(engines, requests, documents)
            return figures


async def _in_turns(engines: dict[str, Engine], requests: list[Request], documents: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    tokens = 0
    found: dict[str, list[list[float]]] = {name: [] for name in engines}
    for begin in range(0, len(requests), _TURN):
        # Each comes first as often as the other.
        for name in sorted(engines, reverse=begin // _TURN % 2 == 1):
            for request in requests[begin : begin + _TURN]:
                started = time.perf_counter()
                result = await engines[name].score(request.query, request.documents)
                seconds[name].append(time.perf_counter() - started)
                found[name].append(result.scores)
                tokens = result.usage.prompt_tokens
    same = sum(len(set(map(tuple, each))) == 1 for each in zip(*found.values(), strict=True))
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    figures: dict[str, Any] = {"tokens": tokens, "same_scores": f"{same} of {len(requests)}"}
    figures |= {f"{name}_ms": round(1e3 * median, 2) for name, median in medians.items()}
    figures["one_call_over_layer_by_layer"] = round(medians["one_call"] / medians["layer_by_layer"], 3)
    return {f"{documents}_documents": figures}


def _layer_by_layer() -> contextlib.AbstractContextManager[object]:
    """Loads models without the way for few rows. The engine has no option for it: where it is used, it gives
    the same."""
    from unittest.mock import patch

    return patch("maxsimd.engine.execution.few_rows.packed_layers", lambda *_: "the benchmark compares both")


def _runs_in_one_call(engine: Engine) -> bool:
    """Whether the engine chose, at load, to run steps of few rows in one call."""
    from maxsimd.engine.execution.few_rows import FewRowsRunner

    return isinstance(engine.device_model.prepared.runner, FewRowsRunner)
