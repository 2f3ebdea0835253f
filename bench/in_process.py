"""Benchmarks of engines in this process: caches, crowds, timeouts, prefixes, encodings and two models."""

import asyncio
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from maxsimd.api.process import frequent_thread_switches, postponed_garbage_collection, resident_bytes
from maxsimd.bench.checkpoints import save_cross_encoder, save_reranker, save_text_model
from maxsimd.bench.datasets import QUERY, Bm25, Pair, docstring_pairs, numbered_documents
from maxsimd.bench.turns import medians, take_turns
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, Engines, Muvera, RerankResult
from maxsimd.engine.workers import give_back_memory

T = TypeVar("T")
Array = NDArray[Any]


async def _timed(work: Awaitable[T]) -> tuple[float, T]:
    """The seconds until the result, and the result."""
    started = time.perf_counter()
    result = await work
    return time.perf_counter() - started, result


async def measure_cache(config: EngineConfig, documents: int, rounds: int) -> dict[str, float]:
    """Medians of `rounds` requests that are encoded, cached in memory, and first after a restart; and how far
    the cache changes scores and ranking."""
    from scipy.stats import kendalltau

    texts = numbered_documents(documents)
    with tempfile.TemporaryDirectory() as folder:
        config = replace(config, cache_dir=folder, cache_mb=max(config.cache_mb or 0, 2048))
        restarted = []
        async with Engine(config) as engine:
            score = partial(engine.score, QUERY, texts, truncation=CUT_LONG)
            await score(cache="use")
            ways = {"encoded": partial(score, cache="bypass"), "cached": partial(score, cache="use")}
            turns = await take_turns(ways, rounds, warm_up=False)
            cache = engine.device_model.cache
            assert cache is not None
            size = cache.memory_bytes
        for _ in range(rounds):
            async with Engine(config) as engine:
                await engine.score(QUERY, ["warm up"])
                restarted.append(await _timed(engine.score(QUERY, texts, truncation=CUT_LONG, cache="use")))
    seconds, results = zip(*restarted, strict=True)
    slow, fast = (statistics.median(turns.seconds[name]) for name in ("encoded", "cached"))
    first = statistics.median(seconds)
    exact, others = (
        turns.results["encoded"][0],
        [each.scores for each in (*turns.results["cached"], *results)],
    )
    return {
        "documents": documents,
        "tokens_a_document": round(exact.usage.prompt_tokens / documents, 1),
        "encoded_ms": round(slow * 1e3, 1),
        "cached_in_memory_ms": round(fast * 1e3, 1),
        "after_a_restart_ms": round(first * 1e3, 1),
        "slowest_after_a_restart_ms": round(max(seconds) * 1e3, 1),
        "encoded_over_memory": round(slow / fast, 1),
        "encoded_over_restart": round(slow / first, 1),
        "largest_difference_of_scores": max(
            float(np.abs(np.subtract(exact.scores, scores)).max()) for scores in others
        ),
        "kendall_tau": min(round(float(kendalltau(exact.scores, scores).statistic), 5) for scores in others),
        "cached_mb": round(size / 1e6, 1),
    }


async def measure_cached_pairs(model: str | None, documents: int, rounds: int) -> dict[str, float]:
    """Medians of `rounds` requests to a cross-encoder, run and from the cache in turns."""
    texts = numbered_documents(documents)
    with tempfile.TemporaryDirectory() as folder:
        async with Engine(EngineConfig(model=model or save_cross_encoder(Path(folder)))) as engine:
            await engine.score(QUERY, texts, cache="use")
            score = partial(engine.score, QUERY, texts)
            ways = {"run": partial(score, cache="bypass"), "cached": partial(score, cache="use")}
            turns = await take_turns(ways, rounds, warm_up=False)
    results = turns.results["run"] + turns.results["cached"]
    return {
        "documents": len(texts),
        "tokens_a_document": round(results[0].usage.prompt_tokens / len(texts), 1),
        "run_ms": turns.median_ms("run"),
        "cached_ms": turns.median_ms("cached", 2),
        "run_over_cached": turns.ratio("run", "cached"),
        "answers_with_other_bits": sum(each.scores != results[0].scores for each in results),
    }


