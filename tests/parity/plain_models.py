"""Models with code of their own, plainly from their cards and that code: one text or pair at a time."""

import json
import math
import string
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file
from sentence_transformers import MultiVectorEncoder
from tokenizers import Tokenizer
from torch.nn.functional import conv1d, cosine_similarity, gelu, layer_norm, linear, normalize, relu
from transformers.models.lfm2 import modeling_lfm2

from tests.checkpoints.retrained import INSTRUCTION, VOYAGE, tensors_of

Tensors = dict[str, torch.Tensor]
Texts = Sequence[str]
Model = Callable[[str], Any]


class PlainEncoder:
    """A checkpoint's config, tokenizer and tensors, `prefix` taken off their names."""

    def __init__(self, path: str, prefix: str) -> None:
        self.config: dict[str, Any] = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))
        self.tokenizer = Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
        self.tokenizer.enable_truncation(512)
        self.tokenizer.no_padding()
        tensors = load_file(Path(path) / "model.safetensors")
        self.tensors: Tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        self.heads: int = self.config.get("num_attention_heads") or self.config["n_head"]
        self.dims: int = (self.config.get("hidden_size") or self.config["n_embd"]) // self.heads

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.config.get("layer_norm_eps") or self.config["layer_norm_epsilon"]
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        return layer_norm(x, x.shape[-1:], weight, bias, eps)

    def embedded(self, ids: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        x = self.tensors["embeddings.word_embeddings.weight"][ids]
        learned = self.tensors.get("embeddings.token_type_embeddings.weight")
        return x if learned is None else x + learned[types]

    def attend(self, *qkv: torch.Tensor, bias: Any = 0) -> torch.Tensor:
        """Softmax attention of [tokens, hidden] each, with a bias [heads, tokens, tokens]."""
        heads = (each.unflatten(-1, (self.heads, -1)).transpose(0, 1) for each in qkv)
        first, second, third = heads  # [heads, tokens, dims] each
        weights = first @ second.mT / math.sqrt(self.dims) + bias
        return (weights.softmax(dim=-1) @ third).transpose(0, 1).flatten(-2)

    def turned(self, x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Turns the two halves of heads of x [tokens, hidden] by position times `frequencies` [dims / 2]."""
        angles = torch.arange(len(x)).float()[:, None] * frequencies
        first, second = x.unflatten(-1, (self.heads, 2, -1)).unbind(-2)  # [tokens, heads, dims / 2] each
        sine, cosine = angles.sin()[:, None], angles.cos()[:, None]
        turned = torch.stack([first * cosine - second * sine, second * cosine + first * sine], dim=-2)
        return turned.flatten(-3)


States = Callable[[PlainEncoder, torch.Tensor, torch.Tensor], torch.Tensor]

Inner = Callable[[torch.Tensor, str, int], torch.Tensor]


def _layers(
    model: PlainEncoder, x: torch.Tensor, names: Sequence[str], inner: Inner, frequencies: Any = None
) -> torch.Tensor:
    """Layers of attention, with rotary positions if there are `frequencies`, and of what is `inner`, each
    with a norm behind it. `names` are those of the layers and of their parts."""
    layers, qkv, out, first, second = names
    for i in range(model.config.get("num_hidden_layers") or model.config["n_layer"]):
        layer = f"{layers}.{i}"
        queries, keys, values = model.linear(x, f"{layer}.{qkv}").chunk(3, dim=-1)
        if frequencies is not None:
            queries, keys = model.turned(queries, frequencies), model.turned(keys, frequencies)
        attended = model.linear(model.attend(queries, keys, values), f"{layer}.{out}")
        x = model.norm(x + attended, f"{layer}.{first}")
        x = model.norm(x + inner(x, f"{layer}.mlp", i), f"{layer}.{second}")
    return x


def new_states(model: PlainEncoder, ids: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
    """Alibaba's `NewModel`: [tokens, hidden]."""
    config = model.config
    exponents = torch.arange(0, model.dims, 2).float() / model.dims
    frequencies = float(config["rope_theta"]) ** -exponents
    if config["rope_scaling"] is not None:
        factor = config["rope_scaling"]["factor"]
        frequencies = (config["rope_theta"] * factor) ** -exponents / factor ** (2 / model.dims)

    def inner(x: torch.Tensor, name: str, layer: int) -> torch.Tensor:
        up, gate = model.linear(x, f"{name}.up_gate_proj").chunk(2, dim=-1)
        return model.linear(gelu(gate) * up, f"{name}.down_proj")

    names = ("encoder.layer", "attention.qkv_proj", "attention.o_proj", "attn_ln", "mlp_ln")
    x = model.norm(model.embedded(ids, types), "embeddings.LayerNorm")
    return _layers(model, x, names, inner, frequencies)


def flash_states(model: PlainEncoder, ids: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
    """XLM-RoBERTa under the names of jinaai/xlm-roberta-flash-implementation: [tokens, hidden]."""
    first = model.config["pad_token_id"] + 1
    positions = model.tensors["embeddings.position_embeddings.weight"][first : first + len(ids)]

    def inner(x: torch.Tensor, name: str, layer: int) -> torch.Tensor:
        return model.linear(gelu(model.linear(x, f"{name}.fc1")), f"{name}.fc2")

    names = ("encoder.layers", "mixer.Wqkv", "mixer.out_proj", "norm1", "norm2")
    return _layers(model, model.norm(model.embedded(ids, types) + positions, "emb_ln"), names, inner)


def nomic_moe_states(model: PlainEncoder, ids: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
    """nomic-embed-text-v2-moe, token by token where it has experts: [tokens, hidden]."""
    frequencies = model.config["rotary_emb_base"] ** -(torch.arange(0, model.dims, 2).float() / model.dims)

    def inner(x: torch.Tensor, name: str, layer: int) -> torch.Tensor:
        if layer % model.config["moe_every_n_layers"] == 1:
            return torch.stack([_mixed(model, name, token) for token in x])
        return model.linear(gelu(model.linear(x, f"{name}.fc1")), f"{name}.fc2")

    names = ("encoder.layers", "attn.Wqkv", "attn.out_proj", "norm1", "norm2")
    x = model.norm(model.embedded(ids, types), "emb_ln")
    return _layers(model, x, names, inner, frequencies)


def jina_bert_states(
    model: PlainEncoder, ids: torch.Tensor, types: torch.Tensor, attended: int | None = None
) -> torch.Tensor:
    """JinaBERT of both codes: [tokens, hidden]. No token attends to those from the `attended`-th on."""
    x = model.norm(model.embedded(ids, types), "embeddings.LayerNorm")
    positions = torch.arange(len(ids))
    apart = (positions[:, None] - positions[None, :]).abs()
    bias = -alibi_slopes(model.heads)[:, None, None] * apart  # [heads, tokens, tokens]
    bias[..., len(ids) if attended is None else attended :] = -torch.inf
    activation = {"geglu": gelu, "reglu": relu}[model.config["feed_forward_type"]]
    for i in range(model.config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        inner = f"{layer}.attention.self"
        parts = {part: model.linear(x, f"{inner}.{part}") for part in ("query", "key", "value")}
        normed = f"{layer}.layer_norm_1.weight" in model.tensors
        if normed:
            for part in ("query", "key"):
                parts[part] = model.norm(parts[part], f"{inner}.layer_norm_{part[0]}")
        attended = model.linear(model.attend(*parts.values(), bias=bias), f"{layer}.attention.output.dense")
        attended = model.norm(x + attended, f"{layer}.attention.output.LayerNorm")
        if normed:
            x = model.norm(x + attended, f"{layer}.layer_norm_1")
            up, gate = model.linear(x, f"{layer}.mlp.up_gated_layer").chunk(2, dim=-1)
            out = model.linear(up * activation(gate), f"{layer}.mlp.down_layer")
            x = model.norm(x + out, f"{layer}.layer_norm_2")
        else:
            gate, up = model.linear(attended, f"{layer}.mlp.gated_layers").chunk(2, dim=-1)
            out = model.linear(activation(gate) * up, f"{layer}.mlp.wo")
            x = model.norm(attended + out, f"{layer}.mlp.layernorm")
    return x


def _mixed(model: PlainEncoder, name: str, token: torch.Tensor) -> torch.Tensor:
    """The weighted outputs of a token's experts, [hidden]."""
    first = model.tensors[f"{name}.experts.mlp.w1"].unflatten(0, (model.config["num_experts"], -1))
    second = model.tensors[f"{name}.experts.mlp.w2"].unflatten(0, (model.config["num_experts"], -1))
    shares = model.linear(token, f"{name}.router.layer").softmax(dim=-1)
    made = model.tensors[f"{name}.experts.bias"].clone()
    for expert in shares.argsort(descending=True)[: model.config["moe_top_k"]]:
        made += shares[expert] * (gelu(first[expert] @ token) @ second[expert])
    return made


def alibi_slopes(heads: int) -> torch.Tensor:
    """A geometric sequence from 2^(-8 / heads) on, filled up from that of the next power of two."""
    below = 2 ** math.floor(math.log2(heads))
    start = 2 ** -(2 ** -(math.log2(below) - 3))
    slopes = [start * start**i for i in range(below)]
    start = 2 ** -(2 ** -(math.log2(2 * below) - 3))
    more = [start * start**i for i in range(2 * below)][0::2]
    return torch.tensor((slopes + more)[:heads])


Scores = NDArray[np.float32]

DETERMINE = (
    "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
    "providing a prediction of either 'Yes' or 'No'."
)
_PREDICT = "Predict whether passage B contains an answer to query A."


class OneByOne:
    """Has the methods of sentence-transformers' models, which make of each text a vector or one a token."""

    def vectors(self, text: str, role: str) -> torch.Tensor:
        raise NotImplementedError

    @torch.inference_mode()
    def encode_query(self, texts: Texts) -> list[torch.Tensor]:
        return [self.vectors(text, "query") for text in texts]

    @torch.inference_mode()
    def encode_document(self, texts: Texts) -> list[torch.Tensor]:
        return [self.vectors(text, "document") for text in texts]


class PlainEmbedder(OneByOne):
    """Vectors that `embed` makes of each text behind its prompt."""

    def __init__(self, embed: Model, prompts: dict[str, str], normalized: bool = True) -> None:
        self._embed, self._prompts, self._normalized = embed, prompts, normalized

    def vectors(self, text: str, role: str) -> torch.Tensor:
        made = self._embed(self._prompts.get(role, "") + text)
        return normalize(made, dim=-1) if self._normalized else made


def cosines(path: str, queries: Texts, documents: Texts, model: Model) -> Scores:
    embedder = model(path)
    first, second = embedder.encode_query(queries), embedder.encode_document(documents)
    return cosine_similarity(torch.stack(first), torch.stack(second)).numpy()


def maxsims(path: str, queries: Texts, documents: Texts, model: Model) -> Scores:
    encoder = model(path)
    pairs = zip(encoder.encode_query(queries), encoder.encode_document(documents), strict=True)
    found = [float((first @ second.T).amax(1).sum()) for first, second in pairs]
    return np.array(found, dtype=np.float32)


@lru_cache(maxsize=4)
def _loaded(path: str, prefix: str) -> PlainEncoder:
    return PlainEncoder(path, prefix)


def _inputs(model: PlainEncoder, *texts: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids and types of a text or a pair, [tokens] each; pairs and texts that are too long are cut."""
    encoded = model.tokenizer.encode(*texts)
    return torch.tensor(encoded.ids), torch.tensor(encoded.type_ids)


def _embedder(
    path: str, states: States, prefix: str = "", pooling: str = "cls", normalized: bool = True, **prompts: str
) -> PlainEmbedder:
    model = _loaded(path, prefix)

    def embed(text: str) -> torch.Tensor:
        rows = states(model, *_inputs(model, text))
        return rows[0] if pooling == "cls" else rows.mean(0)

    return PlainEmbedder(embed, prompts, normalized)


gte_multilingual = partial(_embedder, states=new_states, prefix="new.")
gte_english = partial(_embedder, states=new_states, prefix="new.", normalized=False)
snowflake = partial(_embedder, states=new_states, query="query: ")
jina_embeddings_v2 = partial(_embedder, states=jina_bert_states, pooling="mean", normalized=False)
nomic_v2_moe = partial(
    _embedder, states=nomic_moe_states, pooling="mean", query="search_query: ", document="search_document: "
)

_USUAL = ("pooler.dense", "classifier")


@torch.inference_mode()
def _classified(
    path: str, queries: Texts, documents: Texts, states: States, prefix: str, layers: tuple[str, str] = _USUAL
) -> Scores:
    """The probabilities that two layers on the first token's state give."""
    model, logits = _loaded(path, prefix), []
    for pair in zip(queries, documents, strict=True):
        first = states(model, *_inputs(model, *pair))[0]
        logits.append(model.linear(torch.tanh(model.linear(first, layers[0])), layers[1]))
    return torch.cat(logits).sigmoid().numpy()


gte_reranker = partial(_classified, states=new_states, prefix="new.")
jina_reranker_v1 = partial(_classified, states=jina_bert_states, prefix="bert.")
jina_reranker_v2 = partial(
    _classified, states=flash_states, prefix="roberta.", layers=("classifier.dense", "classifier.out_proj")
)


class JinaColbert(OneByOne):
    """jinaai/jina-colbert-v1-en as Stanford ColBERT runs it: a marker behind [CLS], queries filled up with
    [MASK], which no token attends to, and documents without punctuation."""

    def __init__(self, path: str) -> None:
        self._model = _loaded(path, "bert.")
        self._said = json.loads(Path(path, "artifact.metadata").read_text(encoding="utf-8"))

    def vectors(self, text: str, role: str) -> torch.Tensor:
        name = "query" if role == "query" else "doc"
        word, longest = self._model.tokenizer.token_to_id, self._said[f"{name}_maxlen"]
        inner = self._model.tokenizer.encode(text, add_special_tokens=False).ids[: longest - 3]
        ids = [word("[CLS]"), word(self._said[f"{name}_token_id"]), *inner, word("[SEP]")]
        attended = len(ids)
        ids += [word("[MASK]")] * (longest - len(ids) if name == "query" else 0)
        tensor = torch.tensor(ids)
        states = jina_bert_states(self._model, tensor, torch.zeros_like(tensor), attended)
        if name == "doc":
            punctuation = {word(character) for character in string.punctuation}
            states = states[[i for i, token in enumerate(ids) if token not in punctuation]]
        return normalize(self._model.linear(states, "linear"), dim=-1)


@torch.inference_mode()
def gte_sparse(path: str, queries: Texts, documents: Texts) -> Scores:
    """gte-multilingual-base: the products of the greatest weights of the words that are in both."""
    model = _loaded(path, "new.")
    left_out = {model.tokenizer.token_to_id(token) for token in ("<s>", "</s>", "<pad>", "<unk>")}

    def weights_of(text: str) -> dict[str, float]:
        ids, types = _inputs(model, text)
        weights = model.linear(new_states(model, ids, types), "classifier").relu()[:, 0]
        greatest: dict[str, float] = {}
        for token, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            if token not in left_out and weight > 0:
                word = model.tokenizer.decode([token], skip_special_tokens=False)
                greatest[word] = max(weight, greatest.get(word, 0.0))
        return greatest

    scores = []
    for query, document in zip(queries, documents, strict=True):
        there = weights_of(document)
        scores.append(sum(weight * there.get(word, 0.0) for word, weight in weights_of(query).items()))
    return np.array(scores, dtype=np.float32)


def _config(path: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
    return loaded


class BothWays:
    """A language model of transformers with a mask of its own, in which every token sees every other."""

    def __init__(self, path: str, kind: str, prefix: str = "", tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer or transformers.PreTrainedTokenizerFast.from_pretrained(path)
        # The checkpoint's own settings of directions are left out.
        others = ("model_type", "is_causal", "use_bidirectional_attention")
        published = {name: each for name, each in _config(path).items() if name not in others}
        self.tensors, config = tensors_of(path), transformers.CONFIG_MAPPING[kind]
        self._model = transformers.MODEL_MAPPING[config](config(**published)).eval()
        inside = self._model.state_dict().keys()
        self._model.load_state_dict({name: self.tensors[prefix + name] for name in inside})

    @torch.inference_mode()
    def states(self, text: str) -> torch.Tensor:
        """[tokens, hidden], of a text with the tokenizer's special tokens."""
        ids = torch.tensor([self.tokenizer(text)["input_ids"]])
        every = torch.zeros(1, 1, ids.shape[1], ids.shape[1])  # added to the logits of attention
        states: torch.Tensor = self._model(input_ids=ids, attention_mask=every).last_hidden_state[0]
        return states


def nemotron_rerank(path: str, queries: Texts, documents: Texts) -> Scores:
    """nvidia/llama-nemotron-rerank-1b-v2: the mean of all states, scored and divided by the temperature."""
    model, config = BothWays(path, "llama", "model."), _config(path)
    scores = []
    for query, document in zip(queries, documents, strict=True):
        states = model.states(f"question:{query} \n \n passage:{document}")
        pooled = {"avg": states.mean(0), "cls": states[0], "last": states[-1]}[config["pooling"]]
        scores.append(float(model.tensors["score.weight"][0] @ pooled) / config["temperature"])
    return np.array(scores, dtype=np.float32)


def nemotron_embed(path: str) -> PlainEmbedder:
    """nvidia/llama-nemotron-embed-1b-v2: the mean of all states, behind "query: " and "passage: "."""
    model = BothWays(path, "llama")
    prompts = {"query": "query: ", "document": "passage: "}
    return PlainEmbedder(lambda text: model.states(text).mean(0), prompts)


def mean_of_both_ways(path: str) -> PlainEmbedder:
    """The mean of the states of any language model that transformers has."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = BothWays(path, _config(path)["model_type"], tokenizer=tokenizer)
    return PlainEmbedder(lambda text: model.states(text).mean(0), {})


def voyage_4_nano(path: str) -> PlainEmbedder:
    """voyageai/voyage-4-nano: each state projected, then their mean."""
    model = BothWays(path, "qwen3", "model.")
    projection = model.tensors["linear.weight"]
    return PlainEmbedder(lambda text: (model.states(text) @ projection.T).mean(0), VOYAGE)


def gte_qwen2(path: str) -> PlainEmbedder:
    """Alibaba-NLP/gte-Qwen2-1.5B-instruct: the state of the end-of-text token behind each text."""
    model = BothWays(path, "qwen2", tokenizer=transformers.Qwen2Tokenizer.from_pretrained(path))
    end = model.tokenizer.eos_token
    return PlainEmbedder(lambda text: model.states(f"{text}{end}")[-1], {"query": INSTRUCTION})


def jina_v5(path: str, task: str = "retrieval") -> PlainEmbedder:
    """jinaai/jina-embeddings-v5-text: a task's adapter in the weights, and the last state."""
    config, tensors = _config(path), tensors_of(path)
    del config["model_type"]
    kind = transformers.CONFIG_MAPPING["eurobert" if config.pop("is_decoder", True) is False else "qwen3"]
    folder = Path(path) / "adapters" / task
    said = json.loads((folder / "adapter_config.json").read_text())
    small = load_file(folder / "adapter_model.safetensors")
    for name in [name for name in small if ".lora_A." in name]:
        changed = f"{name.removeprefix('base_model.model.').partition('.lora_')[0]}.weight"
        added = small[name.replace("lora_A", "lora_B")] @ small[name]
        tensors[changed] = tensors[changed] + added * said["lora_alpha"] / said["r"]
    model = transformers.MODEL_MAPPING[kind](kind(**config)).eval()
    model.load_state_dict(tensors)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)

    def last(text: str) -> torch.Tensor:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        state: torch.Tensor = model(input_ids=ids).last_hidden_state[0, -1]
        return state

    return PlainEmbedder(last, {"query": "Query: ", "document": "Document: "})


def _text_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@torch.inference_mode()
def bge_minicpm(path: str, queries: Texts, documents: Texts, layer: int = 4) -> Scores:
    """BAAI/bge-reranker-v2-minicpm-layerwise: MiniCPM (arXiv 2404.06395), a Llama with scaled embeddings, and
    with scaled sums of each half of a layer, for which its last matrix is scaled here."""
    said, tensors = _config(path), tensors_of(path)
    scale = said["scale_depth"] / said["num_hidden_layers"] ** 0.5
    sizes = {name: each for name, each in said.items() if name not in ("model_type", "architectures")}
    model = transformers.LlamaModel(transformers.LlamaConfig(**sizes | {"num_hidden_layers": layer})).eval()
    scales = {"embed_tokens.weight": said["scale_emb"], "o_proj.weight": scale, "down_proj.weight": scale}
    scaled = {
        name.removeprefix("model."): each * scales.get(".".join(name.split(".")[-2:]), 1)
        for name, each in tensors.items()
        if name.startswith("model.")
    }
    model.load_state_dict({name: scaled[name] for name in model.state_dict()})
    head = tensors[f"lm_head.{layer - said['start_layer']}.linear_head.weight"][0]
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    found = []
    for query, document in zip(queries, documents, strict=True):
        parts = [f"A: {query}", "\n", f"B: {document}", "\n", DETERMINE]
        ids = [tokenizer.bos_token_id, *(token for part in parts for token in _text_ids(tokenizer, part))]
        found.append(float(head @ model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]))
    return np.array(found, dtype=np.float32)


@torch.inference_mode()
def bge_gemma2(
    path: str, queries: Texts, documents: Texts, layer: int = 4, ratio: int = 1, compressed: Any = ()
) -> Scores:
    """BAAI/bge-reranker-v2.5-gemma2-lightweight as FlagEmbedding runs it: attention without a cap on its
    logits, the first of the scores. Behind each of the `compressed` layers the rows of the passage become
    means of `ratio` rows each, the last perhaps of fewer, and the next layer counts positions from 0."""
    published = _config(path) | {"model_type": "gemma2", "attn_logit_softcapping": None}
    tensors, tokenizer = tensors_of(path), transformers.PreTrainedTokenizerFast.from_pretrained(path)
    config = transformers.Gemma2Config(**published | {"layer_types": None})
    model = transformers.Gemma2Model(config).eval()
    model.load_state_dict({name[6:]: each for name, each in tensors.items() if name.startswith("model.")})
    each_layer, kinds = list(model.layers), list(config.layer_types)
    norm, model.norm = model.norm, torch.nn.Identity()
    cap, found = published["final_logit_softcapping"], []
    for query, document in zip(queries, documents, strict=True):
        parts = [
            [tokenizer.bos_token_id, *_text_ids(tokenizer, f"A: {query}"), *_text_ids(tokenizer, "\n")],
            _text_ids(tokenizer, f"B: {document}"),
            [*_text_ids(tokenizer, "\n"), *_text_ids(tokenizer, _PREDICT)],
        ]
        states = model.embed_tokens(torch.tensor([token for part in parts for token in part]))
        before, after = len(parts[0]), len(parts[2])
        for number in range(layer):
            if number in compressed:
                means = [rows.mean(0, keepdim=True) for rows in states[before:-after].split(ratio)]
                states = torch.cat([states[:before], *means, states[-after:]])
            model.layers, config.layer_types = torch.nn.ModuleList([each_layer[number]]), [kinds[number]]
            config.num_hidden_layers = 1
            states = model(inputs_embeds=states[None], use_cache=False).last_hidden_state[0]
        logit = tensors["lm_head.0.linear_head.weight"][0] @ norm(states[-1])
        found.append(float(cap * torch.tanh(logit / cap)))
    return np.array(found, dtype=np.float32)


class Lfm2Colbert(OneByOne):
    """A `MultiVectorEncoder` that is given one text at a time: convolutions may see padding."""

    def __init__(self, path: str) -> None:
        self.model = MultiVectorEncoder(path, device="cpu")

    def vectors(self, text: str, role: str) -> torch.Tensor:
        encode = self.model.encode_query if role == "query" else self.model.encode_document
        rows: torch.Tensor = encode([text])[0]
        return rows


def lfm2_5_colbert(path: str) -> Lfm2Colbert:
    """LiquidAI/LFM2.5-ColBERT-350M: PyLate's late interaction, over `_both_ways_lfm2`."""
    encoder = Lfm2Colbert(path)
    _both_ways_lfm2(encoder.model[0].auto_model)
    return encoder


def lfm2_5_embedding(path: str) -> PlainEmbedder:
    """LiquidAI/LFM2.5-Embedding-350M: the first token's state, behind "query: " and "document: "."""
    model = modeling_lfm2.Lfm2Model.from_pretrained(path).eval()
    _both_ways_lfm2(model)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path)

    def embed(text: str) -> torch.Tensor:
        states: torch.Tensor = model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state
        return states[0, 0]

    return PlainEmbedder(embed, {"query": "query: ", "document": "document: "})


def _both_ways_lfm2(model: Any) -> None:
    """Has transformers' LFM2 read in both directions, as Liquid AI's code does: no causal mask, convolutions
    with as many tokens on either side. Tokens that are not attended to take part in these."""
    model.config.is_causal = False
    for layer in model.layers:
        if layer.is_attention_layer:
            layer.self_attn.is_causal = False
        else:
            layer.conv.forward = _centered(layer.conv)


def _centered(conv: modeling_lfm2.Lfm2ShortConv) -> Callable[..., torch.Tensor]:
    def forward(hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        first, second, states = conv.in_proj(hidden_states).transpose(1, 2).chunk(3, dim=1)
        weight, bias = conv.conv.weight, conv.conv.bias
        mixed = conv1d(first * states, weight, bias, padding=weight.shape[-1] // 2, groups=len(weight))
        out: torch.Tensor = conv.out_proj((second * mixed).transpose(1, 2))
        return out

    return forward
