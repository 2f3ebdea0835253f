"""MaxSim for the CPU: one matrix product a query over all of its documents, then maxima by document."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.pooling.maxsim.reference import EMPTY_DOCUMENT_SCORE
from maxsimd.pooling.ragged import Ragged


def maxsim_cpu(queries: Ragged, documents: Ragged, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """As `maxsim_reference`; plain torch operations, so it runs on any device."""
    scores = torch.empty(len(pairs), device=documents.values.device)
    lengths = np.diff(documents.offsets)
    pairs_of: dict[int, list[int]] = {}
    for i, (query, _) in enumerate(pairs):
        pairs_of.setdefault(query, []).append(i)
    for query, places in pairs_of.items():
        wanted = np.array([pairs[i][1] for i in places])
        tokens, owners = _tokens_of(wanted, documents, lengths)
        similarity = tokens.float() @ queries[query].float().T  # [tokens, Lq]
        best = similarity.new_full((len(places), similarity.shape[1]), -torch.inf)
        index = torch.from_numpy(owners).to(similarity.device)[:, None].expand_as(similarity)
        best.scatter_reduce_(0, index, similarity, "amax")  # [documents, Lq]
        total = best.sum(dim=1).nan_to_num(neginf=EMPTY_DOCUMENT_SCORE)
        scores[torch.tensor(places, device=scores.device)] = total
    return scores


def _tokens_of(
    wanted: NDArray[np.int64], documents: Ragged, lengths: NDArray[np.int64]
) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """The rows of the wanted documents, end to end, and for each row the place of its document."""
    owners = np.repeat(np.arange(len(wanted)), lengths[wanted])
    first, last = int(wanted[0]), int(wanted[-1])
    if np.array_equal(wanted, np.arange(first, last + 1)):
        return documents.values[documents.offsets[first] : documents.offsets[last + 1]], owners
    starts = np.asarray(documents.offsets)[wanted]
    within = np.arange(len(owners)) - np.repeat(np.cumsum(lengths[wanted]) - lengths[wanted], lengths[wanted])
    rows = np.repeat(starts, lengths[wanted]) + within
    return documents.values[torch.from_numpy(rows).to(documents.values.device)], owners
