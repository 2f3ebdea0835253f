"""Configurations of small models, and two of them in one process."""

import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from maxsimd.engine import EngineConfig, Engines
from maxsimd.engine.device import load
from tests.checkpoints import bi_encoders, cross_encoders
from tests.checkpoints.shared import SharedCheckpoints


@pytest.fixture(scope="module")
def config(qwen3_embedding: str) -> EngineConfig:
    return EngineConfig(model=qwen3_embedding, dtype="float32", threads=1)


@pytest.fixture(scope="module")
def reranker(config: EngineConfig, checkpoints: SharedCheckpoints) -> EngineConfig:
    return replace(config, model=checkpoints(cross_encoders.bert))


@pytest.fixture(scope="module")
def embedder(config: EngineConfig, checkpoints: SharedCheckpoints) -> EngineConfig:
    path = checkpoints(bi_encoders.bge)
    return replace(config, model=path, score_type="late-interaction", max_model_len=256)


@pytest.fixture
def held_load(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Reading a checkpoint sets the first, and waits for the second."""
    is_read, go_on, load_model = threading.Event(), threading.Event(), load.load_model

    def held(*arguments: Any) -> Any:
        is_read.set()
        go_on.wait()
        return load_model(*arguments)

    monkeypatch.setattr(load, "load_model", held)
    return is_read, go_on


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(embedder: EngineConfig, reranker: EngineConfig) -> AsyncIterator[Engines]:
    async with Engines({"embed": embedder, "rerank": reranker}) as engines:
        yield engines
