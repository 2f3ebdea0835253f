"""The check of scoring on a device that runs plain torch: random items, scored there and on the CPU."""

import numpy as np
import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.scoring.hybrid import Hybrid
from maxsimd.engine.scoring.maxsim import MaxSim, maxsim_reference
from maxsimd.engine.scoring.similarity import TOKEN_SIMILARITIES, score_pairs
from maxsimd.pooling.ragged import Ragged

# A share of the largest score, or of 1: rows have length 1, and their products are of rounded numbers.
_TOLERANCE = 1e-2
# Of two tokens at least: in hybrid scores the first of a text is no match for others.
_QUERIES, _DOCUMENTS = (5, 2, 40), (2, 180, 33, 7)
# As many words as ids that bfloat16 represents exactly.
_WORDS = 256


def refuse_wrong_scores(
    model: LoadedModel, maxsim: MaxSim, dim: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Raises ModelLoadError where items like the model's, in `dtype`, do not score on the device as they do
    on the CPU in float32."""
    random = np.random.default_rng(0)
    queries, documents = (_items(model.similarity, n, dim, random) for n in (_QUERIES, _DOCUMENTS))
    pairs = np.array([(q, d) for q in range(len(queries)) for d in range(len(documents))])

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


def _on(items: Ragged, device: torch.device) -> Ragged:
    return Ragged(items.values.to(device), items.offsets)


def _items(similarity: str, lengths: tuple[int, ...], dim: int, random: np.random.Generator) -> Ragged:
    """Random items as a similarity takes them: one row of length 1 for each token, or one in all; words with
    their weights; or both side by side."""
    is_sparse = similarity.startswith("sparse")
    if similarity not in (*TOKEN_SIMILARITIES, "hybrid") and not is_sparse:
        lengths = (1,) * len(lengths)
    columns = []
    if not is_sparse:
        rows = random.standard_normal((sum(lengths), dim), dtype=np.float32)
        columns.append(rows / np.linalg.norm(rows, axis=1, keepdims=True))
    if is_sparse or similarity == "hybrid":
        words = np.concatenate([random.permutation(_WORDS)[:length] for length in lengths])
        weights = random.random(len(words))
        columns.append(np.stack([words, weights], axis=1).astype(np.float32))
    return Ragged.from_lengths(torch.from_numpy(np.concatenate(columns, axis=1)), lengths)
