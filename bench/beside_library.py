"""The engine beside sentence-transformers, in turns: packed and padded, and each precision by the processor's
instructions.

`maxsimd bench instruction-sets` starts a process for each cap on instructions. Its environment holds the caps
of maxsimd, torch and oneDNN before torch is imported.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import statistics
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
import torch

from maxsimd.bench.checkpoints import TEXT_SHAPES, save_cross_encoder, save_text_model
from maxsimd.bench.datasets import Pair, docstring_pairs
from maxsimd.bench.report import Figures
from maxsimd.bench.turns import Turns, median_ratio, take_turns
from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from maxsimd.engine.execution.attention.cpu import is_compiled_supported
from maxsimd.engine.execution.devices import choose_dtype, dtype_name
from maxsimd.engine.execution.int8 import choose_path
from maxsimd.engine.execution.linear import choose_method
from maxsimd.engine.ops.cpu.library import VARIABLE, used_instruction_sets

log = logging.getLogger(__name__)

_PEER, _ONNX = "sentence-transformers", "ONNX Runtime int8"
_Output = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class _Done:
    """The output of a run, its tokens if they are known, and the processor time of another process."""

    output: _Output
    tokens: int = 0
    processor_seconds: float = 0.0


_Run = Callable[[list[Pair]], Awaitable[_Done]]


def _by_engine(engine: Engine) -> _Run:
    async def run(pairs: list[Pair]) -> _Done:
        documents = [pair.document for pair in pairs]
        if engine.model.score_task == "classify":
            queries = [pair.query for pair in pairs]
            scored = await engine.score(queries, documents, cache="bypass", truncation=CUT_LONG)
            return _Done(np.array(scored.scores, dtype=np.float32), scored.usage.prompt_tokens)
        embedded = await engine.embed(documents, truncation=CUT_LONG)
        await engine.clear_cache()
        return _Done(np.array(embedded.embeddings, dtype=np.float32), embedded.usage.prompt_tokens)

    return run


def _by_sentence_transformers(model: str, dtype: str) -> _Run:
    """With the library's default: batches of 32 that are sorted by length."""
    from sentence_transformers import CrossEncoder, SentenceTransformer

    classifies = _is_classifier(model)
    options: dict[str, Any] = {"device": "cpu", "model_kwargs": {"dtype": getattr(torch, dtype)}}
    library: Any = (CrossEncoder if classifies else SentenceTransformer)(model, **options)

    async def run(pairs: list[Pair]) -> _Done:
        if classifies:
            found = library.predict([(pair.query, pair.document) for pair in pairs], show_progress_bar=False)
        else:
            found = library.encode([pair.document for pair in pairs], show_progress_bar=False)
        return _Done(np.asarray(found, dtype=np.float32))

    return run


def _is_classifier(model: str) -> bool:
    return "Classification" in Path(model, "config.json").read_text(encoding="utf-8")


async def _take_turns(
    runs: dict[str, _Run], pairs: list[Pair], rounds: int, seconds: float = math.inf
) -> Turns[_Done]:
    for run in runs.values():
        await run(pairs[:8])
    contenders = {name: partial(run, pairs) for name, run in runs.items()}
    return await take_turns(contenders, rounds, warm_up=False, seconds=seconds)


async def measure_packed(
    figures: Figures,
    shapes: Sequence[str],
    dtype: str,
    mix: str,
    texts: int,
    layers: int,
    rounds: int,
    quantization: str,
) -> None:
    """Adds figures for each shape in each precision, and prints them as they come: packed by the engine,
    padded by it, and by sentence-transformers."""
    fastest = dtype_name(choose_dtype("auto", torch.device("cpu")))
    dtypes = dict.fromkeys(("float32", fastest)) if dtype == "auto" else (dtype,)
    for shape, each in product(shapes or TEXT_SHAPES, dtypes):
        name = f"{shape}, {each}"
        figures[name] = await _packed(shape, each, _texts_of(mix, texts), layers, rounds, quantization)
        click.echo(f"{name}: {figures[name]}", err=True)


