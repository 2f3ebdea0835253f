"""MaxSim in its plainest form, against which all faster backends are tested."""

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.pooling.ragged import Ragged

# A document without a single scored token ranks below all others (as sentence-transformers has it).
EMPTY_DOCUMENT_SCORE = -1e9


def maxsim_reference(queries: Ragged, documents: Ragged, pairs: NDArray[np.int64]) -> torch.Tensor:
    """score(q, d) = sum over query tokens i of max over document tokens j of <q_i, d_j>.

    Source: Khattab & Zaharia, ColBERT (SIGIR 2020), equation 3. `queries.values` is [Tq, dim] and
    `documents.values` [Td, dim], already normalised if the model normalises; `pairs` [n, 2] are the indices
    of a query and a document each. Returns float32 [n].
    """
    scores = torch.full((len(pairs),), EMPTY_DOCUMENT_SCORE, device=documents.values.device)
    for i, (query, document) in enumerate(pairs):
        similarity = queries[query].float() @ documents[document].float().T  # [Lq, Ld]
        if similarity.shape[1]:
            scores[i] = similarity.amax(dim=1).sum()
    return scores
