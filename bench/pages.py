"""Benchmarks of models that read pictures: docstrings drawn as pages and ranked, and speed."""

import asyncio
import io
import random
import re
import statistics
import tempfile
import textwrap
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from maxsimd.api.process import postponed_garbage_collection
from maxsimd.bench.checkpoints import PAGE_SHAPES, clip_b32
from maxsimd.bench.datasets import Pair, docstring_pairs
from maxsimd.bench.report import Figures
from maxsimd.bench.turns import take_turns
from maxsimd.engine import Content, Engine, EngineConfig
from maxsimd.engine.media import PictureFile

_Precision: TypeAlias = Literal["bfloat16", "float32"]
_QUERY, _DOCUMENT = "w1 w2 w3", "w4 w5 w6 w7 w8 w9"
# Sizes of pages in pixels: A4 standing and lying at 72 an inch, a square, a slide.
_SIZES = ((595, 842), (842, 595), (640, 640), (960, 540))
_FONTS = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "DejaVuSans-Bold", "STIXGeneral")
_MARGIN = 40


def draw_pages(pairs: Sequence[Pair], seed: int) -> list[Any]:
    """A Pillow image for the document of each pair: in one column or two, in one of several fonts and sizes,
    with or without a heading and a rule. Text that does not fit is left out."""
    chosen = random.Random(seed)
    return [_page(pair.document, chosen) for pair in pairs]


def _page(text: str, chosen: random.Random) -> Any:
    from PIL import Image, ImageDraw

    width, height = chosen.choice(_SIZES)
    name, size, columns = chosen.choice(_FONTS), chosen.choice((13, 15, 18)), chosen.choice((1, 1, 2))
    page = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(page)
    top = _MARGIN
    if chosen.random() < 0.5:
        heading, _, text = text.partition("\n")
        pen.text((_MARGIN, top), heading[:60], fill="black", font=_font("DejaVuSans-Bold", size + 6))
        top += size + 18
        pen.line((_MARGIN, top - 6, width - _MARGIN, top - 6), fill="gray", width=2)
    font = _font(name, size)
    column = (width - _MARGIN * (columns + 1)) // columns
    characters = max(10, int(column / pen.textlength("n", font=font)))
    lines = [line for part in text.splitlines() for line in textwrap.wrap(part, characters) or [""]]
    in_column = (height - top - _MARGIN) // (size + 5)
    for number, line in enumerate(lines[: in_column * columns]):
        at, row = divmod(number, in_column)
        pen.text((_MARGIN + at * (column + _MARGIN), top + row * (size + 5)), line, fill="black", font=font)
    return page


def _font(name: str, size: int) -> Any:
    """A font that comes with matplotlib, in pixels."""
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf", size)


_SENTENCE = re.compile(r"(?<=[.!?])\s")


async def measure_page_ranking(config: EngineConfig, pages: int, queries: int) -> dict[str, float]:
    """Mean reciprocal rank of pages by their first sentences, and how often the page comes first. Equal
    scores come before it."""
    pairs = [pair for pair in docstring_pairs() if len(_SENTENCE.split(pair.document, 1)) == 2][:pages]
    drawn = draw_pages(pairs, seed=0)
    ranks = []
    async with Engine(config) as engine:
        for number, pair in enumerate(pairs[:queries]):
            query = " ".join(_SENTENCE.split(pair.document, 1)[0].split())
            scores = (await engine.score(query, drawn)).scores
            ranks.append(sum(score >= scores[number] for score in scores))
    return {
        "pages": float(len(drawn)),
        "queries": float(len(ranks)),
        "mrr": round(sum(1 / rank for rank in ranks) / len(ranks), 4),
        "first": round(sum(rank == 1 for rank in ranks) / len(ranks), 4),
        "by_chance": round(sum(1 / rank for rank in range(1, len(drawn) + 1)) / len(drawn), 4),
    }


async def measure_page_speed(
    shapes: Sequence[str], pages: int, layers: int, rounds: int, dtype: _Precision
) -> Figures:
    """The medians of `rounds` for each shape, or all: the engine and other libraries in turns."""
    drawn = draw_pages(docstring_pairs()[:pages], seed=0)
    found: Figures = {}
    for shape in shapes or PAGE_SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = PAGE_SHAPES[shape](Path(folder) / "model", layers)
            found[shape] = await _speeds(shape, checkpoint, drawn, rounds, dtype)
    return found


async def _speeds(
    shape: str, checkpoint: str, pages: list[Any], rounds: int, dtype: _Precision
) -> dict[str, float]:
    others = _others(shape, checkpoint, dtype)
    async with Engine(EngineConfig(model=checkpoint, dtype=dtype)) as engine:
        await engine.score(_QUERY, pages)
        for encode in others.values():
            await encode(pages[:2])
        ways: dict[str, Callable[[], Awaitable[Any]]] = {
            "engine": partial(engine.score, _QUERY, pages, cache="bypass"),
            "cached": partial(engine.score, _QUERY, pages, cache="use"),
        }
        ways |= {name: partial(encode, pages) for name, encode in others.items()}
        turns = await take_turns(ways, rounds, warm_up=False)
    tokens = turns.results["engine"][-1].usage.prompt_tokens
    medians = {name: statistics.median(taken) for name, taken in turns.seconds.items()}
    figures = {"pages": float(len(pages)), "tokens": float(tokens), "engine_s": round(medians["engine"], 3)}
    for name in others:
        figures[f"{name}_s"] = round(medians[name], 3)
        figures[f"{name}_over_engine"] = round(medians[name] / medians["engine"], 2)
    figures["first_over_cached"] = round(medians["engine"] / medians["cached"], 1)
    return figures


