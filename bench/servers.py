"""Benchmarks of servers and commands that are started for them, under load that they can serve."""

import asyncio
import base64
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from maxsimd.api.cluster.session import require_ray
from maxsimd.bench.checkpoints import save_colbert, save_cross_encoder
from maxsimd.bench.datasets import QUERY, Request, docstring_pairs, docstring_requests, numbered_documents
from maxsimd.bench.load import (
    Running,
    Send,
    SentenceTransformers,
    Server,
    System,
    drive,
    drive_or_raise,
    maxsimd,
    processes_titled,
    resident_megabytes,
    run_engine,
    run_rerank,
    send_at_random,
)
from maxsimd.bench.methods import PEER, maxsim_cpu
from maxsimd.bench.report import Figures
from maxsimd.bench.turns import medians, take_turns
from maxsimd.engine import DocumentDigest, Engine, EngineConfig

Array = NDArray[Any]
_HEADERS = {"Content-Type": "application/json"}
# Requests at a time: enough to keep a server busy.
_AT_A_TIME = 4


async def _documents_per_second(send: Send, requests: Iterator[Request], seconds: float) -> float:
    """The speed over about that time, with a few requests at a time."""
    started = time.perf_counter()
    done = 0

    async def client() -> None:
        nonlocal done
        while time.perf_counter() - started < seconds:
            request = next(requests)
            await send(request)
            done += len(request.documents)

    await asyncio.gather(*(client() for _ in range(_AT_A_TIME)))
    return done / (time.perf_counter() - started)


# Sizes of batches, and batches at a time.
_BATCH_DOCUMENTS, _BATCHES = 10_000, 2


async def measure_mixed_load(
    model: str | None,
    rate: float,
    priority: str | None,
    max_batch_tokens: int | None,
    rounds: int,
    seconds: float,
) -> Figures:
    """One-document requests at `rate` a second (Poisson), and batches of `priority` without a pause: medians
    of each alone, and of both, in `rounds` turns of `seconds`. The throughput of batches counts tokens that
    the model ran for batches."""
    pairs = docstring_pairs()
    batch = _rerank_body(pairs[0].query, numbered_documents(_BATCH_DOCUMENTS), priority)
    bodies = [_rerank_body(pair.query, [pair.document], None) for pair in pairs[:500]]
    draw, numbers = random.Random(0), count()
    options = [] if max_batch_tokens is None else ["--max-batch-tokens", str(max_batch_tokens)]
    with tempfile.TemporaryDirectory() as folder:
        async with maxsimd("maxsimd", *options).run(model, Path(folder, "log")) as running:
            session = running.session

            async def interactive() -> tuple[list[float], int]:
                """The milliseconds of each request, and the tokens of all."""
                ends = time.perf_counter() + seconds
                answers = await send_at_random(
                    lambda _: _post(session, bodies[next(numbers) % len(bodies)]), rate, seconds, draw
                )
                await asyncio.sleep(max(0.0, ends - time.perf_counter()))
                return [taken * 1e3 for taken, _ in answers], sum(tokens for _, tokens in answers)

            async def turn() -> dict[str, float]:
                alone, _ = await interactive()
                async with _batches(session, batch):
                    before = await _tokens(session), time.perf_counter()
                    await asyncio.sleep(seconds)
                    between = await _tokens(session), time.perf_counter()
                    beside, tokens = await interactive()
                    after = await _tokens(session), time.perf_counter()
                return {
                    "p50_alone_ms": statistics.median(alone),
                    "p99_alone_ms": float(np.percentile(alone, 99)),
                    "p50_beside_batches_ms": statistics.median(beside),
                    "p99_beside_batches_ms": float(np.percentile(beside, 99)),
                    "batch_tokens_per_s_alone": (between[0] - before[0]) / (between[1] - before[1]),
                    "batch_tokens_per_s_beside": (after[0] - between[0] - tokens) / (after[1] - between[1]),
                }

            await interactive()
            found = medians([await turn() for _ in range(rounds)], 2)
    return {
        "interactive_per_s": rate,
        **found,
        "p99_beside_batches_over_alone": round(found["p99_beside_batches_ms"] / found["p99_alone_ms"], 2),
        "batch_beside_interactive_over_alone": round(
            found["batch_tokens_per_s_beside"] / found["batch_tokens_per_s_alone"], 3
        ),
    }


