"""The embeddings of an encoder built as BERT's for the CPU: one call of our library, where the module makes
the sum of three tables' rows and its norm.
"""

from typing import Any

import torch
from torch import nn

from maxsimd.engine.ops.cpu.embeddings import Tables, embed
from maxsimd.engine.ops.cpu.linear import Norm

# The rows that are tried, and by what share of their length they may differ.
_ROWS = 32
_SHARE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
_CHILDREN = {"word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm", "dropout"}


class CompiledEmbeddings(nn.Module):
    """Replaces such a module in inference. Where it is called with anything but ids, the module is."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._module = (module,)  # out of the module tree
        self.word_embeddings = module.word_embeddings
        norm = module.LayerNorm
        self._tables = Tables(
            module.word_embeddings.weight.detach().contiguous(),
            module.token_type_embeddings.weight.detach().contiguous(),
            module.position_embeddings.weight.detach().contiguous(),
            Norm(norm.weight.detach().float(), norm.bias.detach().float(), norm.eps),
        )

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        # Positions that are given are counted from there already.
        given = {name for name, value in others.items() if value is not None} - {"past_key_values_length"}
        if input_ids is None or position_ids is None or given:
            made: torch.Tensor = self._module[0](
                input_ids=input_ids, token_type_ids=token_type_ids, position_ids=position_ids, **others
            )
            return made
        types = None if token_type_ids is None else token_type_ids.expand_as(input_ids).reshape(-1)
        positions = position_ids.expand_as(input_ids).reshape(-1)
        return embed(self._tables, input_ids.reshape(-1), positions, types).view(*input_ids.shape, -1)


def compile_embeddings(backbone: nn.Module) -> None:
    """Replaces every such module within a backbone whose results are the same but for rounding."""
    for parent in list(backbone.modules()):
        for name, child in list(parent.named_children()):
            if _is_built_so(child):
                ours = CompiledEmbeddings(child)
                if _gives_the_same(ours, child):
                    setattr(parent, name, ours)


def _is_built_so(module: Any) -> bool:
    if dict(module.named_children()).keys() != _CHILDREN:
        return False
    if any(each._forward_hooks or each._forward_pre_hooks for each in module.modules()):
        return False
    tables = _tables_of(module)
    norm = module.LayerNorm
    if not all(type(table) is nn.Embedding for table in tables) or type(norm) is not nn.LayerNorm:
        return False
    precisions = {table.weight.dtype for table in tables}
    is_precise = precisions == {torch.float32} or precisions == {torch.bfloat16}
    return is_precise and norm.weight is not None and norm.bias is not None


def _tables_of(module: Any) -> tuple[Any, Any, Any]:
    return module.word_embeddings, module.token_type_embeddings, module.position_embeddings


@torch.inference_mode()
def _gives_the_same(ours: nn.Module, module: Any) -> bool:
    """For random ids, with types and without."""
    generator = torch.Generator().manual_seed(0)
    words, types, positions = (
        torch.randint(table.num_embeddings, (1, _ROWS), generator=generator) for table in _tables_of(module)
    )
    try:
        return all(
            _is_near(ours(**ids), module(**ids))
            for ids in (
                {"input_ids": words, "position_ids": positions},
                {"input_ids": words, "position_ids": positions, "token_type_ids": types},
            )
        )
    except Exception:  # it takes something else
        return False


def _is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the difference is what rounding each sum explains, all numbers together."""
    if found.shape != expected.shape or found.dtype is not expected.dtype:
        return False
    off = (found.double() - expected.double()).norm()
    return bool(off <= _SHARE[expected.dtype] * expected.double().norm())
