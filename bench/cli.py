"""`maxsimd bench`: drives a running server, the engine in this process, or a peer beside it."""

import asyncio
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from maxsimd.api.options import config_from, options_from
from maxsimd.bench.cluster_command import bench_cluster_hits, bench_cluster_overhead
from maxsimd.bench.datasets import Request, docstring_requests, mixed_counts, random_requests
from maxsimd.bench.fleet_command import bench_fleet, bench_fleet_overhead
from maxsimd.bench.gpu.command import bench_gpu, bench_kernels
from maxsimd.bench.instruction_sets_command import bench_instruction_sets
from maxsimd.bench.muvera_command import bench_muvera
from maxsimd.bench.packed_command import bench_packed
from maxsimd.bench.page_commands import (
    bench_beside_pages,
    bench_page_speed,
    bench_pages,
    bench_picture_stalls,
)
from maxsimd.bench.peers.command import bench_peers
from maxsimd.bench.report import Report, publish
from maxsimd.bench.running import run_and_clean_up
from maxsimd.bench.several_command import bench_several
from maxsimd.bench.single_command import bench_single
from maxsimd.engine.config import EngineConfig
from maxsimd.scheduler import OLDEST_SHARE, OVERDUE_SHARE


@click.group()
def bench() -> None:
    """Measures throughput, latency and ranking quality."""


