"""Pictures of the figures of `maxsimd bench peers` and `maxsimd bench fleet`, for the documentation."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxsimd.bench.checkpoints import RERANKERS
from maxsimd.bench.peers import OURS, QUANTIZED, SHAPES

_VLLM = "vLLM bfloat16"
_OURS, _OTHERS = "tab:blue", "tab:gray"
_MARKS = {"maxsimd bfloat16": "o", "maxsimd int8": "s", _VLLM: "^"}


def draw(folder: Path) -> list[Path]:
    """Draws the experiments that peers-cpu.json and peer-shapes-cpu.json in `folder` have; returns the
    pictures' paths. ImportError without matplotlib."""
    results: dict[str, Any] = {}
    for file in (folder / "peer-shapes-cpu.json", folder / "peers-cpu.json"):
        if file.exists():
            results |= json.loads(file.read_text(encoding="utf-8"))
    shown = [name for name in _PLOTS if results.get(name)]
    drawn = [save(_PLOTS[name](results[name]), folder / f"{name}.svg") for name in shown]
    shapes = {name: results[name][0] for name in SHAPES if name in results}
    if any(_VLLM in outcome["systems"] for outcome in shapes.values()):  # the chart is of ratios to it
        drawn.append(save(_by_shape(shapes), folder / "shapes.svg"))
    return drawn


def _by_shape(outcomes: dict[str, Any]) -> Any:
    """Bars of our throughput with many documents, in times that of vLLM, for each shape."""
    names: list[str] = []
    ratios: dict[str, list[float]] = {OURS: [], QUANTIZED: []}
    for name, outcome in outcomes.items():
        if outcome["concurrency"] == 8:
            names.append(RERANKERS[SHAPES[name].checkpoint])
            for ours, values in ratios.items():
                values.append(outcome["ratios_of_documents_per_s"][ours][_VLLM])
    figure, axes = _axes(0.75 * len(names) + 1.3)
    for i, (ours, values) in enumerate(ratios.items()):
        places = [row + 0.38 * (i - 0.5) for row in range(len(names))]
        drawn = axes.barh(places, values, height=0.36, label=ours, color=(_OURS, "tab:cyan")[i])
        axes.bar_label(drawn, fmt="%.2f", padding=3)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(1, color=_OTHERS, linestyle="--", label=_VLLM)
    axes.set_xlabel("documents a second, in times vLLM's")
    axes.margins(x=0.12)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _bars_of(what: str, label: str) -> Callable[[Any], Any]:
    def plot(outcomes: Any) -> Any:
        return bars({name: turn[what] for name, turn in outcomes[0]["systems"].items()}, label)

    return plot


def _curve(setting: str, what: str, labels: tuple[str, str]) -> Callable[[Any], Any]:
    def plot(outcomes: Any) -> Any:
        x = [outcome[setting] for outcome in outcomes]
        systems = outcomes[0]["systems"]
        lines = {name: [outcome["systems"][name][what] for outcome in outcomes] for name in systems}
        return _lines(x, lines, labels)

    return plot


def _cache(figures: Any) -> Any:
    encoded, restarted, cached = (
        figures[f"{name}_ms"] for name in ("encoded", "after_a_restart", "cached_in_memory")
    )
    times = {"encoded": encoded, "from disk after a restart": restarted, "from memory": cached}
    return bars(times, "milliseconds for 1,000 documents", logarithmic=True)


def _prefix(figures: Any) -> Any:
    once, every_time = (figures[f"{name}_documents_per_s"] for name in ("shared", "apart"))
    return bars({"prefix run once": once, "prefix run every time": every_time}, "documents a second")


def _scaling(figures: Any) -> Any:
    by_size = figures["ms_a_document"]
    sizes = [int(size) for size in by_size]
    return _lines(sizes, {"maxsimd": list(by_size.values())}, ("documents a request", "ms a document"))


# Each experiment, and how it is drawn.
_PLOTS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("cross-encoder", "pairs", "colbert"), _bars_of("documents_per_s", "documents a second")),
    "single": _bars_of("median_ms", "median latency, ms"),
    "documents": _curve("documents", "documents_per_s", ("documents a request", "documents a second")),
    "load": _curve("concurrency", "median_ms", ("requests at a time", "median latency, ms")),
    "maxsim": lambda found: bars({name: x["ms"] for name, x in found["contenders"].items()}, "milliseconds"),
    "cache": _cache,
    "prefix": _prefix,
    "scaling": _scaling,
    "ranking": lambda found: bars(
        {"bfloat16": found["mrr_without"], "int8": found["mrr"]}, "mean reciprocal rank", "%.4f"
    ),
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


def _axes(height: float, width: float = 7, **grid: int) -> tuple[Any, Any]:
    """Axes in a figure that is not shown on a screen. The same figures give the same file."""
    import matplotlib

    matplotlib.use("Agg")
    hidden = dict.fromkeys(("axes.spines.top", "axes.spines.right"), False)
    matplotlib.rcParams.update({"svg.hashsalt": "maxsimd", **hidden})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained", **grid)
    return figure, axes


def save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def draw_fleets(figures: dict[str, Any], path: Path) -> Path:
    """Four panels: latencies, hits and loads by the number of engines, and what moves as a fleet grows.
    ImportError without matplotlib."""
    figure, ((latency, hits), (load, growth)) = _axes(6.5, 9, nrows=2, ncols=2)
    for name, color in (("by owner", _OURS), ("anywhere", _OTHERS)):
        rows = [row for row in figures["fleets"] if row["documents"] == name]
        members = [row["members"] for row in rows]
        for what, style in (("p50_ms", "--"), ("p99_ms", "-")):
            values, label = [row[what] for row in rows], f"{name}, {what[:3]}"
            latency.plot(members, values, style, marker="o", color=color, label=label)
        hits.plot(members, [row["hits"] for row in rows], marker="o", color=color, label=name)
        loads = [row["max_over_mean_load"] for row in rows]
        load.plot(members, loads, marker="o", color=color, label=name)
    load.axhline(1.3, color="tab:red", linewidth=1, linestyle=":")
    _over_members(latency, members, "latency, ms")
    _over_members(hits, members, "documents found in caches")
    _over_members(load, members, "load of the busiest engine / mean")
    latency.set_yscale("log")
    latency.set_ylim(10, 6_000)
    latency.legend(frameon=False, ncols=2, loc="upper right")
    hits.set_ylim(0, 1)
    load.set_ylim(bottom=0.9)
    # Each step's documents that move, by the engines after it: 1 is one engine's share.
    moves = figures["moves_of_growth"]
    growth.plot(range(2, len(moves) + 2), moves, ".", color=_OURS)
    growth.axhline(1.2, color="tab:red", linewidth=1, linestyle=":")
    growth.set_ylim(bottom=0)
    growth.set_xlabel("engines, with the one that came")
    growth.set_ylabel("documents that move x engines")
    return save(figure, path)


def _over_members(axes: Any, members: list[int], label: str) -> None:
    axes.set_xscale("log")
    axes.set_xticks(members, [f"{count:,}" for count in members])
    axes.minorticks_off()
    axes.set_xlabel("engines")
    axes.set_ylabel(label)
    axes.legend(frameon=False)
