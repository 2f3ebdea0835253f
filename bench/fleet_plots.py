"""The figures of `maxsimd bench fleet` as a picture; docs/internals/fleet.md shows it."""

from pathlib import Path
from typing import Any

from maxsimd.bench.plots import draw_to_files, save

_COLOURS = {"by owner": "tab:blue", "anywhere": "tab:gray"}


def draw_fleets(figures: dict[str, Any], path: Path) -> Path:
    """Four panels: latencies, hits and loads by the number of engines, and what moves as a fleet grows.
    ImportError without matplotlib."""
    draw_to_files()
    from matplotlib import pyplot

    figure, ((latency, hits), (load, growth)) = pyplot.subplots(2, 2, figsize=(9, 6.5), layout="constrained")
    for name, colour in _COLOURS.items():
        rows = [row for row in figures["fleets"] if row["documents"] == name]
        members = [row["members"] for row in rows]
        for what, style in (("p50_ms", "--"), ("p99_ms", "-")):
            latency.plot(
                members,
                [row[what] for row in rows],
                style,
                marker="o",
                color=colour,
                label=f"{name}, {what[:3]}",
            )
        hits.plot(members, [row["hits"] for row in rows], marker="o", color=colour, label=name)
        loads = [row["max_over_mean_load"] for row in rows]
        load.plot(members, loads, marker="o", color=colour, label=name)
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
