"""Embeds the texts of a file, and writes their vectors."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maxsimd.api.commands.printing import open_output
from maxsimd.api.commands.progress import Progress
from maxsimd.api.commands.records import Record
from maxsimd.api.commands.running import each_part, in_parts, started
from maxsimd.engine import EmbedResult, EngineConfig, TokenEmbedResult
from maxsimd.engine.requests import InputType

# Of each text float32 [dim], or [tokens, dim].
Rows = list[NDArray[np.float32]]


async def embed_records(
    config: EngineConfig,
    records: Sequence[Record],
    input_type: InputType | None,
    tokens: bool,
    progress: Progress,
) -> Rows:
    """Raises MaxsimdError, and Interrupted when someone asks the command to end."""
    found: dict[int, NDArray[np.float32]] = {}
    num_tokens = 0
    async with started(config, progress) as engine:

        async def ask(part: list[int]) -> EmbedResult | TokenEmbedResult:
            texts = [records[i].text for i in part]
            call = engine.embed_tokens if tokens else engine.embed
            return await call(texts, input_type=input_type, priority="batch")

        def done(part: list[int], result: EmbedResult | TokenEmbedResult) -> None:
            nonlocal num_tokens
            num_tokens += result.usage.prompt_tokens
            found.update(zip(part, result.embeddings, strict=True))
            progress.update(len(found), num_tokens, is_last=len(found) == len(records))

        progress.update(0, 0)
        await each_part(in_parts(records, range(len(records))), ask, done)
    return [found[i] for i in range(len(records))]


def write_array(path: Path, rows: Rows) -> None:
    """float32 [texts, dim] as .npy."""
    with open_output(path) as file:
        np.save(file, np.stack(rows))


def write_arrays(path: Path, rows: Rows) -> None:
    """`embeddings` float32 [tokens, dim] of all texts end to end, and `offsets` [texts + 1], as .npz."""
    offsets = np.array([0, *accumulate(map(len, rows))])
    with open_output(path) as file:
        np.savez(file, embeddings=np.concatenate(rows), offsets=offsets)
