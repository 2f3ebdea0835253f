"""Architectures that transformers lacks, or whose tensors it does not read as they are published. Importing
this module registers them with transformers' Auto classes."""

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    JinaEmbeddingsV3Config,
    JinaEmbeddingsV3Model,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

from maxsimd.engine.models.jina_bert import JinaBertConfig, JinaBertForSequenceClassification, JinaBertModel


class NomicMoeConfig(JinaEmbeddingsV3Config):
    """jina-embeddings-v3's, with the number of experts, how many of them a token goes to, and which layers
    have them: the second of each `moe_every_n_layers`, or none for 0."""

    model_type = "nomic_bert_moe"

    num_experts: int = 8
    moe_top_k: int = 2
    moe_every_n_layers: int = 2


class NomicMoeMLP(nn.Module):
    """The weighted sum of each token's experts, and one bias for all. `w1` and `w2` have the weights of all
    experts, [experts * inner, hidden] each."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        rows = config.num_experts * config.intermediate_size
        self.router = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(rows, config.hidden_size))
        self.w2 = nn.Parameter(torch.empty(rows, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.hidden_size))
        self.experts, self.chosen = config.num_experts, config.moe_top_k

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.flatten(0, -2)  # [tokens, hidden]
        # Shares of the softmax over all experts: those of a token's experts add up to less than one.
        shares = self.router(x).softmax(dim=-1, dtype=torch.float32)
        weights, numbers = shares.topk(self.chosen, dim=-1)  # [tokens, experts of a token] each
        weights = weights.to(x.dtype)
        made = torch.zeros_like(x)
        ups, downs = (weight.unflatten(0, (self.experts, -1)) for weight in (self.w1, self.w2))
        for expert in range(self.experts):
            tokens, choice = torch.where(numbers == expert)
            if len(tokens):
                out = nn.functional.gelu(x[tokens] @ ups[expert].T) @ downs[expert]
                made.index_add_(0, tokens, out * weights[tokens, choice, None])
        return (made + self.bias).view_as(hidden_states)


class NomicMoeModel(JinaEmbeddingsV3Model):
    """Token ids to hidden states [batch, tokens, hidden]."""

    config: NomicMoeConfig
    config_class = NomicMoeConfig

    def __init__(self, config: NomicMoeConfig) -> None:
        super().__init__(config, add_pooling_layer=False)
        for i, layer in enumerate(self.layers):
            if config.moe_every_n_layers and i % config.moe_every_n_layers == 1:
                layer.mlp = NomicMoeMLP(config)
        self.post_init()


def _thirds(source: str, *targets: str) -> WeightConverter:
    """Divides queries, keys and values that are published as one tensor."""
    return WeightConverter(source_patterns=[source], target_patterns=[*targets], operations=[Chunk(dim=0)])


_NOMIC_TENSORS = [
    WeightRenaming(r"emb_ln", r"embeddings.LayerNorm"),
    WeightRenaming(r"encoder\.layers", r"layers"),
    WeightRenaming(r"attn\.out_proj", r"self_attn.o_proj"),
    WeightRenaming(r"mlp\.router\.layer", r"mlp.router"),
    WeightRenaming(r"mlp\.experts\.mlp", r"mlp"),
    WeightRenaming(r"mlp\.experts\.bias", r"mlp.bias"),
    WeightRenaming(r"norm1", r"post_attention_layernorm"),
    WeightRenaming(r"norm2", r"post_mlp_layernorm"),
    _thirds("attn.Wqkv", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
]


class XLMRobertaFlashConfig(XLMRobertaConfig):
    """transformers' own, by another name."""

    model_type = "xlm_roberta_flash"


class XLMRobertaFlashModel(XLMRobertaModel):
    config: XLMRobertaFlashConfig
    config_class = XLMRobertaFlashConfig


class XLMRobertaFlashForSequenceClassification(XLMRobertaForSequenceClassification):
    config: XLMRobertaFlashConfig
    config_class = XLMRobertaFlashConfig


_FLASH_TENSORS = [
    WeightRenaming(r"emb_ln", r"embeddings.LayerNorm"),
    WeightRenaming(r"encoder\.layers", r"encoder.layer"),
    WeightRenaming(r"mixer\.out_proj", r"attention.output.dense"),
    WeightRenaming(r"norm1", r"attention.output.LayerNorm"),
    WeightRenaming(r"mlp\.fc1", r"intermediate.dense"),
    WeightRenaming(r"mlp\.fc2", r"output.dense"),
    WeightRenaming(r"norm2", r"output.LayerNorm"),
    _thirds("mixer.Wqkv", "attention.self.query", "attention.self.key", "attention.self.value"),
]


def _register(config: Any, model: Any, classifier: Any, tensors: list[Any]) -> None:
    AutoConfig.register(config.model_type, config)
    AutoModel.register(config, model)
    if classifier is not None:
        AutoModelForSequenceClassification.register(config, classifier)
    register_checkpoint_conversion_mapping(config.model_type, tensors)


_register(JinaBertConfig, JinaBertModel, JinaBertForSequenceClassification, [])
_register(NomicMoeConfig, NomicMoeModel, None, _NOMIC_TENSORS)
_register(
    XLMRobertaFlashConfig, XLMRobertaFlashModel, XLMRobertaFlashForSequenceClassification, _FLASH_TENSORS
)
