"""Scores cases, one JSON object a line of input, on the accelerator that does not exist and on the CPU.
With arguments it is the command `maxsimd` instead."""

import json
import sys
from typing import Any

import numpy as np
from PIL import Image

from maxsimd import SyncEngine
from maxsimd.api.cli import main as command
from maxsimd.engine import Content
from maxsimd.engine.media import PillowPicture
from tests.accelerator import device

QUERIES = ("what is a cat", "rain in spain, and where it falls")
DOCUMENTS = (
    "a cat is an animal that purrs", "rain", "bread and butter, " * 8, "it rains in the plain mainly",
)  # fmt: skip


def _scores(case: dict[str, Any], on: str) -> tuple[list[list[float]], dict[str, str]]:
    """Those of new documents, then of ones that are cached, and how the model is run."""
    documents: list[Any] = [*DOCUMENTS]
    if case["pictures"]:
        noise = np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8)
        documents.append(Content.of([PillowPicture(Image.fromarray(noise))]))
    options = {"model": case["path"], "device": on, "dtype": "float32", "cache_mb": 8} | case["settings"]
    with SyncEngine(**options) as engine:
        scores = [engine.score(query, documents).scores for query in (*QUERIES, *reversed(QUERIES))]
        facts = engine._engine.facts
    return scores, {"device": facts.device, "execution": facts.execution, "kernels": facts.kernels}


def _outcome(case: dict[str, Any]) -> dict[str, Any]:
    device.broken = case["broken"]
    try:
        there, facts = _scores(case, device.NAME)
    except Exception as error:  # so that the other cases are run
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        device.broken = None
    return {"there": there, "here": _scores(case, "cpu")[0], **facts}


device.add_device()
if len(sys.argv) > 1:
    command()
for line in sys.stdin:
    print(json.dumps(_outcome(json.loads(line))), flush=True)
