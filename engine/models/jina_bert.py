"""JinaBERT: BERT with ALiBi in place of learned positions, and gated feed-forward layers, under the names of
jinaai/jina-bert-implementation (jina-embeddings-v2, jina-colbert-v1, jina-reranker-v1) or, with norms of
queries and keys, of jinaai/jina-bert-v2-qk-post-norm (jina-embeddings-v2-base-code).

Source: those two modeling files, and Guenther et al. 2023 (arXiv 2310.19923).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import BertConfig
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.bert.modeling_bert import BertPooler, BertSelfOutput

from maxsimd.engine.ops.qkv import PositionBias

# Tables of distances reach at least this far, and twice as far whenever that is not enough.
_LEAST_REACH = 64


def slopes_of(heads: int) -> list[float]:
    """The slope of each head: 2^(-8 i / heads) for the i-th, where heads is a power of two. Another number of
    heads has the slopes of the power of two below it, and then every other slope of twice that power."""
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return slopes if power == heads else slopes + slopes_of(2 * power)[::2][: heads - power]


class AlibiBias:
    """The bias by distance of each of a model's `heads`: a table for all of its layers and many steps, in
    float32 whatever the precision of the model."""

    def __init__(self, heads: int) -> None:
        self._slopes = slopes_of(heads)
        self._tables: dict[tuple[int, torch.device], PositionBias] = {}

    def reaching(self, tokens: int, device: torch.device) -> PositionBias:
        """The table for sequences of at most `tokens` tokens."""
        reach = _LEAST_REACH
        while reach + 1 < tokens:
            reach *= 2
        if (reach, device) not in self._tables:
            apart = torch.arange(-reach, reach + 1, device=device).abs().float()
            # One head at a time: a device takes numbers along, and would wait for a tensor of the host.
            by_distance = torch.stack([apart * -slope for slope in self._slopes])
            self._tables[reach, device] = PositionBias(by_distance)
        return self._tables[reach, device]


def eager_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    position_bias: PositionBias,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention of [batch, heads, tokens, head_dim] each, with a mask [batch, 1, tokens, tokens] that
    is added. Returns [batch, tokens, heads, head_dim] and the weights."""
    weights = torch.matmul(query, key.transpose(2, 3)).float() * scaling
    weights = weights + position_bias.terms(query, key, scaling)
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = torch.softmax(weights, dim=-1).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"geglu": nn.GELU, "reglu": nn.ReLU}


class JinaBertConfig(BertConfig):
    """BERT's, with the kind of feed-forward layers, and whether queries and keys are normalized."""

    model_type = "jina_bert"

    feed_forward_type: str = "geglu"
    norms_queries_and_keys: bool = False


class JinaBertEmbeddings(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None) -> torch.Tensor:
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x: torch.Tensor = self.LayerNorm(self.word_embeddings(input_ids) + self.token_type_embeddings(types))
        return x


class JinaBertSelfAttention(nn.Module):
    """BERT's self-attention with ALiBi, and perhaps a norm over all queries and one over all keys."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.heads = config.num_attention_heads
        self.head_dim = config.hidden_size // self.heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)
        if config.norms_queries_and_keys:
            self.layer_norm_q = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            self.layer_norm_k = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key = self.query(hidden_states), self.key(hidden_states)
        if self.config.norms_queries_and_keys:
            query, key = self.layer_norm_q(query), self.layer_norm_k(key)
        query, key, value = (
            x.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for x in (query, key, self.value(hidden_states))
        )
        named = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(named, eager_attention_forward)
        scaling = self.head_dim**-0.5
        attended, weights = attend(self, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return attended.flatten(-2), weights


class JinaBertAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self = JinaBertSelfAttention(config)
        self.output = BertSelfOutput(config)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended: torch.Tensor = self.output(self.self(hidden_states, **kwargs)[0], hidden_states)
        return attended


class JinaBertGatedMLP(nn.Module):
    """A gated feed-forward layer with the sum and the norm after it; the first half is the gate."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gated_layers = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.act = ACTIVATIONS[config.feed_forward_type]()
        self.wo = nn.Linear(config.intermediate_size, config.hidden_size)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gated_layers(x).chunk(2, dim=-1)
        y: torch.Tensor = self.layernorm(self.wo(self.act(gate) * up) + x)
        return y


class JinaBertLayer(nn.Module):
    """A layer of jinaai/jina-bert-implementation."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = JinaBertAttention(config)
        self.mlp = JinaBertGatedMLP(config)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        y: torch.Tensor = self.mlp(self.attention(x, **kwargs))
        return y


class JinaBertPlainGatedMLP(nn.Module):
    """A gated feed-forward layer alone; the second half is the gate."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up_gated_layer = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.act = ACTIVATIONS[config.feed_forward_type]()
        self.down_layer = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.up_gated_layer(x).chunk(2, dim=-1)
        y: torch.Tensor = self.down_layer(up * self.act(gate))
        return y


class JinaBertNormedLayer(nn.Module):
    """A layer of jinaai/jina-bert-v2-qk-post-norm. Its input is added twice: to what attention gives, whose
    norm follows, and to that again."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = JinaBertAttention(config)
        self.layer_norm_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = JinaBertPlainGatedMLP(config)
        self.layer_norm_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        x = self.layer_norm_1(x + self.attention(x, **kwargs))
        y: torch.Tensor = self.layer_norm_2(x + self.mlp(x))
        return y


class JinaBertEncoder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        kind = JinaBertNormedLayer if config.norms_queries_and_keys else JinaBertLayer
        self.layer = nn.ModuleList(kind(config) for _ in range(config.num_hidden_layers))
        self._bias = AlibiBias(config.num_attention_heads)

    def forward(self, x: torch.Tensor, step_attention: Any = None, **kwargs: Any) -> torch.Tensor:
        """`step_attention` is given in packed steps, whose rows [1, rows, hidden] are several sequences."""
        longest = x.shape[1] if step_attention is None else step_attention.longest
        bias = self._bias.reaching(longest, x.device)
        for layer in self.layer:
            x = layer(x, position_bias=bias, step_attention=step_attention, **kwargs)
        return x


class JinaBertPreTrainedModel(PreTrainedModel):
    config: JinaBertConfig
    config_class = JinaBertConfig
    base_model_prefix = "bert"
    _input_embed_layer = "word_embeddings"
    _supports_attention_backend = True


class JinaBertModel(JinaBertPreTrainedModel):
    """Token ids to hidden states [batch, tokens, hidden]. Position ids change nothing."""

    def __init__(self, config: JinaBertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = JinaBertEmbeddings(config)
        self.encoder = JinaBertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        x = self.embeddings(input_ids, token_type_ids)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=x, attention_mask=attention_mask)
        x = self.encoder(x, attention_mask=mask, **kwargs)
        pooled = None if self.pooler is None else self.pooler(x)
        return BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=pooled)


class JinaBertForSequenceClassification(JinaBertPreTrainedModel):
    """A linear layer on the output of the pooler: logits [batch, labels]."""

    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__(config)
        self.bert = JinaBertModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        outputs = self.bert(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids, **kwargs)
        return SequenceClassifierOutput(logits=self.classifier(outputs.pooler_output))