@asynccontextmanager
async def _batches(session: aiohttp.ClientSession, batch: bytes) -> AsyncIterator[None]:
    """Sends batches until the context ends, the next before the last is done: steps stay full while one is
    prepared. The last batches are canceled. An error of a batch ends the context."""

    async def send() -> None:
        while True:
            await _post(session, batch)

    async with asyncio.TaskGroup() as group:
        sending = [group.create_task(send()) for _ in range(_BATCHES)]
        # Until all of the first batches are prepared and steps are full.
        await asyncio.sleep(5)
        yield
        for each in sending:
            each.cancel()
    await asyncio.sleep(1)


async def _post(session: aiohttp.ClientSession, body: bytes) -> tuple[float, int]:
    """The seconds until the answer, and its tokens."""
    started = time.perf_counter()
    async with session.post("/rerank", data=body, headers=_HEADERS) as response:
        answer = await response.read()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {answer[:500]!r}")
    seconds = time.perf_counter() - started
    return seconds, msgspec.json.decode(answer)["usage"]["total_tokens"]


async def _tokens(session: aiohttp.ClientSession) -> float:
    """The number of tokens that the model has run."""
    return float(next(s.value for s in await _samples(session) if s.name == "maxsimd_tokens_total"))


def _rerank_body(query: str, documents: list[str], priority: str | None) -> bytes:
    given = {"query": query, "documents": documents, "return_documents": False, "cache": "bypass"}
    return msgspec.json.encode(given if priority is None else given | {"priority": priority})


# Documents a request. Requests of at most SMALL are sent a few at a time, so that the device never waits.
_SIZES, _SMALL = (10, 100, 1000, 10_000), 1000
_LAG = "maxsimd_event_loop_lag_seconds_bucket"


async def measure_scaling(model: str | None, clients: int, rounds: int) -> Figures:
    """The event loop's lag under `clients`, the time a document takes by request size, and memory."""
    # All clients' requests are to be served, however long the last of them waits.
    server = maxsimd("maxsimd", "--max-wait-seconds", "3600")
    with tempfile.TemporaryDirectory() as folder:
        async with server.run(model, Path(folder, "log")) as running:
            return await _under_clients(running, clients) | await _by_size(running, rounds)


async def _under_clients(running: Running, clients: int) -> Figures:
    texts = [pair.document for pair in docstring_pairs()]
    requests = [Request(QUERY, [f"client {i} {text}" for text in texts[:100]]) for i in range(clients)]
    await drive(running.send, [Request(QUERY, texts[:200])], 1)
    before = await _buckets(running.session)
    duration, _ = await drive_or_raise(running.send, requests, clients)
    after = await _buckets(running.session)
    # The number of samples up to each bound in seconds; the last is infinite.
    bounds = sorted(after)
    counts = [after[bound] - before[bound] for bound in bounds]
    p99 = np.interp(0.99 * counts[-1], [0.0, *counts], [0.0, *bounds[:-1], bounds[-2]])
    return {
        "clients": clients,
        "clients_done_after_s": round(duration, 2),
        "lag_samples": int(counts[-1]),
        "share_of_lag_up_to_5_ms": round(counts[bounds.index(0.005)] / counts[-1], 4),
        "lag_p99_ms": round(float(p99) * 1e3, 2),
        "memory_then_mb": await resident_megabytes(running.session),
    }


