"""Our BERT, RoBERTa and XLM-RoBERTa beside transformers', on random configurations."""

import random
from dataclasses import fields
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from maxsimd.engine.models import bert

FAMILIES = ("bert", "roberta", "xlm-roberta")


def _random_config(family: str, seed: int) -> Any:
    pick = random.Random(seed)
    heads = pick.choice([1, 2, 4])
    return AutoConfig.for_model(
        family,
        vocab_size=pick.randint(20, 90),
        hidden_size=heads * pick.choice([4, 8, 12]),
        num_hidden_layers=pick.randint(1, 3),
        num_attention_heads=heads,
        intermediate_size=pick.choice([8, 30]),
        hidden_act=pick.choice(sorted(bert.ACTIVATIONS)),
        max_position_embeddings=pick.choice([16, 40]),
        type_vocab_size=pick.choice([1, 2]),
        layer_norm_eps=pick.choice([1e-12, 1e-5]),
        pad_token_id=pick.choice([0, 1, 3]),
        num_labels=pick.choice([1, 3]),
    )


def _ours(config: Any) -> bert.EncoderConfig:
    names = {field.name for field in fields(bert.EncoderConfig)} - {"settings", "_attn_implementation"}
    return bert.EncoderConfig(**{name: getattr(config, name) for name in names})


def _inputs(config: Any, seed: int) -> dict[str, torch.Tensor]:
    """A padded batch with token types, with padding on the right as well as, for one row, on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, config.vocab_size, (3, 12), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in ((0, slice(7, None)), (1, slice(None, 3))):
        ids[row, padding] = config.pad_token_id
        mask[row, padding] = 0
    types = torch.randint(0, config.type_vocab_size, ids.shape, generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_encoders_and_classifiers_equal_those_of_transformers(family: str) -> None:
    for seed in range(4):
        config = _random_config(family, seed)
        theirs = AutoModel.from_config(config).eval()
        ours = bert.ENCODERS[family](_ours(config), has_pooler=True).eval()
        ours.load_state_dict(theirs.state_dict())
        for attention, given in (
            ("sdpa", ("input_ids",)),
            ("sdpa", ("input_ids", "attention_mask", "token_type_ids")),
            ("eager", ("input_ids", "attention_mask", "token_type_ids")),
        ):
            ours.set_attn_implementation(attention)
            inputs = {name: each for name, each in _inputs(config, seed).items() if name in given}
            found, expected = ours(**inputs), theirs(**inputs)
            attended = _inputs(config, seed)["attention_mask"].bool()
            torch.testing.assert_close(
                found.last_hidden_state[attended], expected.last_hidden_state[attended]
            )
            torch.testing.assert_close(found.pooler_output, expected.pooler_output)
        theirs = AutoModelForSequenceClassification.from_config(config).eval()
        ours = bert.CLASSIFIERS[family](_ours(config)).eval()
        ours.load_state_dict(theirs.state_dict())
        inputs = _inputs(config, seed)
        torch.testing.assert_close(ours(**inputs).logits, theirs(**inputs).logits)
    without_pooler = bert.ENCODERS[family](_ours(config), has_pooler=False)
    assert without_pooler(inputs["input_ids"]).pooler_output is None


def test_an_unknown_attention_is_refused() -> None:
    encoder = bert.BertModel(_ours(_random_config("bert", 0)), has_pooler=False)
    with pytest.raises(KeyError):
        encoder.set_attn_implementation("flash")
