"""Runs a layer with rotary positions in about 9 launches, or 12 with norms on both sides; transformers takes
22 to 82.

Norms stand before the parts (Qwen3, Llama, Gemma, ModernBERT), after the sums (jina-embeddings-v3, gte,
nomic-bert), or on both sides (Gemma3). They are LayerNorm or RMSNorm; the feed-forward is gated or plain."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn

from maxsimd.engine.execution.attention.cpu import CompiledMetadata
from maxsimd.engine.execution.fused_layers.parts import (
    ROWS,
    GeluLinear,
    add_product_,
    agrees,
    has_hooks,
    is_plain,
    joined_linear,
    joins_gelu,
    random_like,
    record_attention,
    same_attention_inputs,
)
from maxsimd.engine.execution.linear import CompiledGated, CompiledLinear, Gated, is_exact_gelu
from maxsimd.engine.execution.runner import attend
from maxsimd.engine.ops import elementwise, triton
from maxsimd.engine.ops.cpu.linear import Norm
from maxsimd.engine.ops.cpu.rotary_layers import RotaryLayer, RotaryLayers, RowNorm
from maxsimd.engine.ops.elementwise import ACTIVATIONS, HeadNorms
from maxsimd.engine.ops.qkv import QKV

_Angles: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class _LayerNames(NamedTuple):
    """The children of a layer, with the norms before and after attention and feed-forward."""

    attention: str
    feed_forward: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


class _AttentionNames(NamedTuple):
    """The children of an attention: the products of its input and output, and the norms of heads."""

    qkv: tuple[str, ...]
    out: str
    norms: tuple[str, ...] = ()


class _FeedForwardNames(NamedTuple):
    """The children of a feed-forward: the first products with the gate first, the activation (SiLU is tried
    if it is no child), and the last product."""

    up: tuple[str, ...]
    activation: str | None
    down: str


_LAYERS = (
    # Qwen3, Qwen2, Llama, Mistral, Gemma
    _LayerNames("self_attn", "mlp", before=("input_layernorm", "post_attention_layernorm")),
    # Gemma3
    _LayerNames(
        "self_attn",
        "mlp",
        before=("input_layernorm", "pre_feedforward_layernorm"),
        after=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    # jina-embeddings-v3, gte, nomic-bert
    _LayerNames("self_attn", "mlp", after=("post_attention_layernorm", "post_mlp_layernorm")),
    # ModernBERT
    _LayerNames("attn", "mlp", before=("attn_norm", "mlp_norm")),
    # LFM2
    _LayerNames("self_attn", "feed_forward", before=("operator_norm", "ffn_norm")),
)
_ATTENTIONS = (
    _AttentionNames(("q_proj", "k_proj", "v_proj"), "o_proj"),
    _AttentionNames(("q_proj", "k_proj", "v_proj"), "o_proj", ("q_norm", "k_norm")),
    _AttentionNames(("q_proj", "k_proj", "v_proj"), "out_proj", ("q_layernorm", "k_layernorm")),
    _AttentionNames(("Wqkv",), "Wo"),
)
_FEED_FORWARDS = (
    _FeedForwardNames(("gate_proj", "up_proj"), "act_fn", "down_proj"),
    _FeedForwardNames(("fc1",), "activation_fn", "fc2"),
    _FeedForwardNames(("Wi",), "act", "Wo"),
    _FeedForwardNames(("w1", "w3"), None, "w2"),
)
# Children that do nothing in a step, or that the backbone calls.
_IDLE = (nn.Dropout, nn.Identity)
_IDLE_NAMES = {"rotary_emb"}
# Between the positions of rows in a trial.
_FAR = 1_000_003
# Names of a norm's epsilon.
_EPSILONS = ("variance_epsilon", "eps")


class _RowNorm(nn.Module):
    """The norm of rows [rows, width]: LayerNorm if it `is_centered`, else RMSNorm."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, epsilon: float, *, is_centered: bool
    ) -> None:
        super().__init__()
        self.weight, self.epsilon, self.is_centered = _kernel_weight(weight), epsilon, is_centered
        self.bias = None if bias is None else _kernel_weight(bias)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return elementwise.norm(
            x, self.weight, self.bias, self.epsilon, residual, is_centered=self.is_centered
        )

    def compiled(self) -> RowNorm:
        return RowNorm(self.weight, self.bias, self.epsilon, self.is_centered)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The norm of `x + residual`; before RMSNorm the sum is rounded."""
        return self.forward(x, residual) if self.is_centered else self.with_sum(x, residual)[1]

    def with_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`x + residual`, and its norm."""
        return elementwise.sum_and_norm(
            x, residual, self.weight, self.bias, self.epsilon, is_centered=self.is_centered
        )


