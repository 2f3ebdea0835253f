"""Systems under load: an engine in this process, servers and peers that are started, and timed requests.

Libraries are imported where they are used: `maxsimd bench --help` must stay fast.
"""

import asyncio
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from maxsimd.bench.datasets import QUERY, Request
from maxsimd.bench.report import Outcome, Report
from maxsimd.engine.config import EngineConfig

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

_START_SECONDS = 300
_STOP_SECONDS = 30
# Between looks at a server that starts.
_LOOK_SECONDS = 0.02
_LOG_CHARACTERS = 2000

# Sends one request; returns the scores by document index, and the tokens that were run.
Send = Callable[[Request], Awaitable[tuple[dict[int, float], int]]]


async def drive(
    send: Send, requests: Sequence[Request], concurrency: int, rate: float | None = None, seed: int = 0
) -> tuple[float, list[Outcome]]:
    """Sends all requests, `concurrency` at a time, or at `rate` a second with random (Poisson) arrivals.

    Returns the seconds it took and the outcomes in the order of the requests."""
    from tqdm import tqdm

    gate = asyncio.Semaphore(concurrency)
    draw = random.Random(seed)
    with tqdm(total=len(requests), unit="req", leave=False) as bar:

        async def one(request: Request) -> Outcome:
            async with gate:
                outcome = await _outcome(send, request)
            bar.update()
            return outcome

        started = time.perf_counter()
        tasks = []
        for request in requests:
            tasks.append(asyncio.create_task(one(request)))
            if rate is not None:
                await asyncio.sleep(draw.expovariate(rate))
        outcomes = await asyncio.gather(*tasks)
    return time.perf_counter() - started, list(outcomes)


async def send_at_random(
    send: Callable[[int], Coroutine[Any, Any, T]], rate: float, seconds: float, draw: random.Random
) -> list[T]:
    """Sends numbered requests at random times (Poisson), whether or not earlier ones are answered."""
    started = time.perf_counter()
    tasks: list[asyncio.Task[T]] = []
    due = 0.0
    while due < seconds:
        await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
        tasks.append(asyncio.create_task(send(len(tasks))))
        due += draw.expovariate(rate)
    return await asyncio.gather(*tasks)


async def drive_or_raise(
    send: Send, requests: Sequence[Request], concurrency: int
) -> tuple[float, list[Outcome]]:
    """Like `drive`; raises RuntimeError if a request failed."""
    duration, outcomes = await drive(send, requests, concurrency)
    for outcome in outcomes:
        if outcome.error:
            raise RuntimeError(f"a request failed: {outcome.error}")
    return duration, outcomes


async def _outcome(send: Send, request: Request) -> Outcome:
    started = time.perf_counter()
    try:
        scores, tokens = await send(request)
    except Exception as error:
        return Outcome(time.perf_counter() - started, len(request.documents), 0, error=f"{error}")
    seconds = time.perf_counter() - started
    rank = None
    if request.answer is not None:  # a tie counts against the known answer
        own = scores[request.answer]
        rank = 1 + sum(score >= own for i, score in scores.items() if i != request.answer)
    return Outcome(seconds, len(request.documents), tokens, rank)


async def run_engine(config: EngineConfig, requests: list[Request], workload: dict[str, Any]) -> Report:
    """Warms up and measures an engine that lives for this run."""
    from maxsimd.engine import CUT_LONG, Engine

    started = time.perf_counter()
    async with Engine(config) as engine:
        ready = time.perf_counter() - started
        model = engine.device_model

        async def send(request: Request) -> tuple[dict[int, float], int]:
            result = await engine.score(
                request.query, request.documents, truncation=CUT_LONG, cache=workload["cache"]
            )
            return dict(enumerate(result.scores)), result.usage.prompt_tokens

        settings = {
            "target": "engine",
            "model": engine.model.name,
            "score_type": engine.model.score_type.value,
            "doc_token_pooling": config.doc_token_pooling,
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": None if config.quantization == "none" else config.quantization,
            **_shown(workload),
        }
        loading = {"model_ready_s": round(ready, 2), "packing_proof_s": round(model.proof_seconds, 3)}
        return await _measure(send, requests, workload, settings, loading)


