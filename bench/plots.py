"""The figures in a folder of results as pictures; docs/performance.md shows them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Figures = dict[str, Any]

_OURS, _OTHERS = "tab:blue", "tab:gray"
_MARKS = {"maxsimd bfloat16": "o", "maxsimd int8": "s", "vLLM bfloat16": "^"}


def draw(folder: Path) -> list[Path]:
    """Draws all that there are results for; returns the pictures' paths. ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    # The same figures give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "maxsimd"
    paths = []
    for name, (source, plot) in _PLOTS.items():
        path = folder / f"{source}.json"
        if not path.exists():
            continue
        figure = plot(json.loads(path.read_text(encoding="utf-8")))
        if figure is not None:
            paths.append(_save(figure, folder / f"{name}.svg"))
    return paths


def _rates(experiment: str) -> Callable[[Figures], Any]:
    def plot(results: Figures) -> Any:
        if experiment not in results:
            return None
        systems = results[experiment][0]["systems"]
        return _bars({name: turn["documents_per_s"] for name, turn in systems.items()}, "documents a second")

    return plot


def _single(results: Figures) -> Any:
    if "single" not in results:
        return None
    systems = results["single"][0]["systems"]
    return _bars({name: turn["median_ms"] for name, turn in systems.items()}, "median latency, ms")


def _curve(experiment: str, setting: str, what: str, labels: tuple[str, str]) -> Callable[[Figures], Any]:
    def plot(results: Figures) -> Any:
        if experiment not in results:
            return None
        outcomes = results[experiment]
        x = [outcome[setting] for outcome in outcomes]
        lines = {
            name: [outcome["systems"][name][what] for outcome in outcomes] for name in outcomes[0]["systems"]
        }
        return _lines(x, lines, labels)

    return plot


def _maxsim(results: Figures) -> Any:
    if not results.get("maxsim"):
        return None
    contenders = results["maxsim"]["contenders"]
    return _bars({name: figure["ms"] for name, figure in contenders.items()}, "milliseconds")


def _cache(results: Figures) -> Any:
    figures = results["figures"]
    times = {
        "encoded": figures["encoded_ms"],
        "from disk after a restart": figures["after_a_restart_ms"],
        "from memory": figures["kept_in_memory_ms"],
    }
    return _bars(times, "milliseconds for 1,000 documents", logarithmic=True)


def _prefix(results: Figures) -> Any:
    figures = results["figures"]
    rates = {
        "prefix run once": figures["shared_documents_per_s"],
        "prefix run every time": figures["apart_documents_per_s"],
    }
    return _bars(rates, "documents a second")


def _scaling(results: Figures) -> Any:
    by_size = results["figures"]["ms_a_document"]
    sizes = [int(size) for size in by_size]
    return _lines(sizes, {"maxsimd": list(by_size.values())}, ("documents a request", "ms a document"))


def _ranking(results: Figures) -> Any:
    figures = results["figures"]
    return _bars({"bfloat16": figures["mrr_without"], "int8": figures["mrr"]}, "mean reciprocal rank", "%.4f")


# Each picture: the results it is drawn from, and how.
_PLOTS: dict[str, tuple[str, Callable[[Figures], Any]]] = {
    "cross-encoder": ("peers-cpu", _rates("cross-encoder")),
    "colbert": ("peers-cpu", _rates("colbert")),
    "single": ("peers-cpu", _single),
    "documents": (
        "peers-cpu",
        _curve("documents", "documents", "documents_per_s", ("documents a request", "documents a second")),
    ),
    "load": (
        "peers-cpu",
        _curve("load", "concurrency", "median_ms", ("requests at a time", "median latency, ms")),
    ),
    "maxsim": ("peers-cpu", _maxsim),
    "cache": ("cache-cpu", _cache),
    "prefix": ("prefix-cpu", _prefix),
    "scaling": ("scaling-cpu", _scaling),
    "ranking-int8": ("engine-int8-cpu", _ranking),
}


def _bars(values: dict[str, float], unit: str, format: str = "%.4g", logarithmic: bool = False) -> Any:
    figure, axes = _axes(0.45 * len(values) + 0.9)
    ours = [not name.startswith(("vLLM", "sentence-transformers", "maxsim-cpu")) for name in values]
    bars = axes.barh(list(values), list(values.values()), color=[_OURS if mine else _OTHERS for mine in ours])
    axes.bar_label(bars, fmt=format, padding=3)
    axes.invert_yaxis()
    if logarithmic:
        axes.set_xscale("log")
    axes.set_xlabel(unit)
    axes.margins(x=0.12)
    return figure


def _lines(x: list[int], lines: dict[str, list[float]], labels: tuple[str, str]) -> Any:
    figure, axes = _axes(3.4)
    for name, y in lines.items():
        axes.plot(x, y, marker=_MARKS.get(name, "o"), label=name)
    axes.set_xscale("log")
    axes.set_xticks(x, [f"{setting:,}" for setting in x])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    if len(lines) > 1:
        axes.legend(frameon=False)
    return figure


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
