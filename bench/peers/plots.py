"""The figures of a run as pictures, where matplotlib is installed."""

from pathlib import Path
from typing import Any

from maxsimd.bench.peers.experiments import Outcome
from maxsimd.bench.peers.run import Results

_MARKS = {"maxsimd bfloat16": "o", "maxsimd int8": "s", "vLLM bfloat16": "^"}


def draw(results: Results, folder: Path) -> list[Path]:
    """Draws what there are figures for and returns the paths. ImportError where matplotlib is missing."""
    import matplotlib

    matplotlib.use("Agg")
    paths = []
    for name in ("cross-encoder", "colbert"):
        if name in results.outcomes:
            paths.append(_bars(results.outcomes[name][0], folder / f"peers-{name}.svg"))
    if "documents" in results.outcomes:
        labels = ("documents a request", "documents a second")
        outcomes = results.outcomes["documents"]
        points = [(outcome.documents, outcome) for outcome in outcomes]
        paths.append(_curve(points, "documents_per_s", labels, folder / "peers-documents.svg"))
    if "load" in results.outcomes:
        labels = ("requests at a time", "median latency, ms")
        points = [(outcome.concurrency, outcome) for outcome in results.outcomes["load"]]
        paths.append(_curve(points, "median_ms", labels, folder / "peers-load.svg"))
    if results.maxsim:
        paths.append(_maxsim(results.maxsim, folder / "peers-maxsim.svg"))
    return paths


def _bars(outcome: Outcome, path: Path) -> Path:
    systems = list(outcome.turns)
    rates = [outcome.median(system, "documents_per_s") for system in systems]
    return _horizontal(systems, rates, "documents a second", path)


def _maxsim(figures: dict[str, Any], path: Path) -> Path:
    contenders = figures["contenders"]
    return _horizontal(
        list(contenders), [figure["ms"] for figure in contenders.values()], "milliseconds", path
    )


def _horizontal(names: list[str], values: list[float], unit: str, path: Path) -> Path:
    figure, axes = _axes(0.5 * len(names) + 1)
    colours = ["tab:blue" if name.startswith("maxsimd") else "tab:gray" for name in names]
    bars = axes.barh(names, values, color=colours)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.margins(x=0.12)
    return _save(figure, path)


def _curve(points: list[tuple[int, Outcome]], what: str, labels: tuple[str, str], path: Path) -> Path:
    figure, axes = _axes(3.6)
    for system in points[0][1].turns:
        x = [setting for setting, _ in points]
        y = [outcome.median(system, what) for _, outcome in points]
        axes.plot(x, y, marker=_MARKS.get(system, "x"), label=system)
    axes.set_xscale("log")
    axes.set_xticks([setting for setting, _ in points], [f"{setting:,}" for setting, _ in points])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.legend(frameon=False)
    return _save(figure, path)


def _axes(height: float) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
