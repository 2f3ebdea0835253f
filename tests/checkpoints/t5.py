"""T5 and mT5: encoders of sentence-transformers, and rerankers that answer true or false."""

from pathlib import Path
from typing import Any

import torch
import transformers
from sentence_transformers.base.modules import Dense, Normalize

from tests.checkpoints.bi_encoders import saved_pooled
from tests.checkpoints.tokenizers import unigram

SIZES: dict[str, Any] = {
    "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0,
}  # fmt: skip
_SPECIALS = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}


def sentence_t5(folder: Path, gated: bool = False) -> str:
    """sentence-t5-base and gtr-t5-base: an encoder alone, the mean, projected; `gated` as T5 1.1."""
    feed_forward = "gated-gelu" if gated else "relu"
    size = _tokenizer(folder / "backbone")
    config = transformers.T5Config(vocab_size=size, feed_forward_proj=feed_forward, **SIZES)
    _with_positions(transformers.T5EncoderModel(config)).save_pretrained(folder / "backbone")
    torch.manual_seed(2)
    dense = Dense(128, 96, bias=False, activation_function=torch.nn.Identity())
    torch.nn.init.normal_(dense.linear.weight, std=0.1)
    return saved_pooled(folder, "mean", dense, Normalize())


def monot5(folder: Path) -> str:
    """castorini/monot5-base-msmarco: embeddings that are the output layer too."""
    config = transformers.T5Config(vocab_size=_tokenizer(folder, ("\u2581true", "\u2581false")), **SIZES)
    _with_positions(transformers.T5ForConditionalGeneration(config)).save_pretrained(folder)
    return str(folder)


def mt5(folder: Path) -> str:
    """unicamp-dl/mt5-base-mmarco-v2: gated, an output layer of its own, yes and no."""
    size = _tokenizer(folder, ("\u2581yes", "\u2581no"))
    config = transformers.MT5Config(
        vocab_size=size, feed_forward_proj="gated-gelu", tie_word_embeddings=False, **SIZES
    )
    model = _with_positions(transformers.MT5ForConditionalGeneration(config))
    torch.nn.init.normal_(model.lm_head.weight, std=0.3)
    model.save_pretrained(folder)
    return str(folder)


def _tokenizer(folder: Path, words: tuple[str, ...] = ()) -> int:
    return unigram(folder, _SPECIALS, "$A </s>", "$A </s> $B </s>", words=words)


@torch.no_grad()
def _with_positions(model: Any) -> Any:
    """The model as it is fresh, but with a bias that tells distances apart, and with other norms."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("relative_attention_bias.weight"):
            parameter.normal_(0, 1.5)
        elif parameter.dim() == 1:
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()