def _others(shape: str, checkpoint: str, dtype: str) -> dict[str, Callable[[list[Any]], Awaitable[Any]]]:
    """Other ways to encode a list of pages, in the same precision."""
    import torch
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer
    from transformers import AutoProcessor, ColModernVBertForRetrieval

    numbers = getattr(torch, dtype)
    if shape == "colmodernvbert":  # sentence-transformers hands it pictures without their prompt
        plain = ColModernVBertForRetrieval.from_pretrained(checkpoint, dtype=numbers).eval()
        processor = AutoProcessor.from_pretrained(checkpoint, backend="pil")

        async def by_transformers(pages: list[Any]) -> object:
            with torch.inference_mode():
                return [plain(**processor.process_images([page])).embeddings for page in pages]

        return {"transformers_one_by_one": by_transformers}
    kind = SentenceTransformer if shape == "clip-b32" else MultiVectorEncoder
    options = {"processor_kwargs": {"backend": "pil"}, "model_kwargs": {"dtype": numbers}}
    model = kind(checkpoint, device="cpu", **options)
    encode = getattr(model, "encode_document", model.encode)

    async def in_batches(pages: list[Any], size: int) -> object:
        return encode(pages, batch_size=size, show_progress_bar=False)

    return {"one_by_one": partial(in_batches, size=1), "in_batches": partial(in_batches, size=32)}


async def measure_beside_pages(shape: str, pages: int, layers: int) -> dict[str, float]:
    """Latencies of one-document requests, alone and while a request of many pages of the same priority is
    served, and passes of the vision tower. In milliseconds."""
    drawn = draw_pages(docstring_pairs()[:pages], seed=0)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = PAGE_SHAPES[shape](Path(folder) / "model", layers)
        async with Engine(EngineConfig(model=checkpoint)) as engine:
            passes = _timed_passes(engine)
            for _ in range(20):
                await _one(engine)
            idle = [await _one(engine) for _ in range(200)]
            passes.clear()
            waiting = asyncio.create_task(engine.score(_QUERY, drawn, cache="bypass"))
            beside = []
            await asyncio.sleep(0.2)
            while not waiting.done():
                beside.append(await _one(engine))
                await asyncio.sleep(0.02)
            await waiting
    longest = max(passes)
    p99_idle, p99_beside = (float(np.quantile(each, 0.99)) for each in (idle, beside))
    return {
        "pages": float(len(drawn)),
        "requests_beside": float(len(beside)),
        "idle_p50_ms": round(float(np.median(idle)) * 1e3, 2),
        "idle_p99_ms": round(p99_idle * 1e3, 2),
        "beside_p50_ms": round(float(np.median(beside)) * 1e3, 2),
        "beside_p99_ms": round(p99_beside * 1e3, 2),
        "vision_passes": float(len(passes)),
        "longest_vision_pass_ms": round(longest * 1e3, 2),
        "allowed_p99_ms": round((longest + 2 * p99_idle) * 1e3, 2),
    }


async def _one(engine: Engine) -> float:
    started = time.perf_counter()
    await engine.score(_QUERY, _DOCUMENT, cache="bypass")
    return time.perf_counter() - started


def _timed_passes(engine: Engine) -> list[float]:
    """A list that gets the seconds of each pass of the vision tower from now on."""
    runner: Any = engine.device_model.runner
    passes: list[float] = []
    encode = runner.encode

    def timed(images: Any) -> None:
        started = time.perf_counter()
        encode(images)
        passes.append(time.perf_counter() - started)

    runner.encode = timed
    return passes


_WIDTH, _HEIGHT = 4000, 3000
_TICK = 0.001


async def measure_picture_stalls(pictures: int) -> dict[str, float]:
    """The longest delay of the event loop in milliseconds, idle and while a request with pictures of
    12 megapixels is served, by kind of file. Garbage is collected like in a server."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        async with Engine(EngineConfig(model=clip_b32(Path(folder) / "model", 2))) as engine:
            await engine.score("w1", ["w2"])
            with postponed_garbage_collection():
                figures["idle_ms"] = round(await _longest_stall(asyncio.sleep(1)) * 1e3, 2)
                for kind in ("JPEG", "PNG", "WEBP"):
                    files = [_photograph(kind, seed) for seed in range(pictures)]
                    documents = [Content.of([PictureFile(data)]) for data in files]
                    work = engine.score("w1", documents, cache="bypass")
                    figures[f"{kind.lower()}_ms"] = round(await _longest_stall(work) * 1e3, 2)
    return figures


async def _longest_stall(work: Any) -> float:
    """The longest that a sleeping task oversleeps during some work."""
    task, longest = asyncio.ensure_future(work), 0.0
    while not task.done():
        before = time.perf_counter()
        await asyncio.sleep(_TICK)
        longest = max(longest, time.perf_counter() - before - _TICK)
    await task
    return longest


def _photograph(kind: str, seed: int) -> bytes:
    """Soft shapes with some noise."""
    from PIL import Image

    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (30, 40, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC)).astype(np.int16)
    pixels += random.integers(-3, 4, pixels.shape, dtype=np.int16)
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, kind, quality=85)
    return out.getvalue()
