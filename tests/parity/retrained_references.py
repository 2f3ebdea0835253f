"""What language models that were made into encoders and rerankers must give, plainly from their model cards:
one text at a time, with transformers' classes or without any."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from sentence_transformers import MultiVectorEncoder
from torch.nn.functional import conv1d, normalize, scaled_dot_product_attention, silu
from transformers import (
    CONFIG_MAPPING,
    MODEL_MAPPING,
    AutoTokenizer,
    EuroBertConfig,
    EuroBertModel,
    Gemma2Config,
    Gemma2Model,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Model,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3Model,
)
from transformers.models.lfm2 import modeling_lfm2

from maxsimd.bench.datasets import Pair
from tests.checkpoints.retrained import INSTRUCTION, VOYAGE, tensors_of
from tests.parity.references import Scores

Tensors = dict[str, torch.Tensor]

# What the Gemma2 reranker is asked.
_PREDICT = "Predict whether passage B contains an answer to query A."


def _config(path: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
    return loaded


class BothWays:
    """A language model of transformers with a mask of its own, in which every token sees every other."""

    def __init__(self, path: str, kind: Any, config: Any, prefix: str = "", tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer or PreTrainedTokenizerFast.from_pretrained(path)
        # What the checkpoint itself says of directions is left out.
        others = ("model_type", "is_causal", "use_bidirectional_attention")
        published = {name: each for name, each in _config(path).items() if name not in others}
        self.tensors = tensors_of(path)
        self._model = kind(config(**published)).eval()
        own = {
            name.removeprefix(prefix): each for name, each in self.tensors.items() if name.startswith(prefix)
        }
        inside = self._model.state_dict().keys()
        self._model.load_state_dict({name: each for name, each in own.items() if name in inside})

    @torch.inference_mode()
    def states(self, text: str) -> torch.Tensor:
        """[tokens, hidden], of a text with the tokeniser's special tokens."""
        ids = torch.tensor([self.tokenizer(text)["input_ids"]])
        every = torch.zeros(1, 1, ids.shape[1], ids.shape[1])  # added to the logits of attention
        states: torch.Tensor = self._model(input_ids=ids, attention_mask=every).last_hidden_state[0]
        return states


def nemotron_rerank(path: str, queries: Sequence[str], documents: Sequence[str]) -> Scores:
    """nvidia/llama-nemotron-rerank-1b-v2: the template of its card, the mean of all states, the score of that
    divided by the temperature."""
    model, config = BothWays(path, LlamaModel, LlamaConfig, "model."), _config(path)
    scores = []
    for query, document in zip(queries, documents, strict=True):
        states = model.states(f"question:{query} \n \n passage:{document}")
        pooled = {"avg": states.mean(0), "cls": states[0], "last": states[-1]}[config["pooling"]]
        scores.append(float(model.tensors["score.weight"][0] @ pooled) / config["temperature"])
    return np.array(scores, dtype=np.float32)


class PlainEmbedder:
    """Embeddings as sentence-transformers' models have them, of one text at a time: what `embed` makes of it
    behind its prompt, normalised."""

    def __init__(self, embed: Callable[[str], torch.Tensor], prompts: dict[str, str]) -> None:
        self._embed, self._prompts = embed, prompts

    def encode_query(self, texts: Sequence[str]) -> list[torch.Tensor]:
        return [normalize(self._embed(self._prompts.get("query", "") + text), dim=-1) for text in texts]

    def encode_document(self, texts: Sequence[str]) -> list[torch.Tensor]:
        return [normalize(self._embed(self._prompts.get("document", "") + text), dim=-1) for text in texts]


def cosines(
    path: str, queries: Sequence[str], documents: Sequence[str], model: Callable[[str], PlainEmbedder]
) -> Scores:
    """The cosines of what a model makes of queries and documents."""
    embedder = model(path)
    pairs = zip(embedder.encode_query(queries), embedder.encode_document(documents), strict=True)
    return np.array([float(first @ second) for first, second in pairs], dtype=np.float32)