def _kernel_weight(weight: nn.Parameter) -> nn.Parameter:
    """A norm's weight for its kernel: the one for CPUs reads float32."""
    if triton.runs_on(weight.device):
        return weight
    return nn.Parameter(weight.detach().float().contiguous(), requires_grad=False)


class PlainWide(nn.Module):
    """The first product of a feed-forward, and its activation in another launch, unless the product computes
    it: with the names of BERT's, where `compile_layers` sees to that."""

    def __init__(self, dense: nn.Linear, activation: nn.Module) -> None:
        super().__init__()
        self.dense, self.intermediate_act_fn = dense, activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] to [rows, inner]."""
        made: torch.Tensor = self.intermediate_act_fn(self.dense(x))
        return made


_Wide: TypeAlias = GeluLinear | PlainWide | Gated


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """The modules of a layer. `before` and `after` are the norms of attention and feed-forward, or empty; a
    norm that does nothing is None."""

    attention: nn.Module
    qkv: tuple[nn.Linear, ...]
    head_norms: tuple[Any, ...]
    out: nn.Linear
    wide: _Wide
    down: nn.Linear
    before: tuple[Any, ...]
    after: tuple[Any, ...]


class LayersTogether:
    """Runs all layers of a step in one call while it is open: the model calls one layer after the other, each
    notes its angles and hands the hidden states on, and the last one runs them all."""

    def __init__(self, layers: RotaryLayers, count: int) -> None:
        self.layers = layers
        self.is_open = False
        self._count = count
        self._angles: list[_Angles] = []
        self._handed_on: torch.Tensor | None = None

    def __enter__(self) -> None:
        self.is_open = True

    def __exit__(self, *error: object) -> None:
        self.is_open, self._angles, self._handed_on = False, [], None

    def take(self, hidden_states: torch.Tensor, angles: _Angles, metadata: CompiledMetadata) -> torch.Tensor:
        """The hidden states [1, rows, hidden] for the next layer, or from the last. Raises RuntimeError if
        the model has changed them since the layer before."""
        if self._angles and hidden_states is not self._handed_on:
            raise RuntimeError("the model changes hidden states between its layers")
        self._angles.append(angles)
        self._handed_on = hidden_states
        if len(self._angles) < self._count:
            return hidden_states
        causal = metadata.layout.causal
        return self.layers.run(hidden_states[0], self._angles, metadata.sequences, causal=causal)[None]


class FusedRotaryLayer(nn.Module):
    """The whole layer. Packed attention tells layers apart by the replaced attention module."""

    def __init__(self, replaced: nn.Module, parts: _Parts, asked: QKV) -> None:
        super().__init__()
        # Models read settings of their layers: ModernBERT chooses positions by the type of attention.
        for name, setting in vars(replaced).items():
            if isinstance(setting, (bool, int, str)) and not name.startswith("_"):
                setattr(self, name, setting)
        self.heads = (asked.query.shape[0], asked.key.shape[0])
        self.head_dim = asked.query.shape[-1]
        self.scaling, self.window = asked.scaling, asked.window
        self.qkv = joined_linear(parts.qkv)
        self.q_norm, self.k_norm = parts.head_norms or (None, None)
        self.out, self.wide, self.down = parts.out, parts.wide, parts.down
        self.is_normed_before, self.is_normed_after = bool(parts.before), bool(parts.after)
        self.before_attention, self.before_feed_forward = parts.before or (None, None)
        self.after_attention, self.after_feed_forward = parts.after or (None, None)
        self.replaced_attention = (parts.attention,)  # out of the module tree
        self.together: LayersTogether | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: None = None,
        use_cache: bool | None = False,
        position_embeddings: _Angles | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """[1, rows, hidden] to [1, rows, hidden]; cosines and sines are [1, rows, head_dim]. The input is not
        changed."""
        assert position_embeddings is not None
        if self.together is not None and self.together.is_open:
            return self.together.take(hidden_states, position_embeddings, kwargs["step_attention"].metadata)
        hidden = hidden_states[0]
        x = hidden if self.before_attention is None else self.before_attention(hidden)
        qkv = self._rotated(self.qkv(x), position_embeddings)
        query, key, value = qkv.transpose(0, 1)[None].split((*self.heads, self.heads[1]), dim=1)
        attended, _ = attend(
            self.replaced_attention[0],
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            sliding_window=self.window,
            **kwargs,
        )
        attended = attended.reshape(len(hidden), -1)
        if not self.is_normed_before:
            x = _normed_sum(self.out, attended, hidden, self.after_attention)
            total = _normed_sum(self.down, self.wide(x), x, self.after_feed_forward)
        elif self.is_normed_after:
            total, x = self.before_feed_forward.with_sum(self.after_attention(self.out(attended)), hidden)
            total += self.after_feed_forward(self.down(self.wide(x)))
        elif isinstance(self.out, CompiledLinear) and isinstance(self.down, CompiledLinear):
            total = self.out.plus(attended, hidden)
            total = self.down.plus(self.wide(self.before_feed_forward(total)), total)
        else:
            total, x = self.before_feed_forward.with_sum(self.out(attended), hidden)
            add_product_(total, self.wide(x), self.down)
        given: torch.Tensor = total[None]
        return given

    def compiled(self) -> RotaryLayer:
        """The layer for a call that runs several. Raises ValueError if it is not made of packed products,
        with a gate or exact GELU in the feed-forward."""
        wide: Any = self.wide
        gate = wide.activation if isinstance(wide, CompiledGated) else None
        if isinstance(wide, PlainWide) and type(wide.intermediate_act_fn) is nn.Identity:
            wide = wide.dense
        others = [each for each in (self.qkv, self.out, self.down) if isinstance(each, CompiledLinear)]
        is_packed = len(others) == 3 and not any(each.gelu for each in others)
        if not is_packed or not (gate or (isinstance(wide, CompiledLinear) and wide.gelu)):
            raise ValueError("its products are not packed, or its activation is another")
        qkv, out, down = (each.product for each in others)

        def norms_of(*modules: Any) -> Any:
            return tuple(None if each is None else each.compiled() for each in modules)

        return RotaryLayer(
            *(qkv, out, wide.product, down, gate),
            norms_of(self.before_attention, self.before_feed_forward) if self.is_normed_before else None,
            norms_of(self.after_attention, self.after_feed_forward) if self.is_normed_after else None,
            None if self.q_norm is None else norms_of(self.q_norm, self.k_norm),
            self.heads,
            self.head_dim,
            self.scaling,
            self.window,
        )

    def _rotated(self, product: torch.Tensor, position_embeddings: _Angles) -> torch.Tensor:
        """Rotates queries and keys in place: [rows, all heads, head_dim]. Raises ValueError unless there is
        one position for each row."""
        rows = len(product)
        cos, sin = position_embeddings
        if cos.shape != (1, rows, self.head_dim) or sin.shape != cos.shape:
            raise ValueError(
                f"rotary embeddings must be of shape {(1, rows, self.head_dim)}, not {tuple(cos.shape)}"
            )
        norms = None
        if self.q_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.epsilon)
        qkv = product.view(rows, self.heads[0] + 2 * self.heads[1], self.head_dim)
        elementwise.norm_rotary_(qkv, cos[0], sin[0], self.heads, norms)
        return qkv


def _normed_sum(layer: nn.Module, x: torch.Tensor, residual: torch.Tensor, norm: Any) -> torch.Tensor:
    """The norm of a linear layer's output for `x` plus the residual."""
    if isinstance(layer, CompiledLinear) and norm.is_centered and norm.bias is not None:
        return layer.product.linear_norm(x, residual, Norm(norm.weight, norm.bias, norm.epsilon))
    normed: torch.Tensor = norm.of_sum(layer(x), residual)
    return normed


