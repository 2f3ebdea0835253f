"""The engine of a process that measures lone requests, which `bench/single.py` starts: of this version, or by
another checkout's path. Run as a file, so that it uses nothing of `maxsimd` that an older version lacks.

Its first argument says how all layers are run, its second the engine's configuration as JSON. It answers a
line of JSON on standard input, which says which requests to send, by a line on standard output."""

import asyncio
import contextlib
import functools
import json
import os
import sys
import time
from typing import Any

from maxsimd.bench.datasets import Request, random_requests
from maxsimd.engine import Engine, EngineConfig

# Tokens of a pair of query and document.
_PAIR = 100


@functools.cache
def _requests(documents: int, count: int) -> list[Request]:
    """Made once: what is made between two requests would drive the engine out of the processor's caches."""
    return random_requests(count, documents, _PAIR, 0.0, False, seed=0)


async def _ask(engine: Engine, documents: int, count: int, begin: int, end: int) -> dict[str, Any]:
    """Seconds of some of `count` random requests, the scores of each and the tokens of the last."""
    seconds, scores, tokens = [], [], 0
    for request in _requests(documents, count)[begin:end]:
        started = time.perf_counter()
        result = await engine.score(request.query, request.documents, cache="bypass")
        seconds.append(time.perf_counter() - started)
        scores.append(result.scores)
        tokens = result.usage.prompt_tokens
    return {"seconds": seconds, "scores": scores, "tokens": tokens}


def _layer_by_layer() -> contextlib.AbstractContextManager[Any]:
    """Loads models that run layer by layer. The engine has no option for it: where it is used, it gives
    the same."""
    from unittest.mock import patch

    return patch("maxsimd.engine.execution.one_call.packed_layers", lambda *_: "the benchmark compares both")


def _has_kernels() -> bool:
    from maxsimd.engine.ops.cpu.library import library

    return library() is not None


def _runs_in_one_call(engine: Engine) -> bool:
    """Whether the engine chose, at load, to run all layers in one call."""
    return type(engine.device_model.runner).__name__ == "OneCallRunner"


def main() -> None:
    way, config = sys.argv[1], EngineConfig(**json.loads(sys.argv[2]))
    # Whatever is printed meanwhile is no answer.
    with os.fdopen(os.dup(1), "w") as answers, asyncio.Runner() as runner:
        os.dup2(2, 1)
        engine = Engine(config)
        with _layer_by_layer() if way == "layer_by_layer" else contextlib.nullcontext():
            runner.run(engine.start())
        state = {"one_call": _runs_in_one_call(engine), "kernels": _has_kernels()}
        print(json.dumps(state), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(runner.run(_ask(engine, **json.loads(line)))), file=answers, flush=True)
        runner.run(engine.stop())


if __name__ == "__main__":
    main()
