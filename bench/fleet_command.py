"""`maxsimd bench fleet`, which simulates many engines, and `fleet-overhead`, which starts a few."""

import json
from pathlib import Path

import click

from maxsimd.bench.fleet_simulation import FleetShape, moved_by_one_more, simulate
from maxsimd.bench.overhead import measure_overhead
from maxsimd.bench.peers.systems import maxsimd
from maxsimd.bench.report import publish
from maxsimd.bench.running import run_and_clean_up

_SERVERS = {
    "one process": (),
    "2 fronts, 1 replica": ("--fronts", "2"),
    "1 front, 2 replicas": ("--replicas", "2"),
    "2 fronts, 2 replicas": ("--fronts", "2", "--replicas", "2"),
}


@click.command("fleet-overhead")
@click.option("--executable", help="The command of another version to measure instead.")
@click.option("--rounds", type=int, default=3, show_default=True, help="Rounds; medians are reported.")
@click.option("--seconds", type=float, default=5.0, show_default=True, help="Seconds of new documents each.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_fleet_overhead(executable: str | None, rounds: int, seconds: float, json_file: str | None) -> None:
    """Several fronts and replicas beside one process: the way of cached documents, throughput of new ones."""
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
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_fleet(
    members: tuple[int, ...], requests: int, zipf: float, cell_size: int, busy: float, json_file: str | None
) -> None:
    """Requests of 100 documents over fleets of engines that are not there, planned by the real code:
    documents at their owners, and anywhere."""
    rows = []
    for count in members:
        for by_owner in (True, False):
            shape = FleetShape(count, cell_size=cell_size, zipf=zipf, busy=busy, by_owner=by_owner)
            figures = simulate(shape, max(2_000, requests * count))
            where = "by owner" if by_owner else "anywhere"
            rows.append({"members": count, "documents": where, **figures})
            click.echo(
                f"  {count:>6,} engines, {where:>9}: "
                f"p50 {figures['p50_ms']:7.1f} ms, p99 {figures['p99_ms']:8.1f} ms, "
                f"hits {figures['hits']:.3f}, load max / mean {figures['max_over_mean_load']:.2f}, "
                f"{figures['parts_a_request']:.1f} parts a request"
            )
    moved = {str(count): round(moved_by_one_more(count), 3) for count in members}
    for name, ratio in moved.items():
        click.echo(f"  {name:>6} engines and one more: {ratio:.2f} times 1 / engines of the documents move")
    if json_file is not None:
        text = json.dumps({"fleets": rows, "moved_times_members": moved}, indent=2)
        Path(json_file).write_text(text + "\n", encoding="utf-8")
