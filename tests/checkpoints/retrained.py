"""Language models that were made into encoders and rerankers with code of their own, as published."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.checkpoints.cross_encoders import LLAMA as _BGE
from tests.checkpoints.late_interaction import save_as_pylate
from tests.checkpoints.tokenizers import GEMMA, byte_level_bpe, unigram
from tests.checkpoints.weights import SIZES, change_config, save_model, save_modules, save_tensors, spread

LLAMA = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|pad|>"}
_QWEN = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
INSTRUCTION = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
VOYAGE = {
    "query": "Represent the query for retrieving supporting documents: ",
    "document": "Represent the document for retrieval: ",
}


def _llama(folder: Path, **settings: Any) -> None:
    start = "<|begin_of_text|>"
    size = byte_level_bpe(folder, LLAMA, f"{start} $A", f"{start} $A {start} $B", model_max_length=2048)
    rope = {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
    }  # fmt: skip
    save_model(
        folder, "llama", vocab_size=size, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
        rope_parameters=rope, pad_token_id=2, **settings,
    )  # fmt: skip


def nemotron_rerank(folder: Path) -> str:
    """nvidia/llama-nemotron-rerank-1b-v2: a Llama that reads both ways, averaged, with a temperature."""
    _llama(folder, auto=AutoModelForSequenceClassification, num_labels=1)
    code = "llama_bidirectional_model.LlamaBidirectional"
    return change_config(
        folder, architectures=["LlamaBidirectionalForSequenceClassification"],
        auto_map={"AutoConfig": f"{code}Config", "AutoModelForSequenceClassification": f"{code}ForSeq"},
        model_type="llama_bidirec", pooling="avg", temperature=0.8,
    )  # fmt: skip


def nemotron_embed(folder: Path) -> str:
    """nvidia/llama-3.2-nv-embedqa-1b-v2: the same for embeddings, without sentence-transformers' files."""
    _llama(folder)
    code = "llama_bidirectional_model.LlamaBidirectional"
    return change_config(
        folder, architectures=["LlamaBidirectionalModel"],
        auto_map={"AutoConfig": f"{code}Config", "AutoModel": f"{code}Model"}, model_type="llama_bidirec",
        pooling="avg",
    )  # fmt: skip


def nemotron_embed_with_modules(folder: Path) -> str:
    """nvidia/llama-nemotron-embed-1b-v2: the same with them."""
    nemotron_embed(folder)
    return save_modules(folder, "mean", longest=2048, prompts={"query": "query: ", "document": "passage: "})


