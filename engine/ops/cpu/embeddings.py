"""The embeddings of an encoder built as BERT's, compiled: the sum of three tables' rows and its layer norm.

A row's result is the same to the last bit whatever other rows are in the call, and however many threads there
are.
"""

from dataclasses import dataclass

import torch

from maxsimd.engine.ops.cpu.library import BFLOAT16, FLOAT32, kernels
from maxsimd.engine.ops.cpu.linear import Norm


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Of words, types and positions: [rows, columns] each, contiguous, all in float32 or all in bfloat16; and
    the norm, whose numbers are float32."""

    words: torch.Tensor
    types: torch.Tensor
    positions: torch.Tensor
    norm: Norm


def embed(
    tables: Tables, word_ids: torch.Tensor, position_ids: torch.Tensor, type_ids: torch.Tensor | None
) -> torch.Tensor:
    """Embeddings [rows, columns] in the precision of the tables, for ids [rows]; the type is the first where
    there are no type ids. Raises IndexError for an id that is not in its table."""
    words, types, positions, norm = tables.words, tables.types, tables.positions, tables.norm
    word_ids, position_ids = _numbers(word_ids), _numbers(position_ids)
    type_ids = None if type_ids is None else _numbers(type_ids)
    rows, columns = word_ids.shape[0], words.shape[1]
    out = words.new_empty(rows, columns)
    failed = kernels().maxsimd_embed(
        FLOAT32 if words.dtype is torch.float32 else BFLOAT16,
        word_ids.data_ptr(),
        None if type_ids is None else type_ids.data_ptr(),
        position_ids.data_ptr(),
        rows,
        words.data_ptr(),
        words.shape[0],
        types.data_ptr(),
        types.shape[0],
        positions.data_ptr(),
        positions.shape[0],
        columns,
        norm.weight.data_ptr(),
        norm.bias.data_ptr(),
        norm.epsilon,
        out.data_ptr(),
    )
    if failed:
        raise IndexError("a token, type or position is not in its table of embeddings")
    return out


def _numbers(ids: torch.Tensor) -> torch.Tensor:
    """Ids as the kernel reads them."""
    return ids.to(torch.int64).contiguous()
