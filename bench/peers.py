"""`maxsimd bench peers`: this server beside its peers, with the same checkpoint and requests, in turns.

Every system runs in processes of its own, as its users run it. A peer that is not installed is left out.
"""

import asyncio
import random
import statistics
import tempfile
import timeit
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from maxsimd.bench.checkpoints import RERANKERS, gflop_a_token, save_reranker
from maxsimd.bench.datasets import Request, docstring_pairs, docstring_requests
from maxsimd.bench.load import Send, SentenceTransformers, System, drive_or_raise, maxsimd, run_engine, vllm
from maxsimd.bench.report import Figures, lines_of, machine, table, write_json
from maxsimd.bench.report import Outcome as SentRequest
from maxsimd.bench.turns import median_ratio, medians
from maxsimd.engine.config import EngineConfig

if TYPE_CHECKING:
    import torch

# The last word of a system's name is its precision.
OURS, QUANTIZED, BEFORE = "maxsimd bfloat16", "maxsimd int8", "maxsimd before, bfloat16"

# Threads of a system spin for a while when there is nothing left to compute: each turn waits for that.
_PAUSE_SECONDS = 0.5
# The rounds of curves, and of scaling, whose rounds take minutes and hardly differ.
_FEW_ROUNDS = 2
# Sizes of the matrix product and the copy that measure the machine.
_ROWS, _WIDTH = 2048, 1024
_COPY_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` of `documents` each, `concurrency` at a time; `paired` documents have a query each."""

    requests: int
    documents: int
    concurrency: int
    paired: bool = False

    def make(self, seed: int) -> list[Request]:
        if not self.paired:
            return docstring_requests(self.requests, self.documents, seed)
        pairs = docstring_pairs()
        drawn = (random.Random(seed + i).sample(pairs, self.documents) for i in range(self.requests))
        return [Request([pair.query for pair in each], [pair.document for pair in each]) for each in drawn]


@dataclass(frozen=True, slots=True)
class Experiment:
    """Systems compete under each of `loads`, which gives a throughput table, a latency table or a curve of
    `documents` or `latency`. Without loads, no server competes."""

    title: str
    loads: tuple[Load, ...] = ()
    table: str = "throughput"
    checkpoint: str = "minilm-l6"


async def _measure_alone(name: str, rounds: int) -> Figures:
    from maxsimd.bench.in_process import measure_cache, measure_prefix_sharing
    from maxsimd.bench.methods import time_maxsim
    from maxsimd.bench.servers import measure_scaling

    match name:
        case "maxsim":
            return await time_maxsim(1000, 128, 25)
        case "cache":
            return await measure_cache(EngineConfig(), 1000, rounds)
        case "cache-int8":
            return await measure_cache(EngineConfig(cache_precision="int8"), 1000, rounds)
        case "prefix":
            return await measure_prefix_sharing(100, 0.4, rounds)
        case "scaling":
            return await measure_scaling(None, 64, _FEW_ROUNDS)
        case _:
            return await _measure_ranking()


async def _measure_ranking() -> Figures:
    """The ranking of docstrings by the embedded model, with int8 weights and without."""
    workload = {"dataset": "docstrings", "documents": 100, "concurrency": 4, "request_rate": None}
    workload |= {"cache": "bypass", "warmup": 5, "seed": 0}
    requests = docstring_requests(105, 100, seed=0)
    rounded = await run_engine(EngineConfig(quantization="int8"), requests, workload)
    rounded.add_cost_in_ranking(await run_engine(EngineConfig(), requests, workload))
    shown = ("requests", "failures", "documents_per_s", "documents_per_s_without")
    return {name: rounded.figures()[name] for name in (*shown, "mrr", "mrr_without", "mrr_cost")}


_LOADS_BY_DOCUMENTS = tuple(Load(max(1, min(100, 800 // count)), count, 8) for count in (1, 10, 100, 1000))
_LOADS_BY_CLIENTS = tuple(Load(4 * max(4, clients), 10, clients) for clients in (1, 2, 4, 8, 16, 32))
_SHAPE = "Cross-encoder, MiniLM-L6 shape"
_BY_DOCUMENTS = "Cross-encoder: documents a second by documents a request, 8 requests at a time"
_BY_CLIENTS = "Cross-encoder: latency by requests at a time, 10 documents each"
_PREFIX = "Causal reranker: 40% of the tokens shared by all pairs, run once or every time"
# All experiments, in the order in which they run.
EXPERIMENTS = {
    "cross-encoder": Experiment(_SHAPE, (Load(8, 100, 8),)),
    "pairs": Experiment(f"{_SHAPE}: 200 pairs in one request", (Load(1, 200, 1, paired=True),)),
    "single": Experiment(f"{_SHAPE}: one request of one document at a time", (Load(50, 1, 1),), "latency"),
    "documents": Experiment(_BY_DOCUMENTS, _LOADS_BY_DOCUMENTS, "documents"),
    "load": Experiment(_BY_CLIENTS, _LOADS_BY_CLIENTS, "latency"),
    "colbert": Experiment("ColBERT, BERT-base shape", (Load(4, 50, 4),), checkpoint="colbert"),
    "maxsim": Experiment("MaxSim alone: 32 x 128 query, 1,000 documents of 20 to 340 tokens"),
    "cache": Experiment("Embedding cache, bfloat16: one request of 1,000 documents"),
    "cache-int8": Experiment("Embedding cache, int8: the same"),
    "prefix": Experiment(_PREFIX),
    "scaling": Experiment("Many clients, and requests of 10 to 10,000 documents"),
    "ranking": Experiment("int8 on the embedded model: docstrings ranked"),
}
# Loads of a shape: many documents, one at a time, and 64 clients with one. A turn takes some seconds.
_MANY, _ONE, _CLIENTS = (
    "many documents, 8 requests",
    "one document, one at a time",
    "one document, 64 at a time",
)
_SMALL_LOADS = {_MANY: Load(8, 20, 8), _ONE: Load(40, 1, 1), _CLIENTS: Load(256, 1, 64)}
_LARGE_LOADS = {_MANY: Load(8, 4, 8), _ONE: Load(8, 1, 1), _CLIENTS: Load(64, 1, 64)}
SHAPES = {
    f"{shape}: {name}": Experiment(f"{title}: {name}", (load,), table="shape", checkpoint=shape)
    for shape, title in RERANKERS.items()
    for name, load in (_SMALL_LOADS if shape in ("minilm-l6", "colbert") else _LARGE_LOADS).items()
}


def _turn(sent: list[SentRequest], duration: float) -> dict[str, float]:
    """The figures of one system in one round."""
    p50, p99 = np.percentile([each.seconds * 1e3 for each in sent], (50, 99))
    return {
        "documents_per_s": sum(each.documents for each in sent) / duration,
        "tokens_per_s": sum(each.tokens for each in sent) / duration,
        "median_ms": float(p50),
        "p99_ms": float(p99),
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of all turns of an experiment at one setting, by system."""

    documents: int
    concurrency: int
    turns: dict[str, list[dict[str, float]]]

    def __str__(self) -> str:
        rates = (f"{system} {self.median(system, 'documents_per_s'):.2f}" for system in self.turns)
        return f"documents/s: {', '.join(rates)}"

    def median(self, system: str, what: str) -> float:
        return statistics.median(turn[what] for turn in self.turns[system])

    def ratio(self, system: str, other: str, what: str) -> float:
        """The median over rounds of `what` of `system` divided by that of `other`."""
        return median_ratio(*([turn[what] for turn in self.turns[each]] for each in (system, other)))


@dataclass(frozen=True, slots=True)
class Results:
    """All figures of a run: `limits` of the machine, the GFLOP a token costs in matrix `products` by
    experiment, the outcomes of contests, and the figures of experiments `alone`."""

    limits: dict[str, float]
    products: dict[str, float] = field(default_factory=dict)
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    alone: dict[str, Figures] = field(default_factory=dict)


async def run_peers(
    wanted: frozenset[str], rounds: int, vllm_executable: str | None, threads: int, before: str | None
) -> Results:
    """Runs experiments. `before`, the command of another version, takes the place of sentence-transformers.
    A system that does not start ends the run with an error."""
    experiments = {name: each for name, each in {**EXPERIMENTS, **SHAPES}.items() if name in wanted}
    results = Results(_limits())
    # All clients' requests are to be served, however long the last of them waits.
    patient = ("--max-wait-seconds", "3600")
    servers: list[System] = [maxsimd(OURS, *patient), maxsimd(QUANTIZED, *patient, "--quantization", "int8")]
    if before is not None:
        servers.insert(1, maxsimd(BEFORE, *patient, executable=before))
    if vllm_executable is None:
        click.echo("vLLM is left out: name its executable with --vllm (see --help)", err=True)
    else:
        servers.append(vllm(vllm_executable, f"0-{threads - 1}"))
    plain = [
        SentenceTransformers(f"sentence-transformers {dtype}", dtype) for dtype in ("bfloat16", "float32")
    ]
    for checkpoint in RERANKERS:
        contests = {
            name: experiment
            for name, experiment in experiments.items()
            if experiment.loads and experiment.checkpoint == checkpoint
        }
        if not contests:
            continue
        with_plain = before is None and not contests.keys().isdisjoint(("cross-encoder", "pairs"))
        with tempfile.TemporaryDirectory() as folder:
            path = save_reranker(checkpoint, Path(folder, checkpoint))
            results.products.update(dict.fromkeys(contests, gflop_a_token(path)))
            async with AsyncExitStack() as stack:
                arena = await Arena.enter(stack, [*servers, *(plain if with_plain else [])], path)
                for name, contest in contests.items():
                    click.echo(f"  {name}", err=True)
                    results.outcomes[name] = await arena.compete(contest, rounds)
                    for outcome in results.outcomes[name]:  # in case a later system does not start
                        click.echo(f"    {outcome}", err=True)
    for name, experiment in experiments.items():
        if not experiment.loads:
            click.echo(f"  {name}", err=True)
            results.alone[name] = await _measure_alone(name, rounds)
    # Again, in case something else was still running at first: a machine is never faster than it is.
    for name, value in _limits().items():
        results.limits[name] = max(value, results.limits[name])
    return results


class Arena:
    """Systems that are ready to score with one checkpoint."""

    def __init__(self, senders: dict[str, Send], servers: frozenset[str] = frozenset()) -> None:
        self._senders = senders
        self._servers = servers
        # Systems that cache prefixes must not meet the pairs of another load.
        self._seeds = count()

    @classmethod
    async def enter(cls, stack: AsyncExitStack, systems: list[System], checkpoint: str) -> "Arena":
        """Starts the systems, which stop with the stack."""
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="maxsimd-bench-")))
        senders = {}
        for system in systems:
            click.echo(f"  starting {system.name}", err=True)
            log = folder / f"{system.name.replace(' ', '-')}.log"
            senders[system.name] = await stack.enter_async_context(system.serve(checkpoint, log))
        servers = (system.name for system in systems if not isinstance(system, SentenceTransformers))
        return cls(senders, frozenset(servers))

    async def compete(self, contest: Experiment, rounds: int) -> list[Outcome]:
        """Curves and latencies are of servers alone, curves in fewer rounds: they are for the eye."""
        names = [name for name in self._senders if contest.table == "throughput" or name in self._servers]
        rounds = rounds if len(contest.loads) == 1 else _FEW_ROUNDS
        return [await self.run(load, rounds, names) for load in contest.loads]

    async def run(self, load: Load, rounds: int, names: list[str] | None = None) -> Outcome:
        """One round warms up. Each round has requests of its own, and reverses the order of the systems."""
        names = list(self._senders) if names is None else names
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for number in range(rounds + 1):
            requests = load.make(seed=next(self._seeds))
            for name in names if number % 2 else names[::-1]:
                await asyncio.sleep(_PAUSE_SECONDS)
                duration, outcomes = await drive_or_raise(self._senders[name], requests, load.concurrency)
                if number:
                    turns[name].append(_turn(outcomes, duration))
        return Outcome(load.documents, load.concurrency, turns)


def _limits() -> dict[str, float]:
    import torch

    limits = {
        str(dtype).removeprefix("torch."): _product_peak(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.int8)
    }
    return {**limits, "copy": _copy_bandwidth()}


def _product_peak(dtype: "torch.dtype") -> float:
    """GFLOP/s (or int8 GOP/s) of one large matrix product, by the best library call that there is."""
    import torch

    weight = torch.randn(_WIDTH, _WIDTH)
    x = torch.randn(_ROWS, _WIDTH)
    if dtype is torch.int8:
        run = _int8_product(x, weight)
    else:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), _ROWS)
        rows = x.to(dtype)

        def run() -> object:
            return torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")

    return 2 * _ROWS * _WIDTH * _WIDTH / _best_seconds(run) / 1e9


def _copy_bandwidth() -> float:
    """GB/s read and written by a copy that no cache holds."""
    import torch

    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _best_seconds(lambda: target.copy_(source)) / 1e9


def _int8_product(x: "torch.Tensor", weight: "torch.Tensor") -> Callable[[], object]:
    import torch

    quantized = torch.ops.onednn.qlinear_prepack((weight * 10).round().to(torch.int8), list(x.shape))
    rows = (x * 10 + 128).clamp(0, 255).to(torch.uint8)
    scales, zeros = torch.ones(_WIDTH), torch.zeros(_WIDTH, dtype=torch.int64)
    return lambda: torch.ops.onednn.qlinear_pointwise(
        rows, 0.1, 128, quantized, scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""
    )


def _best_seconds(run: Callable[[], object]) -> float:
    """The lower quartile of some runs: a shared machine is slower now and then, never faster."""
    return statistics.quantiles(timeit.repeat(run, number=1, repeat=25), n=4)[0]


def markdown(results: Results) -> str:
    """The whole report."""
    here = machine()
    limits = results.limits
    lines = [
        "# This server beside its peers",
        "",
        f"{here['processor']}, torch {here['torch']}, Python {here['python']}. Products at best: float32 "
        f"{limits['float32']:.0f} GFLOP/s, bfloat16 {limits['bfloat16']:.0f} GFLOP/s, int8 "
        f"{limits['int8']:.0f} GOP/s; copies {limits['copy']:.0f} GB/s. Medians over rounds, in which every "
        "system has its turn; ratios are taken round by round. The texts are docstrings, the weights random.",
    ]
    if by_shape := {name: results.outcomes[name][0] for name in SHAPES if name in results.outcomes}:
        lines += _shapes_table(by_shape, results)
    for name, outcomes in results.outcomes.items():
        if name in SHAPES:
            continue
        lines += ["", f"## {EXPERIMENTS[name].title}", ""]
        match EXPERIMENTS[name].table:
            case "throughput":
                lines += _throughput(outcomes[0], results, name)
            case "latency" if len(outcomes) == 1:
                lines += _latency(outcomes[0])
            case _:
                lines += _curve(outcomes, name)
    for name, figures in results.alone.items():
        lines += ["", f"## {EXPERIMENTS[name].title}", "", *table(("", ""), lines_of(figures))]
    return "\n".join(lines) + "\n"


def write(results: Results, folder: Path) -> list[Path]:
    """Writes peers-cpu.json and peers-cpu.md, or peer-shapes-cpu.* for shapes, and returns their paths."""
    figures: dict[str, Any] = {
        name: [_as_json(outcome) for outcome in outcomes] for name, outcomes in results.outcomes.items()
    }
    stem = "peers-cpu" if results.outcomes.keys().isdisjoint(SHAPES) else "peer-shapes-cpu"
    report, data = folder / f"{stem}.md", folder / f"{stem}.json"
    report.write_text(markdown(results), encoding="utf-8")
    about = {"limits": results.limits, "products": results.products, "maxsim": {}}
    write_json(str(data), about | figures | results.alone)
    return [report, data]


def _shapes_table(outcomes: dict[str, Outcome], results: Results) -> list[str]:
    """Documents a second of all systems by shape, ratios to the peers, and shares of the products' peak."""
    systems = list(next(iter(outcomes.values())).turns)
    peers = [system for system in systems if system not in (OURS, QUANTIZED)]
    ratios = [(ours, peer) for peer in peers for ours in (OURS, QUANTIZED)]
    heads = [f"{system}, documents/s" for system in systems]
    heads += [f"{ours} / {peer}" for ours, peer in ratios] + ["share of bfloat16's peak", "of int8's"]
    rows = []
    for name, outcome in outcomes.items():
        cells = [f"{outcome.median(system, 'documents_per_s'):.2f}" for system in systems]
        cells += [f"{outcome.ratio(ours, peer, 'documents_per_s'):.2f}" for ours, peer in ratios]
        for system in (OURS, QUANTIZED):
            gflops = outcome.median(system, "tokens_per_s") * results.products[name]
            cells.append(f"{gflops / results.limits[system.split()[-1]]:.0%}")
        rows.append((SHAPES[name].title, *cells))
    return ["", "## By shape", "", *table(("model", *heads), rows)]


def _throughput(outcome: Outcome, results: Results, name: str) -> list[str]:
    title = f"{outcome.documents} documents a request, {outcome.concurrency} requests at a time."
    heads = ("system", "documents/s", "tokens/s", "share of its products' peak", OURS, QUANTIZED)
    rows = []
    tokens_a_document = outcome.median(OURS, "tokens_per_s") / outcome.median(OURS, "documents_per_s")
    for system in outcome.turns:
        documents = outcome.median(system, "documents_per_s")
        # In-process peers do not say how many tokens they ran; they are given the same texts.
        tokens = outcome.median(system, "tokens_per_s") or documents * tokens_a_document
        share = tokens * results.products[name] / results.limits[system.split()[-1]]
        ratios = [f"{outcome.ratio(ours, system, 'documents_per_s'):.2f} x" for ours in (OURS, QUANTIZED)]
        rows.append((system, f"{documents:.1f}", f"{tokens:,.0f}", f"{share:.0%}", *ratios))
    return [title, "", *table(heads, rows), *_by_tokens(outcome)]


def _by_tokens(outcome: Outcome) -> list[str]:
    """Servers that run other numbers of tokens for the same texts, by what they do a token."""
    ratios = [
        f"{ours} {outcome.ratio(ours, system, 'tokens_per_s'):.2f} times {system}"
        for system in outcome.turns
        for ours in (OURS, QUANTIZED)
        if system not in (OURS, QUANTIZED) and outcome.median(system, "tokens_per_s")
    ]
    return ["", f"By tokens instead of documents: {', '.join(ratios)}."] if ratios else []


def _latency(outcome: Outcome) -> list[str]:
    rows = []
    for system in outcome.turns:
        ratio = outcome.ratio(OURS, system, "median_ms")
        rows.append((system, f"{outcome.median(system, 'median_ms'):.1f}", f"{ratio:.2f}"))
    return table(("system", "median ms", f"of it, {OURS}"), rows)


def _curve(outcomes: list[Outcome], name: str) -> list[str]:
    systems = list(outcomes[0].turns)
    rows = []
    for outcome in outcomes:
        if name == "documents":
            cells = [f"{outcome.median(system, 'documents_per_s'):.1f}/s" for system in systems]
        else:
            cells = [f"{outcome.median(system, 'median_ms'):.0f} ms" for system in systems]
        setting = outcome.documents if name == "documents" else outcome.concurrency
        rows.append((f"{setting:,}", *cells))
    return table(("documents" if name == "documents" else "at a time", *systems), rows)


def _as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "documents": outcome.documents,
        "concurrency": outcome.concurrency,
        "rounds": len(next(iter(outcome.turns.values()))),
        "systems": {system: medians(turns, 2) for system, turns in outcome.turns.items()},
        "ratios_of_documents_per_s": {
            ours: {
                system: outcome.ratio(ours, system, "documents_per_s")
                for system in outcome.turns
                if system != ours
            }
            for ours in (OURS, QUANTIZED)
        },
    }
