"""Cross-encoders: `*ForSequenceClassification`, as they are published."""

from pathlib import Path
from typing import Any

import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Dropout, Pooling
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.checkpoints.bi_encoders import CHATML
from tests.checkpoints.language_models import ROLES_TEMPLATE
from tests.checkpoints.tokenizers import ENDS, GEMMA, WORDS, XLM_R, byte_level_bpe, unigram, wordpiece
from tests.checkpoints.tokenizers import xlm_roberta as xlm_roberta_tokenizer
from tests.checkpoints.weights import change_config, save_model, save_own

PROMPTS: dict[str, Any] = {
    "prompts": {"rank": "Is this an answer to it? ", "other": "Say: "},
    "default_prompt_name": "rank",
}
_IDENTITY = "torch.nn.modules.linear.Identity"
_QWEN = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def _save(folder: Path, kind: str, labels: int = 1, **settings: Any) -> str:
    save_model(folder, kind, AutoModelForSequenceClassification, num_labels=labels, **settings)
    return str(folder)


def _with_wordpiece(folder: Path, kind: str, **settings: Any) -> str:
    wordpiece().save_pretrained(folder)
    return _save(folder, kind, vocab_size=WORDS, **settings)


def bert(folder: Path, labels: int = 1) -> str:
    """A plain checkpoint, whose logit becomes a probability."""
    return _with_wordpiece(folder, "bert", labels=labels, max_position_embeddings=512)


def ms_marco_minilm(folder: Path) -> str:
    """cross-encoder/ms-marco-MiniLM-L6-v2: the config names the activation, which is none."""
    bert(folder)
    return change_config(folder, sbert_ce_default_activation_function=_IDENTITY)


def prompted(folder: Path) -> str:
    """A save of CrossEncoder with prompts, one of which is for all queries."""
    plain = bert(folder.with_name(f"{folder.name}-plain"))
    return save_own(CrossEncoder(plain, device="cpu", **PROMPTS), folder)


def electra(folder: Path, embedding: int = 64) -> str:
    """The small one, whose embeddings a layer projects; those of the base one are as wide as states."""
    _with_wordpiece(folder, "electra", embedding_size=embedding)
    return change_config(folder, sbert_ce_default_activation_function=_IDENTITY)


def distilbert(folder: Path) -> str:
    return _with_wordpiece(folder, "distilbert", dim=128, n_layers=3, n_heads=4, hidden_dim=256)


def roberta(folder: Path) -> str:
    size = byte_level_bpe(folder, XLM_R, *ENDS)
    pad = _id(folder, "<pad>")
    return _save(folder, "roberta", vocab_size=size, pad_token_id=pad, max_position_embeddings=514)


def xlm_roberta(folder: Path) -> str:
    """BAAI/bge-reranker-v2-m3: positions from 2 on, two separators between the texts."""
    size = xlm_roberta_tokenizer(folder)
    return _save(folder, "xlm-roberta", vocab_size=size, max_position_embeddings=514, type_vocab_size=1)


MODERNBERT: dict[str, Any] = {
    "max_position_embeddings": 512, "local_attention": 16, "global_attn_every_n_layers": 2, "pad_token_id": 0,
    "cls_token_id": 101, "sep_token_id": 102,
}  # fmt: skip


def modernbert(folder: Path) -> str:
    """Alibaba-NLP/gte-reranker-modernbert-base: local and global layers, the classifier on their mean."""
    return _with_wordpiece(folder, "modernbert", classifier_pooling="mean", **MODERNBERT)


