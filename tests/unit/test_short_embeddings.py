"""Embeddings without their module's Python: the same bits, and the module where it does anything else."""

from typing import Any

import pytest
import torch
from transformers import AlbertConfig, BertConfig, XLMRobertaConfig
from transformers.models.albert.modeling_albert import AlbertEmbeddings
from transformers.models.bert.modeling_bert import BertEmbeddings
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaEmbeddings

from maxsimd.engine.execution.fused_layers.embeddings import short_embeddings

SIZES = {"vocab_size": 50, "hidden_size": 32, "max_position_embeddings": 40, "num_attention_heads": 2}
NAMES = ("input_ids", "position_ids", "token_type_ids")
MAKERS: dict[str, Any] = {
    "bert": lambda: BertEmbeddings(BertConfig(**SIZES)),
    "albert": lambda: AlbertEmbeddings(AlbertConfig(**SIZES, embedding_size=32)),
    "xlm-roberta": lambda: XLMRobertaEmbeddings(XLMRobertaConfig(**SIZES, type_vocab_size=1)),
}


def inputs(names: tuple[str, ...], rows: int, types: int) -> dict[str, torch.Tensor]:
    below = dict(zip(NAMES, (50, 40, types), strict=True))
    return {name: torch.randint(below[name], (rows,)) for name in names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", [NAMES, NAMES[:2]])
@pytest.mark.parametrize("family", MAKERS)
@torch.inference_mode()
def test_the_sum_of_tables_has_the_bits_of_the_module(
    family: str, names: tuple[str, ...], dtype: torch.dtype
) -> None:
    module = MAKERS[family]().to(dtype).eval()
    torch.nn.init.normal_(module.LayerNorm.weight)
    torch.nn.init.normal_(module.token_type_embeddings.weight)
    short = short_embeddings(module, names)
    assert short.__name__ == "sums"
    for rows in (1, 7, 64):
        given = inputs(names, rows, module.token_type_embeddings.num_embeddings)
        assert torch.equal(short(given), module(**{name: ids[None] for name, ids in given.items()})[0])


class Scaled(BertEmbeddings):
    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        return 2 * super().forward(*arguments, **named)


class Doubled(torch.nn.Embedding):
    pass


@pytest.mark.parametrize("change", ["scaled", "another table", "more inputs"])
@torch.inference_mode()
def test_a_module_that_does_anything_else_is_called(change: str) -> None:
    config = BertConfig(**SIZES)
    module = (Scaled if change == "scaled" else BertEmbeddings)(config).eval()
    names = NAMES
    if change == "another table":
        module.word_embeddings = Doubled(50, 32)
    if change == "more inputs":
        names = (*NAMES, "attended_rows")
    short = short_embeddings(module, names)
    assert short.__name__ == "called"
    if change != "more inputs":
        given = inputs(names, 5, 2)
        assert torch.equal(short(given), module(**{name: ids[None] for name, ids in given.items()})[0])
