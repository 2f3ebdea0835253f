"""Runs sequences one by one through the model's own library: slow, and right by definition. For models for
which neither packed nor padded execution is proven.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from maxsimd.engine.checkpoint import Task
from maxsimd.engine.checkpoint.heads import after_reference
from maxsimd.engine.checkpoint.reference import Reference
from maxsimd.engine.errors import ModelLoadError
from maxsimd.pooling.methods import PoolingCursor
from maxsimd.pooling.sparse import TOKEN_WEIGHT_METHODS, GivenWords, WordsHead
from maxsimd.scheduler import ImageJob, Step


class OwnForwardRunner:
    """A `ModelRunner` whose rows are finished items, made by the task's reference in `references`."""

    chunked = False

    def __init__(self, references: Mapping[str, Reference]) -> None:
        self._references = dict(references)

    @torch.inference_mode()
    def forward(self, step: Step) -> tuple[torch.Tensor, PoolingCursor]:
        items = [self._references[chunk.sequence.payload.task](chunk.sequence) for chunk in step.chunks]
        starts = (0, *accumulate(len(item) for item in items[:-1]))
        return torch.cat(items), PoolingCursor(step.chunks, starts)

    def encode(self, images: Sequence[ImageJob]) -> None:
        """The model encodes a sequence's pictures itself, when it runs that."""

    def free(self, sequence_id: int) -> None:
        """Nothing stays between steps."""

    @property
    def num_features(self) -> int:
        return 0

    @property
    def num_prefill_kv(self) -> int:
        return 0


def finished(task: Task) -> Task:
    """The task for rows that are finished items: all rows of a sequence, or its only one; of a sparse vector
    this has the weights of all words."""
    if task.pooling in TOKEN_WEIGHT_METHODS:
        raise ModelLoadError(
            "a model whose tokens are weighed cannot be run one by one; leave its layers sparse_linear and "
            "colbert_linear away"
        )
    if isinstance(task.head, WordsHead):
        return replace(task, pooling="given", head=GivenWords(task.head), reference=None)
    pooling = "all" if task.pooling == "all" else "cls"
    return replace(task, pooling=pooling, head=after_reference(task.head), reference=None)
