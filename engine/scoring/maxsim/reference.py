"""MaxSim in its plainest form, against which all faster backends are tested."""

from collections.abc import Sequence

import torch

from maxsimd.pooling.ragged import Ragged

# A document without a single scored token ranks below all others (as sentence-transformers has it).
EMPTY_DOCUMENT_SCORE = -1e9


def maxsim_reference(queries: Ragged, documents: Ragged, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """score(q, d) = sum over query tokens i of max over document tokens j of <q_i, d_j>.

    Source: Khattab & Zaharia, ColBERT (SIGIR 2020), equation 3. `queries.values` is [Tq, dim] and
    `documents.values` [Td, dim], already normalised if the model normalises; returns float32 [pairs].
    """
    scores = torch.full((len(pairs),), EMPTY_DOCUMENT_SCORE, device=documents.values.device)
    for i, (query, document) in enumerate(pairs):
        similarity = queries[query].float() @ documents[document].float().T  # [Lq, Ld]
        if similarity.shape[1]:
            scores[i] = similarity.amax(dim=1).sum()
    return scores
