"""`maxsimd bench cluster-overhead` and `cluster-hits`: what Ray costs and gains."""

import sys
from pathlib import Path

import click

from maxsimd.api.cluster.session import ray_session, require_ray
from maxsimd.bench.report import publish
from maxsimd.bench.running import run_and_clean_up

# How the processes of Ray are titled that requests pass through.
_TITLES = {
    "the proxy": "ray::ProxyActor",
    "the front": "ray::ServeReplica:maxsimd:Front",
    "the scorer": "ray::ServeReplica:maxsimd:Scorer",
}


@click.command("cluster-overhead")
@click.option("--rounds", type=int, default=3, show_default=True, help="Rounds; medians are reported.")
@click.option("--seconds", type=float, default=5.0, show_default=True, help="Seconds of new documents each.")
@click.option("--cpus", type=int, default=2, show_default=True, help="Threads of the server and the scorer.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_cluster_overhead(rounds: int, seconds: float, cpus: int, json_file: str | None) -> None:
    """A front and a scorer on Ray beside the server that is one process."""
    require_ray()
    from maxsimd.bench.overhead import measure_overhead
    from maxsimd.bench.peers.systems import Server, maxsimd

    own = str(Path(sys.executable).with_name("maxsimd"))
    servers = [
        maxsimd("one process", "--cache-mb", "256", "--threads", str(cpus)),
        Server("on Ray", (own, "cluster", "serve", "--cache-mb", "256", "--num-cpus", str(cpus))),
    ]
    figures = run_and_clean_up(measure_overhead(servers, rounds, seconds, _TITLES))
    ratio = figures["on Ray: new documents/s"] / figures["one process: new documents/s"]
    figures["new documents/s, on Ray / one process"] = round(ratio, 3)
    publish({"rounds": rounds, "seconds": seconds, "cpus": cpus}, figures, json_file)


@click.command("cluster-hits")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all randomness.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_cluster_hits(seed: int, json_file: str | None) -> None:
    """Documents that are found in caches on Ray: at their owners, and anywhere; after deaths and growth."""
    require_ray()
    from maxsimd.bench.cluster_hits import measure_hits

    with ray_session(None, num_cpus=5):
        from ray import serve

        serve.start(proxy_location="Disabled")
        figures = run_and_clean_up(measure_hits(seed))
        serve.shutdown()
    publish({"seed": seed}, figures, json_file)