def _qwen(folder: Path, kind: str, specials: dict[str, str] = _QWEN, **settings: Any) -> Any:
    """A decoder, or an encoder like one, of 2,048 tokens, with a byte-level tokenizer."""
    size = byte_level_bpe(folder, specials, "$A", "$A $B", model_max_length=2048)
    sizes = {"vocab_size": size, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    return save_model(folder, kind, **sizes, **settings)


def voyage_4_nano(folder: Path) -> str:
    """voyageai/voyage-4-nano: a Qwen3 that reads both ways, and a projection to more dimensions."""
    model = _qwen(folder, "qwen3", head_dim=32)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    save_tensors(tensors | {"linear.weight": torch.randn(192, 128) * 0.2}, folder)
    save_modules(folder, "mean", longest=2048, prompts=VOYAGE, dim=192)
    return change_config(
        folder, architectures=["Qwen3ForCausalLM"],
        auto_map={"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"},
        use_bidirectional_attention=True, num_labels=192, tie_word_embeddings=True,
    )  # fmt: skip


def gte_qwen2(folder: Path) -> str:
    """Alibaba-NLP/gte-Qwen2-1.5B-instruct: a Qwen2 that reads both ways, with an end-of-text token."""
    _qwen(folder, "qwen2")
    kinds = [f"tokenization_qwen.{kind}" for kind in ("Qwen2Tokenizer", "Qwen2TokenizerFast")]
    change_config(
        folder, "tokenizer_config.json", add_eos_token=True, auto_map={"AutoTokenizer": kinds},
        tokenizer_class="Qwen2Tokenizer",
    )  # fmt: skip
    save_modules(folder, "lasttoken", longest=2048, prompts={"query": INSTRUCTION})
    code = "modeling_qwen.Qwen2"
    own = {"AutoModel": f"{code}Model", "AutoModelForCausalLM": f"{code}ForCausalLM"}
    return change_config(folder, architectures=["Qwen2ForCausalLM"], auto_map=own, is_causal=False)


def jina_v5_small(folder: Path) -> str:
    """jinaai/jina-embeddings-v5-text-small: a Qwen3 without adapters, and one for each task beside it."""
    return _jina_v5(folder, _qwen(folder, "qwen3", head_dim=32))


def jina_v5_nano(folder: Path) -> str:
    """jinaai/jina-embeddings-v5-text-nano: the same of a EuroBERT, which reads in both directions."""
    return _jina_v5(folder, _qwen(folder, "eurobert", LLAMA, pad_token_id=2), is_decoder=False)


def _jina_v5(folder: Path, model: Any, **settings: Any) -> str:
    tasks = ["retrieval", "text-matching"]
    layers = [name for name, module in model.named_modules() if name.endswith(("q_proj", "down_proj"))]
    for seed, task in enumerate(tasks):
        random = torch.Generator().manual_seed(seed)
        tensors = {}
        for layer in layers:
            out, into = model.get_submodule(layer).weight.shape
            name = f"base_model.model.{layer}.lora_"
            tensors[f"{name}A.weight"] = torch.randn(4, into, generator=random) * 0.1
            tensors[f"{name}B.weight"] = torch.randn(out, 4, generator=random) * 0.1
        (folder / "adapters" / task).mkdir(parents=True)
        save_file(tensors, folder / "adapters" / task / "adapter_model.safetensors")
        adapter = {
            "base_model_name_or_path": str(folder), "lora_alpha": 8, "peft_type": "LORA", "r": 4,
            "target_modules": ["q_proj", "down_proj"], "task_type": "FEATURE_EXTRACTION",
        }  # fmt: skip
        (folder / "adapters" / task / "adapter_config.json").write_text(json.dumps(adapter))
    modules = [{"idx": 0, "name": "transformer", "path": "", "type": "custom_st.Transformer"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    code = "jina_embeddings_v5.JinaEmbeddingsV5"
    return change_config(
        folder, architectures=["JinaEmbeddingsV5Model"],
        auto_map={"AutoConfig": f"configuration_{code}Config", "AutoModel": f"modeling_{code}Model"},
        model_type="jina_embeddings_v5", task_names=tasks, **settings,
    )  # fmt: skip


# The ways in which configs say that a model reads in both directions.
_SAID = {
    "is_causal": {"is_causal": False},
    "field": {"use_bidirectional_attention": True},
    "class": {"architectures": ["Qwen3BidirectionalModel"]},
    "code": {"auto_map": {"AutoModel": "modeling_bidirectional.BidirectionalModel"}},
}


def both_ways(folder: Path, kind: str, said: str = "is_causal") -> str:
    """A language model of transformers whose config says that it reads in both directions; mean pooling."""
    _qwen(folder, kind, head_dim=32, sliding_window=None, pad_token_id=0)
    save_modules(folder, "mean", longest=2048, prompts={})
    return change_config(folder, **_SAID[said])


def _heads(count: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {f"lm_head.{i}.linear_head.weight": torch.randn(1, 128) * 0.2 for i in range(count)}


def bge_minicpm(folder: Path) -> str:
    """BAAI/bge-reranker-v2-minicpm-layerwise: MiniCPM, with a score behind each layer from the second."""
    size = unigram(folder, _BGE, "<s> $A", "<s> $A <s> $B", model_max_length=2048)
    sizes = SIZES | {"num_hidden_layers": 4}
    backbone = save_model(folder, "llama", vocab_size=size, num_key_value_heads=4, num_hidden_layers=4)
    tensors = {f"model.{name}": tensor for name, tensor in backbone.state_dict().items()}
    save_tensors(tensors | _heads(3), folder)
    code = "BAAI/bge-reranker-v2-minicpm-layerwise--modeling_minicpm_reranker.LayerWiseMiniCPM"
    settings = {
        "architectures": ["LayerWiseMiniCPMForCausalLM"],
        "auto_map": {"AutoModel": f"{code}Model", "AutoModelForCausalLM": f"{code}ForCausalLM"},
        "model_type": "minicpm", "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1,
        "dim_model_base": 32, "head_multi": True, "head_type": "simple", "hidden_act": "silu",
        "max_position_embeddings": 2048, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "scale_depth": 1.4, "scale_emb": 3, "start_layer": 2, "torch_dtype": "float32", "vocab_size": size,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings | sizes))
    return str(folder)


def bge_gemma2(folder: Path) -> str:
    """BAAI/bge-reranker-v2.5-gemma2-lightweight: Gemma2 with a score behind each layer from the second."""
    size = unigram(folder, GEMMA, "<bos> $A", "<bos> $A <bos> $B", model_max_length=2048)
    model = save_model(
        folder, "gemma2", vocab_size=size, num_hidden_layers=4, num_key_value_heads=2, head_dim=32,
        query_pre_attn_scalar=32, max_position_embeddings=2048, sliding_window=64,
    )  # fmt: skip
    tensors = {f"model.{name}": each for name, each in spread(model, weight=0.1).state_dict().items()}
    save_tensors(tensors | _heads(3), folder)
    code = "BAAI/bge-reranker-v2.5-gemma2-lightweight--gemma_model.CostWiseGemma"
    return change_config(
        folder, architectures=["CostWiseGemmaForCausalLM"],
        auto_map={"AutoModel": f"{code}Model", "AutoModelForCausalLM": f"{code}ForCausalLM"},
        model_type="cost_wise_gemma", start_layer=2, layer_sep=1, layer_wise=True,
    )  # fmt: skip


def lfm2_colbert(folder: Path, both_ways: bool = False) -> str:
    """LiquidAI/LFM2-ColBERT-350M: an LFM2 saved by PyLate; eos fills queries up, as there is no mask."""
    specials = {"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    begin = "<|startoftext|>"
    size = byte_level_bpe(folder, specials, f"{begin} $A", f"{begin} $A $B", model_max_length=2048)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["[Q] ", "[D] "])
    tokenizer.save_pretrained(folder)
    save_model(
        folder, "lfm2", vocab_size=size + 2, num_key_value_heads=2, max_position_embeddings=2048,
        layer_types=["conv", "full_attention", "conv"], block_multiple_of=32,
    )  # fmt: skip
    if both_ways:
        name = "Lfm2BidirectionalModel"
        code = {"AutoModel": f"modeling_lfm2_bidirectional.{name}"}
        change_config(folder, architectures=[name], auto_map=code)
    torch.manual_seed(4)
    return save_as_pylate(folder, "ColBERT", 511, 300)


def lfm2_5_colbert(folder: Path) -> str:
    """LiquidAI/LFM2.5-ColBERT-350M: the same reading in both directions, by code of its own."""
    return lfm2_colbert(folder, both_ways=True)


def lfm2_5_embedding(folder: Path) -> str:
    """LiquidAI/LFM2.5-Embedding-350M: such a backbone, of which the first token's state is the embedding."""
    lfm2_colbert(folder, both_ways=True)
    shutil.rmtree(folder / "1_Dense")
    return save_modules(folder, "cls", longest=2048, prompts={"query": "query: ", "document": "document: "})


def tensors_of(path: str) -> dict[str, torch.Tensor]:
    return load_file(Path(path) / "model.safetensors")
