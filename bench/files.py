"""`maxsimd rerank` on a file beside the engine alone on the same documents, in turns."""

import asyncio
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

from maxsimd.bench.datasets import QUERY, Request, numbered_documents
from maxsimd.bench.targets import run_engine
from maxsimd.engine import EngineConfig

# Documents of a request to the engine alone, and how many are made at a time.
_AT_ONCE, _CONCURRENCY = 256, 4
_DONE = re.compile(rb"([\d,]+) of [\d,]+ documents")


async def measure_files(documents: int, rounds: int) -> dict[str, float]:
    """Medians of the documents a second of both, each in a process or engine of its own, and of when the
    command says something, and has scored something."""
    texts = [" ".join(text.split()) for text in numbered_documents(documents)]
    command, alone, said, scored, ratios = [], [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "documents.txt"
        file.write_text("\n".join(texts), encoding="utf-8")
        for _ in range(rounds):
            speed, first_line, first_progress = await _run_command(file, documents)
            engine = await _engine_speed(texts)
            command.append(speed)
            alone.append(engine)
            ratios.append(speed / engine)
            said.append(first_line)
            scored.append(first_progress)
    return {
        "command_documents_per_s": round(statistics.median(command), 1),
        "engine_documents_per_s": round(statistics.median(alone), 1),
        "command_over_engine": round(statistics.median(ratios), 3),
        "first_line_after_s": round(statistics.median(said), 2),
        "first_scores_after_loading_s": round(statistics.median(scored), 2),
    }


async def _run_command(file: Path, documents: int) -> tuple[float, float, float]:
    """Documents a second from the end of loading on, when the first line came after the start, and the first
    scores after the end of loading."""
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "maxsimd", "rerank", "--query", QUERY, "--documents", str(file)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    first_line = loaded = first_scores = ended = 0.0
    async for line in process.stderr:
        now = time.perf_counter()
        first_line = first_line or now - started
        found = _DONE.match(line)
        if found and found[1] == b"0":
            loaded = now
        elif found:
            first_scores = first_scores or now - loaded
            ended = now
    if await process.wait() != 0:
        raise RuntimeError("maxsimd rerank failed")
    return documents / (ended - loaded), first_line, first_scores


async def _engine_speed(texts: list[str]) -> float:
    """As `maxsimd bench engine` measures it."""
    parts = [texts[start : start + _AT_ONCE] for start in range(0, len(texts), _AT_ONCE)]
    workload = {
        **{"dataset": "docstrings", "cache": "use", "concurrency": _CONCURRENCY, "request_rate": None},
        **{"seed": 0, "warmup": 0, "num_requests": len(parts), "documents": _AT_ONCE},
    }
    report = await run_engine(EngineConfig(), [Request(QUERY, part) for part in parts], workload)
    return len(texts) / report.duration
