"""Queries and documents that come as their embeddings: checked, and ready to be scored."""

import torch

from maxsimd.engine.cache import CachedEmbedding
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.preprocess.long_inputs import InputName
from maxsimd.engine.preprocess.workers import yield_to_smaller
from maxsimd.pooling.vectors import Vectors


class GivenVectors:
    """Checks embeddings for one model. All raise InvalidRequestError."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    def document(self, vectors: Vectors, index: int) -> CachedEmbedding:
        """A document that is scored as if it were cached; no token was ever run for it."""
        yield_to_smaller()
        rows, scales = self._checked(vectors, InputName("documents", index))
        return CachedEmbedding(rows, scales, tokens=0, truncated=False)

    def query(self, vectors: Vectors, index: int) -> torch.Tensor:
        """A query's rows [tokens, dim], without scales."""
        rows, scales = self._checked(vectors, InputName("queries", index))
        return rows if scales is None else rows * scales[:, None]

    def _checked(self, vectors: Vectors, name: InputName) -> tuple[torch.Tensor, torch.Tensor | None]:
        try:
            rows, scales = vectors.checked(self._model.tasks[self._model.score_task].dim)
            if self._model.score_task == "embed" and len(rows) > 1:
                raise ValueError(f"has {len(rows)} vectors, but with this model a text has one")
        except ValueError as error:
            raise InvalidRequestError(f"{name} {error}", name.param) from None
        return rows, scales