async def measure_crowd(config: EngineConfig, requests: int, documents: int, rounds: int) -> dict[str, float]:
    """Medians of `rounds`: a one-line request alone, and right after `requests` others of `documents` cached
    documents each. The limit is three times the first, and the step that the request stands behind. The
    interpreter is set up like the server's."""
    texts = numbered_documents(documents)
    config = replace(config, cache_mb=max(config.cache_mb or 0, 4096))
    with frequent_thread_switches():
        async with Engine(config) as engine:
            await engine.score(QUERY, texts, truncation=CUT_LONG)
            with postponed_garbage_collection():
                figures = [await _crowd(engine, texts, requests, number) for number in range(rounds)]
    found = medians(figures, 2)
    limit = 3 * found["alone_ms"] + found["step_ms"]
    return {
        "crowd_requests": requests,
        "documents_each": documents,
        **found,
        "limit_ms": round(limit, 2),
        "behind_over_limit": round(found["behind_the_crowd_ms"] / limit, 3),
    }


async def _crowd(engine: Engine, texts: list[str], requests: int, number: int) -> dict[str, float]:
    """The request alone and behind the crowd, the step it stood behind, the mean step, and the crowd."""
    alone, _ = await _timed(engine.score(QUERY, [f"alone {number}"]))
    steps = _StepSeconds()
    metrics: Any = engine.metrics
    metrics.step_seconds, usual = steps, metrics.step_seconds
    started = time.perf_counter()
    crowd = [
        asyncio.create_task(engine.score(f"{QUERY} {number} {i}", texts, truncation=CUT_LONG))
        for i in range(requests)
    ]
    while engine.stats().steps_in_flight == 0:  # noqa: ASYNC110 (there is no event to wait for)
        await asyncio.sleep(0.0005)
    num_before = len(steps)
    behind, _ = await _timed(engine.score(QUERY, [f"behind {number}"]))
    await asyncio.gather(*crowd)
    crowd_seconds = time.perf_counter() - started
    metrics.step_seconds = usual
    names = ("alone_ms", "behind_the_crowd_ms", "step_ms", "mean_step_ms", "crowd_ms")
    seconds = (alone, behind, steps[num_before], statistics.mean(steps), crowd_seconds)
    return {name: 1e3 * value for name, value in zip(names, seconds, strict=True)}


class _StepSeconds(list[float]):
    """Keeps each step's seconds, in place of a histogram."""

    def observe(self, seconds: float) -> None:
        self.append(seconds)


async def measure_partial(config: EngineConfig, documents: int, share: float, rounds: int) -> dict[str, Any]:
    """A request of `documents` whole, and with a timeout of `share` of that time and a partial result, in
    turns. Medians, but the worst of what must hold each time."""
    texts = numbered_documents(documents)
    found: list[tuple[float, ...]] = []
    wrong = 0
    async with Engine(config) as engine:
        await engine.score(QUERY, texts[:200], truncation=CUT_LONG, cache="bypass")
        for _ in range(rounds):
            seconds, whole = await _timed(engine.rerank(QUERY, texts, cache="bypass"))
            before, timeout = _steps(engine), share * seconds
            took, partial = await _timed(
                engine.rerank(QUERY, texts, cache="bypass", timeout=timeout, on_timeout="partial")
            )
            steps, step_seconds = (after - b for after, b in zip(_steps(engine), before, strict=True))
            scored = len(partial.results) / documents
            found.append((seconds, took, took - timeout, step_seconds / max(1, steps), scored))
            wrong += _wrong(whole, partial, documents)
    whole_s, partial_s, overtime, step_s, shares = zip(*found, strict=True)
    return {
        "documents": documents,
        "whole_s": round(statistics.median(whole_s), 3),
        "timeout_over_whole": round(share, 3),
        "partial_s": round(statistics.median(partial_s), 3),
        "latest_after_the_timeout_ms": round(max(overtime) * 1e3, 2),
        "mean_step_ms": round(statistics.median(step_s) * 1e3, 2),
        "least_share_scored": round(min(shares), 3),
        "wrong": wrong,
    }


