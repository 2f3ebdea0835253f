"""What encoders with code of their own compute, read plainly from their published modeling files: one text at
a time, in torch alone, from the tensors under their published names."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer

Tensors = dict[str, torch.Tensor]


class PlainEncoder:
    """A checkpoint's config, tokeniser and tensors, `prefix` taken off their names."""

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
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.config.get("layer_norm_eps") or self.config["layer_norm_epsilon"]
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def embedded(self, ids: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        """The sum of the embeddings of tokens and of their types, [tokens, hidden]."""
        x = self.tensors["embeddings.word_embeddings.weight"][ids]
        learned = self.tensors.get("embeddings.token_type_embeddings.weight")
        return x if learned is None else x + learned[types]

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Softmax attention of [tokens, hidden] each, head by head, with a bias [heads, tokens, tokens]."""
        outputs = []
        for head in range(self.heads):
            part = slice(head * self.dims, (head + 1) * self.dims)
            weights = queries[:, part] @ keys[:, part].T / math.sqrt(self.dims)
            if bias is not None:
                weights = weights + bias[head]
            outputs.append(weights.softmax(dim=-1) @ values[:, part])
        return torch.cat(outputs, dim=-1)

    def turned(self, x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Rotary positions: x [tokens, hidden], whose heads' two halves are turned by position times
        `frequencies` [dims / 2]."""
        angles = torch.arange(len(x)).float()[:, None] * frequencies
        first, second = x.unflatten(-1, (self.heads, 2, -1)).unbind(-2)  # [tokens, heads, dims / 2] each
        sine, cosine = angles.sin()[:, None], angles.cos()[:, None]
        turned = torch.stack([first * cosine - second * sine, second * cosine + first * sine], dim=-2)
        return turned.flatten(-3)


States = Callable[[PlainEncoder, torch.Tensor, torch.Tensor], torch.Tensor]


def _layers(
    model: PlainEncoder,
    x: torch.Tensor,
    names: tuple[str, str, str, str, str],
    inner: Callable[[torch.Tensor, str, int], torch.Tensor],
    frequencies: torch.Tensor | None = None,
) -> torch.Tensor:
    """Layers of attention, with rotary positions if there are `frequencies`, and of what is `inner`, each with
    a norm behind it. `names` are those of the layers and of their parts."""
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
        return model.linear(F.gelu(gate) * up, f"{name}.down_proj")

    names = ("encoder.layer", "attention.qkv_proj", "attention.o_proj", "attn_ln", "mlp_ln")
    x = model.norm(model.embedded(ids, types), "embeddings.LayerNorm")
    return _layers(model, x, names, inner, frequencies)


def flash_states(model: PlainEncoder, ids: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
    """XLM-RoBERTa under the names of jinaai/xlm-roberta-flash-implementation: [tokens, hidden]."""
    first = model.config["pad_token_id"] + 1
    positions = model.tensors["embeddings.position_embeddings.weight"][first : first + len(ids)]

    def inner(x: torch.Tensor, name: str, layer: int) -> torch.Tensor:
        return model.linear(F.gelu(model.linear(x, f"{name}.fc1")), f"{name}.fc2")

    names = ("encoder.layers", "mixer.Wqkv", "mixer.out_proj", "norm1", "norm2")
    return _layers(model, model.norm(model.embedded(ids, types) + positions, "emb_ln"), names, inner)


def nomic_moe_states(model: PlainEncoder, ids: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
    """nomic-embed-text-v2-moe, token by token where it has experts: [tokens, hidden]."""
    frequencies = model.config["rotary_emb_base"] ** -(torch.arange(0, model.dims, 2).float() / model.dims)

    def inner(x: torch.Tensor, name: str, layer: int) -> torch.Tensor:
        if layer % model.config["moe_every_n_layers"] == 1:
            return torch.stack([_mixed(model, name, token) for token in x])
        return model.linear(F.gelu(model.linear(x, f"{name}.fc1")), f"{name}.fc2")

    names = ("encoder.layers", "attn.Wqkv", "attn.out_proj", "norm1", "norm2")
    x = model.norm(model.embedded(ids, types), "emb_ln")
    return _layers(model, x, names, inner, frequencies)


def jina_bert_states(
    model: PlainEncoder, ids: torch.Tensor, types: torch.Tensor, attended: int | None = None
) -> torch.Tensor:
    """JinaBERT, of jinaai/jina-bert-implementation or jina-bert-v2-qk-post-norm: [tokens, hidden]. No token
    attends to those from the `attended`-th on."""
    x = model.norm(model.embedded(ids, types), "embeddings.LayerNorm")
    positions = torch.arange(len(ids))
    apart = (positions[:, None] - positions[None, :]).abs()
    bias = -alibi_slopes(model.heads)[:, None, None] * apart  # [heads, tokens, tokens]
    bias[..., len(ids) if attended is None else attended :] = -torch.inf
    activation = {"geglu": F.gelu, "reglu": F.relu}[model.config["feed_forward_type"]]
    for i in range(model.config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        parts = {
            part: model.linear(x, f"{layer}.attention.self.{part}") for part in ("query", "key", "value")
        }
        normed = f"{layer}.layer_norm_1.weight" in model.tensors
        if normed:
            for part in ("query", "key"):
                parts[part] = model.norm(parts[part], f"{layer}.attention.self.layer_norm_{part[0]}")
        attended = model.linear(model.attend(*parts.values(), bias), f"{layer}.attention.output.dense")
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
    """What a token's experts make of it, [hidden]."""
    first = model.tensors[f"{name}.experts.mlp.w1"].unflatten(0, (model.config["num_experts"], -1))
    second = model.tensors[f"{name}.experts.mlp.w2"].unflatten(0, (model.config["num_experts"], -1))
    shares = model.linear(token, f"{name}.router.layer").softmax(dim=-1)
    made = model.tensors[f"{name}.experts.bias"].clone()
    for expert in shares.argsort(descending=True)[: model.config["moe_top_k"]]:
        made += shares[expert] * (F.gelu(first[expert] @ token) @ second[expert])
    return made


def alibi_slopes(heads: int) -> torch.Tensor:
    """The slopes of the paper's authors' code: a geometric sequence from 2^(-8 / heads) on, for heads that
    are no power of two filled up from that of the next one."""
    below = 2 ** math.floor(math.log2(heads))
    start = 2 ** -(2 ** -(math.log2(below) - 3))
    slopes = [start * start**i for i in range(below)]
    start = 2 ** -(2 ** -(math.log2(2 * below) - 3))
    more = [start * start**i for i in range(2 * below)][0::2]
    return torch.tensor((slopes + more)[:heads])
