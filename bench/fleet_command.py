"""`maxsimd bench fleet`, which simulates many engines, and `fleet-overhead`, which starts a few."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from maxsimd.bench.fleet_changes import moves_of_growth, moves_times_members
from maxsimd.bench.fleet_simulation import FleetShape, Routing, simulate
from maxsimd.bench.fleet_sweep import line_of, sweep
from maxsimd.bench.report import publish
from maxsimd.bench.running import run_and_clean_up

_SERVERS = {
    "one process": (),
    "2 fronts, 1 replica": ("--fronts", "2"),
    "1 front, 2 replicas": ("--replicas", "2"),
    "2 fronts, 2 replicas": ("--fronts", "2", "--replicas", "2"),
}
# To how many engines a fleet grows one by one.
_GROWN = 100
# Requests that count at least, however few engines there are.
_LEAST_REQUESTS = 2_000


@click.command("fleet-overhead")
@click.option("--executable", help="The command of another version to measure instead.")
@click.option("--rounds", type=int, default=3, show_default=True, help="Rounds; medians are reported.")
@click.option("--seconds", type=float, default=5.0, show_default=True, help="Seconds of new documents each.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_fleet_overhead(executable: str | None, rounds: int, seconds: float, json_file: str | None) -> None:
    """Several fronts and replicas beside one process: the way of cached documents, throughput of new ones."""
    from maxsimd.bench.overhead import measure_overhead
    from maxsimd.bench.peers.systems import maxsimd

    servers = [
        maxsimd(name, *options, "--cache-mb", "256", executable=executable)
        for name, options in _SERVERS.items()
    ]
    figures = run_and_clean_up(measure_overhead(servers, rounds, seconds, {}))
    publish({"rounds": rounds, "seconds": seconds}, figures, json_file)


@click.command("fleet")
@click.option(
    "--members",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1, 10, 100, 1_000),
    show_default=True,
    help="Engines; repeatable.",
)
@click.option("--requests", type=int, default=40, show_default=True, help="Requests that count, an engine.")
@click.option(
    "--zipf", type=float, default=1.0, show_default=True, help="How uneven documents are asked for."
)
@click.option("--cell-size", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--busy", type=float, default=0.6, show_default=True, help="Share of the time engines work.")
@click.option("--sweep", "sweeps", is_flag=True, help="Also 100 engines where one thing differs.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
@click.option("--plot", "plot_file", type=click.Path(), help="Also draw them, as .svg or .png.")
def bench_fleet(
    members: tuple[int, ...],
    requests: int,
    zipf: float,
    cell_size: int,
    busy: float,
    sweeps: bool,
    json_file: str | None,
    plot_file: str | None,
) -> None:
    """Requests of 100 documents over fleets of engines that are not there, planned by the real code:
    documents at their owners, and anywhere; what moves when an engine comes or goes."""
    shape = FleetShape(1, cell_size=cell_size, zipf=zipf, busy=busy)
    figures: dict[str, Any] = {"fleets": _fleets(shape, members, requests)}
    figures["moves"] = _moves(members, cell_size)
    figures["moves_of_growth"] = _growth(cell_size)
    if sweeps:
        figures["sweep"] = []
        for row in sweep(requests):
            figures["sweep"].append(row)
            click.echo(line_of(row["what"], row))
    if json_file is not None:
        Path(json_file).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if plot_file is not None:
        from maxsimd.bench.fleet_plots import draw_fleets

        draw_fleets(figures, Path(plot_file))


def _fleets(shape: FleetShape, members: tuple[int, ...], requests: int) -> list[dict[str, Any]]:
    """Each fleet by owner and anywhere, printed as they come."""
    rows = []
    for count in members:
        for routing in (Routing.BY_OWNER, Routing.ANYWHERE):
            row = simulate(
                replace(shape, members=count, routing=routing), max(_LEAST_REQUESTS, requests * count)
            )
            rows.append({"members": count, "documents": routing.value, **row})
            click.echo(line_of(f"{count:,} engines, {routing.value}", row))
    return rows


def _moves(members: tuple[int, ...], cell_size: int) -> dict[str, dict[str, float]]:
    """The share of requested documents that move, times the engines, printed."""
    moves = {}
    for count in members:
        moves[str(count)] = moves_times_members(count, cell_size)
        for change, times in moves[str(count)].items():
            click.echo(
                f"  {count:>5,} engines, {change + ':':<40} {times:.2f} / engines of the documents move"
            )
    return moves


def _growth(cell_size: int) -> list[float]:
    """The same as a fleet grows, printed."""
    steps = moves_of_growth(_GROWN, cell_size)
    click.echo(
        f"  from 1 engine to {_GROWN}, one by one: {sum(steps) / len(steps):.2f} / engines a step, at most "
        f"{max(steps):.2f}"
    )
    return steps
