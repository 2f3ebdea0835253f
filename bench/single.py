"""A lone request with all layers in one call of the library if the model allows it, layer by layer, and in
another version of maxsimd, each in a process of its own, in turns."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

import click

from maxsimd.bench import single_engine
from maxsimd.bench.text_models import minilm_l6

# Documents of a large request. One of these is measured for as many requests of one document.
_MANY, _SHARE_OF_MANY = 40, 10
# Requests in a row to one engine: after the first few its weights are in the processor's caches, as in a
# server that has the processor for itself.
_TURN = 10


def measure_single(
    model: str | None, other: Path | None, settings: dict[str, Any], rounds: int
) -> dict[str, Any]:
    """Medians of `rounds` requests of one document and a tenth of that of 40, with random words, and how
    often one call gave the same scores as layer by layer. Without a model, one as MiniLM-L6 cross-encoders
    are, with random weights. `other` is a checkout of another version, whose kernels are compiled.

    Raises ClickException where there is nothing to compare, because the engine runs all steps layer by layer
    and no other version is given, and where the other version lacks its kernels."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        config = {"model": model or minilm_l6(Path(folder) / "model"), "device": "cpu", **settings}
        ways = ["one_call", "layer_by_layer", *([] if other is None else ["other"])]
        engines = {
            way: stack.enter_context(_Engine(way, config, other if way == "other" else None)) for way in ways
        }
        if not engines["one_call"].state["one_call"]:
            if other is None:
                raise click.ClickException("this processor, or this model, runs all steps layer by layer")
            engines.pop("one_call").stop()
        if other is not None and not engines["other"].state["kernels"]:
            raise click.ClickException(f"the kernels of {other} are not compiled: pip install it, editable")
        figures: dict[str, Any] = {}
        for documents, count in ((1, rounds), (_MANY, max(1, rounds // _SHARE_OF_MANY))):
            figures[f"{documents}_documents"] = _in_turns(engines, documents, count)
        return figures


class _Engine:
    """An engine in a process of its own; `state` says what it chose. It stops when the context ends."""

    def __init__(self, way: str, config: dict[str, Any], checkout: Path | None) -> None:
        environment = dict(os.environ)
        if checkout is not None:
            environment["PYTHONPATH"] = str(checkout.absolute() / "tests" / "typings")
        self._process = subprocess.Popen(
            # Without -P, modules of this folder would hide libraries of the same names.
            [sys.executable, "-P", single_engine.__file__, way, json.dumps(config)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.state = self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the process, if it has not ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def ask(self, **which: int) -> dict[str, Any]:
        """Sends requests: those from `begin` to `end` of `count` random ones with `documents` each."""
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
        engine.ask(documents=documents, count=count, begin=0, end=min(_TURN, count))  # makes them
    for begin in range(0, count, _TURN):
        # Each comes first as often as last.
        for way in list(engines)[:: -1 if begin // _TURN % 2 else 1]:
            end = min(begin + _TURN, count)
            answer = engines[way].ask(documents=documents, count=count, begin=begin, end=end)
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