def _steps(engine: Engine) -> tuple[float, float]:
    """The number of steps so far, and their seconds."""
    (family,) = engine.metrics.step_seconds.collect()
    values = {sample.name.rpartition("_")[2]: sample.value for sample in family.samples}
    return values["count"], values["sum"]


def _wrong(whole: RerankResult, partial: RerankResult, documents: int) -> int:
    """The number of results that differ from the whole request's, are out of order, or missing."""
    scores = {result.index: result.score for result in whole.results}
    given = [(result.index, result.score) for result in partial.results]
    differing = sum(not np.isclose(score, scores[i], rtol=1e-4, atol=1e-5) for i, score in given)
    ranks = [score for _, score in given]
    out_of_order = sum(earlier < later for earlier, later in pairwise(ranks))
    listed = {i for i, _ in given} | set(partial.unscored)
    return differing + out_of_order + (documents - len(listed))


async def measure_prefix_sharing(documents: int, share: float, rounds: int) -> dict[str, float]:
    """Medians of one request to a causal reranker, whose pairs all begin with `share` of their tokens: with
    the prefix run once, and every time, in turns."""
    texts = numbered_documents(documents)
    with tempfile.TemporaryDirectory() as folder:
        model = save_reranker("small causal", Path(folder))
        config = EngineConfig(model=model, device="cpu", cache_mb=0)
        async with Engine(config) as together, Engine(replace(config, prefix_sharing="off")) as apart:
            own = await apart.score("", texts, truncation=CUT_LONG)
            wanted = own.usage.prompt_tokens / documents * share / (1 - share)
            query = _query_of(apart, round(wanted))
            ways = {
                name: partial(engine.score, query, texts, truncation=CUT_LONG, use_activation=False)
                for name, engine in (("shared", together), ("apart", apart))
            }
            turns = await take_turns(ways, rounds)
    shared, apart_result = (turns.results[name][-1] for name in ways)
    usage, difference = shared.usage, np.subtract(shared.scores, apart_result.scores)
    return {
        "documents": documents,
        "tokens": usage.prompt_tokens,
        "share_not_run": round(usage.cached_tokens / usage.prompt_tokens, 3),
        "shared_documents_per_s": round(documents / statistics.median(turns.seconds["shared"]), 1),
        "apart_documents_per_s": round(documents / statistics.median(turns.seconds["apart"]), 1),
        "times_as_fast": turns.ratio("apart", "shared"),
        "largest_difference_of_logits": float(np.abs(difference).max()),
    }


def _query_of(engine: Engine, tokens: int) -> str:
    """Real words of about `tokens` tokens."""
    words = " ".join(pair.query for pair in docstring_pairs()[-40:]).split()
    while len(engine.tokenizer.encode([" ".join(words)], "query")[0]) > tokens:
        words.pop()
    return " ".join(words)


# The best of MaxSim are looked for among the best of an encoding.
TOP, AMONG = 10, 100


