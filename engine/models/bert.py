"""BERT, RoBERTa and XLM-RoBERTa encoders and classifiers, without transformers.

Importing transformers takes longer than loading such a model. Modules and tensors have the names that
transformers gives them, so that checkpoints, compiled layers and fused kernels find what they look for.

Sources: Devlin et al. 2018 (arXiv 1810.04805), Liu et al. 2019 (arXiv 1907.11692), Conneau et al. 2019
(arXiv 1911.02116).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_new": lambda: nn.GELU("tanh"),
    "gelu_pytorch_tanh": lambda: nn.GELU("tanh"),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
}


@dataclass
class EncoderConfig:
    """The shape of an encoder. `settings` are all settings of the checkpoint, as transformers states them."""

    model_type: Literal["bert", "roberta", "xlm-roberta"]
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    pad_token_id: int | None
    num_labels: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    _attn_implementation: str = "sdpa"

    def get_text_config(self) -> "EncoderConfig":
        return self

    def to_dict(self) -> dict[str, Any]:
        return dict(self.settings)


@dataclass(frozen=True, slots=True)
class EncoderOutput:
    """Hidden states [n, tokens, hidden], and what the pooler makes of the first token [n, hidden]."""

    last_hidden_state: torch.Tensor
    pooler_output: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ClassifierOutput:
    """Logits [n, labels]."""

    logits: torch.Tensor


def sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """torch's attention, the plain way."""
    out = nn.functional.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
    return out.transpose(1, 2), None


def eager(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention as two products and a softmax."""
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    return (scores.softmax(dim=-1) @ value).transpose(1, 2), None


# Attention functions by name. Each takes the attention module, queries, keys and values
# [n, heads, tokens, head_dim] and a bool mask or None, and returns [n, tokens, heads, head_dim] and None.
ATTENTION_FUNCTIONS: dict[str, Callable[..., tuple[torch.Tensor, None]]] = {"sdpa": sdpa, "eager": eager}


def _table(rows: int, columns: int, padding: int | None = None) -> nn.Embedding:
    """An embedding without random weights, which would import torch's compiler where the device is meta."""
    return nn.Embedding(rows, columns, padding, _weight=torch.empty(rows, columns))


class Embeddings(nn.Module):
    """The sum of the rows of three tables, normalized."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        padding = config.pad_token_id
        self.word_embeddings = _table(config.vocab_size, config.hidden_size, padding)
        self.token_type_embeddings = _table(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(0.0)
        # RoBERTa's positions begin behind it, BERT's at 0: see `position_offset` of a checkpoint.
        self.padding_idx = None if config.model_type == "bert" else padding
        positions = config.max_position_embeddings
        self.position_embeddings = _table(positions, config.hidden_size, self.padding_idx)

    def forward(
        self,
        input_ids: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """int64 [n, tokens] each to [n, tokens, hidden]."""
        if position_ids is None:
            position_ids = self._positions(input_ids)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        summed = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        out: torch.Tensor = self.LayerNorm(summed + self.position_embeddings(position_ids))
        return out

    def _positions(self, input_ids: torch.Tensor) -> torch.Tensor:
        """RoBERTa counts the tokens that are not padding, from `padding_idx + 1`, wherever padding stands."""
        if self.padding_idx is None:
            return torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        is_token = input_ids.ne(self.padding_idx).long()
        return is_token.cumsum(dim=1) * is_token + self.padding_idx


class SelfAttention(nn.Module):
    def __init__(self, config: EncoderConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(0.0)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """[n, tokens, hidden] to the same. `kwargs` go to the attention function."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            product(hidden_states).view(shape).transpose(1, 2)  # [n, heads, tokens, head_dim]
            for product in (self.query, self.key, self.value)
        )
        attend = ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return out.reshape(hidden_states.shape), None


