"""The results of a run on a GPU, in a folder: JSON, Markdown and a plot."""

from pathlib import Path
from typing import Any

from maxsimd.bench.plots import bars, save
from maxsimd.bench.report import lines_of, machine, write_json

Figures = dict[str, Any]


def write_report(name: str, title: str, figures: Figures, folder: Path) -> list[Path]:
    """Writes NAME.json, NAME.md and, with matplotlib, NAME-*.svg, a plot for each table of milliseconds or of
    requests a second. Returns their paths."""
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
        lines += ["", f"## {name}", "", "| | |", "| --- | ---: |"]
        lines += [f"| {shown} | {value} |" for shown, value in lines_of(values)]
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
