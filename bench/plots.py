"""The figures of `maxsimd bench peers` as pictures; docs/performance.md shows them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

_OURS, _OTHERS = "tab:blue", "tab:gray"
_MARKS = {"maxsimd bfloat16": "o", "maxsimd int8": "s", "vLLM bfloat16": "^"}


def draw(folder: Path) -> list[Path]:
    """Draws the experiments that peers-cpu.json in `folder` has; returns the pictures' paths. ImportError
    without matplotlib."""
    draw_to_files()
    results = json.loads((folder / "peers-cpu.json").read_text(encoding="utf-8"))
    shown = [name for name in _PLOTS if results.get(name)]
    return [save(_PLOTS[name](results[name]), folder / f"{name}.svg") for name in shown]


def draw_to_files() -> None:
    """From now on nothing is shown on a screen, and the same figures give the same file."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "maxsimd"


def _rates(outcomes: Any) -> Any:
    rates = {name: turn["documents_per_s"] for name, turn in outcomes[0]["systems"].items()}
    return bars(rates, "documents a second")


def _single(outcomes: Any) -> Any:
    latencies = {name: turn["median_ms"] for name, turn in outcomes[0]["systems"].items()}
    return bars(latencies, "median latency, ms")


def _curve(setting: str, what: str, labels: tuple[str, str]) -> Callable[[Any], Any]:
    def plot(outcomes: Any) -> Any:
        x = [outcome[setting] for outcome in outcomes]
        lines = {
            name: [outcome["systems"][name][what] for outcome in outcomes] for name in outcomes[0]["systems"]
        }
        return _lines(x, lines, labels)

    return plot


def _maxsim(figures: Any) -> Any:
    contenders = figures["contenders"]
    return bars({name: figure["ms"] for name, figure in contenders.items()}, "milliseconds")


def _cache(figures: Any) -> Any:
    times = {
        "encoded": figures["encoded_ms"],
        "from disk after a restart": figures["after_a_restart_ms"],
        "from memory": figures["cached_in_memory_ms"],
    }
    return bars(times, "milliseconds for 1,000 documents", logarithmic=True)


def _prefix(figures: Any) -> Any:
    rates = {
        "prefix run once": figures["shared_documents_per_s"],
        "prefix run every time": figures["apart_documents_per_s"],
    }
    return bars(rates, "documents a second")


def _scaling(figures: Any) -> Any:
    by_size = figures["ms_a_document"]
    sizes = [int(size) for size in by_size]
    return _lines(sizes, {"maxsimd": list(by_size.values())}, ("documents a request", "ms a document"))


def _ranking(figures: Any) -> Any:
    return bars({"bfloat16": figures["mrr_without"], "int8": figures["mrr"]}, "mean reciprocal rank", "%.4f")


# Each experiment, and how it is drawn.
_PLOTS: dict[str, Callable[[Any], Any]] = {
    "cross-encoder": _rates,
    "pairs": _rates,
    "colbert": _rates,
    "single": _single,
    "documents": _curve("documents", "documents_per_s", ("documents a request", "documents a second")),
    "load": _curve("concurrency", "median_ms", ("requests at a time", "median latency, ms")),
    "maxsim": _maxsim,
    "cache": _cache,
    "prefix": _prefix,
    "scaling": _scaling,
    "ranking": _ranking,
}


def bars(values: dict[str, float], unit: str, format: str = "%.4g", logarithmic: bool = False) -> Any:
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


def save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