def workload_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say what is sent and how."""
    options = [
        click.option("--dataset", type=click.Choice(["random", "docstrings"]), default="docstrings",
                     show_default=True, help="Random words, or real English with known answers."),
        click.option("--num-requests", type=int, default=100, show_default=True, help="Requests to measure."),
        click.option("--documents", type=int, default=100, show_default=True, help="Documents in a request."),
        click.option("--mix", help="Documents of random requests by shares, as 20:0.9,500:0.1."),
        click.option("--random-input-len", type=int, default=256, show_default=True,
                     help="Tokens of a pair of random words."),
        click.option("--random-range-ratio", type=float, default=0.5, show_default=True,
                     help="How much random lengths vary, 0 to 1."),
        click.option("--shared-query", is_flag=True, help="One random query for the whole run."),
        click.option("--concurrency", type=int, default=4, show_default=True, help="Requests at a time."),
        click.option("--request-rate", type=float, help="Requests a second, instead of a fixed concurrency."),
        click.option("--cache", type=click.Choice(["bypass", "use"]), default="bypass", show_default=True,
                     help="Whether documents that were sent before may come from the cache."),
        click.option("--warmup", type=int, default=5, show_default=True, help="Requests before measuring."),
        click.option("--seed", type=int, default=0, show_default=True, help="Seed of all randomness."),
        click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file."),
    ]  # fmt: skip
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


def make_requests(workload: dict[str, Any]) -> list[Request]:
    """The measured requests with those of the warm-up in front."""
    count = workload["num_requests"] + workload["warmup"]
    if workload["dataset"] == "docstrings":
        return docstring_requests(count, workload["documents"], workload["seed"])
    mix = workload["mix"]
    return random_requests(
        count,
        workload["documents"] if mix is None else mixed_counts(mix, count, workload["seed"]),
        workload["random_input_len"],
        workload["random_range_ratio"],
        workload["shared_query"],
        workload["seed"],
    )


def finish(report: Report, json_file: str | None) -> None:
    click.echo(report.show())
    if json_file:
        report.write(json_file)


@bench.command("engine")
@click.argument("model", required=False)
@options_from(EngineConfig, exclude=frozenset({"model"}))
@workload_options
def bench_engine(**values: Any) -> None:
    """Measures the engine in this process, with MODEL or the embedded one.

    With --doc-token-pooling or --quantization also without them, to show what they cost in ranking."""
    config = config_from(EngineConfig, values)
    from maxsimd.bench.targets import run_engine

    requests = make_requests(values)
    report = asyncio.run(run_engine(config, requests, values))
    plain = replace(config, doc_token_pooling=None, quantization="none")
    if plain != config:
        report.add_cost_in_ranking(asyncio.run(run_engine(plain, requests, values)))
    finish(report, values["json_file"])


@bench.command("serve")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server's address.")
@click.option("--api-key", help="Key to send as a bearer token.")
@workload_options
def bench_serve(url: str, api_key: str | None, **values: Any) -> None:
    """Measures a running server through POST /rerank, maxsimd or any that answers alike."""
    from maxsimd.bench.targets import run_server

    report = asyncio.run(run_server(url, api_key, make_requests(values), values))
    finish(report, values["json_file"])


@bench.command("allpool")
@click.option("--sequences", type=int, default=256, show_default=True)
@click.option("--tokens", type=int, default=8, show_default=True, help="Mean tokens a sequence.")
@click.option("--hidden", type=int, default=384, show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N, mps, ...")
@click.option("--rounds", type=int, default=50, show_default=True)
def bench_allpool(sequences: int, tokens: int, hidden: int, device: str, rounds: int) -> None:
    """All-token pooling with one slice and one split a step, against slicing sequence by sequence."""
    from maxsimd.bench.allpool import measure_allpool

    measure_allpool(sequences, tokens, hidden, device, rounds)


@bench.command("cache")
@click.argument("model", required=False)
@options_from(EngineConfig, exclude=frozenset({"model"}))
@click.option("--documents", type=int, default=1000, show_default=True, help="Documents in the request.")
@click.option("--rounds", type=int, default=5, show_default=True, help="Rounds; medians are reported.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_cache(documents: int, rounds: int, json_file: str | None, **values: Any) -> None:
    """One large request: encoded, cached in memory, and cached on disk over a restart."""
    config = config_from(EngineConfig, values)
    from maxsimd.bench.cache import measure_cache

    settings = {"model": config.model, "score_type": config.score_type, "precision": config.cache_precision}
    publish(settings, asyncio.run(measure_cache(config, documents, rounds)), json_file)


@bench.command("crowd")
@click.argument("model", required=False)
@options_from(EngineConfig, exclude=frozenset({"model"}))
@click.option("--requests", type=int, default=20, show_default=True, help="Requests in the crowd.")
@click.option("--documents", type=int, default=2000, show_default=True, help="Cached documents in each.")
@click.option("--rounds", type=int, default=7, show_default=True, help="Rounds; medians are reported.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_crowd(requests: int, documents: int, rounds: int, json_file: str | None, **values: Any) -> None:
    """A one-line request alone, and behind a crowd of requests whose documents are all cached."""
    config = config_from(EngineConfig, values)
    from maxsimd.bench.crowd import measure_crowd

    settings = {"model": config.model, "score_type": config.score_type}
    publish(settings, asyncio.run(measure_crowd(config, requests, documents, rounds)), json_file)


@bench.command("scaling")
@click.argument("model", required=False)
@click.option(
    "--clients", type=int, default=64, show_default=True, help="Clients that rerank at the same time."
)
@click.option("--rounds", type=int, default=3, show_default=True, help="Rounds; medians are reported.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_scaling(model: str | None, clients: int, rounds: int, json_file: str | None) -> None:
    """A server of its own: event-loop lag under many clients, and 10 to 10,000 documents a request."""
    from maxsimd.bench.scaling import measure_scaling

    figures = run_and_clean_up(measure_scaling(model, clients, rounds))
    publish({"clients": clients, "rounds": rounds}, figures, json_file)


@bench.command("maxsim")
@click.option("--documents", type=int, default=1000, show_default=True)
@click.option("--dim", type=int, default=128, show_default=True)
@click.option("--rounds", type=int, default=25, show_default=True, help="Turns; medians are reported.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_maxsim(documents: int, dim: int, rounds: int, json_file: str | None) -> None:
    """MaxSim on the CPU beside the package maxsim-cpu, in turns."""
    from maxsimd.bench.maxsim import measure_maxsim

    measure_maxsim(documents, dim, rounds, json_file)


@bench.command("cached-pairs")
@click.argument("model", required=False)
@click.option("--documents", type=int, default=100, show_default=True)
@click.option("--rounds", type=int, default=9, show_default=True, help="Turns; medians are reported.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_cached_pairs(model: str | None, documents: int, rounds: int, json_file: str | None) -> None:
    """A cross-encoder that is asked the same again: its scores from the cache, and run, in turns."""
    from maxsimd.bench.cached_pairs import measure_cached_pairs

    figures = asyncio.run(measure_cached_pairs(model, documents, rounds))
    publish({"model": model}, figures, json_file)


@bench.command("prefix")
@click.option("--documents", type=int, default=100, show_default=True)
@click.option("--share", type=float, default=0.4, show_default=True, help="Share of tokens that pairs share.")
@click.option("--rounds", type=int, default=5, show_default=True, help="Rounds; medians are reported.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_prefix(documents: int, share: float, rounds: int, json_file: str | None) -> None:
    """A causal reranker with what all pairs begin with run once, and run every time, in turns."""
    from maxsimd.bench.prefix import measure_prefix_sharing

    figures = asyncio.run(measure_prefix_sharing(documents, share, rounds))
    publish({"documents": documents, "share": share}, figures, json_file)


@bench.command("tokenizer")
@click.argument("path", required=False)
@click.option(
    "--entries",
    type=int,
    default=250_000,
    show_default=True,
    help="Size of the synthetic vocabulary, used without PATH.",
)
@click.option(
    "--threads", default="1,2,4", show_default=True, help="Numbers of threads, separated by commas."
)
@click.option("--rounds", type=int, default=5, show_default=True, help="Rounds; medians are reported.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_tokenizer(
    path: str | None, entries: int, threads: str, rounds: int, json_file: str | None
) -> None:  # fmt: skip
    """Tokens a second of the tokenizer.json at PATH, or of a large synthetic Unigram vocabulary."""
    from maxsimd.bench.tokenizer import measure_tokenizer

    numbers = [int(number) for number in threads.split(",")]
    publish({"path": path, "threads": threads}, measure_tokenizer(path, entries, numbers, rounds), json_file)


@bench.command("order-of-work")
@click.option("--requests", type=int, default=1500, show_default=True, help="Requests in each simulation.")
@click.option("--seeds", type=int, default=3, show_default=True, help="Simulations of each mix and load.")
@click.option("--oldest-share", type=float, default=OLDEST_SHARE, show_default=True,
              help="Share of each step for the oldest request.")  # fmt: skip
@click.option("--overdue-share", type=float, default=OVERDUE_SHARE, show_default=True,
              help="The same once it is overdue.")  # fmt: skip
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_order_of_work(
    requests: int, seeds: int, oldest_share: float, overdue_share: float, json_file: str | None
) -> None:
    """The scheduler under load, simulated, beside first come first served and round robin."""
    from maxsimd.bench.order_of_work import measure_order_of_work

    measure_order_of_work(requests, seeds, oldest_share, overdue_share, json_file)


@bench.command("beside-batches")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_beside_batches(json_file: str | None) -> None:
    """What requests lose to batches of 10,000 documents, by the batches' priority, simulated."""
    from maxsimd.bench.beside_batches import measure_beside_batches

    measure_beside_batches(json_file)