async def _by_size(running: Running, rounds: int) -> Figures:
    """The same documents in requests of every size; the largest has them several times, numbered."""
    base, turns, memory = numbered_documents(_SMALL), [], []
    for number in range(rounds):
        turns.append(dict[str, float]())
        for size in _SIZES:
            copies = range(max(1, size // len(base)))
            documents = [f"{number} {copy} {text}" for copy in copies for text in base]
            parts = [documents[start : start + size] for start in range(0, len(documents), size)]
            requests = [Request(QUERY, part) for part in parts]
            duration, _ = await drive_or_raise(running.send, requests, _AT_A_TIME if size <= _SMALL else 1)
            turns[-1][str(size)] = duration / len(documents) * 1e3
        memory.append(await resident_megabytes(running.session))
    found = medians(turns, 3)
    return {
        "ms_a_document": found,
        "slowest_size_over_fastest": round(max(found.values()) / min(found.values()), 3),
        "memory_by_round_mb": " ".join(map(str, memory)),
    }


async def _samples(session: aiohttp.ClientSession) -> list[Any]:
    """All that the server counts and measures now."""
    from prometheus_client.parser import text_string_to_metric_families

    async with session.get("/metrics") as response:
        families = list(text_string_to_metric_families(await response.text()))
    return [sample for family in families for sample in family.samples]


async def _buckets(session: aiohttp.ClientSession) -> dict[float, float]:
    """The histogram of the event loop's lag: the number of samples up to each number of seconds."""
    samples = await _samples(session)
    return {float(sample.labels["le"]): sample.value for sample in samples if sample.name == _LAG}


_NEIGHBORS, _NEIGHBORS_DOCUMENTS = (0, 1, 2, 4), 20


async def measure_neighbors(executable: str | None, rounds: int, seconds: float) -> Figures:
    """Documents a second of a cross-encoder with 0, 1, 2 and 4 busy processes in the same session, in turns.
    Fair is the share that as many processes with all cores to themselves would have: cores / (cores + n)."""
    systems: list[System] = [
        replace(maxsimd("maxsimd", executable=executable), own_session=False),
        SentenceTransformers("sentence-transformers", "bfloat16"),
    ]
    requests = docstring_requests(64, _NEIGHBORS_DOCUMENTS, seed=0)

    async def speed(send: Send) -> float:
        return await _documents_per_second(send, (requests[i % 64] for i in count()), seconds)

    async def turn(send: Send, number: int) -> float:
        async with _busy(number):
            return await speed(send)

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_cross_encoder(Path(folder, "cross-encoder"))
        async with AsyncExitStack() as stack:
            contenders: dict[str, Callable[[], Awaitable[float]]] = {}
            for system in systems:
                log = Path(folder, f"{system.name}.log")
                send = await stack.enter_async_context(system.serve(checkpoint, log))
                await speed(send)
                contenders |= {f"{system.name} {n}": partial(turn, send, n) for n in _NEIGHBORS}
            turns = await take_turns(contenders, rounds, warm_up=False)
    cores = len(os.sched_getaffinity(0))
    speeds = {key: statistics.median(values) for key, values in turns.results.items()}
    figures: Figures = {"cores": cores}
    for number in _NEIGHBORS:
        figures[f"fair_share_with_{number}"] = round(min(1.0, cores / (cores + number)), 3)
        for name in (system.name for system in systems):
            figures[f"{name}_documents_per_s_with_{number}"] = round(speeds[f"{name} {number}"], 1)
            share = speeds[f"{name} {number}"] / speeds[f"{name} 0"]
            figures[f"{name}_share_with_{number}"] = round(share, 3)
    return figures


@asynccontextmanager
async def _busy(count: int) -> AsyncIterator[None]:
    """Processes that only compute."""
    processes = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])  # noqa: ASYNC220 (starting takes no time)
        for _ in range(count)
    ]
    try:
        await asyncio.sleep(0.5)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# Cached documents of a request, new documents of a request, and requests for a median.
_CACHED, _NEW, _REQUESTS = (1, 10, 100, 1_000), 100, 20


async def measure_fleet_overhead(executable: str | None, rounds: int, seconds: float) -> Figures:
    fleets = {
        "one process": (),
        "2 fronts, 1 replica": ("--fronts", "2"),
        "1 front, 2 replicas": ("--replicas", "2"),
        "2 fronts, 2 replicas": ("--fronts", "2", "--replicas", "2"),
    }
    servers = [
        maxsimd(name, *options, "--cache-mb", "256", executable=executable)
        for name, options in fleets.items()
    ]
    return await _overhead(servers, rounds, seconds, {})


async def measure_cluster_overhead(rounds: int, seconds: float, cpus: int) -> Figures:
    require_ray()
    own = str(Path(sys.executable).with_name("maxsimd"))
    servers = [
        maxsimd("one process", "--cache-mb", "256", "--threads", str(cpus)),
        Server("on Ray", (own, "cluster", "serve", "--cache-mb", "256", "--num-cpus", str(cpus))),
    ]
    # The titles of Ray's processes that requests pass through.
    titles = {
        "the proxy": "ray::ProxyActor",
        "the front": "ray::ServeReplica:maxsimd:Front",
        "the scorer": "ray::ServeReplica:maxsimd:Scorer",
    }
    figures = await _overhead(servers, rounds, seconds, titles)
    ratio = figures["on Ray: new documents/s"] / figures["one process: new documents/s"]
    return figures | {"new documents/s, on Ray / one process": round(ratio, 3)}


