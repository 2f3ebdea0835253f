"""Pages that are encoded by the engine, and by others' libraries one by one and in batches."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

from maxsimd.bench.datasets import docstring_pairs
from maxsimd.bench.drawn_pages import draw_pages
from maxsimd.bench.page_models import SHAPES
from maxsimd.engine import Engine, EngineConfig

_Precision: TypeAlias = Literal["bfloat16", "float32"]
_QUERY = "w1 w2 w3"
# As sentence-transformers has it.
_BATCH = 32


async def measure_page_speed(
    shapes: list[str], pages: int, layers: int, rounds: int, dtype: _Precision
) -> dict[str, dict[str, float]]:
    """For each shape the medians of `rounds`, all taken in turns."""
    drawn = draw_pages(docstring_pairs()[:pages], seed=0)
    found = {}
    for shape in shapes:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = SHAPES[shape](Path(folder) / "model", layers)
            found[shape] = await _measure(shape, checkpoint, drawn, rounds, dtype)
    return found


async def _measure(
    shape: str, checkpoint: str, pages: list[Any], rounds: int, dtype: _Precision
) -> dict[str, float]:
    others = _others(shape, checkpoint, dtype)
    seconds: dict[str, list[float]] = {name: [] for name in ("engine", "cached", *others)}
    async with Engine(EngineConfig(model=checkpoint, dtype=dtype)) as engine:
        await engine.score(_QUERY, pages[:2])
        tokens = 0
        for _ in range(rounds):
            await engine.clear_cache()
            for name in ("engine", "cached"):
                started = time.perf_counter()
                result = await engine.score(_QUERY, pages)
                seconds[name].append(time.perf_counter() - started)
                tokens = result.usage.prompt_tokens
            for name, encode in others.items():
                started = time.perf_counter()
                encode(pages)
                seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    figures = {"pages": float(len(pages)), "tokens": float(tokens), "engine_s": round(medians["engine"], 3)}
    for name in others:
        figures[f"{name}_s"] = round(medians[name], 3)
        figures[f"{name}_over_engine"] = round(medians[name] / medians["engine"], 2)
    figures["first_over_cached"] = round(medians["engine"] / medians["cached"], 1)
    return figures


def _others(shape: str, checkpoint: str, dtype: str) -> dict[str, Callable[[list[Any]], object]]:
    """What encodes a list of pages otherwise, in the same precision."""
    import torch
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer

    options = {"processor_kwargs": {"backend": "pil"}, "model_kwargs": {"dtype": getattr(torch, dtype)}}
    if shape == "colmodernvbert":  # sentence-transformers hands it pictures without their prompt
        return {"transformers_one_by_one": _by_transformers(checkpoint, getattr(torch, dtype))}
    kind = SentenceTransformer if shape == "clip-b32" else MultiVectorEncoder
    model = kind(checkpoint, device="cpu", **options)
    encode = getattr(model, "encode_document", model.encode)
    return {
        "one_by_one": lambda pages: encode(pages, batch_size=1, show_progress_bar=False),
        "in_batches": lambda pages: encode(pages, batch_size=_BATCH, show_progress_bar=False),
    }


def _by_transformers(checkpoint: str, dtype: Any) -> Callable[[list[Any]], object]:
    import torch
    from transformers import AutoProcessor, ColModernVBertForRetrieval

    model = ColModernVBertForRetrieval.from_pretrained(checkpoint, dtype=dtype).eval()
    processor = AutoProcessor.from_pretrained(checkpoint, backend="pil")

    @torch.inference_mode()
    def encode(pages: list[Any]) -> list[torch.Tensor]:
        return [model(**processor.process_images([page])).embeddings for page in pages]

    return encode