async def run_server(
    url: str, api_key: str | None, requests: list[Request], workload: dict[str, Any]
) -> Report:
    """Warms up and measures a server that is already running."""
    async with _session(url, {"Authorization": f"Bearer {api_key}"} if api_key else {}) as session:

        async def send(request: Request) -> tuple[dict[int, float], int]:
            body = {"query": request.query, "documents": request.documents, "cache": workload["cache"]}
            answer = await _post(session, "/rerank", body | {"return_documents": False})
            scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
            return scores, answer["usage"]["prompt_tokens"]

        async with session.get("/v1/models") as response:
            model = (await response.json())["data"][0]["id"] if response.status == 200 else None
        settings = {"target": url, "model": model, **_shown(workload)}
        before = await resident_megabytes(session)
        report = await _measure(send, requests, workload, settings, {})
        after = await resident_megabytes(session)
        if before is not None and after is not None:
            report.extra.update(server_memory_before_mb=before, server_memory_after_mb=after)
        return report


async def _measure(
    send: Send,
    requests: list[Request],
    workload: dict[str, Any],
    settings: dict[str, Any],
    extra: dict[str, Any],
) -> Report:
    concurrency, rate, seed = workload["concurrency"], workload["request_rate"], workload["seed"]
    if rate is not None:
        concurrency = len(requests)
    await drive(send, requests[: workload["warmup"]], min(4, concurrency))
    duration, outcomes = await drive(send, requests[workload["warmup"] :], concurrency, rate, seed)
    return Report(settings, duration, outcomes, extra)


def _shown(workload: dict[str, Any]) -> dict[str, Any]:
    names = ("dataset", "documents", "concurrency", "request_rate", "cache", "seed")
    shown = {name: workload[name] for name in names}
    if workload["dataset"] == "random":
        shown |= {name: workload[name] for name in ("mix", "random_input_len", "random_range_ratio")}
        shown["queries"] = "one for the whole run" if workload["shared_query"] else "one a request"
    return shown