async def _overhead(
    servers: Sequence[Server], rounds: int, seconds: float, titles: Mapping[str, str]
) -> Figures:
    """Medians of `rounds`, in which servers with the embedded model take turns: milliseconds of a request
    with cached documents, and new documents a second, a few requests at a time. `titles` names processes by
    the beginning of their title: their processor time is given in milliseconds a request."""
    documents, new = numbered_documents(max(_CACHED)), numbered_documents(_NEW)
    requests = (Request(QUERY, [f"{mark} {text}" for text in new]) for mark in count())

    async def turn(send: Send) -> dict[str, float]:
        found = {}
        for number in _CACHED:
            before = _processor_seconds(titles)
            request = Request(QUERY, documents[:number])
            sent = await take_turns({"": partial(send, request)}, _REQUESTS, warm_up=False)
            found[f"{number} cached ms"] = sent.median_ms("", 3)
            for kind, used in _processor_seconds(titles).items():
                if used > before[kind]:
                    what = f"{number} cached, processor ms of {kind}"
                    found[what] = (used - before[kind]) * 1e3 / _REQUESTS
        return found | {"new documents/s": await _documents_per_second(send, requests, seconds)}

    with tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            contenders: dict[str, Callable[[], Awaitable[dict[str, float]]]] = {}
            for server in servers:
                log = Path(folder, f"{len(contenders)}.log")
                send = (await stack.enter_async_context(server.run(None, log))).send
                await send(Request(QUERY, documents))
                await _documents_per_second(send, requests, seconds)
                contenders[server.name] = partial(turn, send)
            turns = await take_turns(contenders, rounds, warm_up=False)
    found = {name: medians(results, 2) for name, results in turns.results.items()}
    return {f"{name}: {what}": value for name, each in found.items() for what, value in each.items()}


def _processor_seconds(titles: Mapping[str, str]) -> dict[str, float]:
    """The processor seconds of all processes whose title begins with a name's."""
    used = dict.fromkeys(titles, 0.0)
    for kind, title in titles.items():
        for process in processes_titled(title):
            with suppress(OSError):
                fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
                used[kind] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


_DIM, _QUERY_TOKENS = 128, 32
# Documents whose ranking by their vectors is compared with that by their texts.
_RANKED = 100


async def measure_vectors(documents: int, tokens: int, rounds: int) -> Figures:
    """Documents given as vectors, to a ColBERT of 128 dimensions: medians of `rounds` turns. maxsim-cpu
    takes float32 only, and is left out if it is not installed."""
    draw = np.random.default_rng(0)
    query = _unit(draw.standard_normal((_QUERY_TOKENS, _DIM), dtype=np.float32))
    whole = [_unit(draw.standard_normal((tokens, _DIM), dtype=np.float32)) for _ in range(documents)]
    halves = [rows.astype(np.float16) for rows in whole]
    body = _vectors_body(query, halves)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_colbert(Path(folder, "colbert"))
        async with (
            Engine(checkpoint) as engine,
            maxsimd("maxsimd").run(checkpoint, Path(folder, "log")) as running,
        ):
            ways: dict[str, Callable[[], Awaitable[Array]]] = {
                "python_float16": lambda: _scored(engine, query, halves),
                "python_float32": lambda: _scored(engine, query, whole),
                "http_float16": lambda: _posted(running.session, body),
            }
            if (peer := maxsim_cpu()) is not None:
                ways[PEER] = lambda: asyncio.to_thread(peer, query, whole)
            turns = await take_turns(ways, rounds)
            ranking = await _beside_texts(engine)
    exact = np.array([(query @ rows.T).max(axis=1).sum() for rows in whole])
    figures: Figures = {"documents": documents, "tokens": tokens, "body_mb": round(len(body) / 1e6, 1)}
    for name, (*_, scores) in turns.results.items():
        figures[f"{name}_ms"] = turns.median_ms(name)
        figures[f"{name}_largest_error"] = round(float(np.abs(scores - exact).max()), 5)
    figures["http_more_ms"] = round(figures["http_float16_ms"] - figures["python_float16_ms"], 1)
    for name in ("python_float16", "python_float32") if PEER in ways else ():
        figures[f"{PEER}_over_{name}"] = turns.ratio(PEER, name)
    return figures | ranking


async def _beside_texts(engine: Engine) -> Figures:
    """Real texts, ranked as texts and by their vectors."""
    from scipy.stats import kendalltau

    texts = [pair.document for pair in docstring_pairs()][:_RANKED]
    expected = (await engine.score(QUERY, texts)).scores
    vectors = (await engine.embed_tokens(texts, input_type="document")).embeddings
    figures: Figures = {}
    for kind in (np.float32, np.float16):
        found = await _scored(engine, QUERY, [rows.astype(kind) for rows in vectors])
        name = f"texts_{np.dtype(kind)}"
        figures[f"{name}_kendall_tau"] = round(float(kendalltau(expected, found).statistic), 5)
        figures[f"{name}_largest_difference"] = round(float(np.abs(found - np.array(expected)).max()), 5)
    return figures


