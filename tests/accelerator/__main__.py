"""Runs cases on the accelerator that does not exist, and on the CPU. Reads lines of JSON, each with a case's
name and the path of its checkpoint, and answers each by a line with both scores, or with the error that
loading ends with. With arguments it is the command `maxsimd` instead."""

import json
import sys
from typing import Any

import numpy as np
from PIL import Image

from maxsimd import SyncEngine
from maxsimd.engine import Content
from maxsimd.engine.media import PillowPicture
from tests.accelerator import device
from tests.accelerator.cases import BROKEN, CASES, OTHERS, Case

QUERIES = ("what is a cat", "rain in spain, and where it falls")
DOCUMENTS = (
    "a cat is an animal that purrs",
    "rain",
    "bread and butter, " * 8,
    "it rains in the plain mainly",
)


def _documents(case: Case) -> list[Any]:
    if case.name != "colpali":
        return [*DOCUMENTS]
    noise = np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    return [*DOCUMENTS, Content.of([PillowPicture(Image.fromarray(noise))])]


def _scores(case: Case, path: str, on: str) -> tuple[list[list[float]], dict[str, str]]:
    """Those of new documents, then of ones that are cached, and how the model is run."""
    with SyncEngine(
        **({"model": path, "device": on, "dtype": "float32", "cache_mb": 8} | case.settings)
    ) as engine:
        scores = [engine.score(query, _documents(case)).scores for query in (*QUERIES, *reversed(QUERIES))]
        facts = engine._engine.facts
    return scores, {"device": facts.device, "execution": facts.execution, "kernels": facts.kernels}


def _outcome(case: Case, path: str) -> dict[str, Any]:
    device.broken = case.broken
    try:
        there, facts = _scores(case, path, device.NAME)
    except Exception as error:  # so that the other cases are run
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        device.broken = None
    return {"there": there, "here": _scores(case, path, "cpu")[0], **facts}


def main() -> None:
    device.add_device()
    if len(sys.argv) > 1:
        from maxsimd.api.cli import main as command

        command()
        return
    cases = {case.name: case for case in (*CASES, *OTHERS, *BROKEN)}
    for line in sys.stdin:
        name, path = json.loads(line)
        print(json.dumps([name, _outcome(cases[name], path)]), flush=True)


main()