def deberta_v2(folder: Path, changes: tuple[tuple[str, Any], ...] = ()) -> str:
    """mixedbread-ai/mxbai-rerank-base-v1: relative positions inside attention, with changed settings."""
    specials = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "unk", "mask")}
    settings: dict[str, Any] = {
        "vocab_size": unigram(folder, specials, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
        "max_position_embeddings": 512, "type_vocab_size": 0, "relative_attention": True,
        "position_buckets": 32, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
        "share_att_key": True, "norm_rel_ebd": "layer_norm", "pooler_hidden_size": 128,
    }  # fmt: skip
    return _save(folder, "deberta-v2", **settings | dict(changes))


def _decoder(folder: Path, kind: str, size: int, pad: str, **settings: Any) -> str:
    pad_id = _id(folder, pad)
    return _save(folder, kind, vocab_size=size, max_position_embeddings=1024, pad_token_id=pad_id, **settings)


def qwen2(folder: Path) -> str:
    size = byte_level_bpe(folder, _QWEN, "$A", "$A $B")
    return _decoder(folder, "qwen2", size, "<|endoftext|>", num_key_value_heads=2)


def qwen3(folder: Path) -> str:
    size = byte_level_bpe(folder, _QWEN, "$A", "$A $B")
    return _decoder(folder, "qwen3", size, "<|endoftext|>", num_key_value_heads=2, head_dim=32)


def chatting(folder: Path, pad: str = "<|endoftext|>", **prompts: Any) -> str:
    """A Qwen3ForSequenceClassification saved by CrossEncoder, whose chat template ends in its eos."""
    plain = folder.with_name(f"{folder.name}-plain")
    specials, more = _QWEN | {"pad_token": pad}, ["<|im_start|>"]
    size = byte_level_bpe(plain, specials, "$A", "$A $B", additional_special_tokens=more)
    _decoder(plain, "qwen3", size, pad, num_key_value_heads=2, head_dim=32)
    (plain / "chat_template.jinja").write_text(ROLES_TEMPLATE + "yes<|im_end|>")
    return save_own(CrossEncoder(str(plain), device="cpu", **prompts), folder)


def padded_by_eos(folder: Path, kind: str = "qwen2", **settings: Any) -> str:
    """A language model's classifier whose padding token is its eos, as GPT-2's is and many Qwen2's are."""
    size = byte_level_bpe(folder, _QWEN | {"pad_token": "<|im_end|>"}, "$A", "$A $B")
    return _decoder(folder, kind, size, "<|im_end|>", **{"num_key_value_heads": 2} | settings)


def without_pad_id(folder: Path, kind: str = "qwen2") -> str:
    """A language model's classifier whose config names no padding token, as transformers' defaults do."""
    padded_by_eos(folder, kind)
    return change_config(folder, pad_token_id=None)


def llama(folder: Path) -> str:
    size = byte_level_bpe(folder, LLAMA, "<s> $A", "<s> $A <s> $B")
    return _decoder(folder, "llama", size, "<pad>", num_key_value_heads=4)


def gemma(folder: Path) -> str:
    size = unigram(folder, GEMMA, "<bos> $A", "<bos> $A <bos> $B")
    return _decoder(folder, "gemma", size, "<pad>", num_key_value_heads=1, head_dim=32)


def _id(folder: Path, token: str) -> int:
    token_id = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(token)
    assert isinstance(token_id, int)
    return token_id


def scored_by_modules(folder: Path, columns: int = 1) -> str:
    """A CrossEncoder made of a plain encoder: the mean of a pair's tokens, and two Dense modules."""
    save_model(folder / "backbone", "bert", vocab_size=WORDS)
    wordpiece().save_pretrained(folder / "backbone")
    transformer = Transformer(str(folder / "backbone"))
    torch.manual_seed(5)
    dense = [
        Dense(128, 64, activation_function=torch.nn.GELU()),
        Dense(64, columns, activation_function=torch.nn.Identity(), module_output_name="scores"),
    ]
    modules = [transformer, Pooling(128), dense[0], Dropout(0.3), dense[1]]
    return save_own(CrossEncoder(modules=modules, device="cpu"), folder / "saved")


def qwen3_in_chat(folder: Path) -> str:
    """A plain classifier whose tokenizer has a chat template, by which sentence-transformers joins pairs."""
    chat = ["<|im_start|>", "<|im_end|>"]
    specials = {"eos_token": "<|endoftext|>", "pad_token": "<pad>"}
    options = {"additional_special_tokens": chat, "model_max_length": 512}
    size = byte_level_bpe(folder, specials, "$A", "$A $B", **options)
    (folder / "chat_template.jinja").write_text(CHATML)
    return _decoder(folder, "qwen3", size, "<pad>", num_key_value_heads=2, head_dim=32)
