"""Checks of scoring on a device, and the warm-up of a GPU, before the first request."""

import logging

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.cache.embeddings import rounded
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution import ModelRunner
from maxsimd.engine.execution.self_check.proof import encode_images, free_images, step_of
from maxsimd.engine.execution.self_check.samples import random_sequences
from maxsimd.engine.scoring.maxsim import MaxSim, choose_maxsim, maxsim_reference
from maxsimd.engine.scoring.similarity import TOKEN_SIMILARITIES, Hybrid, score_pairs
from maxsimd.pooling.dispatch import DispatchPooler
from maxsimd.pooling.ragged import Ragged

log = logging.getLogger(__name__)

# For scores of unit vectors, or as a share of the largest score above 1: products of rounded numbers are
# summed in float32.
_TOLERANCE = 1e-2
# MaxSim: queries of every length with its own kernel, and one longer than a program's block; documents that
# are scored whole, and one that is divided among programs.
_QUERIES = (5, 33, 65, 129, 300)
_DOCUMENTS = ((1, 180, 0, 40), (2000,))
# Any similarity: at least two tokens, because in hybrid scores the first token of a text matches no other.
_ITEM_QUERIES, _ITEM_DOCUMENTS = (5, 2, 40), (2, 180, 33, 7)
# bfloat16 holds this many ids exactly.
_WORDS = 256


def checked_maxsim(
    name: str, maxsim: MaxSim, dim: int, device: torch.device, dtype: torch.dtype, *, int8: bool = False
) -> tuple[str, MaxSim]:
    """The backend, compiled for embeddings of `dim` dimensions in all lengths and types (with `int8`, also
    int8 documents). Falls back to plain torch with a warning if it fails on this device, or scores random
    texts otherwise than the reference."""
    random = np.random.default_rng(0)
    queries = Ragged.from_lengths(_unit_rows(random, sum(_QUERIES), dim).to(dtype), _QUERIES)
    documents = []
    for lengths in _DOCUMENTS:
        rows = _unit_rows(random, sum(lengths), dim)
        documents.append(Ragged.from_lengths(rows.to(dtype), lengths))
        if int8:
            values, scales = rounded(rows, "int8")
            documents.append(Ragged(values, documents[-1].offsets, scales))
    try:
        for items in documents:
            pairs = _all_pairs(queries, items)
            exact = maxsim_reference(queries, items.decoded(torch.float32), pairs)
            scores = maxsim(_on(queries, device), _on(items, device), pairs).cpu()
            worst = float((scores - exact).abs().max())
            if not worst <= _TOLERANCE:
                raise ValueError(f"its scores differ from plain ones by {worst:.2g}")
    except Exception as error:
        log.warning("MaxSim by %s is not used: %s", name, error)
        return choose_maxsim("tiled", device)
    return name, maxsim


def _all_pairs(queries: Ragged, documents: Ragged) -> NDArray[np.int64]:
    return np.argwhere(np.ones((len(queries), len(documents))))


def _on(items: Ragged, device: torch.device) -> Ragged:
    scales = None if items.scales is None else items.scales.to(device)
    return Ragged(items.values.to(device), items.offsets, scales)


@torch.inference_mode()
def warm_up(model: LoadedModel, runner: ModelRunner, pooler: DispatchPooler) -> None:
    """Runs random sequences and pictures through model and pooling, to compile kernels and load libraries."""
    sequences = random_sequences(model, model.score_task)
    encode_images(runner, sequences)
    for step in (step_of(sequences), step_of(sequences[:1])):
        pooler.pool(*runner.forward(step))
    free_images(runner, sequences)


def refuse_wrong_scores(
    model: LoadedModel, maxsim: MaxSim, dim: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Raises ModelLoadError if items like the model's, in `dtype`, do not score on the device as on the CPU
    in float32.
    """
    random = np.random.default_rng(0)
    queries, documents = (_items(model.similarity, n, dim, random) for n in (_ITEM_QUERIES, _ITEM_DOCUMENTS))
    pairs = _all_pairs(queries, documents)

    def scores(compare: MaxSim, of: Ragged, among: Ragged) -> torch.Tensor:
        if model.similarity == "hybrid":
            compare = Hybrid(model.hybrid_weights, compare)
        return score_pairs(model.similarity, of, among, pairs, compare)

    queries, documents = (Ragged(each.values.to(dtype), each.offsets) for each in (queries, documents))
    expected = scores(maxsim_reference, queries.decoded(torch.float32), documents.decoded(torch.float32))
    try:
        found = scores(maxsim, _on(queries, device), _on(documents, device)).cpu().float()
        difference = float((found - expected).abs().max())
    except Exception as error:  # each kind of device has errors of its own
        raise ModelLoadError(f"scores cannot be computed on {device}: {error}") from error
    if not difference <= _TOLERANCE * max(1.0, float(expected.abs().max())):
        raise ModelLoadError(f"scores on {device} differ from those on the CPU by {difference:.2g}")


def _unit_rows(random: np.random.Generator, count: int, dim: int) -> torch.Tensor:
    rows = torch.from_numpy(random.standard_normal((count, dim), dtype=np.float32))
    return torch.nn.functional.normalize(rows, dim=-1)


def _items(similarity: str, lengths: tuple[int, ...], dim: int, random: np.random.Generator) -> Ragged:
    """Random items for a similarity: unit rows for each token or one in all, words with weights, or both."""
    is_sparse, is_hybrid = similarity.startswith("sparse"), similarity == "hybrid"
    if not (is_sparse or is_hybrid or similarity in TOKEN_SIMILARITIES):
        lengths = (1,) * len(lengths)
    columns = [] if is_sparse else [_unit_rows(random, sum(lengths), dim)]
    if is_sparse or is_hybrid:
        words = np.concatenate([random.permutation(_WORDS)[:length] for length in lengths])
        weights = random.random(len(words))
        columns.append(torch.from_numpy(np.stack([words, weights], axis=1)).float())
    return Ragged.from_lengths(torch.cat(columns, dim=1), lengths)
