"""Models of text, as wide as those that are published, with random weights: for speed, not for quality. All
have MiniLM's tokeniser."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def deberta_v3_base(folder: Path, layers: int) -> str:
    """mixedbread-ai/mxbai-rerank-base-v1: microsoft/deberta-v3-base with a classifier."""
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    config = DebertaV2Config(
        vocab_size=30522,
        hidden_size=768,
        num_attention_heads=12,
        intermediate_size=3072,
        num_hidden_layers=layers,
        max_position_embeddings=512,
        type_vocab_size=0,
        relative_attention=True,
        position_buckets=256,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        num_labels=1,
    )
    return _saved(folder, DebertaV2ForSequenceClassification, config)


def mpnet_base(folder: Path, layers: int) -> str:
    """sentence-transformers/all-mpnet-base-v2."""
    from transformers import MPNetConfig, MPNetModel

    return _saved(folder, MPNetModel, MPNetConfig(num_hidden_layers=layers, max_position_embeddings=514))


_T5_BASE: dict[str, Any] = {"vocab_size": 30522, "d_model": 768, "d_ff": 3072, "num_heads": 12}


def t5_base(folder: Path, layers: int) -> str:
    """The encoder of sentence-transformers/sentence-t5-base and gtr-t5-base."""
    from transformers import T5Config, T5EncoderModel

    return _saved(folder, T5EncoderModel, T5Config(**_T5_BASE, num_layers=layers))


def minilm_l6(folder: Path) -> str:
    """cross-encoder/ms-marco-MiniLM-L6-v2."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        num_hidden_layers=6,
        hidden_size=384,
        num_attention_heads=12,
        intermediate_size=1536,
        num_labels=1,
    )
    return _saved(folder, BertForSequenceClassification, config)


def gte_base(folder: Path, layers: int) -> str:
    """Alibaba-NLP/gte-multilingual-base, by transformers' class for it."""
    from transformers import GteConfig, GteModel

    return _saved(folder, GteModel, GteConfig(vocab_size=30522, num_hidden_layers=layers, pad_token_id=0))


def jina_base(folder: Path, layers: int) -> str:
    """jinaai/jina-embeddings-v2-base-en, by the class in `maxsimd.engine.models`, which sentence-transformers
    runs as well."""
    from maxsimd.engine.models.jina_bert import JinaBertConfig, JinaBertModel

    config = JinaBertConfig(num_hidden_layers=layers, max_position_embeddings=8192)
    return _saved(folder, JinaBertModel, config)


def nomic_moe(folder: Path, layers: int) -> str:
    """nomic-ai/nomic-embed-text-v2-moe, by the class in `maxsimd.engine.models`, likewise: every second layer
    has experts."""
    from maxsimd.engine.models.nomic_moe import NomicMoeConfig, NomicMoeModel

    width: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    config = NomicMoeConfig(
        vocab_size=30522, num_hidden_layers=layers, max_position_embeddings=2048, pad_token_id=0, **width
    )
    return _saved(folder, NomicMoeModel, config)


def modernbert_base(folder: Path, layers: int) -> str:
    """answerdotai/ModernBERT-base: windows of 128 tokens but in every third layer."""
    from transformers import ModernBertConfig, ModernBertModel

    special = dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id", "eos_token_id"), 0)
    config = ModernBertConfig(vocab_size=30522, num_hidden_layers=layers, sep_token_id=0, **special)
    return _saved(folder, ModernBertModel, config)


def lfm2_350m(folder: Path, layers: int) -> str:
    """LiquidAI/LFM2-350M, which LFM2-ColBERT-350M was made of: short convolutions, and attention in about two
    of five layers."""
    from transformers import Lfm2Config, Lfm2Model

    config = Lfm2Config(
        vocab_size=30522,
        hidden_size=1024,
        intermediate_size=6656,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        layer_types=[("full_attention" if i % 5 in (1, 3) else "conv") for i in range(layers)],
        max_position_embeddings=2048,
    )
    return _saved(folder, Lfm2Model, config)


# Packed here, and padded elsewhere.
SHAPES: dict[str, Callable[[Path, int], str]] = {
    "deberta-v3-base": deberta_v3_base,
    "mpnet-base": mpnet_base,
    "t5-base": t5_base,
    "gte-multilingual-base": gte_base,
    "jina-v2-base": jina_base,
    "nomic-v2-moe": nomic_moe,
    "modernbert-base": modernbert_base,
    "lfm2-350m": lfm2_350m,
}


def _saved(folder: Path, kind: Any, config: Any) -> str:
    import torch
    from transformers import AutoTokenizer

    from maxsimd.engine.checkpoint.embedded import embedded_model_path

    torch.manual_seed(0)
    model = kind(config)
    for name, weight in model.named_parameters():
        if ".experts." in name:  # which no class of transformers fills
            torch.nn.init.normal_(weight, std=0.02)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(embedded_model_path(), model_max_length=512).save_pretrained(folder)
    return str(folder)
