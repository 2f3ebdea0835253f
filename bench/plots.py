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
    draw_to_files()
    drawn = []
    if (file := folder / "peers-cpu.json").exists():
        results = json.loads(file.read_text(encoding="utf-8"))
        shown = [name for name in _PLOTS if results.get(name)]
        drawn = [save(_PLOTS[name](results[name]), folder / f"{name}.svg") for name in shown]
    if (file := folder / "peer-shapes-cpu.json").exists():
        results = json.loads(file.read_text(encoding="utf-8"))
        outcomes = [outcome for name, found in results.items() if name in SHAPES for outcome in found]
        if any(_VLLM in outcome["systems"] for outcome in outcomes):  # the chart is of ratios to it
            drawn.append(save(_by_shape(results), folder / "shapes.svg"))
    return drawn


def _by_shape(results: dict[str, Any]) -> Any:
    """Bars of our throughput with many documents, in times that of vLLM, for each shape."""
    names: list[str] = []
    ratios: dict[str, list[float]] = {OURS: [], QUANTIZED: []}
    for name, (outcome, *_) in ((name, found) for name, found in results.items() if name in SHAPES):
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


def draw_to_files() -> None:
    """From now on nothing is shown on a screen, and the same figures give the same file."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "maxsimd"


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


def draw_fleets(figures: dict[str, Any], path: Path) -> Path:
    """Four panels: latencies, hits and loads by the number of engines, and what moves as a fleet grows.
    ImportError without matplotlib."""
    draw_to_files()
    from matplotlib import pyplot

    figure, ((latency, hits), (load, growth)) = pyplot.subplots(2, 2, figsize=(9, 6.5), layout="constrained")
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
    _growth(growth, figures["moves_of_growth"])
    return save(figure, path)


def _over_members(axes: Any, members: list[int], label: str) -> None:
    axes.set_xscale("log")
    axes.set_xticks(members, [f"{count:,}" for count in members])
    axes.minorticks_off()
    axes.set_xlabel("engines")
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _growth(axes: Any, moves: list[float]) -> None:
    """Each step's documents that move, by the engines after it: 1 is one engine's share."""
    axes.plot(range(2, len(moves) + 2), moves, ".", color="tab:blue")
    axes.axhline(1.2, color="tab:red", linewidth=1, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("engines, with the one that came")
    axes.set_ylabel("documents that move x engines")
    axes.spines[["top", "right"]].set_visible(False)