@bench.command("neighbours")
@click.option("--executable", help="The command of another version to measure instead.")
@click.option("--rounds", type=int, default=3, show_default=True, help="Rounds; medians are reported.")
@click.option("--seconds", type=float, default=8.0, show_default=True, help="Seconds for each measurement.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_neighbours(executable: str | None, rounds: int, seconds: float, json_file: str | None) -> None:
    """Throughput while other processes keep the cores busy, beside sentence-transformers."""
    from maxsimd.bench.neighbours import measure_neighbours

    figures = run_and_clean_up(measure_neighbours(executable, rounds, seconds))
    publish({"rounds": rounds, "seconds": seconds}, figures, json_file)


@bench.command("partial")
@click.argument("model", required=False)
@options_from(EngineConfig, exclude=frozenset({"model"}))
@click.option("--documents", type=int, default=1000, show_default=True, help="Documents in the request.")
@click.option("--share", type=float, default=1 / 3, help="The timeout, as a share of the time of all.")
@click.option("--rounds", type=int, default=5, show_default=True, help="Rounds; medians are reported.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_partial(documents: int, share: float, rounds: int, json_file: str | None, **values: Any) -> None:
    """What is scored of a request whose time is up before it is done."""
    config = config_from(EngineConfig, values)
    from maxsimd.bench.partial import measure_partial

    settings = {"model": config.model, "score_type": config.score_type}
    publish(settings, asyncio.run(measure_partial(config, documents, share, rounds)), json_file)


@bench.command("mixed")
@click.argument("model", required=False)
@click.option("--rate", type=float, default=5.0, show_default=True, help="One-document requests a second.")
@click.option("--priority", type=click.Choice(["interactive", "batch"]), help="The priority of the batches.")
@click.option("--max-batch-tokens", type=int, help="The server's token budget.")
@click.option("--rounds", type=int, default=3, show_default=True, help="Rounds; medians are reported.")
@click.option("--seconds", type=float, default=20.0, show_default=True, help="Seconds for each measurement.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_mixed(
    model: str | None, max_batch_tokens: int | None, json_file: str | None, **values: Any
) -> None:
    """A server of its own with one-document requests beside batches of 10,000 documents."""
    from maxsimd.bench.mixed import MixedLoad, measure_mixed_load

    options = [] if max_batch_tokens is None else ["--max-batch-tokens", str(max_batch_tokens)]
    figures = run_and_clean_up(measure_mixed_load(model, MixedLoad(**values), *options))
    publish({"model": model, "max_batch_tokens": max_batch_tokens, **values}, figures, json_file)


@bench.command("overload")
@click.argument("model", required=False)
@click.option("--max-wait-seconds", type=float, default=0.2, show_default=True, help="The server's limit.")
@click.option("--seconds", type=float, default=60.0, show_default=True, help="Seconds at each rate.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_overload(model: str | None, max_wait_seconds: float, seconds: float, json_file: str | None) -> None:
    """A server of its own at 2, 5 and 10 times what it can do."""
    from maxsimd.bench.overload import measure_overload

    figures = run_and_clean_up(measure_overload(model, max_wait_seconds, seconds))
    publish({"model": model, "seconds": seconds}, figures, json_file)


@bench.command("vectors")
@click.option("--documents", type=int, default=1000, show_default=True, help="Documents in the request.")
@click.option("--tokens", type=int, default=180, show_default=True, help="Vectors of each.")
@click.option("--rounds", type=int, default=9, show_default=True, help="Rounds; medians are reported.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_vectors(documents: int, tokens: int, rounds: int, json_file: str | None) -> None:
    """Documents given as vectors, in Python and over HTTP, beside maxsim-cpu."""
    from maxsimd.bench.vectors import measure_vectors

    publish({"rounds": rounds}, run_and_clean_up(measure_vectors(documents, tokens, rounds)), json_file)


@bench.command("slab")
@click.option("--documents", type=int, default=10_000, show_default=True, help="Cached documents.")
@click.option("--tokens", type=int, default=180, show_default=True, help="Vectors of each.")
@click.option("--dim", type=int, default=128, show_default=True, help="Dimensions of a vector.")
@click.option("--rounds", type=int, default=9, show_default=True, help="Rounds; medians are reported.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_slab(documents: int, tokens: int, dim: int, rounds: int, json_file: str | None) -> None:
    """Host work of cached documents: on the GPU already, and copied there."""
    from maxsimd.bench.slab import measure_slab

    publish({"rounds": rounds}, measure_slab(documents, tokens, dim, rounds), json_file)


@bench.command("files")
@click.option("--documents", type=int, default=10_000, show_default=True, help="Lines of the file.")
@click.option("--rounds", type=int, default=3, show_default=True, help="Rounds; medians are reported.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_files(documents: int, rounds: int, json_file: str | None) -> None:
    """`maxsimd rerank` on a file beside the engine alone."""
    from maxsimd.bench.files import measure_files

    settings = {"documents": documents, "rounds": rounds}
    publish(settings, run_and_clean_up(measure_files(documents, rounds)), json_file)


@bench.command("startup")
@click.option("--other", type=click.Path(exists=True, file_okay=False), help="Checkout of another version.")
@click.option(
    "--model",
    "models",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    help="Folder of a model; repeatable. By default the embedded model.",
)
@click.option(
    "--command",
    type=click.Choice(["serve", "rerank"]),
    default="serve",
    show_default=True,
    help="serve measures a server; rerank times the ranking of 100 lines.",
)
@click.option(
    "--documents",
    type=click.Path(exists=True, dir_okay=False),
    help="File whose first 100 lines rerank ranks. By default the license.",
)
@click.option("--rounds", type=int, default=5, show_default=True, help="Starts of each; medians count.")
@click.option("--first", is_flag=True, help="Measure first starts: none finds what earlier ones have kept.")
@click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file.")
def bench_startup(
    other: str | None,
    models: tuple[str, ...],
    command: str,
    documents: str | None,
    rounds: int,
    first: bool,
    json_file: str | None,
) -> None:
    """Start, memory and lone requests of a server, or the time of rerank; run it in a checkout."""
    from maxsimd.bench.startup import measure_startup

    folder, lines = None if other is None else Path(other), None if documents is None else Path(documents)
    figures = measure_startup(Path.cwd(), folder, rounds, models, command, lines, first)
    settings = {"command": command, "models": list(models), "rounds": rounds, "first": first}
    publish(settings, figures, json_file)


@bench.command("plots")
@click.argument("folder", type=click.Path(exists=True, file_okay=False))
def bench_plots(folder: str) -> None:
    """Draws the results in FOLDER (with matplotlib, from the extra `bench`)."""
    from maxsimd.bench.plots import draw

    for path in draw(Path(folder)):
        click.echo(f"wrote {path}")


for command in (
    *(bench_peers, bench_gpu, bench_kernels),
    *(
        bench_pages,
        bench_page_speed,
        bench_beside_pages,
        bench_picture_stalls,
        bench_packed,
        bench_single,
        bench_fleet,
        bench_fleet_overhead,
        bench_cluster_hits,
        bench_cluster_overhead,
        bench_muvera,
        bench_several,
        bench_instruction_sets,
    ),
):
    bench.add_command(command)
