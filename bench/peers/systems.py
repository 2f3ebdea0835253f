"""The systems that are compared: servers behind HTTP, and sentence-transformers in a process of its own."""

import asyncio
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from maxsimd.bench.datasets import Request
from maxsimd.bench.load import Send

_START_SECONDS = 300
_STOP_SECONDS = 30
_LOG_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is up: what sends it a request, and a session to ask it anything else."""

    send: Send
    session: aiohttp.ClientSession


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers POST /rerank and /score; `command` is given the port, and the checkpoint if there
    is one. In a session of its own Linux may give it a share of its own of the cores (autogroup)."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    own_session: bool = True

    @asynccontextmanager
    async def serve(self, checkpoint: str, log: Path) -> AsyncIterator[Send]:
        """Starts it, yields what sends a request, and stops it."""
        async with self.run(checkpoint, log) as running:
            yield running.send

    @asynccontextmanager
    async def run(self, checkpoint: str | None, log: Path) -> AsyncIterator[Running]:
        """Starts it on a free port, waits until it is healthy, and stops it in the end."""
        port = _free_port()
        command = [*self.command, *([checkpoint] if checkpoint else []), "--port", str(port)]
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: ASYNC220  (starting takes no time)
                command,
                stdout=output,
                stderr=output,
                env=os.environ | {"MAXSIMD_DRAIN_SECONDS": "0"} | self.environment,
                start_new_session=self.own_session,
            )
            try:
                connector = aiohttp.TCPConnector(limit=0)
                timeout = aiohttp.ClientTimeout(total=600)
                url = f"http://127.0.0.1:{port}"
                async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
                    await _until_healthy(session, process, self.name, log)
                    yield Running(lambda request: _score(session, request), session)
            finally:
                process.terminate()
                try:
                    await asyncio.to_thread(process.wait, _STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


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
    """This server, or that of another version, without its cache: documents are sent again and again here."""
    executable = executable or str(Path(sys.executable).with_name("maxsimd"))
    return Server(name, (executable, "serve", "--cache-mb", "0", *options))


def vllm(executable: str, threads: str) -> Server:
    """vLLM's CPU build, on the same cores; left to itself it keeps one of them for its front end."""
    environment = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": threads,
        "HF_HUB_OFFLINE": "1",
    }
    return Server("vLLM bfloat16", (executable, "serve", "--dtype", "bfloat16"), environment)


async def _score(session: aiohttp.ClientSession, request: Request) -> tuple[dict[int, float], int]:
    """One query by POST /rerank, one for each document by POST /score."""
    if isinstance(request.query, str):
        answer = await _post(session, "/rerank", {"query": request.query, "documents": request.documents})
        scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
    else:
        answer = await _post(session, "/score", {"text_1": request.query, "text_2": request.documents})
        scores = {result["index"]: result["score"] for result in answer["data"]}
    return scores, answer["usage"]["total_tokens"]


async def _post(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Any:
    async with session.post(path, json=body | {"truncate_prompt_tokens": -1}) as response:
        answer = await response.json()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {answer}")
    return answer


async def _until_healthy(
    session: aiohttp.ClientSession, process: "subprocess.Popen[bytes]", name: str, log: Path
) -> None:
    async with asyncio.timeout(_START_SECONDS):
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended while it started; the end of its log:\n{_end_of(log)}")
            try:
                # Answered by all of them, and only once the model is there; /health may be, before that.
                async with session.get("/v1/models") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.25)


def _end_of(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARACTERS:]


def _free_port() -> int:
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
