"""All-token pooling as a method: one slice and one split a step, against slicing sequence by sequence."""

import random

import click
import numpy as np
import torch

from maxsimd.bench.timing import medians
from maxsimd.engine.execution import choose_device
from maxsimd.pooling.methods import AllPool, PoolingCursor
from maxsimd.scheduler import Chunk, ResultSlot, Tokens, TokenSequence


def measure_allpool(sequences: int, tokens: int, hidden: int, device: str, rounds: int) -> None:
    """Prints the medians of both ways over the same step, with a projection to 128 and normalisation."""
    chosen = choose_device(device)
    draw = random.Random(0)
    lengths = [draw.randint(max(1, tokens // 2), tokens * 3 // 2) for _ in range(sequences)]
    chunks = tuple(
        Chunk(
            TokenSequence.text(i, ResultSlot(0, i), "all", Tokens(np.zeros(length, dtype=np.int32))),
            0,
            length,
        )
        for i, length in enumerate(lengths)
    )
    starts = tuple(int(start) for start in np.cumsum([0, *lengths[:-1]]))
    cursor = PoolingCursor(chunks, starts)
    states = torch.randn(sum(lengths), hidden).bfloat16().to(chosen)
    projection = torch.nn.Linear(hidden, 128, bias=False).to(chosen)

    def head(rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(projection(rows), dim=-1)

    pool = AllPool(head)

    def together() -> list[torch.Tensor]:
        return list(pool.pool(states, cursor))

    def one_by_one() -> list[torch.Tensor]:
        return [
            head(states[start : start + len(chunk)].float())
            for chunk, start in zip(chunks, starts, strict=True)
        ]

    with torch.inference_mode():
        for ours, plain in zip(together(), one_by_one(), strict=True):
            torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
        seconds = medians({"together": together, "apart": one_by_one}, chosen, rounds)
    a, b = seconds["together"], seconds["apart"]
    click.echo(f"{sequences} sequences, {sum(lengths)} tokens, hidden {hidden} -> 128, on {chosen}")
    click.echo(f"  one slice and one split   {a * 1e3:8.3f} ms")
    click.echo(f"  sequence by sequence      {b * 1e3:8.3f} ms   {b / a:.2f} times as long")
