"""`maxsimd bench single`: a lone request with all layers in one call of the library, layer by layer, and in
another version of maxsimd, each in a process of its own, in turns.

The processes run this file, perhaps with another version's `maxsimd`, of which they use only old names. They
are told how to run layers and the configuration as JSON, then asked by lines of JSON.
"""

import asyncio
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import click

if TYPE_CHECKING:
    from maxsimd.bench.datasets import Request
    from maxsimd.engine import Engine

# Documents of a large request. One of these is measured for as many requests of one document.
_MANY, _SHARE_OF_MANY = 40, 10
# Requests in a row to one engine: after the first few its weights are in the processor's caches, as in a
# server that has the processor for itself.
_TURN = 10
# Tokens of a pair of query and document.
_PAIR = 100


def measure_single(model: str | None, rounds: int, other: Path | None, **settings: Any) -> dict[str, Any]:
    """Medians of `rounds` requests of one document and a tenth as many of 40, with random words; and how
    often one call gave the same scores as layer by layer. `other` is a checkout of another version.

    Raises ClickException if the engine runs all steps layer by layer and there is no other version, or the
    kernels of the other version are not compiled."""
    from maxsimd.bench.checkpoints import save_cross_encoder

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        config = {"model": model or save_cross_encoder(Path(folder) / "model"), "device": "cpu", **settings}
        ways = ["one_call", "layer_by_layer", *([] if other is None else ["other"])]
        engines = {
            way: stack.enter_context(closing(_Engine(way, config, other if way == "other" else None)))
            for way in ways
        }
        if not engines["one_call"].state["one_call"]:
            if other is None:
                raise click.ClickException("this processor, or this model, runs all steps layer by layer")
            engines.pop("one_call").close()
        if other is not None and not engines["other"].state["kernels"]:
            raise click.ClickException(f"the kernels of {other} are not compiled: pip install it, editable")
        figures: dict[str, Any] = {}
        for documents, count in ((1, rounds), (_MANY, max(1, rounds // _SHARE_OF_MANY))):
            figures[f"{documents}_documents"] = _in_turns(engines, documents, count)
        return figures


class _Engine:
    """An engine in a process of its own; `state` says what it chose."""

    def __init__(self, way: str, config: dict[str, Any], checkout: Path | None) -> None:
        environment = dict(os.environ)
        if checkout is not None:
            environment["PYTHONPATH"] = str(checkout.absolute() / "tests" / "typings")
        self._process = subprocess.Popen(
            # Without -P, modules of this folder would hide libraries of the same names.
            [sys.executable, "-P", __file__, way, json.dumps(config)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.state = self._answer()

    def close(self) -> None:
        """Ends the process, if it has not ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def ask(self, **which: int) -> dict[str, Any]:
        """Sends a turn of requests, from `begin` on, of `count` random ones with `documents` each."""
        assert self._process.stdin is not None
        print(json.dumps(which), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process of an engine ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _in_turns(engines: dict[str, _Engine], documents: int, count: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {way: [] for way in engines}
    scores: dict[str, list[list[float]]] = {way: [] for way in engines}
    tokens = 0
    for engine in engines.values():
        engine.ask(documents=documents, count=count, begin=0)  # makes them
    for begin in range(0, count, _TURN):
        # Each engine comes first as often as last.
        for way in list(engines)[:: -1 if begin // _TURN % 2 else 1]:
            answer = engines[way].ask(documents=documents, count=count, begin=begin)
            seconds[way] += answer["seconds"]
            scores[way] += answer["scores"]
            tokens = answer["tokens"]
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    first, *others = medians
    figures: dict[str, Any] = {"tokens": tokens}
    if "one_call" in scores:
        same = map(list.__eq__, scores["one_call"], scores["layer_by_layer"])
        figures["same_scores"] = f"{sum(same)} of {count}"
    figures |= {f"{way}_ms": round(1e3 * median, 2) for way, median in medians.items()}
    for way in others:
        figures[f"{first}_over_{way}"] = round(medians[first] / medians[way], 3)
    return figures


@functools.cache
def _requests(documents: int, count: int) -> "list[Request]":
    """Made once: work between requests would drive the engine out of the processor's caches."""
    from maxsimd.bench.datasets import random_requests

    return random_requests(count, documents, _PAIR, 0.0, False, seed=0)


async def _ask(engine: "Engine", documents: int, count: int, begin: int) -> dict[str, Any]:
    """Seconds of a turn of `count` random requests, the scores of each and the tokens of the last."""
    seconds, scores, tokens = [], [], 0
    for request in _requests(documents, count)[begin : begin + _TURN]:
        started = time.perf_counter()
        result = await engine.score(request.query, request.documents, cache="bypass")
        seconds.append(time.perf_counter() - started)
        scores.append(result.scores)
        tokens = result.usage.prompt_tokens
    return {"seconds": seconds, "scores": scores, "tokens": tokens}


def is_one_call(runner: object) -> bool:
    """Whether a runner, perhaps of another version, runs all layers in one call."""
    return any(kind.__name__ == "OneCallRunner" for kind in type(runner).__mro__)


def layer_by_layer() -> AbstractContextManager[Any]:
    """Models that are loaded meanwhile run layer by layer, for which the engine has no option."""
    return patch("maxsimd.engine.execution.one_call._one_call", lambda *_: "the benchmark compares both")


def main() -> None:
    from maxsimd.engine import Engine, EngineConfig
    from maxsimd.engine.ops.cpu import is_available

    way, config = sys.argv[1], EngineConfig.of(json.loads(sys.argv[2]))
    # Libraries may print meanwhile.
    with os.fdopen(os.dup(1), "w") as answers, asyncio.Runner() as runner:
        os.dup2(2, 1)
        engine = Engine(config)
        with layer_by_layer() if way == "layer_by_layer" else nullcontext():
            runner.run(engine.start())
        model: Any = engine.device_model
        model = getattr(model, "prepared", model)  # of older versions
        state = {"one_call": is_one_call(model.runner), "kernels": is_available()}
        print(json.dumps(state), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(runner.run(_ask(engine, **json.loads(line)))), file=answers, flush=True)
        runner.run(engine.stop())


if __name__ == "__main__":
    main()
