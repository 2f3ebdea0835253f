"""How long the event loop stands still while large pictures are read in threads."""

import asyncio
import io
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from maxsimd.api.process import garbage_left_alone
from maxsimd.bench.page_models import clip_b32
from maxsimd.engine import Content, Engine, EngineConfig
from maxsimd.engine.media import PictureFile

_WIDTH, _HEIGHT = 4000, 3000
_TICK = 0.001


async def measure_picture_stalls(pictures: int) -> dict[str, float]:
    """The longest that a task which sleeps for a millisecond overslept, in milliseconds, while a request with
    pictures of 12 million pixels was read and run, for each kind of file; and with none. Garbage is collected
    as in a server."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        async with Engine(EngineConfig(model=clip_b32(Path(folder) / "model", 2))) as engine:
            await engine.score("w1", ["w2"])
            with garbage_left_alone():
                figures["idle_ms"] = round(await _longest_stall(asyncio.sleep(1)) * 1e3, 2)
                for kind in ("JPEG", "PNG", "WEBP"):
                    files = [_file(kind, seed) for seed in range(pictures)]
                    documents = [Content.of([PictureFile(data)]) for data in files]
                    work = engine.score("w1", documents, cache="bypass")
                    figures[f"{kind.lower()}_ms"] = round(await _longest_stall(work) * 1e3, 2)
    return figures


async def _longest_stall(work: Any) -> float:
    """The longest that a sleeping task overslept while some work went on."""
    task, longest = asyncio.ensure_future(work), 0.0
    while not task.done():
        before = time.perf_counter()
        await asyncio.sleep(_TICK)
        longest = max(longest, time.perf_counter() - before - _TICK)
    await task
    return longest


def _file(kind: str, seed: int) -> bytes:
    """A photograph of sorts: soft shapes with some noise."""
    from PIL import Image

    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (30, 40, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC)).astype(np.int16)
    pixels += random.integers(-3, 4, pixels.shape, dtype=np.int16)
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, kind, quality=85)
    return out.getvalue()