def fused_rotary_layer(layer: Any) -> FusedRotaryLayer | None:
    """A fused layer, or None if the structure is unknown or the results differ."""
    parts = _parts_of(layer)
    if parts is None:
        return None
    like = parts.out.weight
    large = random_like((1, ROWS, parts.out.out_features), like)
    # Before a norm, small rows add as much as large ones, which shows in the sum.
    rows = [large, large / 64] if parts.before else [large]

    def run(module: Any, x: torch.Tensor, head_dim: int) -> tuple[QKV, torch.Tensor] | None:
        angles = random_like((1, ROWS, head_dim // 2), like, seed=2).float().repeat(1, 1, 2)
        options: dict[str, Any] = {
            "attention_mask": None,
            # Far apart, to show a layer that does more with positions than rotate.
            "position_ids": torch.arange(ROWS, device=like.device)[None] * _FAR,
            "past_key_values": None,
            "use_cache": False,
            "position_embeddings": (angles.cos().to(like.dtype), angles.sin().to(like.dtype)),
        }
        return record_attention(lambda attention: module(x, step_attention=attention, **options))

    head_dim = getattr(parts.attention, "head_dim", None)
    if not isinstance(head_dim, int):
        return None
    fused: FusedRotaryLayer | None = None
    for x in rows:
        theirs = run(layer, x, head_dim)
        if theirs is None or not _has_heads(parts, theirs[0]):
            return None
        fused = fused or FusedRotaryLayer(layer, parts, theirs[0])
        ours = run(fused, x, theirs[0].query.shape[-1])
        if ours is None or not same_attention_inputs(ours[0], theirs[0]) or not agrees(ours[1], theirs[1]):
            return None
    return fused


def _parts_of(layer: Any) -> _Parts | None:
    """The parts of a layer of known structure whose rows fit the kernels."""
    names = _names_of(layer, _LAYERS)
    if names is None or any(has_hooks(module) for module in layer.modules()):
        return None
    attention, feed_forward = getattr(layer, names.attention), getattr(layer, names.feed_forward)
    of_attention = _names_of(attention, _ATTENTIONS)
    of_feed_forward = _names_of(feed_forward, _FEED_FORWARDS)
    if of_attention is None or of_feed_forward is None:
        return None
    if any({**module._parameters, **module._buffers} for module in (layer, attention, feed_forward)):
        return None  # for example a scale of the layer's output
    qkv, up = _children(attention, of_attention.qkv), _children(feed_forward, of_feed_forward.up)
    out, down = getattr(attention, of_attention.out), getattr(feed_forward, of_feed_forward.down)
    if not all(is_plain(linear) for linear in (*qkv, out, *up, down)):
        return None
    precisions = {parameter.dtype for parameter in layer.parameters()}
    if len(precisions) != 1 or out.out_features > elementwise.LARGEST_WIDTH:
        return None
    activation = of_feed_forward.activation
    wide = _wide_of(up, getattr(feed_forward, activation) if activation else None, down.in_features)
    before = [_norm_of(norm) for norm in _children(layer, names.before)]
    after = [_norm_of(norm) for norm in _children(layer, names.after)]
    head_norms = [_norm_of(norm) for norm in _children(attention, of_attention.norms)]
    # The first layer's input may have been normed before.
    if wide is None or None in (*before[1:], *after, *head_norms):
        return None
    if before and before[0] is None and not isinstance(getattr(layer, names.before[0]), nn.Identity):
        return None
    if any(norm is not None and norm.is_centered for norm in head_norms):
        return None
    return _Parts(attention, qkv, tuple(head_norms), out, wide, down, tuple(before), tuple(after))


_Names = TypeVar("_Names", bound=tuple[Any, ...])


def _names_of(module: nn.Module, known: Sequence[_Names]) -> _Names | None:
    """The known names of a module's children; its other children do nothing in a step."""
    children = dict(module.named_children())
    working = {
        name for name, child in children.items() if type(child) not in _IDLE and name not in _IDLE_NAMES
    }
    for names in known:
        own = {name for field in names for name in ((field,) if isinstance(field, str) else field or ())}
        if working <= own <= children.keys():
            return names
    return None


def _children(module: nn.Module, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(getattr(module, name) for name in names)


def _wide_of(up: tuple[nn.Linear, ...], activation: nn.Module | None, inner: int) -> _Wide | None:
    """The first products and the activation of a feed-forward whose last product takes `inner` columns; None
    for an unknown activation or other widths."""
    made = sum(linear.out_features for linear in up)
    if made == inner and len(up) == 1 and activation is not None:
        joins = is_exact_gelu(activation) and joins_gelu(up[0])
        return GeluLinear(up[0]) if joins else PlainWide(up[0], activation)
    name = _activation_name(activation)
    return Gated(joined_linear(up), name) if made == 2 * inner and name is not None else None


def _activation_name(module: nn.Module | None) -> Any:
    """The kernel's name for an activation, by comparing outputs; None if it has none."""
    if module is None:
        return "silu"
    x = torch.linspace(-8, 8, 1001, dtype=torch.float32)
    with torch.inference_mode():
        found = module(x)
    made = {name: elementwise.activated_reference(x, name) for name in ACTIVATIONS}
    # GELU and its approximation differ by 5e-4.
    return next((name for name in made if torch.allclose(found, made[name], atol=1e-5)), None)


def _norm_of(module: Any) -> _RowNorm | None:
    """Our version of a LayerNorm, or of an RMSNorm by its weight or its weight plus one; None for others."""
    if type(module) is nn.LayerNorm:
        if module.weight is None or module.weight.dim() != 1:
            return None
        return _RowNorm(module.weight, module.bias, module.eps, is_centered=True)
    parameters = dict(module.named_parameters())
    epsilon = next((float(getattr(module, name)) for name in _EPSILONS if hasattr(module, name)), None)
    if parameters.keys() != {"weight"} or parameters["weight"].dim() != 1 or epsilon is None:
        return None
    weight = parameters["weight"]
    # With a mean that is not zero, to tell a norm that subtracts it.
    x = random_like((ROWS, len(weight)), weight) + 1
    plus_one = nn.Parameter(weight.detach().float() + 1, requires_grad=False)
    with torch.inference_mode():
        found = module(x)
        made = {
            candidate: elementwise.norm_reference(x, candidate, None, epsilon, is_centered=False)
            for candidate in (weight, plus_one)
        }
    # Beside a few large weights, both may agree in 16 bits.
    nearest = min(made, key=lambda candidate: float((made[candidate].float() - found.float()).norm()))
    return _RowNorm(nearest, None, epsilon, is_centered=False) if agrees(made[nearest], found) else None


def _has_heads(parts: _Parts, asked: QKV) -> bool:
    """Whether queries, keys and values are heads of one size, side by side in the products."""
    heads, _, head_dim = asked.query.shape
    kv_heads = asked.key.shape[0]
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    found = [linear.out_features for linear in parts.qkv]
    return (
        elementwise.is_rotary_supported(head_dim)
        and asked.value.shape == asked.key.shape
        and found == (widths if len(found) == 3 else [sum(widths)])
        and all(norm.weight.shape == (head_dim,) for norm in parts.head_norms)
        and len({norm.epsilon for norm in parts.head_norms}) <= 1
    )
