"""All layers with rotary positions in one call, compiled: float32 with float32 weights, bfloat16 with
bfloat16 or int8 weights. A row's bits are those of single calls."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from maxsimd.engine.ops.cpu.blocks import BlockTensor
from maxsimd.engine.ops.cpu.library import address, check_float32, kernels
from maxsimd.engine.ops.cpu.linear import FIRST_GATE, GELU, HEAD_UNIT, Product, aligned_workspace
from maxsimd.engine.ops.elementwise import ACTIVATIONS, Activation


@dataclass(frozen=True, slots=True, eq=False)
class RowNorm:
    """LayerNorm if it `is_centered`, else RMSNorm: float32 weight, and bias or None, [columns]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    epsilon: float
    is_centered: bool


@dataclass(frozen=True, slots=True, eq=False)
class RotaryLayer:
    """A layer: `qkv` makes queries, keys and values, heads of each side by side; `out` follows attention;
    `wide` and `down` are the feed-forward, the first with a gate in the order of `gated_order`, or with exact
    GELU if there is no `gate`. Norms of attention and feed-forward stand `before` them, `after` them, or on
    both sides; if `after` alone, they are of the sums, centered and with a bias. `head_norms` are those of
    queries and keys. `heads` counts queries, and keys and values."""

    qkv: Product
    out: Product
    wide: Product
    down: Product
    gate: Activation | None
    before: tuple[RowNorm | None, RowNorm] | None
    after: tuple[RowNorm, RowNorm] | None
    head_norms: tuple[RowNorm, RowNorm] | None
    heads: tuple[int, int]
    head_dim: int
    scaling: float
    window: int | None

    @property
    def products(self) -> tuple[Product, ...]:
        return self.qkv, self.out, self.wide, self.down

    @property
    def norms(self) -> tuple[RowNorm | None, ...]:
        """Those before attention and feed-forward, then those after them."""
        return (*(self.before or (None, None)), *(self.after or (None, None)))

    @property
    def shape(self) -> tuple[float | int, ...]:
        """Sizes and scaling, which all layers of a call must share. Raises ValueError for products and norms
        that do not fit together or that the kernel does not take."""
        (queries, keys), hidden, inner = self.heads, self.qkv.weights.inputs, self.down.weights.inputs
        expected = [
            (hidden, (queries + 2 * keys) * self.head_dim),
            (queries * self.head_dim, hidden),
            (hidden, inner if self.gate is None else 2 * inner),
            (inner, hidden),
        ]
        if [(each.weights.inputs, each.weights.columns) for each in self.products] != expected:
            raise ValueError("the products of a layer do not fit together")
        if self.head_dim % HEAD_UNIT:
            raise ValueError(f"heads of {self.head_dim} numbers are not a multiple of {HEAD_UNIT}")
        if any(isinstance(each.weights.packed, BlockTensor) for each in self.products):
            raise ValueError("weights in blocks are multiplied layer by layer")
        for each in self.products:
            check_float32(each.weights.columns, each.bias)
        for row_norm in self.norms:
            if row_norm is not None:
                check_float32(hidden, row_norm.weight, row_norm.bias)
        if self.before is None and not all(
            each.is_centered and each.bias is not None for each in self.after or ()
        ):
            raise ValueError("norms of sums must be layer norms with a bias")
        for norm in self.head_norms or ():
            check_float32(self.head_dim, norm.weight)
        return hidden, inner, queries, keys, self.head_dim, self.scaling

    @property
    def addresses(self) -> list[int]:
        """The layer as `maxsimd_rotary_layers` reads it."""
        row = [number for product in self.products for number in product.addresses]
        row.append(GELU if self.gate is None else FIRST_GATE + ACTIVATIONS.index(self.gate))
        for norm in self.norms:
            row += [0, 0, 0] if norm is None else [address(norm.weight), address(norm.bias), norm.is_centered]
        row += [0, 0] if self.head_norms is None else [address(norm.weight) for norm in self.head_norms]
        return [*row, self.window or 0]

    @property
    def epsilons(self) -> list[float]:
        norms = (*self.norms, self.head_norms and self.head_norms[0])
        return [0.0 if norm is None else norm.epsilon for norm in norms]


class RotaryLayers:
    """Layers for steps of at most `most_rows` rows. Owns the memory of a step, so it runs one step at a time.
    Raises ValueError for layers that differ in size or precision, or that the kernel does not take."""

    def __init__(self, layers: Sequence[RotaryLayer], most_rows: int) -> None:
        weights = [product.weights for layer in layers for product in layer.products]
        if len({each.kind for each in weights}) != 1:
            raise ValueError("layers differ in precision")
        if len({layer.shape for layer in layers}) != 1:
            raise ValueError("layers differ in size")
        self.most_rows = most_rows
        self._dtype, self._kind = weights[0].dtype, weights[0].kind
        self._layers = tuple(layers)  # keeps the tensors of the table alive
        self._table = torch.tensor([layer.addresses for layer in layers])
        self._epsilons = torch.tensor([layer.epsilons for layer in layers], dtype=torch.float32)
        values = kernels().maxsimd_rotary_layers_workspace(self._table.data_ptr(), most_rows)
        self._workspace, self._start = aligned_workspace(values, self._dtype)

    def run(
        self,
        hidden: torch.Tensor,
        angles: Sequence[tuple[torch.Tensor, torch.Tensor]],
        sequences: torch.Tensor,
        *,
        causal: bool,
    ) -> torch.Tensor:
        """The result of the last layer for `hidden` [rows, hidden], with the cosines and sines [1, rows,
        head_dim] of each layer. `sequences`, int64 [n, 4], are those of `attention` and have all rows. Raises
        ValueError for rows or angles of another shape or precision."""
        (rows, size), first = hidden.shape, self._layers[0]
        if (
            size != first.qkv.weights.inputs
            or hidden.dtype is not self._dtype
            or not 0 < rows <= self.most_rows
        ):
            raise ValueError(f"layers cannot run {rows} rows of {size} in {hidden.dtype}")
        # Layers of one kind share their angles.
        pairs = {id(each): each for each in angles}
        if any(each.shape != (1, rows, first.head_dim) for pair in pairs.values() for each in pair):
            raise ValueError(f"cosines and sines must be {(1, rows, first.head_dim)}")
        read = {name: [each.to(self._dtype).contiguous() for each in pair] for name, pair in pairs.items()}
        addresses = torch.tensor([[each.data_ptr() for each in read[id(pair)]] for pair in angles])
        hidden = hidden.clone(memory_format=torch.contiguous_format)
        kernels().maxsimd_rotary_layers(
            self._kind,
            self._table.data_ptr(),
            self._epsilons.data_ptr(),
            addresses.data_ptr(),
            len(self._layers),
            *first.heads,
            first.head_dim,
            first.scaling,
            causal,
            hidden.data_ptr(),
            rows,
            sequences.data_ptr(),
            len(sequences),
            self._start,
        )
        return hidden
