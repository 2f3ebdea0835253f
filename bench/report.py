"""Runs a benchmark and reports its figures: printed, as JSON, and as a folder with Markdown."""

import json
import os
import platform
import signal
import statistics
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np

T = TypeVar("T")
Figures = dict[str, Any]


def run_and_clean_up(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on uvloop, whose clients leave more of the machine to the server. SIGTERM ends it like
    Ctrl-C, so that what it started is stopped."""
    import uvloop

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return uvloop.run(coroutine)
    finally:
        signal.signal(signal.SIGTERM, before)


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

    settings: Figures
    duration: float
    outcomes: list[Outcome]
    extra: Figures = field(default_factory=dict)

    def figures(self) -> Figures:
        done = [outcome for outcome in self.outcomes if outcome.error is None]
        tokens = sum(outcome.tokens for outcome in done)
        documents = sum(outcome.documents for outcome in done)
        figures: Figures = {
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
        """Adds the speed and ranking of the same requests without pooling and quantization."""
        ours, theirs = self.figures(), plain.figures()
        self.extra["documents_per_s_without"] = theirs["documents_per_s"]
        if "mrr" in ours and "mrr" in theirs:
            self.extra["mrr_without"] = theirs["mrr"]
            self.extra["mrr_cost"] = round(theirs["mrr"] - ours["mrr"], 4)

    def publish(self, json_file: str | None) -> None:
        """Prints the settings, the figures and some errors."""
        click.echo("  ".join(f"{name}={value}" for name, value in self.settings.items() if value is not None))
        publish(self.settings, self.figures(), json_file)
        for error in sorted({outcome.error for outcome in self.outcomes if outcome.error})[:5]:
            click.echo(f"  failed: {error}")


def publish(settings: Figures, figures: Figures, json_file: str | None) -> None:
    """Prints figures, one a line, and writes them to a file where asked."""
    for name, value in lines_of(figures):
        click.echo(f"  {name:<44}{value!s:>14}")
    if json_file:
        write_json(json_file, {"settings": settings, "figures": figures})


def lines_of(figures: Figures) -> list[tuple[str, Any]]:
    """Figures by readable names; nested figures follow the name of theirs. Lists are for files only."""
    lines: list[tuple[str, Any]] = []
    for name, value in figures.items():
        shown = name.replace("_", " ")
        if isinstance(value, dict):
            lines += [(f"{shown}, {inner}", figure) for inner, figure in lines_of(value)]
        elif not isinstance(value, list):
            lines.append((shown, value))
    return lines


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of Markdown; all columns but the first are numbers."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


def write_json(path: str, content: Figures) -> None:
    """Writes figures to a file, with the machine that they belong to."""
    text = json.dumps({"machine": machine()} | content, indent=2, default=os.fspath)
    Path(path).write_text(f"{text}\n", encoding="utf-8")


def machine() -> Figures:
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


def write_report(name: str, title: str, figures: Figures, folder: Path) -> list[Path]:
    """Writes NAME.json, NAME.md and, with matplotlib, NAME-*.svg, a plot for each table of milliseconds or of
    requests a second. Returns their paths."""
    from maxsimd.bench.plots import bars, save

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.json", folder / f"{name}.md"]
    write_json(str(paths[0]), figures)
    pictures = []
    try:
        for index, (heading, values) in enumerate(_plotted(figures).items()):
            pictures.append(save(bars(values, heading), folder / f"{name}-{index}.svg"))
    except ImportError:
        pass
    paths[1].write_text(_markdown(title, figures, pictures), encoding="utf-8")
    return paths + pictures


def _markdown(title: str, figures: Figures, pictures: list[Path]) -> str:
    here = machine()
    lines = [f"# {title}", "", f"{here['gpu'] or here['processor']}, torch {here['torch']}."]
    for name, values in figures.items():
        lines += ["", f"## {name}", "", *table(("", ""), lines_of(values))]
    lines += [f"\n![]({picture.name})" for picture in pictures]
    return "\n".join(lines) + "\n"


def _plotted(figures: Figures) -> dict[str, dict[str, float]]:
    """The values of each plot by heading: milliseconds by contender, and requests a second by workload."""
    plots: dict[str, dict[str, float]] = {}
    for name, values in figures.items():
        times = {key.removesuffix("_ms"): value for key, value in values.items() if key.endswith("_ms")}
        if "requests_per_s" in values:
            plots.setdefault("requests a second", {})[name] = values["requests_per_s"]
        elif times:
            plots[f"{name}, ms"] = times
    return plots