async def measure_muvera(
    config: EngineConfig, queries: int, candidates: int, **given: int | None
) -> dict[str, Any]:
    """For each fixed dimensional encoding, with the parameters that are `given`: Spearman's rank correlation
    with MaxSim over each query's BM25 candidates, as mean and lowest; and the recall of MaxSim's best among
    the encoding's best."""
    parameters: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if parameters.get("d_proj") == 0:
        parameters["d_proj"] = None
    encodings = {
        "encoding": Muvera(**parameters),
        "as_in_the_paper": Muvera(**parameters, full_length=False),
        "the_papers_parameters": Muvera(k_sim=5, r_reps=20, d_proj=16, full_length=False),
    }
    pairs = docstring_pairs()
    draw = np.random.default_rng(0)
    asked = draw.choice(len(pairs), min(queries, len(pairs)), replace=False).tolist()
    async with Engine(config) as engine:
        if engine.model.score_task != "token_embed":
            raise ValueError("this model does not score by late interaction")
        name = engine.model.name
        texts = [pair.document for pair in pairs]
        embedded = await engine.embed_tokens(texts, input_type="document", truncation=CUT_LONG)
        documents = embedded.embeddings
        texts = [pairs[i].query for i in asked]
        embedded = await engine.embed_tokens(texts, input_type="query", truncation=CUT_LONG)
        of_queries = embedded.embeddings
    exact = _candidates(pairs, asked, of_queries, documents, candidates)
    figures: dict[str, Any] = {
        "model": name,
        "queries": len(asked),
        "candidates": candidates,
        "documents": len(documents),
        "tokens_a_document": round(sum(map(len, documents)) / len(documents), 1),
    }
    for title, encoding in encodings.items():
        started = time.process_time()
        vectors = encoding.encode(documents, "document")
        seconds = time.process_time() - started
        figures[title] = {
            "dimensions": vectors.shape[1],
            **_beside(exact, encoding.encode(of_queries, "query"), vectors),
            "cpu_ms_a_document": round(seconds * 1e3 / len(documents), 3),
        }
    return figures


def _candidates(
    pairs: list[Pair], asked: list[int], queries: list[Array], documents: list[Array], most: int
) -> list[tuple[Array, Array]]:
    """The candidates of each query by index, and their MaxSim."""
    index = Bm25([pair.document for pair in pairs])
    rows = np.concatenate(documents)
    starts = np.cumsum([0, *map(len, documents[:-1])])
    found = []
    for i, query in zip(asked, queries, strict=True):
        maxsim = np.maximum.reduceat(query @ rows.T, starts, axis=1).sum(axis=0)
        best = np.array(index.best(pairs[i].query, most))
        found.append((best, maxsim[best]))
    return found


def _beside(exact: list[tuple[Array, Array]], queries: Array, documents: Array) -> dict[str, float]:
    from scipy.stats import spearmanr

    correlations, recalls = [], []
    for (indices, maxsim), query in zip(exact, queries, strict=True):
        estimate = documents[indices] @ query
        correlations.append(float(spearmanr(maxsim, estimate).statistic))
        best, among = (set(np.argsort(-scores, kind="stable")[:count].tolist())
                       for scores, count in ((maxsim, TOP), (estimate, AMONG)))  # fmt: skip
        recalls.append(len(best & among) / len(best))
    return {
        "spearman": round(float(np.mean(correlations)), 4),
        "lowest_spearman": round(min(correlations), 4),
        f"recall_of_{TOP}_in_{AMONG}": round(float(np.mean(recalls)), 4),
        "lowest_recall": round(min(recalls), 2),
    }


_MIB = 1 << 20
_NAMES = ("first", "second")
# Enough requests at a time that each model always has a step waiting, and steps so small that there are many
# in the time that is measured.
_CLIENTS, _DOCUMENTS, _STEP_TOKENS = 8, 20, 256
_CHARACTERS = 600  # so that each document fits into a step
_WARM_UP_SECONDS = 2.0


async def measure_several(
    models: tuple[str, ...], weights: str, seconds: float, dtype: str, threads: int | None
) -> dict[str, float]:
    """The memory and the shares of two models, or of two random ones."""
    if len(models) not in (0, 2):
        raise click.UsageError(f"name two models or none, not {len(models)}")
    with tempfile.TemporaryDirectory() as folder:
        shapes = ("mpnet-base", "deberta-v3-base")
        first, second = models or [save_text_model(shape, Path(folder) / shape, 12) for shape in shapes]
        shares = [float(weight) for weight in weights.split(",")]
        figures = measure_memory((first, second), dtype, threads)
        return figures | await measure_shares((first, second), shares, seconds, dtype, threads)


