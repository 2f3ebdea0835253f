"""A cross-encoder of MiniLM-L6 shape with random weights: this engine beside sentence-transformers."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable

import click
import torch

from maxsimd.bench.datasets import docstring_pairs
from maxsimd.bench.report import write_json
from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from maxsimd.engine.checkpoint.embedded import embedded_model_path


def save_random_cross_encoder(folder: str) -> None:
    """Saves a `BertForSequenceClassification` of MiniLM-L6 shape, with MiniLM's tokeniser."""
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    source = embedded_model_path()
    torch.manual_seed(0)
    config = BertConfig.from_pretrained(source, num_labels=1)
    BertForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def compare_cross_encoders(count: int, rounds: int, json_file: str | None) -> None:
    """Scores the same docstring pairs with all contestants in turns, and prints medians and ratios."""
    pairs = docstring_pairs()[:count]
    with tempfile.TemporaryDirectory() as folder:
        save_random_cross_encoder(folder)
        asyncio.run(_compare(folder, [(pair.query, pair.document) for pair in pairs], rounds, json_file))


async def _compare(folder: str, pairs: list[tuple[str, str]], rounds: int, json_file: str | None) -> None:
    from sentence_transformers import CrossEncoder

    queries, documents = [query for query, _ in pairs], [document for _, document in pairs]
    plain = CrossEncoder(folder, device="cpu")
    half = CrossEncoder(folder, device="cpu", model_kwargs={"dtype": torch.bfloat16})
    async with Engine(EngineConfig(model=folder, device="cpu")) as engine:
        tokens = (await engine.score(queries, documents, truncation=CUT_LONG)).usage.prompt_tokens

        async def ours() -> None:
            await engine.score(queries, documents, truncation=CUT_LONG)

        def peer(model: CrossEncoder) -> Callable[[], "asyncio.Future[None]"]:
            return lambda: asyncio.get_running_loop().run_in_executor(
                None, lambda: model.predict(pairs, show_progress_bar=False)
            )

        dtype = str(engine.on_device.prepared.dtype).removeprefix("torch.")
        contestants = {
            f"maxsimd {dtype}": ours,
            "sentence-transformers bfloat16": peer(half),
            "sentence-transformers float32": peer(plain),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for round_number in range(rounds + 1):
            for name, run in contestants.items():
                started = time.perf_counter()
                await run()
                if round_number:  # the first round warms up
                    seconds[name].append(time.perf_counter() - started)

    first, *others = contestants
    click.echo(
        f"{len(pairs)} docstring pairs, {tokens / len(pairs):.0f} tokens a pair, {rounds} rounds in turns"
    )
    figures: dict[str, object] = {"pairs": len(pairs), "tokens": tokens, "rounds": rounds}
    for name, taken in seconds.items():
        rate = len(pairs) / statistics.median(taken)
        figures[f"{name} documents_per_s"] = round(rate, 1)
        click.echo(f"  {name:<34}{rate:>8.1f} documents/s{tokens / statistics.median(taken):>10.0f} tokens/s")
    for name in others:
        # Round by round, so that a machine that drifts does so for both.
        ratio = statistics.median(b / a for a, b in zip(seconds[first], seconds[name], strict=True))
        figures[f"ratio to {name}"] = round(ratio, 2)
        click.echo(f"  {ratio:.2f} times {name}")
    if json_file:
        write_json(json_file, {"figures": figures})
