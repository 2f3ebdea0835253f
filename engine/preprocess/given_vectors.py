"""Queries and documents that come as their embeddings: checked, and ready to be scored."""

from dataclasses import dataclass

import torch

from maxsimd.engine.cache import CachedEmbedding
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.preprocess.long_inputs import InputName
from maxsimd.engine.preprocess.workers import yield_to_smaller
from maxsimd.pooling.vectors import Vectors


@dataclass(frozen=True, slots=True)
class GivenVectors:
    """Checks embeddings of `dim` columns; with `one_each` a text has one vector, else one a token. All raise
    InvalidRequestError."""

    dim: int
    one_each: bool

    @classmethod
    def of(cls, model: LoadedModel) -> "GivenVectors":
        return cls(model.tasks[model.score_task].dim, model.score_task == "embed")

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
            rows, scales = vectors.checked(self.dim)
            if self.one_each and len(rows) > 1:
                raise ValueError(f"has {len(rows)} vectors, but with this model a text has one")
        except ValueError as error:
            raise InvalidRequestError(f"{name} {error}", name.param) from None
        return rows, scales