def nemotron_embed(path: str) -> PlainEmbedder:
    """nvidia/llama-nemotron-embed-1b-v2: the mean of all states, behind "query: " and "passage: "."""
    model = BothWays(path, LlamaModel, LlamaConfig)
    prompts = {"query": "query: ", "document": "passage: "}
    return PlainEmbedder(lambda text: model.states(text).mean(0), prompts)


def mean_of_both_ways(path: str) -> PlainEmbedder:
    """The mean of the states of any language model that transformers has."""
    config = CONFIG_MAPPING[_config(path)["model_type"]]
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    model = BothWays(path, MODEL_MAPPING[config], config, tokenizer=tokenizer)
    return PlainEmbedder(lambda text: model.states(text).mean(0), {})


def jina_v5(path: str, task: str = "retrieval") -> PlainEmbedder:
    """jinaai/jina-embeddings-v5-text: a task's adapter in the weights, the last state, "Query: " and
    "Document: " in front."""
    config, tensors = _config(path), tensors_of(path)
    encodes = config.pop("is_decoder", True) is False
    kind, settings = (EuroBertModel, EuroBertConfig) if encodes else (Qwen3Model, Qwen3Config)
    folder = Path(path) / "adapters" / task
    said = json.loads((folder / "adapter_config.json").read_text())
    small = load_file(folder / "adapter_model.safetensors")
    for name in [name for name in small if ".lora_A." in name]:
        changed = f"{name.removeprefix('base_model.model.').partition('.lora_')[0]}.weight"
        added = small[name.replace("lora_A", "lora_B")] @ small[name]
        tensors[changed] = tensors[changed] + added * said["lora_alpha"] / said["r"]
    model = kind(settings(**{name: each for name, each in config.items() if name != "model_type"})).eval()
    model.load_state_dict(tensors)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)

    @torch.inference_mode()
    def last(text: str) -> torch.Tensor:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        state: torch.Tensor = model(input_ids=ids).last_hidden_state[0, -1]
        return state

    return PlainEmbedder(last, {"query": "Query: ", "document": "Document: "})


def voyage_4_nano(path: str) -> PlainEmbedder:
    """voyageai/voyage-4-nano: each state projected, then their mean."""
    model = BothWays(path, Qwen3Model, Qwen3Config, "model.")
    projection = model.tensors["linear.weight"]
    return PlainEmbedder(lambda text: (model.states(text) @ projection.T).mean(0), VOYAGE)


def gte_qwen2(path: str) -> PlainEmbedder:
    """Alibaba-NLP/gte-Qwen2-1.5B-instruct: the state of the end-of-text token behind each text."""
    model = BothWays(path, Qwen2Model, Qwen2Config, tokenizer=Qwen2Tokenizer.from_pretrained(path))
    end = model.tokenizer.eos_token
    return PlainEmbedder(lambda text: model.states(f"{text}{end}")[-1], {"query": INSTRUCTION})


def _ids(tokenizer: Any, query: str, document: str, task: str) -> torch.Tensor:
    """How FlagEmbedding puts the inputs of its language models together."""
    parts = [f"A: {query}", "\n", f"B: {document}", "\n", task]
    ids = [token for part in parts for token in _text_ids(tokenizer, part)]
    return torch.tensor([tokenizer.bos_token_id, *ids])