async def _scored(engine: Engine, query: str | Array, documents: list[Array]) -> Array:
    return np.array((await engine.score(query, documents)).scores)


async def _posted(session: aiohttp.ClientSession, body: bytes) -> Array:
    async with session.post("/score", data=body, headers=_HEADERS) as response:
        response.raise_for_status()
        data = msgspec.json.decode(await response.read())["data"]
    return np.array([item["score"] for item in data])


def _vectors_body(query: Array, documents: list[Array]) -> bytes:
    def sent(rows: Array) -> Figures:
        values = base64.b64encode(rows.tobytes()).decode()
        return {"embedding": values, "dtype": "float16", "shape": rows.shape}

    return msgspec.json.encode(
        {"queries": sent(query.astype(np.float16)), "documents": [*map(sent, documents)]}
    )


async def measure_digests(model: str | None, documents: int, rounds: int) -> Figures:
    """Cached documents sent as texts and named by their digests, over HTTP: bytes of the body, and medians of
    `rounds` turns."""
    texts = numbered_documents(documents)
    sent = {"texts": texts, "digests": [{"digest": str(DocumentDigest.of(text))} for text in texts]}
    bodies = {name: msgspec.json.encode({"queries": QUERY, "documents": each}) for name, each in sent.items()}
    options = ("--cache-mb", "2048", "--limit", "document_store_mb=256")
    with tempfile.TemporaryDirectory() as folder:
        async with maxsimd("maxsimd", *options).run(model, Path(folder, "log")) as running:
            added = msgspec.json.encode({"documents": texts})
            async with running.session.post("/documents", data=added, headers=_HEADERS) as response:
                response.raise_for_status()
                assert all(each["kept"] for each in (await response.json())["data"])
            await _posted(running.session, bodies["texts"])  # a cross-encoder caches scores by this
            ways = {name: partial(_posted, running.session, body) for name, body in bodies.items()}
            turns = await take_turns(ways, rounds)
    figures: Figures = {"documents": documents}
    for name, body in bodies.items():
        figures |= {f"{name}_bytes": len(body), f"{name}_ms": turns.median_ms(name, 2)}
    scores = [scores for results in turns.results.values() for scores in results]
    return figures | {
        "texts_over_digests": turns.ratio("texts", "digests"),
        "largest_difference_of_scores": max(float(np.abs(scores[0] - each).max()) for each in scores),
    }


def _unit(rows: Array) -> Array:
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True))


# Documents of a request to the engine alone.
_AT_ONCE = 256
_DONE = re.compile(rb"([\d,]+) of [\d,]+ documents")


async def measure_files(documents: int, rounds: int) -> Figures:
    """`maxsimd rerank` on a file beside the engine alone, in turns: medians of documents a second, and of
    the seconds until the command prints its first line, and has its first scores."""
    texts = [" ".join(text.split()) for text in numbered_documents(documents)]
    turns = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "documents.txt"
        file.write_text("\n".join(texts), encoding="utf-8")
        for _ in range(rounds):
            printed = await run_rerank(str(file))
            # Progress ends with a return or a newline; it begins once the model is loaded.
            progress = [(at, done) for at, part in printed for done in _DONE.findall(part)]
            loaded = max(at for at, done in progress if done == b"0")
            scored = [at for at, done in progress if done != b"0"]
            speeds = documents / (scored[-1] - loaded), await _engine_speed(texts)
            turns.append(
                {
                    "command_documents_per_s": speeds[0],
                    "engine_documents_per_s": speeds[1],
                    "command_over_engine": speeds[0] / speeds[1],
                    "first_line_after_s": printed[0][0],
                    "first_scores_after_loading_s": scored[0] - loaded,
                }
            )
    return medians(turns, 3)


async def _engine_speed(texts: list[str]) -> float:
    """Documents a second, measured like `maxsimd bench engine`."""
    parts = [texts[start : start + _AT_ONCE] for start in range(0, len(texts), _AT_ONCE)]
    workload = {
        **{"dataset": "docstrings", "cache": "use", "concurrency": _AT_A_TIME, "request_rate": None},
        **{"seed": 0, "warmup": 0, "num_requests": len(parts), "documents": _AT_ONCE},
    }
    report = await run_engine(EngineConfig(), [Request(QUERY, part) for part in parts], workload)
    return len(texts) / report.duration
