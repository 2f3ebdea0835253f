"""Cross-encoders: `*ForSequenceClassification`, as they are published."""

import json
from pathlib import Path
from typing import Any

from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ElectraConfig,
    ElectraForSequenceClassification,
    GemmaConfig,
    GemmaForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

from tests.checkpoints.tokenizers import byte_level_bpe, unigram, wordpiece
from tests.checkpoints.weights import SIZES, spread

_IDENTITY = "torch.nn.modules.linear.Identity"
XLM_R = {
    "bos_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "cls_token": "<s>",
    "sep_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}


def _with_settings(folder: Path, **settings: Any) -> str:
    """Adds keys to a config.json that transformers' own config does not have."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return str(folder)


def bert(folder: Path, labels: int = 1) -> str:
    """A plain checkpoint, whose logit becomes a probability."""
    config = BertConfig(vocab_size=30522, max_position_embeddings=512, num_labels=labels, **SIZES)
    spread(BertForSequenceClassification(config)).save_pretrained(folder)
    wordpiece().save_pretrained(folder)
    return str(folder)


def ms_marco_minilm(folder: Path) -> str:
    """cross-encoder/ms-marco-MiniLM-L6-v2: the config names the activation, which is none."""
    return _with_settings(Path(bert(folder)), sbert_ce_default_activation_function=_IDENTITY)


def electra(folder: Path, embedding: int = 64) -> str:
    """With embeddings of other dimensions than its states, which a layer projects, as the small one has it;
    the base one, and so cross-encoder/ms-marco-electra-base, has them alike."""
    config = ElectraConfig(vocab_size=30522, embedding_size=embedding, num_labels=1, **SIZES)
    spread(ElectraForSequenceClassification(config)).save_pretrained(folder)
    wordpiece().save_pretrained(folder)
    return _with_settings(folder, sbert_ce_default_activation_function=_IDENTITY)


def distilbert(folder: Path) -> str:
    config = DistilBertConfig(vocab_size=30522, dim=128, n_layers=3, n_heads=4, hidden_dim=256, num_labels=1)
    spread(DistilBertForSequenceClassification(config)).save_pretrained(folder)
    wordpiece().save_pretrained(folder)
    return str(folder)


def roberta(folder: Path) -> str:
    size = byte_level_bpe(folder, XLM_R, "<s> $A </s>", "<s> $A </s> </s> $B </s>")
    config = RobertaConfig(
        vocab_size=size, pad_token_id=_id(folder, "<pad>"), max_position_embeddings=514, num_labels=1, **SIZES
    )
    spread(RobertaForSequenceClassification(config)).save_pretrained(folder)
    return str(folder)


def xlm_roberta(folder: Path) -> str:
    """BAAI/bge-reranker-v2-m3: positions from 2 on, two separators between the texts."""
    size = unigram(folder, XLM_R, "<s> $A </s>", "<s> $A </s> </s> $B </s>")
    config = XLMRobertaConfig(
        vocab_size=size, max_position_embeddings=514, type_vocab_size=1, num_labels=1, **SIZES
    )
    spread(XLMRobertaForSequenceClassification(config)).save_pretrained(folder)
    return str(folder)


def modernbert(folder: Path) -> str:
    """Alibaba-NLP/gte-reranker-modernbert-base: local and global layers, the classifier on their mean."""
    config = ModernBertConfig(
        vocab_size=30522,
        max_position_embeddings=512,
        local_attention=16,
        global_attn_every_n_layers=2,
        classifier_pooling="mean",
        num_labels=1,
        pad_token_id=0,
        cls_token_id=101,
        sep_token_id=102,
        **SIZES,
    )
    spread(ModernBertForSequenceClassification(config)).save_pretrained(folder)
    wordpiece().save_pretrained(folder)
    return str(folder)


def deberta_v2(folder: Path, changes: tuple[tuple[str, Any], ...] = ()) -> str:
    """mixedbread-ai/mxbai-rerank-base-v1: relative positions inside attention, which has no interface; with
    changes to its config."""
    specials = {
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "unk_token": "[UNK]",
        "mask_token": "[MASK]",
    }
    single, pair = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
    size = unigram(folder, specials, single, pair)
    settings = {
        "vocab_size": size,
        "max_position_embeddings": 512,
        "type_vocab_size": 0,
        "relative_attention": True,
        "position_buckets": 32,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "pooler_hidden_size": 128,
        "num_labels": 1,
        **SIZES,
    }
    config = DebertaV2Config(**settings | dict(changes))
    spread(DebertaV2ForSequenceClassification(config)).save_pretrained(folder)
    return str(folder)


def qwen2(folder: Path) -> str:
    size = byte_level_bpe(folder, _QWEN, "$A", "$A $B")
    config = Qwen2Config(vocab_size=size, num_key_value_heads=2, **_decoder(folder, "<|endoftext|>"))
    spread(Qwen2ForSequenceClassification(config)).save_pretrained(folder)
    return str(folder)


def qwen3(folder: Path) -> str:
    size = byte_level_bpe(folder, _QWEN, "$A", "$A $B")
    config = Qwen3Config(
        vocab_size=size, num_key_value_heads=2, head_dim=32, **_decoder(folder, "<|endoftext|>")
    )
    spread(Qwen3ForSequenceClassification(config)).save_pretrained(folder)
    return str(folder)


def llama(folder: Path) -> str:
    specials = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    size = byte_level_bpe(folder, specials, "<s> $A", "<s> $A <s> $B")
    config = LlamaConfig(vocab_size=size, num_key_value_heads=4, **_decoder(folder, "<pad>"))
    spread(LlamaForSequenceClassification(config)).save_pretrained(folder)
    return str(folder)


def gemma(folder: Path) -> str:
    size = unigram(folder, GEMMA, "<bos> $A", "<bos> $A <bos> $B")
    config = GemmaConfig(vocab_size=size, num_key_value_heads=1, head_dim=32, **_decoder(folder, "<pad>"))
    spread(GemmaForSequenceClassification(config)).save_pretrained(folder)
    return str(folder)


_QWEN = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
GEMMA = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}


def _decoder(folder: Path, pad: str) -> dict[str, Any]:
    return SIZES | {"max_position_embeddings": 1024, "num_labels": 1, "pad_token_id": _id(folder, pad)}


def _id(folder: Path, token: str) -> int:
    from transformers import AutoTokenizer

    token_id = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(token)
    assert isinstance(token_id, int)
    return token_id
