"""What `maxsimd bench instruction-sets` runs under each cap, in a process of its own: `python -m
maxsimd.bench.one_instruction_set MODEL TEXTS ROUNDS SECONDS THREADS [INTERPRETER]`, which prints JSON."""

import asyncio
import contextlib
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maxsimd.bench.datasets import Pair, docstring_pairs
from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from maxsimd.engine.execution.attention.cpu import is_compiled_supported
from maxsimd.engine.execution.int8 import choose_path
from maxsimd.engine.execution.linear import choose_way
from maxsimd.engine.ops.cpu.library import in_words

log = logging.getLogger(__name__)

_PEER = "sentence-transformers"
_ONNX = "ONNX Runtime int8"
_SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "auto", "quantization": "int8"},
}
_OURS = "our kernels"
_CPU = torch.device("cpu")

_Output = np.ndarray[Any, np.dtype[np.float32]]
# What comes out, and the processor time of other processes that it took.
_Run = Callable[[list[Pair]], Awaitable[tuple[_Output, float]]]


async def measure(
    model: str, texts: int, rounds: int, seconds: float, threads: int, onnx: str | None
) -> dict[str, Any]:
    """Medians of each, in turns, and the median of each round's ratios."""
    pairs = docstring_pairs()[:texts]
    torch.set_num_threads(threads)
    async with contextlib.AsyncExitStack() as stack:
        runs: dict[str, _Run] = {_PEER: _by_sentence_transformers(model)}
        paths: dict[str, str] = {}
        refused: dict[str, str] = {}
        for name, settings in _SETTINGS.items():
            try:
                engine = Engine(EngineConfig(model=model, device="cpu", threads=threads, **settings))
                runs[name] = _by_engine(await stack.enter_async_context(engine))
                paths[name] = _path(engine, name)
            except Exception as error:  # a precision that this processor lacks
                log.warning("%s does not run: %s", name, error)
                paths[name], refused[name] = "does not run", str(error)
        versions: dict[str, str] = {}
        if onnx is not None:
            runs[_ONNX], versions = stack.enter_context(_by_onnx(onnx, model, threads))
        figures = await _in_turns(runs, pairs, rounds, seconds)
    about = {"instructions": in_words(), "torch": torch.backends.cpu.get_cpu_capability()}
    return {**about, "paths": paths, "refused": refused, "onnx": versions, **figures}


def _path(engine: Engine, name: str) -> str:
    """What multiplies the weights of an engine's linear layers."""
    dtype = engine.device_model.dtype
    if is_compiled_supported(_CPU, dtype) and (name != "int8" or dtype is torch.bfloat16):
        return _OURS
    if name == "int8":
        return choose_path(True).name
    return choose_way(dtype).name


async def _in_turns(runs: dict[str, _Run], pairs: list[Pair], rounds: int, seconds: float) -> dict[str, Any]:
    """Rounds of all, each begun by another one; none is begun once the time is up."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    on_processor: dict[str, list[float]] = {name: [] for name in runs}
    outputs: dict[str, _Output] = {}
    for run in runs.values():
        await run(pairs[:8])
    until = time.perf_counter() + seconds
    for number in range(rounds):
        if number and time.perf_counter() > until:
            break
        names = list(runs)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started, before = time.perf_counter(), time.process_time()
            outputs[name], elsewhere = await runs[name](pairs)
            on_processor[name].append(time.process_time() - before + elsewhere)
            taken[name].append(time.perf_counter() - started)
    figures: dict[str, Any] = {"rounds": len(taken[_PEER])}
    figures["seconds"] = {name: round(statistics.median(each), 3) for name, each in taken.items()}
    figures["over_sentence_transformers"] = _ratios(taken)
    figures["over_sentence_transformers_in_processor_time"] = _ratios(on_processor)
    if {"int8", "float32"} <= taken.keys():
        figures["int8_over_float32"] = _ratio(taken["float32"], taken["int8"])
        ratio = _ratio(on_processor["float32"], on_processor["int8"])
        figures["int8_over_float32_in_processor_time"] = ratio
    figures["differs_by"] = {
        name: float(np.abs(output - outputs[_PEER]).max())
        for name, output in outputs.items()
        if name != _PEER
    }
    return figures


def _ratios(taken: dict[str, list[float]]) -> dict[str, float]:
    return {name: _ratio(taken[_PEER], each) for name, each in taken.items() if name != _PEER}


def _ratio(slow: list[float], fast: list[float]) -> float:
    """How many times as fast, by the median of the rounds' ratios."""
    return round(statistics.median(a / b for a, b in zip(slow, fast, strict=True)), 2)


def _by_engine(engine: Engine) -> _Run:
    async def run(pairs: list[Pair]) -> tuple[_Output, float]:
        documents = [pair.document for pair in pairs]
        if engine.model.score_task == "classify":
            queries = [pair.query for pair in pairs]
            scored = await engine.score(queries, documents, cache="bypass", truncation=CUT_LONG)
            return np.array(scored.scores, dtype=np.float32), 0.0
        embedded = await engine.embed(documents, truncation=CUT_LONG)
        await engine.clear_cache()
        return np.array(embedded.embeddings, dtype=np.float32), 0.0

    return run


def _by_sentence_transformers(model: str) -> _Run:
    """Its default: float32, in batches of 32 that are sorted by length."""
    from sentence_transformers import CrossEncoder, SentenceTransformer

    classifies = is_classifier(model)
    library: Any = (CrossEncoder if classifies else SentenceTransformer)(model, device="cpu")

    async def run(pairs: list[Pair]) -> tuple[_Output, float]:
        if classifies:
            found = library.predict([(pair.query, pair.document) for pair in pairs], show_progress_bar=False)
        else:
            found = library.encode([pair.document for pair in pairs], show_progress_bar=False)
        return np.asarray(found, dtype=np.float32), 0.0

    return run


def is_classifier(model: str) -> bool:
    """Whether a folder holds a cross-encoder."""
    return "Classification" in Path(model, "config.json").read_text(encoding="utf-8")


@contextlib.contextmanager
def _by_onnx(interpreter: str, model: str, threads: int) -> Iterator[tuple[_Run, dict[str, str]]]:
    """sentence-transformers with ONNX Runtime and weights in int8, in a process of another environment."""
    script = Path(__file__).with_name("onnx_int8.py")
    command = [interpreter, str(script), model, str(threads), str(int(is_classifier(model)))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        versions = json.loads(stdout.readline())

        async def run(pairs: list[Pair]) -> tuple[_Output, float]:
            print(json.dumps([[pair.query, pair.document] for pair in pairs]), file=stdin, flush=True)
            found, processor_seconds = json.loads(stdout.readline())
            return np.array(found, dtype=np.float32), processor_seconds

        try:
            yield run, versions
        finally:
            stdin.close()


def main() -> None:
    model, *numbers = sys.argv[1:6]
    onnx = sys.argv[6] if len(sys.argv) > 6 else None
    texts, rounds, seconds, threads = int(numbers[0]), int(numbers[1]), float(numbers[2]), int(numbers[3])
    logging.basicConfig(level=logging.WARNING)
    print(json.dumps(asyncio.run(measure(model, texts, rounds, seconds, threads, onnx))))


if __name__ == "__main__":
    main()
