"""A decoder layer with RMSNorm before attention and gated feed-forward (Qwen3, Qwen2, Llama, Mistral) in nine
launches: norm; one product for queries, keys and values; norm of heads and rotation; attention; the output
product; sum and norm; one product for gate and up; SwiGLU; and the last product, which adds to the residual.
transformers takes 54 for Qwen3.

The residual is changed where it is only where this layer has made it: what a layer is given stays as it was.
"""

from typing import Any

import torch
from torch import nn

from maxsimd.engine.execution.attention.interface import attend
from maxsimd.engine.execution.fused_layers.linears import JoinedLinear, add_product_, is_plain
from maxsimd.engine.execution.fused_layers.trial import (
    ROWS,
    agrees,
    asks_the_same,
    random_like,
    recorded,
)
from maxsimd.engine.ops.qkv import QKV

_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_HEAD_NORMS = frozenset({"q_norm", "k_norm"})
# How norms call their epsilon.
_EPSILONS = ("variance_epsilon", "eps")


class FusedDecoderLayer(nn.Module):
    """The whole layer. The attention module that it replaces is handed on to packed attention, which tells
    layers apart by it."""

    def __init__(self, replaced: Any, asked: QKV) -> None:
        super().__init__()
        attention, mlp = replaced.self_attn, replaced.mlp
        self.heads = (asked.query.shape[0], asked.key.shape[0])
        self.head_dim = asked.query.shape[-1]
        self.scaling, self.window = asked.scaling, asked.window
        self.input_layernorm = replaced.input_layernorm
        self.qkv = JoinedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.q_norm: Any = getattr(attention, "q_norm", None)
        self.k_norm: Any = getattr(attention, "k_norm", None)
        self.o_proj = attention.o_proj
        self.post_attention_layernorm = replaced.post_attention_layernorm
        self.gate_up = JoinedLinear([mlp.gate_proj, mlp.up_proj])
        self.down_proj = mlp.down_proj
        self._attention = (attention,)  # out of the module tree

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[1, rows, hidden] to [1, rows, hidden]; the cosines and sines of `position_embeddings` are [1,
        rows, head_dim]."""
        from maxsimd.engine.ops.triton.rms_norm import add_rms_norm, rms_norm
        from maxsimd.engine.ops.triton.swiglu import swiglu

        assert position_embeddings is not None
        hidden = hidden_states[0]
        before = self.input_layernorm
        qkv = self._turned(self.qkv(rms_norm(hidden, before.weight, epsilon_of(before))), position_embeddings)
        query, key, value = qkv.transpose(0, 1)[None].split((*self.heads, self.heads[1]), dim=1)
        attended, _ = attend(
            self._attention[0],
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            sliding_window=self.window,
            **kwargs,
        )
        made = self.o_proj(attended.reshape(len(hidden), -1))
        after = self.post_attention_layernorm
        total, normed = add_rms_norm(made, hidden, after.weight, epsilon_of(after))
        return add_product_(total, swiglu(self.gate_up(normed)), self.down_proj)[None]

    def _turned(
        self, product: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Queries, keys and values [rows, all heads, head_dim], where the product wrote them. ValueError for
        positions that are not one for each row."""
        from maxsimd.engine.ops.triton.rotary import HeadNorms, norm_rotary_

        rows = len(product)
        cos, sin = position_embeddings
        if cos.shape != (1, rows, self.head_dim) or sin.shape != cos.shape:
            raise ValueError(f"rotary embeddings of shape {tuple(cos.shape)} are not taken")
        norms = None
        if self.q_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, epsilon_of(self.q_norm))
        qkv = product.view(rows, self.heads[0] + 2 * self.heads[1], self.head_dim)
        norm_rotary_(qkv, cos[0], sin[0], self.heads, norms)
        return qkv


def fused_decoder_layer(layer: Any) -> FusedDecoderLayer | None:
    """What replaces a decoder layer of this structure; None for any other module."""
    if not _has_structure(layer):
        return None
    like = layer.self_attn.q_proj.weight
    # Small: it is normed, so that what the layer adds is as large as ever, and shows in the sum.
    x = random_like((1, ROWS, layer.self_attn.q_proj.in_features), like) / 64

    def run(module: Any, head_dim: int) -> tuple[QKV, torch.Tensor] | None:
        angles = random_like((1, ROWS, head_dim // 2), like, seed=2).float().repeat(1, 1, 2)
        options: dict[str, Any] = {
            "attention_mask": None,
            "position_ids": torch.arange(ROWS, device=like.device)[None],
            "past_key_values": None,
            "use_cache": False,
            "position_embeddings": (angles.cos().to(like.dtype), angles.sin().to(like.dtype)),
        }
        return recorded(lambda attention: module(x, step_attention=attention, **options))

    head_dim = getattr(layer.self_attn, "head_dim", None)
    theirs = run(layer, head_dim) if isinstance(head_dim, int) else None
    if theirs is None or not _has_heads(layer.self_attn, theirs[0]):
        return None
    fused = FusedDecoderLayer(layer, theirs[0])
    ours = run(fused, theirs[0].query.shape[-1])
    right = ours is not None and asks_the_same(ours[0], theirs[0]) and agrees(ours[1], theirs[1])
    return fused if right else None


def epsilon_of(norm: Any) -> float:
    """An RMSNorm's epsilon. AttributeError if it has none."""
    for name in _EPSILONS:
        if hasattr(norm, name):
            return float(getattr(norm, name))
    raise AttributeError(f"{type(norm).__name__} has no epsilon")


def _has_structure(layer: Any) -> bool:
    """Whether a layer has the children of such a decoder layer, and rows that the kernels hold."""
    from maxsimd.engine.ops.triton.rms_norm import is_supported

    if _children(layer) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if _children(attention) - {"rotary_emb"} not in (_PROJECTIONS, _PROJECTIONS | _HEAD_NORMS):
        return False
    if _children(mlp) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    linears = [getattr(attention, name) for name in sorted(_PROJECTIONS)]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in sorted(_HEAD_NORMS & _children(attention))]
    if not all(is_plain(linear) for linear in linears) or not all(_is_norm(norm) for norm in norms):
        return False
    precisions = {module.weight.dtype for module in [*linears, *norms]}
    return len(precisions) == 1 and is_supported(attention.q_proj.in_features)


def _is_norm(module: Any) -> bool:
    """Whether a module has one weight for each column, and an epsilon."""
    parameters = dict(module.named_parameters())
    return parameters.keys() == {"weight"} and parameters["weight"].dim() == 1 and _has_epsilon(module)


def _has_epsilon(module: Any) -> bool:
    return any(hasattr(module, name) for name in _EPSILONS)


def _has_heads(attention: Any, asked: QKV) -> bool:
    """Whether queries, keys and values are heads of one size that stand side by side in the products."""
    from maxsimd.engine.ops.triton.rotary import is_supported

    heads, _, head_dim = asked.query.shape
    kv_heads = asked.key.shape[0]
    norms = [getattr(attention, name) for name in sorted(_HEAD_NORMS & _children(attention))]
    return (
        is_supported(head_dim)
        and asked.value.shape == asked.key.shape
        and attention.q_proj.out_features == heads * head_dim
        and attention.k_proj.out_features == attention.v_proj.out_features == kv_heads * head_dim
        and all(norm.weight.shape == (head_dim,) for norm in norms)
        and len({epsilon_of(norm) for norm in norms}) <= 1
    )


def _children(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in module.named_children())
