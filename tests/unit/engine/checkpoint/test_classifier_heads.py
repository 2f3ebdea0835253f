"""A classifier's head without the rest of the model's code: the same bits, and the model's code where it does
anything else."""

from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

from maxsimd.engine.checkpoint.heads import ClassifierHead

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
MODELS: dict[str, Any] = {
    "bert": lambda: BertForSequenceClassification(BertConfig(**SIZES, intermediate_size=48, num_labels=3)),
    "xlm-roberta": lambda: XLMRobertaForSequenceClassification(
        XLMRobertaConfig(**SIZES, intermediate_size=48, num_labels=1)
    ),
    "distilbert": lambda: DistilBertForSequenceClassification(
        DistilBertConfig(vocab_size=50, dim=32, hidden_dim=48, n_layers=1, n_heads=2, num_labels=2)
    ),
    "modernbert": lambda: ModernBertForSequenceClassification(
        ModernBertConfig(**SIZES, intermediate_size=48, num_labels=1, pad_token_id=0)
    ),
}


@pytest.mark.parametrize("family", MODELS)
@torch.inference_mode()
def test_a_head_gives_the_bits_of_the_models_own_code(family: str) -> None:
    head = ClassifierHead(MODELS[family]().eval())
    for count in (0, 1, 9):
        rows = torch.randn(count, 32)
        expected = head._by_model(rows) if count else rows.new_empty(0, head.model.config.num_labels)
        assert torch.equal(head(rows), expected)


class Doubled(BertForSequenceClassification):
    def forward(self, *arguments: Any, **named: Any) -> Any:
        output = super().forward(*arguments, **named)
        output.logits = 2 * output.logits
        return output


def test_a_model_that_changes_the_logits_is_called() -> None:
    head = ClassifierHead(Doubled(BertConfig(**SIZES, intermediate_size=48, num_labels=1)).eval())
    assert not head._is_short
