"""A cross-encoder of MiniLM-L6 shape with random weights: this engine beside sentence-transformers.

Each peer runs in a process of its own, as its users run it, so that nobody's settings reach another.
"""

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import click

from maxsimd.bench.datasets import docstring_pairs
from maxsimd.bench.report import write_json
from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from maxsimd.engine.checkpoint.embedded import embedded_model_path

Pairs = list[tuple[str, str]]


def save_random_cross_encoder(folder: str) -> None:
    """Saves a `BertForSequenceClassification` of MiniLM-L6 shape, with MiniLM's tokeniser."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    source = embedded_model_path()
    torch.manual_seed(0)
    config = BertConfig.from_pretrained(source, num_labels=1)
    BertForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def compare_cross_encoders(count: int, rounds: int, json_file: str | None) -> None:
    """Scores the same docstring pairs with all contestants in turns, and prints medians and ratios."""
    pairs = [(pair.query, pair.document) for pair in docstring_pairs()[:count]]
    with tempfile.TemporaryDirectory() as folder:
        save_random_cross_encoder(folder)
        tokens, seconds = asyncio.run(_compare(folder, pairs, rounds))
    figures = _show(len(pairs), tokens, seconds)
    if json_file:
        write_json(json_file, {"pairs": count, "rounds": rounds, "tokens": tokens, "figures": figures})


async def _compare(folder: str, pairs: Pairs, rounds: int) -> tuple[int, dict[str, list[float]]]:
    """The tokens of all pairs, and the seconds of each contestant by round."""
    queries, documents = [query for query, _ in pairs], [document for _, document in pairs]
    with ExitStack() as stack:
        half = stack.enter_context(_peer(folder, "bfloat16"))
        plain = stack.enter_context(_peer(folder, "float32"))
        async with Engine(EngineConfig(model=folder, device="cpu")) as engine:
            tokens = (await engine.score(queries, documents, truncation=CUT_LONG)).usage.prompt_tokens
            dtype = str(engine.on_device.prepared.dtype).removeprefix("torch.")
            contestants: dict[str, Callable[[], Awaitable[Any]]] = {
                f"maxsimd {dtype}": lambda: engine.score(queries, documents, truncation=CUT_LONG),
                "sentence-transformers bfloat16": lambda: half(pairs),
                "sentence-transformers float32": lambda: plain(pairs),
            }
            seconds: dict[str, list[float]] = {name: [] for name in contestants}
            for round_number in range(rounds + 1):
                for name, run in contestants.items():
                    started = time.perf_counter()
                    await run()
                    if round_number:  # the first round warms up
                        seconds[name].append(time.perf_counter() - started)
    return tokens, seconds


@contextmanager
def _peer(folder: str, dtype: str) -> Iterator[Callable[[Pairs], Awaitable[None]]]:
    """sentence-transformers' CrossEncoder in a process of its own; yields what predicts there."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _load_peer, (folder, dtype)) as executor:
        yield lambda pairs: asyncio.get_running_loop().run_in_executor(executor, _predict, pairs)


def _load_peer(folder: str, dtype: str) -> None:
    global _model
    from sentence_transformers import CrossEncoder

    _model = CrossEncoder(folder, device="cpu", model_kwargs={"dtype": dtype})


def _predict(pairs: Pairs) -> None:
    _model.predict(pairs, show_progress_bar=False)


_model: Any = None


def _show(pairs: int, tokens: int, seconds: dict[str, list[float]]) -> dict[str, float]:
    """Prints each contestant's rate and how often faster the first one is; returns the figures."""
    first, *others = seconds
    rounds = len(seconds[first])
    click.echo(f"{pairs} docstring pairs, {tokens / pairs:.0f} tokens a pair, {rounds} rounds in turns")
    figures = {}
    for name, taken in seconds.items():
        median = statistics.median(taken)
        figures[f"{name} documents_per_s"] = round(pairs / median, 1)
        click.echo(f"  {name:<34}{pairs / median:>8.1f} documents/s{tokens / median:>10.0f} tokens/s")
    for name in others:
        # Round by round, so that a machine that drifts does so for both.
        ratio = statistics.median(b / a for a, b in zip(seconds[first], seconds[name], strict=True))
        figures[f"ratio to {name}"] = round(ratio, 2)
        click.echo(f"  {ratio:.2f} times {name}")
    return figures
