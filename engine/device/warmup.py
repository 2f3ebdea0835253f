"""What a first request on a GPU would wait for, or stumble over, done before there is one."""

import logging

import numpy as np
import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.execution import ModelRunner
from maxsimd.engine.execution.selfcheck.proof import step_of
from maxsimd.engine.execution.selfcheck.samples import random_sequences
from maxsimd.engine.scoring.maxsim import MaxSim, choose_maxsim, maxsim_reference
from maxsimd.pooling.dispatch import DispatchPooler
from maxsimd.pooling.ragged import Ragged

log = logging.getLogger(__name__)

# Scores of random unit vectors, with products of rounded numbers summed in float32.
_TOLERANCE = 1e-2
_QUERIES, _DOCUMENTS = (32, 5), (1, 180, 0, 40)


def checked_maxsim(
    name: str, maxsim: MaxSim, dim: int, device: torch.device, dtype: torch.dtype
) -> tuple[str, MaxSim]:
    """The backend, compiled for embeddings of `dim` dimensions; where it fails or is wrong on this device,
    the one in plain torch, with a warning."""
    mismatch = why_wrong(maxsim, dim, device, dtype)
    if mismatch is None:
        return name, maxsim
    log.warning("MaxSim by %s is not used: %s", name, mismatch)
    return choose_maxsim("tiled", device)


def why_wrong(maxsim: MaxSim, dim: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """None where random texts score as by the reference, else a description of the mismatch."""
    random = np.random.default_rng(0)
    queries = Ragged.from_lengths(_unit_rows(random, sum(_QUERIES), dim).to(dtype), _QUERIES)
    documents = Ragged.from_lengths(_unit_rows(random, sum(_DOCUMENTS), dim).to(dtype), _DOCUMENTS)
    pairs = np.array([(q, d) for q in range(len(_QUERIES)) for d in range(len(_DOCUMENTS))])
    exact = maxsim_reference(queries, documents, pairs)
    try:
        q, d = (Ragged(items.values.to(device), items.offsets) for items in (queries, documents))
        worst = float((maxsim(q, d, pairs).cpu() - exact).abs().max())
    except Exception as error:
        return f"it failed: {error}"
    return None if worst <= _TOLERANCE else f"its scores differ from plain ones by {worst:.2g}"


@torch.inference_mode()
def warm_up(model: LoadedModel, runner: ModelRunner, pooler: DispatchPooler) -> None:
    """Runs random sequences through model and pooling, so that kernels are compiled and libraries loaded."""
    sequences = random_sequences(model, model.score_task)
    for step in (step_of(sequences), step_of(sequences[:1])):
        pooler.pool(*runner.forward(step))


def _unit_rows(random: np.random.Generator, count: int, dim: int) -> torch.Tensor:
    rows = torch.from_numpy(random.standard_normal((count, dim), dtype=np.float32))
    return torch.nn.functional.normalize(rows, dim=-1)
