"""The embeddings of an encoder built as BERT's without the Python of their module, which for few rows takes
longer than what it computes."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from maxsimd.engine.execution.fused_layers.trial import ROWS

# Hidden states [rows, hidden] of the model's inputs by name, int64 [rows] each.
Embeddings = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]

_CHILDREN = {"word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm", "dropout"}


def short_embeddings(module: Any, names: tuple[str, ...]) -> Embeddings:
    """What gives what the module gives for inputs of these names: the tables' rows, their sum and its norm
    where the module consists of these and that gives the same bits for random inputs; else a call of the
    module."""

    def called(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        hidden: torch.Tensor = module(**{name: ids[None] for name, ids in inputs.items()})[0]
        return hidden

    if {name for name, _ in module.named_children()} != _CHILDREN or not _is_plain(module):
        return called
    short = _sums(module)
    tables = {"input_ids": module.word_embeddings, "position_ids": module.position_embeddings}
    tables["token_type_ids"] = module.token_type_embeddings
    if not tables.keys() >= set(names) >= {"input_ids", "position_ids"}:
        return called
    generator = torch.Generator().manual_seed(0)
    inputs = {
        name: torch.randint(tables[name].num_embeddings, (ROWS,), generator=generator) for name in names
    }
    with torch.inference_mode():
        return short if torch.equal(short(inputs), called(inputs)) else called


def _is_plain(module: Any) -> bool:
    tables = (module.word_embeddings, module.position_embeddings, module.token_type_embeddings)
    return all(type(table) is nn.Embedding for table in tables) and type(module.LayerNorm) is nn.LayerNorm


def _sums(module: Any) -> Embeddings:
    words, positions = module.word_embeddings.weight, module.position_embeddings.weight
    types, norm = module.token_type_embeddings.weight, module.LayerNorm
    first_type = types[:1]

    def sums(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        type_ids = inputs.get("token_type_ids")
        of_types = first_type if type_ids is None else nn.functional.embedding(type_ids, types)
        hidden = nn.functional.embedding(inputs["input_ids"], words) + of_types
        hidden = hidden + nn.functional.embedding(inputs["position_ids"], positions)
        return nn.functional.layer_norm(hidden, norm.normalized_shape, norm.weight, norm.bias, norm.eps)

    return sums