class SelfOutput(nn.Module):
    """A linear layer, the residual sum, and a layer norm."""

    def __init__(self, config: EncoderConfig, inputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.LayerNorm(self.dense(hidden_states) + input_tensor)
        return out


class Output(SelfOutput):
    """The same layer behind the feed-forward."""


class Attention(nn.Module):
    def __init__(self, config: EncoderConfig, layer_idx: int) -> None:
        super().__init__()
        self.self = SelfAttention(config, layer_idx)
        self.output = SelfOutput(config, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = self.output(self.self(hidden_states, **kwargs)[0], hidden_states)
        return out


class Intermediate(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = ACTIVATIONS[config.hidden_act]()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.intermediate_act_fn(self.dense(hidden_states))
        return out


class Layer(nn.Module):
    def __init__(self, config: EncoderConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention = Attention(config, layer_idx)
        self.intermediate = Intermediate(config)
        self.output = Output(config, config.intermediate_size)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attended = self.attention(hidden_states, **kwargs)
        out: torch.Tensor = self.output(self.intermediate(attended), attended)
        return out


class LayerStack(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for layer in self.layer:
            hidden_states = layer(hidden_states, **kwargs)
        return hidden_states


class Pooler(nn.Module):
    """BERT's pooler: a linear layer and tanh over the first token."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.Tanh()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, tokens, hidden] to [n, hidden]."""
        out: torch.Tensor = self.activation(self.dense(hidden_states[:, 0]))
        return out


class Encoder(nn.Module):
    """The backbone of all three families: embeddings and layers, and a pooler if `has_pooler`."""

    def __init__(self, config: EncoderConfig, has_pooler: bool) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = LayerStack(config)
        self.pooler = Pooler(config) if has_pooler else None

    @property
    def base_model(self) -> "Encoder":
        return self

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def set_attn_implementation(self, name: str) -> None:
        """Attends by the function of this name in `ATTENTION_FUNCTIONS`. Raises KeyError for another name."""
        if name not in ATTENTION_FUNCTIONS:
            raise KeyError(name)
        self.config._attn_implementation = name

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> EncoderOutput:
        """int64 [n, tokens] each; the mask has 1 for tokens that are attended to. `kwargs` go to the
        attention function."""
        hidden = self.embeddings(
            input_ids=input_ids, token_type_ids=token_type_ids, position_ids=position_ids
        )
        if attention_mask is not None:
            attention_mask = attention_mask.bool()[:, None, None, :]  # over [n, heads, tokens, keys]
        hidden = self.encoder(hidden, attention_mask=attention_mask, **kwargs)  # [n, tokens, hidden]
        return EncoderOutput(hidden, None if self.pooler is None else self.pooler(hidden))


class BertModel(Encoder):
    pass


class RobertaModel(Encoder):
    pass


class XLMRobertaModel(Encoder):
    pass


ENCODERS: Mapping[str, type[Encoder]] = {
    "bert": BertModel,
    "roberta": RobertaModel,
    "xlm-roberta": XLMRobertaModel,
}


class ClassificationHead(nn.Module):
    """RoBERTa's classifier over the first token: linear, tanh, linear."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(0.0)
        self.out_proj = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[n, tokens, hidden] to logits [n, labels]."""
        out: torch.Tensor = self.out_proj(torch.tanh(self.dense(features[:, 0])))
        return out


class EncoderForClassification(nn.Module):
    """An encoder with a classifier: BERT's reads the pooler's output, RoBERTa's the hidden states."""

    base_model_prefix = "roberta"
    reads_pooled = False
    output_type = EncoderOutput

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        encoder = ENCODERS[config.model_type](config, has_pooler=self.reads_pooled)
        setattr(self, self.base_model_prefix, encoder)
        if self.reads_pooled:
            self.dropout = nn.Dropout(0.0)
            self.classifier: nn.Module = nn.Linear(config.hidden_size, config.num_labels)
        else:
            self.classifier = ClassificationHead(config)

    @property
    def base_model(self) -> Any:
        return getattr(self, self.base_model_prefix)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> ClassifierOutput:
        """Maps the encoder's inputs to logits [n, labels]."""
        made = self.base_model(input_ids, attention_mask, token_type_ids, position_ids)
        read = made.pooler_output if self.reads_pooled else made.last_hidden_state
        return ClassifierOutput(self.classifier(read))


class BertForSequenceClassification(EncoderForClassification):
    base_model_prefix = "bert"
    reads_pooled = True


class RobertaForSequenceClassification(EncoderForClassification):
    pass


class XLMRobertaForSequenceClassification(EncoderForClassification):
    pass


CLASSIFIERS: Mapping[str, type[EncoderForClassification]] = {
    "bert": BertForSequenceClassification,
    "roberta": RobertaForSequenceClassification,
    "xlm-roberta": XLMRobertaForSequenceClassification,
}
