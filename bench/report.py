"""What came of a run: figures, printed and written as JSON."""

import json
import platform
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request that was sent: `seconds` from sending to answer; `rank` of the known answer, from 1."""

    seconds: float
    documents: int
    tokens: int
    rank: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """All outcomes of a run of `duration` seconds, and what was run."""

    settings: dict[str, Any]
    duration: float
    outcomes: list[Outcome]
    extra: dict[str, Any] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        done = [outcome for outcome in self.outcomes if outcome.error is None]
        tokens = sum(outcome.tokens for outcome in done)
        documents = sum(outcome.documents for outcome in done)
        figures: dict[str, Any] = {
            "requests": len(self.outcomes),
            "failures": len(self.outcomes) - len(done),
            "duration_s": round(self.duration, 3),
            "tokens": tokens,
            "requests_per_s": round(len(done) / self.duration, 2),
            "documents_per_s": round(documents / self.duration, 1),
            "tokens_per_s": round(tokens / self.duration),
        }
        if done:
            seconds = [outcome.seconds * 1e3 for outcome in done]
            p50, p95, p99 = np.percentile(seconds, (50, 95, 99))
            figures |= {
                "latency_mean_ms": round(statistics.fmean(seconds), 2),
                "latency_median_ms": round(float(p50), 2),
                "latency_p95_ms": round(float(p95), 2),
                "latency_p99_ms": round(float(p99), 2),
            }
        ranks = [outcome.rank for outcome in done if outcome.rank is not None]
        if ranks:
            figures["mrr"] = round(statistics.fmean(1 / rank for rank in ranks), 4)
        return figures | self.extra

    def add_cost_in_ranking(self, plain: "Report") -> None:
        """Adds how the same requests were ranked without what makes this run cheaper, and how fast."""
        ours, theirs = self.figures(), plain.figures()
        self.extra["documents_per_s_without"] = theirs["documents_per_s"]
        if "mrr" in ours and "mrr" in theirs:
            self.extra["mrr_without"] = theirs["mrr"]
            self.extra["mrr_cost"] = round(theirs["mrr"] - ours["mrr"], 4)

    def show(self) -> str:
        settings = "  ".join(f"{name}={value}" for name, value in self.settings.items() if value is not None)
        lines = [settings]
        lines += [f"  {name.replace('_', ' '):<26}{value:>14}" for name, value in self.figures().items()]
        errors = sorted({outcome.error for outcome in self.outcomes if outcome.error})
        lines += [f"  failed: {error}" for error in errors[:5]]
        return "\n".join(lines)

    def write(self, path: str) -> None:
        write_json(path, {"settings": self.settings, "figures": self.figures()})


def publish(settings: dict[str, Any], figures: dict[str, Any], json_file: str | None) -> None:
    """Prints figures, one a line, and writes them to a file where asked."""
    for name, value in lines_of(figures):
        click.echo(f"  {name:<44}{value:>14}")
    if json_file:
        write_json(json_file, {"settings": settings, "figures": figures})


def lines_of(figures: dict[str, Any]) -> list[tuple[str, Any]]:
    """Figures by readable names; those within a figure follow it."""
    lines: list[tuple[str, Any]] = []
    for name, value in figures.items():
        shown = name.replace("_", " ")
        if isinstance(value, dict):
            lines += [(f"{shown}, {inner}", figure) for inner, figure in value.items()]
        else:
            lines.append((shown, value))
    return lines


def write_json(path: str, content: dict[str, Any]) -> None:
    """Writes figures to a file, with the machine that they belong to."""
    Path(path).write_text(json.dumps({"machine": machine()} | content, indent=2) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """The hardware and libraries that a figure belongs to."""
    import torch

    processor = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        processor = f"{len(names)} x {names[0].split(':')[1].strip()}" if names else processor
    return {
        "processor": processor,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