def _texts_of(mix: str, count: int) -> list[Pair]:
    """Docstrings without their first sentence, or mixed with as many first sentences. Each has a query."""
    pairs = docstring_pairs()
    if mix == "docstrings":
        return pairs[:count]
    half = pairs[: (count + 1) // 2]
    both = [each for pair in half for each in (pair, Pair(pair.query, pair.query))]
    return both[:count]


async def _packed(
    shape: str, dtype: str, pairs: list[Pair], layers: int, rounds: int, quantization: Any
) -> dict[str, float]:
    settings: dict[str, Any] = {"dtype": dtype, "quantization": quantization}
    with tempfile.TemporaryDirectory() as folder:
        model = save_text_model(shape, Path(folder) / "model", layers)
        async with contextlib.AsyncExitStack() as stack:
            runs: dict[str, _Run] = {}
            packing: Any
            for name, packing in (("packed", "auto"), ("padded", "off")):
                config = EngineConfig.of({"model": model, "packing": packing, **settings})
                engine = await stack.enter_async_context(Engine(config))
                if engine.device_model.execution != name:
                    raise RuntimeError(f"this model runs {engine.device_model.execution}, not {name}")
                runs[name] = _by_engine(engine)
            if quantization == "none":
                runs["sentence_transformers"] = _by_sentence_transformers(model, dtype)
            turns = await _take_turns(runs, pairs, rounds)
    packed = turns.results["packed"][-1]
    figures = {"texts": float(len(pairs)), "tokens": float(packed.tokens)}
    seconds, processor = (
        {name: statistics.median(each) for name, each in some.items()}
        for some in (turns.seconds, turns.processor)
    )
    for name, (*_, done) in turns.results.items():
        figures[f"{name}_s"] = round(seconds[name], 3)
        figures[f"{name}_processor_s"] = round(processor[name], 3)
        if name != "packed":
            figures[f"{name}_over_packed"] = round(seconds[name] / seconds["packed"], 2)
            figures[f"{name}_over_packed_processor"] = round(processor[name] / processor["packed"], 2)
            figures[f"{name}_differs_by"] = float(np.abs(done.output - packed.output).max())
    return figures


# The engine's settings by precision.
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "auto", "quantization": "int8"},
}
WHOLE = "the processor as it is"
_ENVIRONMENT = (VARIABLE, "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")


@dataclass(frozen=True, slots=True)
class Cap:
    """The most instructions a process may use, as maxsimd (`level`), `torch` and oneDNN name them."""

    title: str
    level: str
    torch: str
    onednn: str

    @property
    def environment(self) -> dict[str, str]:
        return dict(zip(_ENVIRONMENT, (self.level, self.torch, self.onednn), strict=True))


# From the most to the least, each with the instructions that it takes away.
_CAPS = (
    (Cap("AVX-512 with VNNI", "avx512_vnni", "avx512", "AVX512_CORE_VNNI"), "avx512_bf16"),
    (Cap("AVX-512", "avx512", "avx512", "AVX512_CORE"), "avx512_vnni"),
    (Cap("AVX2", "avx2", "avx2", "AVX2"), "avx512"),
    (Cap("without AVX2", "default", "default", "SSE41"), "avx2"),
)


def caps() -> list[Cap | None]:
    """The caps that take instructions from this processor, after None for the processor as it is."""
    has = {
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "avx512_vnni": torch.cpu._is_vnni_supported(),
        "avx512": torch.cpu._is_avx512_supported(),
        "avx2": torch.cpu._is_avx2_supported(),
    }
    return [None, *(cap for cap, needed in _CAPS if has[needed])]


def measure_instruction_sets(
    shape: str, texts: int, rounds: int, seconds: float, threads: int | None, onnx: str | None
) -> Figures:
    """Figures by the titles of the caps, each of `texts` docstrings in `rounds` rounds, or as many as begin
    within `seconds`. `onnx` is an interpreter whose ONNX Runtime is measured on the processor as it is."""
    threads = threads or len(os.sched_getaffinity(0))
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        # Wide models of 12 layers take about eight times as long as MiniLM-L6.
        model = save_cross_encoder(path) if shape == "minilm-l6" else save_text_model(shape, path, 12)
        for cap in caps():
            title = WHOLE if cap is None else cap.title
            environment = {name: value for name, value in os.environ.items() if name not in _ENVIRONMENT}
            environment |= {} if cap is None else cap.environment
            arguments = (model, texts, rounds, seconds, threads, onnx if cap is None else None)
            with (
                patch.dict(os.environ, environment, clear=True),
                ProcessPoolExecutor(1, get_context("spawn")) as process,
            ):
                found = process.submit(_measure_precisions, *arguments).result()
            figures[title] = {"emulated": cap is not None, **found}
            click.echo(f"{title}: {found['over_sentence_transformers']}", err=True)
    return figures