def measure_memory(models: tuple[str, str], dtype: Any, threads: int | None) -> dict[str, float]:
    """In MiB, each in a process of its own: each model alone and both, above a process without models that
    has loaded the libraries."""
    first, second = (EngineConfig(model=model, dtype=dtype, threads=threads) for model in models)
    loaded = {"nothing": {}, "first": {"first": first}, "second": {"second": second}}
    loaded["both"] = {"first": first, "second": second}
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        found = dict(zip(loaded, processes.map(_resident, loaded.values()), strict=True))
    above = {name: resident - found["nothing"] for name, resident in found.items()}
    weights = sum(_weights(Path(model), 2 if dtype == "bfloat16" else 4) for model in models)
    return {
        "process_without_models_mib": round(found["nothing"] / _MIB, 1),
        "first_alone_mib": round(above["first"] / _MIB, 1),
        "second_alone_mib": round(above["second"] / _MIB, 1),
        "both_mib": round(above["both"] / _MIB, 1),
        "weights_of_both_mib": round(weights / _MIB, 1),
        "both_over_weights": round(above["both"] / weights, 3),
        "both_over_each_alone": round(above["both"] / (above["first"] + above["second"]), 3),
    }


def _weights(folder: Path, bytes_each: int) -> int:
    """The bytes of the weights in a folder's safetensors files."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total * bytes_each


def _resident(configs: dict[str, EngineConfig]) -> int:
    """The bytes of this process once all models have scored. The default model, loaded and dropped before,
    brings the libraries that models need."""

    async def run() -> int:
        query, documents = _workload()
        async with Engines({"default": EngineConfig()}) as engines:
            await engines["default"].score(query, documents[0], cache="bypass")
        async with Engines(configs) as engines:
            for name in engines.names:
                await engines[name].score(query, documents[0], cache="bypass")
            gc.collect()
            give_back_memory()
            return resident_bytes()

    return asyncio.run(run())


async def measure_shares(
    models: tuple[str, str], weights: Sequence[float], seconds: float, dtype: Any, threads: int | None
) -> dict[str, float]:
    """Each model's share of the time on the device while both always have work."""
    configs = {
        name: EngineConfig(model=model, dtype=dtype, threads=threads, max_batch_tokens=_STEP_TOKENS)
        for name, model in zip(_NAMES, models, strict=True)
    }
    query, documents = _workload()
    async with Engines(configs, weights=dict(zip(_NAMES, weights, strict=True))) as engines:

        async def ask(name: str) -> None:
            for i in count():
                await engines[name].score(query, documents[i % len(documents)], cache="bypass")

        clients = [asyncio.create_task(ask(name)) for name in _NAMES for _ in range(_CLIENTS)]
        await asyncio.sleep(_WARM_UP_SECONDS)
        before = [engines.device_seconds(name) for name in _NAMES]
        started = time.perf_counter()
        await asyncio.sleep(seconds)
        passed = time.perf_counter() - started
        used = [engines.device_seconds(name) - before[i] for i, name in enumerate(_NAMES)]
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    due = weights[0] / sum(weights)
    return {
        "first_device_s": round(used[0], 2),
        "second_device_s": round(used[1], 2),
        "device_used": round(sum(used) / passed, 3),
        "first_share": round(used[0] / sum(used), 3),
        "first_share_due": round(due, 3),
        "first_share_over_due": round(used[0] / sum(used) / due, 3),
    }


def _workload() -> tuple[str, list[list[str]]]:
    pairs = docstring_pairs()
    documents = [pair.document[:_CHARACTERS] for pair in pairs]
    return pairs[0].query, [documents[i : i + _DOCUMENTS] for i in range(0, 400, _DOCUMENTS)]
