"""Nomic's encoder with experts, tensor by tensor as it is published."""

from pathlib import Path
from typing import Any

from tests.checkpoints.tokenizers import xlm_roberta
from tests.checkpoints.weights import RandomTensors, save, save_modules

_CODE = "nomic-ai/nomic-bert-2048--"
_CONFIG: dict[str, Any] = {
    "activation_function": "gelu", "add_pooling_layer": False, "architectures": ["NomicBertModel"],
    "attn_pdrop": 0.0,
    "auto_map": {
        "AutoConfig": f"{_CODE}configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": f"{_CODE}modeling_hf_nomic_bert.NomicBertModel",
        "AutoModelForMaskedLM": f"{_CODE}modeling_hf_nomic_bert.NomicBertForPreTraining",
    },
    "bos_token_id": None, "causal": False, "dense_seq_output": True, "embd_pdrop": 0.1, "eos_token_id": None,
    "expert_choice_router": False, "ffn_div": 1, "fused_bias_fc": True, "fused_dropout_add_ln": True,
    "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "max_trained_positions": 2048,
    "mlp_fc1_bias": True, "mlp_fc2_bias": True, "model_type": "nomic_bert", "moe_every_n_layers": 2,
    "moe_impl": "megablocks", "moe_normalize_expert_weights": False, "moe_resid_pdrop": 0.0, "moe_top_k": 2,
    "n_embd": 128, "n_head": 4, "n_inner": 256, "n_layer": 4, "n_positions": 2048, "num_experts": 8,
    "num_shared_experts": 0, "pad_token_id": 1, "parallel_block": False, "prenorm": False,
    "qkv_proj_bias": True, "resid_pdrop": 0.0, "rotary_emb_base": 10000, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
    "scale_attn_weights": True, "type_vocab_size": 1, "use_cache": True, "use_flash_attn": True,
    "use_rms_norm": None, "use_xentropy": True,
}  # fmt: skip


def v2_moe(folder: Path) -> str:
    """nomic-ai/nomic-embed-text-v2-moe: the mean, normalized; prefixes, and experts in every second layer."""
    vocabulary = xlm_roberta(folder)
    config = _CONFIG | {"vocab_size": vocabulary}
    random, hidden, inner = RandomTensors(11), config["n_embd"], config["n_inner"]
    experts = config["num_experts"]
    named = {
        "embeddings.word_embeddings.weight": random.embedding(vocabulary, hidden),
        "embeddings.token_type_embeddings.weight": random.embedding(1, hidden),
        **random.norm("emb_ln", hidden),
    }
    for i in range(config["n_layer"]):
        layer = f"encoder.layers.{i}."
        named |= {
            **random.linear(f"{layer}attn.Wqkv", 3 * hidden, hidden),
            **random.linear(f"{layer}attn.out_proj", hidden, hidden),
            **random.norm(f"{layer}norm1", hidden),
            **random.norm(f"{layer}norm2", hidden),
        }
        if i % 2 == 1:
            named |= {
                **random.linear(f"{layer}mlp.router.layer", experts, hidden, bias=False),
                f"{layer}mlp.experts.mlp.w1": random(experts * inner, hidden),
                f"{layer}mlp.experts.mlp.w2": random(experts * inner, hidden),
                f"{layer}mlp.experts.bias": random(hidden),
            }
        else:
            named |= random.linear(f"{layer}mlp.fc1", inner, hidden)
            named |= random.linear(f"{layer}mlp.fc2", hidden, inner)
    save(folder, config, named)
    prompts = {"query": "search_query: ", "document": "search_document: "}
    return save_modules(folder, "mean", normalize=True, prompts=prompts)
