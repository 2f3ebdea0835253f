"""bge-m3's scores are those of FlagEmbedding, whose authors trained it.

It has an environment of its own, made the first time, and runs where MAXSIMD_ORACLES is set: `make
test-oracles`. Another interpreter that has FlagEmbedding can be named by MAXSIMD_FLAG_EMBEDDING."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from maxsimd.bench.datasets import Pair
from maxsimd.engine import EngineConfig
from tests.checkpoints import bi_encoders
from tests.checkpoints.shared import SharedCheckpoints
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


def flag_embedding(checkpoint: str, pairs: list[Pair], folder: Path) -> dict[str, NDArray[np.float64]]:
    order = {
        "checkpoint": checkpoint,
        "pairs": [(pair.query, pair.document) for pair in pairs],
        "weights": WEIGHTS,
        "output": str(folder / "scores.npz"),
    }
    python = os.environ.get("MAXSIMD_FLAG_EMBEDDING") or made("flagembedding")
    subprocess.run([python, str(_SIDE)], input=json.dumps(order), text=True, check=True, timeout=600)
    with np.load(folder / "scores.npz") as found:
        return dict(found)


async def test_scores_equal_flag_embedding(
    checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair], tmp_path: Path
) -> None:
    checkpoint = checkpoints(bi_encoders.bge_m3)
    expected = flag_embedding(checkpoint, pairs[:100], tmp_path)
    for kind, name in KINDS.items():
        config = EngineConfig(model=checkpoint, dtype="float32", score_type=kind, allow_pickle=True)  # type: ignore[arg-type]
        found = await engines.scores(config, pairs[:100])
        assert expected[name].std() > 0.005, "the checkpoint must tell pairs apart"
        np.testing.assert_allclose(found, expected[name], atol=1e-4, rtol=0, err_msg=kind)
        print(f"{kind}: largest difference {np.abs(found - expected[name]).max():.1e}")