async def resident_megabytes(session: "aiohttp.ClientSession") -> int | None:
    """The resident memory of the server's processes; None if its metrics lack it."""
    async with session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    found = [float(line.split()[-1]) for line in lines if line.startswith("process_resident_memory_bytes")]
    return round(sum(found) / 1e6) if found else None


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is up: `send` scores a request, `session` is for anything else. Its first line and its
    readiness came so many seconds after its start."""

    send: Send
    session: "aiohttp.ClientSession"
    port: int
    pid: int
    first_line_s: float
    ready_s: float


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers POST /rerank and /score. The checkpoint, if any, and the port are added to
    `command`. With `own_session`, Linux may give it a share of the cores of its own (autogroup)."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    own_session: bool = True

    @asynccontextmanager
    async def serve(self, checkpoint: str, log: Path) -> AsyncIterator[Send]:
        """Runs the server and yields what sends a request."""
        async with self.run(checkpoint, log) as running:
            yield running.send

    @asynccontextmanager
    async def run(self, checkpoint: str | None, log: Path) -> AsyncIterator[Running]:
        """Runs the server on a free port, from when it is healthy."""
        port = free_port()
        command = [*self.command, *([checkpoint] if checkpoint else []), "--port", str(port)]
        started = time.perf_counter()
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: ASYNC220  (starting takes no time)
                command,
                stdout=output,
                stderr=output,
                env=os.environ | {"MAXSIMD_DRAIN_SECONDS": "0"} | self.environment,
                start_new_session=self.own_session,
            )
            try:
                async with _session(f"http://127.0.0.1:{port}") as session:
                    printed = await self._until_healthy(session, process, log)
                    yield Running(
                        lambda request: _score(session, request),
                        session,
                        port,
                        process.pid,
                        printed - started,
                        time.perf_counter() - started,
                    )
            finally:
                process.terminate()
                try:
                    await asyncio.to_thread(process.wait, _STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    async def _until_healthy(
        self, session: "aiohttp.ClientSession", process: "subprocess.Popen[bytes]", log: Path
    ) -> float:
        """Returns the time of the first line in the log."""
        import aiohttp

        printed = 0.0
        async with asyncio.timeout(_START_SECONDS):
            while True:
                if self._has_printed(process, log) and not printed:
                    printed = time.perf_counter()
                try:
                    # All servers answer this, and only with their model; some answer /health before.
                    async with session.get("/v1/models") as response:
                        if response.status == 200:
                            return printed or time.perf_counter()
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(_LOOK_SECONDS)

    def _has_printed(self, process: "subprocess.Popen[bytes]", log: Path) -> bool:
        text = log.read_text(encoding="utf-8", errors="replace")
        if process.poll() is not None:
            end = text[-_LOG_CHARACTERS:]
            raise RuntimeError(f"{self.name} ended while it started; the end of its log:\n{end}")
        return bool(text)


@dataclass(frozen=True, slots=True)
class SentenceTransformers:
    """`CrossEncoder.predict` in a process of its own, in one precision."""

    name: str
    dtype: str

    @asynccontextmanager
    async def serve(self, checkpoint: str, log: Path) -> AsyncIterator[Send]:
        """Loads the model there and yields what scores a request."""
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, _load, (checkpoint, self.dtype)) as executor:

            async def send(request: Request) -> tuple[dict[int, float], int]:
                queries = request.query
                if isinstance(queries, str):
                    queries = [queries] * len(request.documents)
                pairs = list(zip(queries, request.documents, strict=True))
                scores = await asyncio.get_running_loop().run_in_executor(executor, _predict, pairs)
                return dict(enumerate(scores)), 0

            yield send


System = Server | SentenceTransformers


def maxsimd(name: str, *options: str, executable: str | None = None) -> Server:
    """This server, or that of another version, without its cache: benchmarks repeat documents."""
    executable = executable or str(Path(sys.executable).with_name("maxsimd"))
    return Server(name, (executable, "serve", "--cache-mb", "0", *options))


async def run_rerank(documents: str, *options: str, **environment: str) -> list[tuple[float, bytes]]:
    """Ranks the lines of a file by `maxsimd rerank`. Returns all that it printed to standard error, each part
    after its seconds from the start, and at last an empty part for its end. RuntimeError if it failed."""
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "maxsimd", "rerank", *options, "--query", QUERY, "--documents", documents),
        env=os.environ | environment,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    printed = []
    while part := await process.stderr.read(1 << 16):
        printed.append((time.perf_counter() - started, part))
    if status := await process.wait():
        raise RuntimeError(f"maxsimd rerank ended with {status}: {b''.join(part for _, part in printed)!r}")
    return [*printed, (time.perf_counter() - started, b"")]


def vllm(executable: str, threads: str) -> Server:
    """vLLM's CPU build, on the same cores; left to itself it keeps one of them for its front end."""
    environment = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": threads, "HF_HUB_OFFLINE": "1"}
    return Server("vLLM bfloat16", (executable, "serve", "--dtype", "bfloat16"), environment)


async def _score(session: "aiohttp.ClientSession", request: Request) -> tuple[dict[int, float], int]:
    """One query by POST /rerank, one for each document by POST /score."""
    if isinstance(request.query, str):
        answer = await _post(session, "/rerank", {"query": request.query, "documents": request.documents})
        scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
    else:
        answer = await _post(session, "/score", {"text_1": request.query, "text_2": request.documents})
        scores = {result["index"]: result["score"] for result in answer["data"]}
    return scores, answer["usage"]["total_tokens"]


async def _post(session: "aiohttp.ClientSession", path: str, body: dict[str, Any]) -> Any:
    async with session.post(path, json=body | {"truncate_prompt_tokens": -1}) as response:
        answer = await response.json()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {answer}")
    return answer


def _session(url: str, headers: dict[str, str] | None = None) -> "aiohttp.ClientSession":
    import aiohttp

    timeout, connector = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(url, headers=headers, timeout=timeout, connector=connector)


def processes_titled(title: str) -> list[int]:
    """The ids of all processes whose command line begins with `title`."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # a process may end meanwhile
            if Path("/proc", entry, "cmdline").read_bytes().startswith(title.encode()):
                found.append(int(entry))
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _load(checkpoint: str, dtype: str) -> None:
    global _model
    from sentence_transformers import CrossEncoder

    _model = CrossEncoder(checkpoint, device="cpu", model_kwargs={"dtype": dtype})


def _predict(pairs: list[tuple[str, str]]) -> list[float]:
    scores: list[float] = _model.predict(pairs, show_progress_bar=False).tolist()
    return scores


_model: Any = None
