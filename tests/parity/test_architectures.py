"""Every architecture of transformers scores as sentence-transformers does, or is refused with a reason."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from maxsimd.engine import CUT_LONG, Engine, EngineConfig, ModelLoadError
from tests.checkpoints import architectures
from tests.checkpoints.architectures import UNSCORED, Architecture, Outputs, build, left_out, sample_pairs

# One of each way through the loaders that no family takes; the others are for `make test-all`.
ONE_OF_EACH = {
    *(f"cross-encoder: {name}" for name in ("albert", "fnet", "convbert", "bart", "llama", "gpt2")),
    *(f"bi-encoder: {name}" for name in ("t5", "mamba", "dpr")),
}


def _with_marks(architecture: Architecture) -> object:
    marks = () if str(architecture) in ONE_OF_EACH else (pytest.mark.exhaustive,)
    return pytest.param(architecture, id=str(architecture), marks=marks)


every_architecture = pytest.mark.parametrize(
    "architecture", map(_with_marks, architectures.all_architectures())
)


@pytest.fixture
def checkpoint(architecture: Architecture) -> Iterator[str]:
    """Gone after the test, since there are hundreds."""
    torch.set_num_threads(1)  # the models are too small for more
    reason = left_out(architecture)
    if reason is not None:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory() as folder:
        yield build(architecture, Path(folder))


@every_architecture
async def test_it_is_exact_or_refused_at_load(architecture: Architecture, checkpoint: str) -> None:
    if architecture.model_type in UNSCORED:
        with pytest.raises(ModelLoadError):
            await _ours(architecture, checkpoint)
        return
    expected = architectures.reference(architecture, checkpoint, sample_pairs())
    assert architectures.difference_of_inputs(expected) >= 0.1, "texts must differ, or this shows nothing"
    ours = await _ours(architecture, checkpoint)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


async def _ours(architecture: Architecture, path: str) -> Outputs:
    queries, documents = zip(*((pair.query, pair.document) for pair in sample_pairs()), strict=True)
    config = EngineConfig(model=path, score_type=architecture.kind, dtype="float32", threads=1)
    async with Engine(config) as engine:
        if architecture.kind == "bi-encoder":
            return (await engine.embed(documents, truncation=CUT_LONG)).embeddings
        result = await engine.score(queries, documents, truncation=CUT_LONG, use_activation=False)
    return np.array(result.scores, dtype=np.float32)
