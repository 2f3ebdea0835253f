"""A lone request with all layers in one call of the library and layer by layer, each in a process of its own,
in turns."""

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
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
# Requests in a row to one engine: after the first few its weights are in the processor's caches, as in a
# server that has the processor for itself.
_TURN = 10
_WAYS = ("one_call", "layer_by_layer")

# Seconds of requests, the scores of each and the tokens of the last.
_Turn = tuple[list[float], list[list[float]], int]


def measure_single(model: str | None, settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Medians of `rounds` requests of one document and a tenth of that of 40, with random words, and how
    often both ways gave the same scores. Without a model, one as MiniLM-L6 cross-encoders are, with random
    weights. Raises ClickException where the engine runs all steps layer by layer: there is nothing to
    compare."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        config = EngineConfig(model=model or minilm_l6(Path(folder) / "model"), device="cpu", **settings)
        processes: dict[str, Executor] = {
            way: stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn"))) for way in _WAYS
        }
        runs_in_one_call = [processes[way].submit(_start, config, way).result() for way in _WAYS]
        for process in processes.values():
            stack.callback(process.submit, _stop)
        if not runs_in_one_call[0]:
            raise click.ClickException(
                "this processor, or this model, runs all steps layer by layer; the log says why"
            )
        figures: dict[str, Any] = {}
        for documents, count in ((1, rounds), (_MANY, max(1, rounds // _SHARE_OF_MANY))):
            requests = random_requests(count, documents, _PAIR, 0.0, False, seed=0)
            figures |= _in_turns(processes, requests, documents)
        return figures


def _in_turns(processes: dict[str, Executor], requests: list[Request], documents: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    scores: dict[str, list[list[float]]] = {way: [] for way in _WAYS}
    tokens = 0
    for begin in range(0, len(requests), _TURN):
        # Each comes first as often as the other.
        for way in sorted(_WAYS, reverse=begin // _TURN % 2 == 1):
            taken, found, tokens = processes[way].submit(_ask, requests[begin : begin + _TURN]).result()
            seconds[way] += taken
            scores[way] += found
    same = sum(one == other for one, other in zip(*scores.values(), strict=True))
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    figures: dict[str, Any] = {"tokens": tokens, "same_scores": f"{same} of {len(requests)}"}
    figures |= {f"{way}_ms": round(1e3 * median, 2) for way, median in medians.items()}
    figures["one_call_over_layer_by_layer"] = round(medians["one_call"] / medians["layer_by_layer"], 3)
    return {f"{documents}_documents": figures}


# The engine of a measuring process and its event loop.
_runner: asyncio.Runner | None = None
_engine: Engine | None = None


def _start(config: EngineConfig, way: str) -> bool:
    """Starts this process's engine; says whether it runs steps of few rows in one call."""
    global _runner, _engine
    _runner, _engine = asyncio.Runner(), Engine(config)
    with _layer_by_layer() if way == "layer_by_layer" else contextlib.nullcontext():
        _runner.run(_engine.start())
    return _runs_in_one_call(_engine)


def _stop() -> None:
    if _runner is not None and _engine is not None:
        _runner.run(_engine.stop())
        _runner.close()


def _ask(requests: list[Request]) -> _Turn:
    assert _runner is not None
    return _runner.run(_one_after_the_other(requests))


async def _one_after_the_other(requests: list[Request]) -> _Turn:
    assert _engine is not None
    seconds, scores, tokens = [], [], 0
    for request in requests:
        started = time.perf_counter()
        result = await _engine.score(request.query, request.documents)
        seconds.append(time.perf_counter() - started)
        scores.append(result.scores)
        tokens = result.usage.prompt_tokens
    return seconds, scores, tokens


@contextlib.contextmanager
def _layer_by_layer() -> Iterator[None]:
    """Loads models without the way for few rows. The engine has no option for it: where it is used, it gives
    the same."""
    from unittest.mock import patch

    with patch("maxsimd.engine.execution.few_rows.packed_layers", lambda *_: "the benchmark compares both"):
        yield


def _runs_in_one_call(engine: Engine) -> bool:
    """Whether the engine chose, at load, to run steps of few rows in one call."""
    from maxsimd.engine.execution.few_rows import FewRowsRunner

    return isinstance(engine.device_model.prepared.runner, FewRowsRunner)
