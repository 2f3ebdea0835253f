"""Embeddings compiled: the sum of three tables' rows and its norm, and the module where it does more."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AlbertConfig, BertConfig, XLMRobertaConfig
from transformers.models.albert.modeling_albert import AlbertEmbeddings
from transformers.models.bert.modeling_bert import BertEmbeddings
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaEmbeddings

from maxsimd.engine.execution.embeddings import CompiledEmbeddings, compile_embeddings
from tests.unit.engine.ops.test_kernels import needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("two_threads")]

WORDS, POSITIONS = 50, 40
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 40,
    "max_position_embeddings": POSITIONS,
    "num_attention_heads": 2,
}
MAKERS: dict[str, Any] = {
    "bert": lambda: BertEmbeddings(BertConfig(**SIZES)),
    "albert": lambda: AlbertEmbeddings(AlbertConfig(**SIZES, embedding_size=40)),
    "xlm-roberta": lambda: XLMRobertaEmbeddings(XLMRobertaConfig(**SIZES, type_vocab_size=1)),
}
# Of a number, how far what is rounded once may be from what is rounded after each sum.
NEAR = {torch.float32: {"atol": 2e-6, "rtol": 2e-6}, torch.bfloat16: {"atol": 4e-2, "rtol": 2e-2}}


def made(family: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A module with random numbers, and the compiled one in its place."""
    torch.manual_seed(0)
    module = MAKERS[family]()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    module.to(dtype).eval()
    backbone = nn.ModuleDict({"embeddings": module})
    compile_embeddings(backbone)
    return module, backbone["embeddings"]


def ids(shape: tuple[int, ...], types: int) -> dict[str, torch.Tensor]:
    below = {"input_ids": WORDS, "position_ids": POSITIONS, "token_type_ids": types}
    return {name: torch.randint(count, shape) for name, count in below.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_types", [True, False])
@pytest.mark.parametrize("family", MAKERS)
@torch.inference_mode()
def test_the_compiled_sum_equals_the_module_but_for_rounding(
    family: str, with_types: bool, dtype: torch.dtype
) -> None:
    module, ours = made(family, dtype)
    assert isinstance(ours, CompiledEmbeddings)
    for shape in ((1, 1), (1, 7), (3, 21), (1, 200)):
        given = ids(shape, module.token_type_embeddings.num_embeddings)  # type: ignore[union-attr]
        if not with_types:
            del given["token_type_ids"]
        torch.testing.assert_close(ours(**given), module(**given), **NEAR[dtype])


@pytest.mark.parametrize("name", ["input_ids", "position_ids", "token_type_ids"])
@pytest.mark.parametrize("wrong", [-1, 10_000])
@torch.inference_mode()
def test_an_id_that_is_in_no_table_is_refused(name: str, wrong: int) -> None:
    _, ours = made("bert", torch.float32)
    given = ids((1, 5), 2)
    given[name][0, 3] = wrong
    with pytest.raises(IndexError, match="not in its table"):
        ours(**given)


@torch.inference_mode()
def test_calls_with_more_than_ids_go_through_the_module() -> None:
    module, ours = made("bert", torch.float32)
    given: dict[str, Any] = {"inputs_embeds": torch.randn(1, 5, 40), "position_ids": torch.arange(5)[None]}
    assert torch.equal(ours(**given), module(**given))
    alone = {"input_ids": torch.arange(5)[None], "past_key_values_length": 3}
    assert torch.equal(ours(**alone), module(**alone))
    with pytest.raises(TypeError, match="mask"):  # as the module does
        ours(**ids((1, 5), 2), mask=torch.ones(1, 5))


class Scaled(BertEmbeddings):
    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        return 1.02 * super().forward(*arguments, **named)


class Doubled(torch.nn.Embedding):
    pass


@pytest.mark.parametrize("change", ["scaled", "another table", "precision", "hooks"])
def test_a_module_that_does_anything_else_stays(change: str) -> None:
    module = (Scaled if change == "scaled" else BertEmbeddings)(BertConfig(**SIZES)).eval().bfloat16()
    if change == "another table":
        module.word_embeddings = Doubled(WORDS, 40).bfloat16()
    if change == "precision":
        module.half()
    if change == "hooks":
        module.LayerNorm.register_forward_hook(lambda _, __, output: output + 1)
    backbone = nn.ModuleDict({"embeddings": module})
    compile_embeddings(backbone)
    assert backbone["embeddings"] is module
