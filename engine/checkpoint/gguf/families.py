"""The architectures that are read from GGUF files: the settings of each in transformers' terms, the names of
its tensors, and what the conversion to GGUF changed in their values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from maxsimd.engine.checkpoint.gguf.container import GgufFile
from maxsimd.engine.errors import ModelLoadError

Config = dict[str, Any]
Undo = Callable[[str, torch.Tensor, Config], torch.Tensor]

# Of decoders: llama.cpp's name without its ending, and the published one. `{}` is the layer's number.
_DECODER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
_QK_NORMS = {
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
}
# The rows of the answers of a reranker, which the loader puts back into its output layer.
ANSWERS = "cls.output"
_BERT = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "blk.{}.attn_q": "encoder.layer.{}.attention.self.query",
    "blk.{}.attn_k": "encoder.layer.{}.attention.self.key",
    "blk.{}.attn_v": "encoder.layer.{}.attention.self.value",
    "blk.{}.attn_output": "encoder.layer.{}.attention.output.dense",
    "blk.{}.attn_output_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "blk.{}.ffn_up": "encoder.layer.{}.intermediate.dense",
    "blk.{}.ffn_down": "encoder.layer.{}.output.dense",
    "blk.{}.layer_output_norm": "encoder.layer.{}.output.LayerNorm",
}
_CLASSIFIER = {"cls": "classifier.dense", ANSWERS: "classifier.out_proj"}


@dataclass(frozen=True, slots=True)
class Family:
    """`backbone` is transformers' class without a head and `whole` the one with the head that `names` has;
    `prefix` is what the published names begin with in a checkpoint that has a head."""

    backbone: str
    whole: str
    config: Callable[[GgufFile], Config]
    names: Mapping[str, str]
    undo: Undo
    causal: bool = True
    prefix: str = ""


def family_of(file: GgufFile) -> Family:
    """The family of a file. Raises ModelLoadError for an architecture that is not read."""
    if file.architecture == "bert" and file.get("tokenizer.ggml.model") == "t5":
        return _XLM_ROBERTA
    found = _FAMILIES.get(file.architecture)
    if found is None:
        raise ModelLoadError(
            f"{file.path} is a {file.architecture!r}; of GGUF files {', '.join(sorted(_FAMILIES))} can be "
            "served: name the checkpoint that it was made from"
        )
    return found


def _common(file: GgufFile) -> Config:
    """What all configs share. Raises ModelLoadError for positions that are scaled."""
    scaling = file.setting("rope.scaling.type")
    if scaling not in (None, "none"):
        raise ModelLoadError(f"{file.path} scales positions by {scaling!r}, which is not carried out here")
    file.setting("vocab_size")  # the rows of the embeddings say the same, and are what is read
    return {
        "hidden_size": file.number("embedding_length"),
        "num_hidden_layers": file.number("block_count"),
        "intermediate_size": file.number("feed_forward_length"),
        "num_attention_heads": file.number("attention.head_count"),
        "max_position_embeddings": file.number("context_length"),
        "vocab_size": file.names["token_embd.weight"][0],
        "dtype": "float32",
    }


def _decoder(file: GgufFile, kind: str) -> Config:
    if file.setting("attention.causal") is False:
        raise ModelLoadError(f"{file.path} is a {kind} that attends both ways, which is not carried out here")
    common = _common(file)
    head = file.setting("attention.key_length") or common["hidden_size"] // common["num_attention_heads"]
    for key in ("attention.value_length", "rope.dimension_count"):
        if (file.setting(key) or head) != head:
            raise ModelLoadError(f"{file.path} has another {file.architecture}.{key} than its heads are wide")
    theta = file.setting("rope.freq_base")
    return common | {
        "model_type": kind,
        "num_key_value_heads": file.setting("attention.head_count_kv") or common["num_attention_heads"],
        "head_dim": head,
        "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0 if theta is None else theta},
        "tie_word_embeddings": "output.weight" not in file.names,
    }


def _qwen2(file: GgufFile) -> Config:
    config = _decoder(file, "qwen2")
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise ModelLoadError(f"{file.path} is a Qwen2 whose heads are not as wide as its states together")
    return config


def _llama(file: GgufFile) -> Config:
    """Llama's. The factors by which Llama 3.1 and later divide frequencies are a tensor in the file."""
    if "rope_freqs.weight" in file.names:
        raise ModelLoadError(
            f"{file.path} scales positions as Llama 3.1 does, which a GGUF file says by its result alone; "
            "name the checkpoint that it was made from"
        )
    biased = "blk.0.attn_q.bias" in file.names
    return _decoder(file, "llama") | {"attention_bias": biased}


def _gemma(file: GgufFile) -> Config:
    return _decoder(file, "gemma") | {"hidden_act": "gelu_pytorch_tanh"}


def _bert(file: GgufFile) -> Config:
    if "token_types.weight" not in file.names:
        raise ModelLoadError(f"{file.path} is a 'bert' without types of tokens; name what it was made from")
    if file.setting("attention.causal") is not False:
        raise ModelLoadError(f"{file.path} is a 'bert' that is not said to attend both ways")
    return _common(file) | {
        "model_type": "bert",
        "layer_norm_eps": file.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu",
        "type_vocab_size": file.names["token_types.weight"][0],
    }


def _xlm_roberta(file: GgufFile) -> Config:
    """XLM-RoBERTa's: the positions of its padding, which no text has, are cut off its embeddings."""
    config = _bert(file)
    return config | {
        "model_type": "xlm-roberta",
        "max_position_embeddings": file.names["position_embd.weight"][0] + _PADDING_ROWS,
        "pad_token_id": _PADDING_ROWS - 1,
    }


# RoBERTa counts positions from behind its padding's id, 1.
_PADDING_ROWS = 2


def _as_is(name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    return tensor


def _in_halves(name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    """Rows of queries and keys as transformers has them: the first coordinates of all pairs that are rotated,
    then the second ones; llama.cpp has them in turn."""
    if ".attn_q." not in name and ".attn_k." not in name:
        return tensor
    heads = config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]
    paired = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return paired.transpose(1, 2).reshape(tensor.shape)


def _around_zero(name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    """Gemma's norms multiply by one more than their weight, which the conversion has added."""
    return tensor - 1 if name.endswith("norm.weight") else tensor


def _with_padding(name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    if name != "position_embd.weight":
        return tensor
    return torch.cat([tensor.new_zeros(_PADDING_ROWS, tensor.shape[1]), tensor])


_XLM_ROBERTA = Family(
    "XLMRobertaModel", "XLMRobertaForSequenceClassification", _xlm_roberta, _BERT | _CLASSIFIER,
    _with_padding, causal=False, prefix="roberta.",
)  # fmt: skip
_FAMILIES = {
    "bert": Family("BertModel", "", _bert, _BERT, _as_is, causal=False),
    "gemma": Family("GemmaModel", "GemmaForCausalLM", _gemma, _DECODER, _around_zero),
    "llama": Family("LlamaModel", "LlamaForCausalLM", _llama, _DECODER, _in_halves),
    "qwen2": Family("Qwen2Model", "Qwen2ForCausalLM", _qwen2, _DECODER, _as_is),
    "qwen3": Family(
        "Qwen3Model", "Qwen3ForCausalLM", lambda file: _decoder(file, "qwen3"),
        _DECODER | _QK_NORMS | {ANSWERS: ANSWERS}, _as_is,
    ),
}  # fmt: skip
