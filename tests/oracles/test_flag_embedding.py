"""The scores of bge-m3 and of bge-reranker-v2.5-gemma2-lightweight are those of FlagEmbedding, whose authors
trained them.

It has environments of its own, made the first time, and runs where MAXSIMD_ORACLES is set: `make
test-oracles`. Other interpreters that have FlagEmbedding can be named by MAXSIMD_FLAG_EMBEDDING and, with
transformers 4.46, MAXSIMD_FLAG_EMBEDDING_GEMMA2."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maxsimd.bench.datasets import Pair
from maxsimd.engine import EngineConfig
from tests.checkpoints import bi_encoders, retrained
from tests.checkpoints.shared import SharedCheckpoints
from tests.checkpoints.weights import change_config
from tests.clients.environments import made
from tests.engines import Engines

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif("MAXSIMD_ORACLES" not in os.environ, reason="run by make test-oracles"),
]

_SIDE = Path(__file__).with_name("flag_embedding_side.py")
WEIGHTS = (0.4, 0.2, 0.4)
# Our kinds of scores, and what FlagEmbedding calls them.
KINDS = {
    "bi-encoder": "dense",
    "sparse": "sparse",
    "late-interaction": "colbert",
    "hybrid": "colbert+sparse+dense",
}


# Cutoff, ratio and layers of token compression: none, [k], [k, m], and a layer that is not reached.
RUNS = [(4, 1, (8,)), *((4, ratio, layers) for ratio in (2, 4) for layers in ((2,), (1, 3))), (3, 2, (2, 3))]


def _asked(
    python: str, checkpoint: str, pairs: list[Pair], folder: Path, **more: Any
) -> dict[str, NDArray[np.float64]]:
    order = {
        "checkpoint": checkpoint,
        "pairs": [(pair.query, pair.document) for pair in pairs],
        "output": str(folder / "scores.npz"),
        **more,
    }
    subprocess.run([python, str(_SIDE)], input=json.dumps(order), text=True, check=True, timeout=600)
    with np.load(folder / "scores.npz") as found:
        return dict(found)


async def test_scores_equal_flag_embedding(
    checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair], tmp_path: Path
) -> None:
    checkpoint = checkpoints(bi_encoders.bge_m3)
    expected = _asked(
        os.environ.get("MAXSIMD_FLAG_EMBEDDING") or made("flagembedding"),
        checkpoint,
        pairs[:100],
        tmp_path,
        weights=WEIGHTS,
    )
    for kind, name in KINDS.items():
        config = EngineConfig(model=checkpoint, dtype="float32", score_type=kind, allow_pickle=True)  # type: ignore[arg-type]
        found = await engines.scores(config, pairs[:100])
        assert expected[name].std() > 0.005, "the checkpoint must tell pairs apart"
        np.testing.assert_allclose(found, expected[name], atol=1e-4, rtol=0, err_msg=kind)
        print(f"{kind}: largest difference {np.abs(found - expected[name]).max():.1e}")


async def test_token_compression_equals_flag_embedding(
    checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair], tmp_path: Path
) -> None:
    """With one layer and with two; a ratio of 1 is none."""
    path = checkpoints(retrained.bge_gemma2)
    copy = checkpoints.copy(retrained.bge_gemma2, tmp_path / "copy")
    # Earlier transformers do not know the class of its tokeniser.
    change_config(copy, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    runs = {
        str(i): {"cutoff_layers": [cutoff], "compress_ratio": ratio, "compress_layers": layers}
        for i, (cutoff, ratio, layers) in enumerate(RUNS)
    }
    expected = _asked(
        os.environ.get("MAXSIMD_FLAG_EMBEDDING_GEMMA2") or made("flagembedding-gemma2"),
        str(copy),
        pairs[:40],
        tmp_path,
        runs=runs,
    )
    for i, (cutoff, ratio, layers) in enumerate(RUNS):
        named = None if ratio == 1 else ",".join(map(str, layers))
        config = EngineConfig(
            model=path, dtype="float32", cutoff_layer=cutoff, compress_ratio=ratio, compress_layers=named
        )
        found = await engines.scores(config, pairs[:40])
        run = f"cutoff {cutoff}, ratio {ratio}, layers {layers}"
        assert expected[str(i)].std() > 0.005, "the checkpoint must tell pairs apart"
        np.testing.assert_allclose(found, expected[str(i)], atol=1e-4, rtol=0, err_msg=run)
        print(f"{run}: largest difference {np.abs(found - expected[str(i)]).max():.1e}")