def _measure_precisions(*arguments: Any) -> Figures:
    return asyncio.run(_precisions(*arguments))


async def _precisions(
    model: str, texts: int, rounds: int, seconds: float, threads: int, onnx: str | None
) -> Figures:
    """Medians of each precision, in turns, and the median of each round's ratios."""
    torch.set_num_threads(threads)
    async with contextlib.AsyncExitStack() as stack:
        runs: dict[str, _Run] = {_PEER: _by_sentence_transformers(model, "float32")}
        paths: dict[str, str] = {}
        refused: dict[str, str] = {}
        for name, settings in PRECISIONS.items():
            try:
                engine = Engine(
                    EngineConfig.of({"model": model, "device": "cpu", "threads": threads, **settings})
                )
                runs[name] = _by_engine(await stack.enter_async_context(engine))
                paths[name] = _path(engine, name)
            except Exception as error:  # a precision that this processor lacks
                log.warning("%s does not run: %s", name, error)
                paths[name], refused[name] = "does not run", str(error)
        versions: dict[str, str] = {}
        if onnx is not None:
            runs[_ONNX], versions = stack.enter_context(_by_onnx(onnx, model, threads))
        turns = await _take_turns(runs, docstring_pairs()[:texts], rounds, seconds)
    if onnx is not None:
        turns.processor[_ONNX] = [done.processor_seconds for done in turns.results[_ONNX]]
    figures: Figures = {
        "instructions": used_instruction_sets(),
        "torch": torch.backends.cpu.get_cpu_capability(),
    }
    figures |= {"paths": paths, "refused": refused, "onnx": versions, "rounds": len(turns.seconds[_PEER])}
    figures["seconds"] = {name: round(statistics.median(each), 3) for name, each in turns.seconds.items()}
    for suffix, taken in (("", turns.seconds), ("_in_processor_time", turns.processor)):
        others = {name: median_ratio(taken[_PEER], each) for name, each in taken.items() if name != _PEER}
        figures[f"over_sentence_transformers{suffix}"] = others
        if {"int8", "float32"} <= taken.keys():
            figures[f"int8_over_float32{suffix}"] = median_ratio(taken["float32"], taken["int8"])
    outputs = {name: results[-1].output for name, results in turns.results.items()}
    exact = outputs.pop(_PEER)
    figures["differs_by"] = {name: float(np.abs(each - exact).max()) for name, each in outputs.items()}
    return figures


def _path(engine: Engine, name: str) -> str:
    """The way an engine multiplies the weights of linear layers."""
    dtype = engine.device_model.dtype
    if is_compiled_supported(torch.device("cpu"), dtype) and (name != "int8" or dtype is torch.bfloat16):
        return "our kernels"
    return choose_path(True).name if name == "int8" else choose_method(dtype).name


@contextlib.contextmanager
def _by_onnx(interpreter: str, model: str, threads: int) -> Iterator[tuple[_Run, dict[str, str]]]:
    """sentence-transformers with ONNX Runtime and weights in int8, in a process of another environment."""
    script = Path(__file__).with_name("onnx_int8.py")
    command = [interpreter, str(script), model, str(threads), str(int(_is_classifier(model)))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        versions = json.loads(stdout.readline())

        async def run(pairs: list[Pair]) -> _Done:
            print(json.dumps([[pair.query, pair.document] for pair in pairs]), file=stdin, flush=True)
            found, processor_seconds = json.loads(stdout.readline())
            return _Done(np.array(found, dtype=np.float32), processor_seconds=processor_seconds)

        try:
            yield run, versions
        finally:
            stdin.close()
