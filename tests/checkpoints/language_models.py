"""Language models that rerank: by the logits of a word, and listwise."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.checkpoints.tokenizers import GEMMA, byte_level_bpe, unigram
from tests.checkpoints.weights import change_config, save_model, save_module_list

_CHAT = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
_MARKERS = ["<|embed_token|>", "<|rerank_token|>"]
_SPECIALS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}

# As sentence-transformers' integrations of rerankers write theirs: roles for the instruction and both texts.
ROLES_TEMPLATE = (
    "{%- set instruction = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | "
    "first | default('find what answers the query') -%}"
    "<|im_start|>system\n{{ instruction }}\n<|im_end|>\n"
    "<|im_start|>user\n"
    "{{ messages | selectattr('role', 'equalto', 'query') | map(attribute='content') | first }}\n"
    "{{ messages | selectattr('role', 'equalto', 'document') | map(attribute='content') | first }}"
    "<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def _qwen_tokenizer(folder: Path, **options: Any) -> int:
    words = ("yes", "no", "Yes", "0", "1")
    extra = [token for token in _CHAT if token not in _SPECIALS.values()]
    return byte_level_bpe(
        folder, _SPECIALS, "$A", "$A $B", words, additional_special_tokens=extra + options.pop("markers", []),
        padding_side="left", **{"model_max_length": 4096} | options,
    )  # fmt: skip


def _save(folder: Path, kind: str, size: int, **settings: Any) -> str:
    sizes = {"vocab_size": size, "max_position_embeddings": 4096}
    save_model(folder, kind, AutoModelForCausalLM, **sizes, **settings)
    return str(folder)


def qwen3_reranker(folder: Path, vocabulary: int = 0, **settings: Any) -> str:
    """Qwen/Qwen3-Reranker-0.6B: a plain Qwen3ForCausalLM; `vocabulary` makes its output matrix larger."""
    size = max(_qwen_tokenizer(folder), vocabulary)
    heads = {"num_key_value_heads": 2, "head_dim": 32}
    return _save(folder, "qwen3", size, tie_word_embeddings=True, **heads, **settings)


def mxbai_rerank_v2(folder: Path) -> str:
    """mixedbread-ai/mxbai-rerank-base-v2: a plain Qwen2ForCausalLM that answers 0 or 1."""
    return _save(folder, "qwen2", _qwen_tokenizer(folder), num_key_value_heads=2, tie_word_embeddings=True)


def bge_reranker_v2_gemma(folder: Path) -> str:
    """BAAI/bge-reranker-v2-gemma: a plain GemmaForCausalLM, scored by the logit of Yes."""
    size = unigram(folder, GEMMA, "<bos> $A", "<bos> $A $B", model_max_length=4096)
    return _save(folder, "gemma", size, num_key_value_heads=1, head_dim=32)


def zerank_2(folder: Path) -> str:
    """zeroentropy/zerank-2: a Qwen3ForCausalLM with a LogitScore of one word and a template of roles."""
    qwen3_reranker(folder)
    true_id = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]["Yes"]
    (folder / "chat_template.jinja").write_text(ROLES_TEMPLATE)
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(
        json.dumps({"true_token_id": true_id, "false_token_id": None})
    )
    kinds = {
        "": "sentence_transformers.base.modules.transformer.Transformer",
        "1_LogitScore": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
    }
    save_module_list(folder, kinds)
    settings = {
        "model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity", "prompts": {},
        "default_prompt_name": None,
    }  # fmt: skip
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    logits = {"method": "forward", "method_output_name": "logits"}
    transformer = {
        "transformer_task": "text-generation",
        "modality_config": {"text": logits, "message": logits | {"format": "flat"}},
        "module_output_name": "causal_logits",
    }
    (folder / "sentence_bert_config.json").write_text(json.dumps(transformer))
    return str(folder)


def jina_reranker_v3(folder: Path) -> str:
    """jinaai/jina-reranker-v3: JinaForRanking, a Qwen3 with a projection of two layers at markers."""
    size = _qwen_tokenizer(folder, markers=_MARKERS, model_max_length=24_576)
    return _jina_reranker_v3(folder, size, 96)


def jina_reranker_v3_with_published_ids(folder: Path) -> str:
    """The same with the ids of markers and the dimensions that vLLM takes for granted."""
    _qwen_tokenizer(folder, markers=_MARKERS, model_max_length=24_576)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    ids = dict(zip(_MARKERS, (151_670, 151_671), strict=True))
    tokenizer["model"]["vocab"] |= ids
    for token in tokenizer["added_tokens"]:
        token["id"] = ids.get(token["content"], token["id"])
    path.write_text(json.dumps(tokenizer))
    return _jina_reranker_v3(folder, 151_936, 512)


def _jina_reranker_v3(folder: Path, size: int, dimensions: int) -> str:
    sizes = {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 24_576}
    save_model(folder, "qwen3", vocab_size=size, **sizes)
    tensors = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["projector.0.weight"] = torch.randn(64, 128) * 0.2
    tensors["projector.2.weight"] = torch.randn(dimensions, 64) * 0.2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    code = {"AutoModel": "modeling.JinaForRanking"}
    return change_config(folder, architectures=["JinaForRanking"], auto_map=code)
