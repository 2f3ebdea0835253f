"""By what the embeddings of one model are told from those of another."""

import hashlib
from collections.abc import Iterator
from typing import TypeAlias

import torch

from maxsimd.engine.checkpoint.heads import FirstColumns, modules_of
from maxsimd.engine.checkpoint.model import LoadedModel
from maxsimd.pooling.sparse import WordsHead

# How many numbers of each weight are looked at: training changes some in nearly all weights, and reading
# whole checkpoints would make each start longer.
_NUMBERS = 64

_Named: TypeAlias = tuple[str, torch.Tensor]


def identity_of(model: LoadedModel) -> str:
    """A digest of what its embeddings are made by and compared by, the same in every process and in every
    precision that the model may be run in. The weights must be as they were loaded."""
    task = model.tasks[model.score_task]
    columns = task.head.dimensions if isinstance(task.head, FirstColumns) else None
    head = [repr(module) for module in modules_of(task.head)]
    if isinstance(task.head, WordsHead):
        head.append(str(task.head))
    stated = model.architecture, model.similarity, task.pooling, task.dim, columns, head
    digest = hashlib.sha256(repr(stated).encode())
    named = [*_weights(model)]
    digest.update(repr([(name, tuple(weight.shape)) for name, weight in named]).encode())
    numbers = [weight.detach().reshape(-1)[:_NUMBERS].float() for _, weight in named]
    digest.update(torch.cat(numbers).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def _weights(model: LoadedModel) -> Iterator[_Named]:
    modules = (*model.encoders, *modules_of(model.tasks[model.score_task].head))
    head = model.tasks[model.score_task].head
    if isinstance(head, WordsHead) and head.static_weights is not None:
        yield "static", head.static_weights
    for i, module in enumerate(modules):
        for name, weight in module.named_parameters():
            yield f"{i}.{name}", weight