def _text_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, without special ones."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def bge_minicpm(path: str, queries: Sequence[str], documents: Sequence[str], layer: int = 4) -> Scores:
    """BAAI/bge-reranker-v2-minicpm-layerwise, without any library's model."""
    model = _MiniCPM(path)
    task = (
        "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
        "providing a prediction of either 'Yes' or 'No'."
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    pairs = zip(queries, documents, strict=True)
    found = [model.score(_ids(tokenizer, query, document, task), layer) for query, document in pairs]
    return np.array(found, dtype=np.float32)


class _MiniCPM:
    """MiniCPM (Hu et al. 2024, arXiv 2404.06395): a Llama whose embeddings are multiplied by `scale_emb`, and
    what each half of a layer adds by `scale_depth` / sqrt(layers)."""

    def __init__(self, path: str) -> None:
        self._config, self._tensors = _config(path), tensors_of(path)
        self._heads = self._config["num_attention_heads"]

    @torch.inference_mode()
    def score(self, ids: torch.Tensor, layer: int) -> float:
        states = self._tensors["model.embed_tokens.weight"][ids] * self._config["scale_emb"]
        scale = self._config["scale_depth"] / self._config["num_hidden_layers"] ** 0.5
        for i in range(layer):
            prefix = f"model.layers.{i}."
            normed = self._norm(states, f"{prefix}input_layernorm")
            states = states + scale * self._attention(normed, f"{prefix}self_attn.")
            normed = self._norm(states, f"{prefix}post_attention_layernorm")
            gate, up = (self._linear(normed, f"{prefix}mlp.{name}_proj") for name in ("gate", "up"))
            states = states + scale * self._linear(silu(gate) * up, f"{prefix}mlp.down_proj")
        last = self._norm(states, "model.norm")[-1]
        head = self._tensors[f"lm_head.{layer - self._config['start_layer']}.linear_head.weight"]
        return float(head[0] @ last)

    def _linear(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return rows @ self._tensors[f"{name}.weight"].T

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        size = rows.pow(2).mean(-1, keepdim=True) + self._config["rms_norm_eps"]
        return rows * size.rsqrt() * self._tensors[f"{name}.weight"]

    def _attention(self, rows: torch.Tensor, prefix: str) -> torch.Tensor:
        split = [
            self._linear(rows, f"{prefix}{name}_proj").unflatten(-1, (self._heads, -1)).transpose(0, 1)
            for name in ("q", "k", "v")
        ]
        query, key, value = split  # [heads, tokens, head_dim]
        half = query.shape[-1] // 2
        angles = torch.arange(len(rows))[:, None] * 10_000.0 ** (-torch.arange(half) / half)

        def turned(each: torch.Tensor) -> torch.Tensor:
            first, second = each[..., :half], each[..., half:]
            cos, sin = angles.cos(), angles.sin()
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

        out = scaled_dot_product_attention(turned(query), turned(key), value, is_causal=True)
        return self._linear(out.transpose(0, 1).flatten(1), f"{prefix}o_proj")


@torch.inference_mode()
def bge_gemma2(path: str, queries: Sequence[str], documents: Sequence[str], layer: int = 4) -> Scores:
    """BAAI/bge-reranker-v2.5-gemma2-lightweight as FlagEmbedding runs it: attention without a cap on its
    logits, the first of the scores."""
    published = _config(path) | {"model_type": "gemma2", "attn_logit_softcapping": None}
    config = Gemma2Config(**published | {"layer_types": None})
    model, tensors = Gemma2Model(config), tensors_of(path)
    model.load_state_dict({name[6:]: each for name, each in tensors.items() if name.startswith("model.")})
    model.layers = model.layers[:layer]
    config.num_hidden_layers = layer
    model.eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    cap = published["final_logit_softcapping"]
    found = []
    for query, document in zip(queries, documents, strict=True):
        ids = _ids(tokenizer, query, document, _PREDICT)
        state = model(input_ids=ids[None]).last_hidden_state[0, -1]
        found.append(float(cap * torch.tanh(tensors["lm_head.0.linear_head.weight"][0] @ state / cap)))
    return np.array(found, dtype=np.float32)


@torch.inference_mode()
def bge_gemma2_compressed(
    path: str, pairs: Sequence[Pair], ratio: int, layers: Sequence[int], cutoff: int
) -> Scores:
    """The same with token compression: behind each of the layers the rows of the passage become means of
    `ratio` rows each, the last perhaps of fewer, and the next layer counts positions from 0."""
    published = _config(path) | {"model_type": "gemma2", "attn_logit_softcapping": None}
    tensors, tokenizer = tensors_of(path), PreTrainedTokenizerFast.from_pretrained(path)
    config = Gemma2Config(**published | {"layer_types": None})
    model = Gemma2Model(config).eval()
    model.load_state_dict({name[6:]: each for name, each in tensors.items() if name.startswith("model.")})
    each_layer, kinds = list(model.layers), list(config.layer_types)
    norm, model.norm = model.norm, torch.nn.Identity()
    cap, found = published["final_logit_softcapping"], []
    for pair in pairs:
        parts = [
            [tokenizer.bos_token_id, *_text_ids(tokenizer, f"A: {pair.query}"), *_text_ids(tokenizer, "\n")],
            _text_ids(tokenizer, f"B: {pair.document}"),
            [*_text_ids(tokenizer, "\n"), *_text_ids(tokenizer, _PREDICT)],
        ]
        states = model.embed_tokens(torch.tensor([token for part in parts for token in part]))
        before, after = len(parts[0]), len(parts[2])
        for number in range(cutoff):
            if number in layers:
                passage = states[before:-after].split(ratio)
                means = [rows.mean(0, keepdim=True) for rows in passage]
                states = torch.cat([states[:before], *means, states[-after:]])
            model.layers, config.layer_types = torch.nn.ModuleList([each_layer[number]]), [kinds[number]]
            config.num_hidden_layers = 1
            states = model(inputs_embeds=states[None], use_cache=False).last_hidden_state[0]
        logit = tensors["lm_head.0.linear_head.weight"][0] @ norm(states[-1])
        found.append(float(cap * torch.tanh(logit / cap)))
    return np.array(found, dtype=np.float32)


class OneByOne:
    """A `MultiVectorEncoder` that is given one text at a time: convolutions may see padding."""

    def __init__(self, model: MultiVectorEncoder) -> None:
        self._model = model

    def encode_query(self, texts: Sequence[str]) -> list[torch.Tensor]:
        return [self._model.encode_query([text])[0] for text in texts]

    def encode_document(self, texts: Sequence[str]) -> list[torch.Tensor]:
        return [self._model.encode_document([text])[0] for text in texts]


def lfm2_5_colbert(path: str) -> OneByOne:
    """LiquidAI/LFM2.5-ColBERT-350M: PyLate's late interaction, over `both_ways_lfm2`."""
    model = MultiVectorEncoder(path, device="cpu")
    both_ways_lfm2(model[0].auto_model)
    return OneByOne(model)


def plain_maxsims(path: str, queries: Sequence[str], documents: Sequence[str]) -> Scores:
    """MaxSim of LFM2-ColBERT's vectors, which transformers makes as it is."""
    return _maxsims(OneByOne(MultiVectorEncoder(path, device="cpu")), queries, documents)


def maxsims(path: str, queries: Sequence[str], documents: Sequence[str]) -> Scores:
    """MaxSim of LFM2.5-ColBERT's vectors."""
    return _maxsims(lfm2_5_colbert(path), queries, documents)


def _maxsims(model: OneByOne, queries: Sequence[str], documents: Sequence[str]) -> Scores:
    pairs = zip(model.encode_query(queries), model.encode_document(documents), strict=True)
    found = [float((first @ second.T).amax(1).sum()) for first, second in pairs]
    return np.array(found, dtype=np.float32)


def both_ways_lfm2(model: Any) -> None:
    """Has transformers' LFM2 read in both directions, as Liquid AI's code does: no causal mask, convolutions
    with as many tokens on either side. Tokens that are not attended to take part in these."""
    model.config.is_causal = False
    for layer in model.layers:
        if layer.is_attention_layer:
            layer.self_attn.is_causal = False
        else:
            layer.conv.forward = _centred(layer.conv)


def _centred(conv: modeling_lfm2.Lfm2ShortConv) -> Callable[..., torch.Tensor]:
    def forward(hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        first, second, states = conv.in_proj(hidden_states).transpose(1, 2).chunk(3, dim=1)
        weight = conv.conv.weight
        mixed = conv1d(
            first * states, weight, conv.conv.bias, padding=weight.shape[-1] // 2, groups=len(weight)
        )
        out: torch.Tensor = conv.out_proj((second * mixed).transpose(1, 2))
        return out

    return forward


def lfm2_5_embedding(path: str) -> PlainEmbedder:
    """LiquidAI/LFM2.5-Embedding-350M: the first token's state, behind "query: " and "document: "."""
    model = modeling_lfm2.Lfm2Model.from_pretrained(path).eval()
    both_ways_lfm2(model)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)

    @torch.inference_mode()
    def embed(text: str) -> torch.Tensor:
        states: torch.Tensor = model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state
        return states[0, 0]

    return PlainEmbedder(embed, {"query": "query: ", "document": "document: "})
