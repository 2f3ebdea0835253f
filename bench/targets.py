"""What is measured: the engine in this process, or a server over HTTP."""

import time
from typing import Any

import aiohttp

from maxsimd.bench.datasets import Request
from maxsimd.bench.load import Send, drive
from maxsimd.bench.report import Report
from maxsimd.engine import CUT_LONG, Engine, EngineConfig


async def run_engine(config: EngineConfig, requests: list[Request], workload: dict[str, Any]) -> Report:
    """Warms up and measures an engine that lives for this run."""
    started = time.perf_counter()
    async with Engine(config) as engine:
        ready = time.perf_counter() - started

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
            "dtype": str(engine.device_model.dtype).removeprefix("torch."),
            "quantization": None if config.quantization == "none" else config.quantization,
            **_shown(workload),
        }
        loading = {
            "model_ready_s": round(ready, 2),
            "packing_proof_s": round(engine.device_model.proof_seconds, 3),
        }
        return await _measure(send, requests, workload, settings, loading)


async def run_server(
    url: str, api_key: str | None, requests: list[Request], workload: dict[str, Any]
) -> Report:
    """Warms up and measures a server that is already running."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, headers=headers, timeout=timeout, connector=connector) as session:

        async def send(request: Request) -> tuple[dict[int, float], int]:
            body = {"query": request.query, "documents": request.documents, "truncate_prompt_tokens": -1}
            body["cache"] = workload["cache"]
            async with session.post("/rerank", json=body | {"return_documents": False}) as response:
                answer = await response.json()
                if response.status != 200:
                    raise RuntimeError(f"{response.status}: {answer}")
            scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
            return scores, answer["usage"]["prompt_tokens"]

        settings = {"target": url, "model": await _model_name(session), **_shown(workload)}
        before = await _resident_megabytes(session)
        report = await _measure(send, requests, workload, settings, {})
        after = await _resident_megabytes(session)
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
    await drive(send, requests[: workload["warmup"]], min(4, concurrency), None, seed)
    duration, outcomes = await drive(send, requests[workload["warmup"] :], concurrency, rate, seed)
    return Report(settings, duration, outcomes, extra)


def _shown(workload: dict[str, Any]) -> dict[str, Any]:
    shown = {
        name: workload[name]
        for name in ("dataset", "documents", "concurrency", "request_rate", "cache", "seed")
    }
    if workload["dataset"] == "random":
        shown |= {name: workload[name] for name in ("mix", "random_input_len", "random_range_ratio")}
        shown["queries"] = "one for the whole run" if workload["shared_query"] else "one a request"
    return shown


async def _model_name(session: aiohttp.ClientSession) -> str | None:
    async with session.get("/v1/models") as response:
        return (await response.json())["data"][0]["id"] if response.status == 200 else None


async def _resident_megabytes(session: aiohttp.ClientSession) -> int | None:
    """The server's resident memory, where its metrics tell."""
    async with session.get("/metrics") as response:
        for line in (await response.text()).splitlines():
            if line.startswith("process_resident_memory_bytes"):
                return round(float(line.split()[1]) / 1e6)
    return None
