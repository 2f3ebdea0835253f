"""bge-reranker-v2.5-gemma2-lightweight with token compression, against a plain reading of it: one pair at a
time, without padding."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, ModelLoadError
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.inspection import inspect_model
from tests.checkpoints import cross_encoders, retrained
from tests.checkpoints.shared import SharedCheckpoints
from tests.parity.retrained_references import bge_gemma2, bge_gemma2_compressed
from tests.parity.selection import with_default

CPU = torch.device("cpu")


@pytest.fixture
def path(checkpoints: SharedCheckpoints) -> str:
    return checkpoints(retrained.bge_gemma2)


@pytest.fixture
def ragged(pairs: list[Pair]) -> list[Pair]:
    """Pairs of random lengths, from no word of a document to more than attention's window."""
    draw = np.random.default_rng(0)
    words = " ".join(pair.document for pair in pairs).split()

    def text(most: int) -> str:
        start = int(draw.integers(len(words) - most))
        return " ".join(words[start : start + int(draw.integers(most + 1))])

    return [*(Pair(text(12) or "why", text(90)) for _ in range(14)), Pair("why", ""), Pair("why", "because")]


async def _scores(path: str, pairs: list[Pair], **settings: Any) -> np.ndarray:
    queries, documents = [pair.query for pair in pairs], [pair.document for pair in pairs]
    async with Engine(EngineConfig(model=path, dtype="float32", **settings)) as engine:
        assert engine.device_model.prepared.execution == "padded"
        assert not engine.device_model.prepared.runner.chunked
        return np.array((await engine.score(queries, documents, truncation=CUT_LONG)).scores)


@pytest.mark.parametrize(
    ("ratio", "layers", "cutoff"),
    with_default(
        [
            (2, (2,), 4),
            (4, (2,), 4),
            (8, (1,), 4),
            (2, (1, 3), 4),
            (4, (2, 3), 4),
            (8, (1, 2, 3), 4),
            (2, (1,), 3),
        ],
        [(4, (2,), 4), (8, (1, 2, 3), 4), (2, (1,), 3)],
    ),
)
async def test_scores_equal_a_plain_reading(
    ratio: int, layers: tuple[int, ...], cutoff: int, path: str, ragged: list[Pair]
) -> None:
    settings = {"compress_ratio": ratio, "compress_layers": ",".join(map(str, layers))}
    ours = await _scores(path, ragged, cutoff_layer=cutoff, **settings)
    expected = bge_gemma2_compressed(path, ragged, ratio, layers, cutoff)
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)
    whole = bge_gemma2(path, [p.query for p in ragged], [p.document for p in ragged], cutoff)
    assert np.abs(expected - whole).max() > 0.01, "compression must make a difference"


async def test_layers_behind_the_cutoff_compress_nothing(
    path: str, ragged: list[Pair], caplog: pytest.LogCaptureFixture
) -> None:
    """As in FlagEmbedding, and in the example of the model's card."""
    caplog.set_level("INFO")
    ours = await _scores(path, ragged[:8], cutoff_layer=2, compress_ratio=2, compress_layers="1,3")
    np.testing.assert_allclose(ours, bge_gemma2_compressed(path, ragged[:8], 2, (1,), 2), atol=1e-4, rtol=0)
    assert "token compression: every 2 rows of a document become one behind layer 1" in caplog.text
    assert "not compressed behind layers that are not run, as in FlagEmbedding: 3" in caplog.text


def test_inspection_says_how_it_runs(path: str) -> None:
    config = EngineConfig(model=path, dtype="float32", device="cpu", compress_ratio=4, compress_layers="1,2")
    rows = inspect_model(config)
    assert rows["compression"] == "every 4 rows of a document become one behind layers 1 and 2"
    assert rows["execution"].startswith("padded: documents have fewer rows")  # type: ignore[union-attr]
    assert rows["attention"] == "causal, whole sequences"


def test_a_ratio_of_1_compresses_nothing(path: str) -> None:
    model = load_model(EngineConfig(model=path, compress_ratio=1), CPU)
    assert model.compression is None
    assert type(model.backbone).__name__ == "Gemma2Model"


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (cross_encoders.bert, {"compress_ratio": 2}, "trained with token compression"),
        (retrained.bge_minicpm, {"compress_layers": "2"}, "trained with token compression"),
        (retrained.bge_gemma2, {"compress_layers": "2"}, "no effect with compress_ratio=1"),
        (retrained.bge_gemma2, {"compress_ratio": 2, "compress_layers": "2,4"}, "behind the layers 1 to 3"),
        # The layer that FlagEmbedding takes by default.
        (retrained.bge_gemma2, {"compress_ratio": 2}, "no layer follows the layer 8"),
        (
            retrained.bge_gemma2,
            {"compress_ratio": 2, "compress_layers": "2,3", "cutoff_layer": 2},
            "of the layers 2, 3 none is before the layer 2",
        ),
        (
            retrained.bge_gemma2,
            {"compress_ratio": 2, "compress_layers": "2", "score_template": "{{ query }} {{ document }}"},
            "leave out score_template",
        ),
    ],
)
def test_what_cannot_be_compressed_is_refused(
    build: Callable[..., str], settings: dict[str, Any], message: str, checkpoints: SharedCheckpoints
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_model(EngineConfig(model=checkpoints(build), **settings), CPU)
