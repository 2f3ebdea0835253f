"""All layers of an encoder built as BERT's in one call of the library.

A row's result is the same to the last bit as that of the layers' products, attention and norms called one by
one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from maxsimd.engine.ops.cpu.library import kernels
from maxsimd.engine.ops.cpu.linear import Norm, Weights

_HEAD_UNIT = 16  # the kernel takes head sizes that are multiples of this
_LINE = 64  # bytes


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The packed weights of a linear layer, and its float32 bias."""

    weights: Weights
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Queries, keys and values; the product and norm after attention; and the feed-forward: a product with
    GELU, and one with a norm. Either norm is of the sum with what came before."""

    query: Product
    key: Product
    value: Product
    attended: Product
    attended_norm: Norm
    widened: Product
    narrowed: Product
    narrowed_norm: Norm

    @property
    def products(self) -> tuple[Product, ...]:
        return self.query, self.key, self.value, self.attended, self.widened, self.narrowed

    @property
    def norms(self) -> tuple[Norm, Norm]:
        return self.attended_norm, self.narrowed_norm


class Layers:
    """The layers of an encoder with `heads` heads, whose products of queries and keys are multiplied by
    `scaling`, for steps of at most `most_rows` rows.

    Owns the memory in which a step is computed, so it runs one step at a time. Raises ValueError for layers
    that differ in size or precision, or that do not fit together."""

    def __init__(self, layers: Sequence[Layer], heads: int, scaling: float, most_rows: int) -> None:
        sizes = _sizes(layers, heads)
        self.most_rows = most_rows
        self.hidden_size = sizes[0]
        self.dtype = layers[0].query.weights.dtype
        self._kind = layers[0].query.weights.kind
        self._layers = tuple(layers)  # whose tensors the table has the addresses of
        self._heads, self._scaling = heads, scaling
        self._table = torch.tensor([_addresses(layer) for layer in layers])
        epsilons = [[norm.epsilon for norm in layer.norms] for layer in layers]
        self._epsilons = torch.tensor(epsilons, dtype=torch.float32)
        # Not touched before steps of that size come, so no memory is taken before.
        values = kernels().maxsimd_layers_workspace(self._table.data_ptr(), most_rows)
        self._workspace = torch.empty(values + _LINE, dtype=self.dtype)
        self._start = -(-self._workspace.data_ptr() // _LINE) * _LINE

    def run(self, hidden: torch.Tensor, sequences: torch.Tensor, *, firsts_only: bool) -> torch.Tensor:
        """What the last layer gives for `hidden` [rows, hidden]; with `firsts_only` for the first row of each
        sequence alone. May change `hidden` in place, and give it back.

        `sequences`, int64 [n, 4], is as `attention` has it, and the sequences have all rows between them.
        Raises ValueError for hidden states of another shape or precision."""
        rows, size = hidden.shape
        if size != self.hidden_size or hidden.dtype is not self.dtype or not 0 < rows <= self.most_rows:
            raise ValueError(f"layers cannot run {rows} rows of {size} in {hidden.dtype}")
        hidden = hidden.contiguous()
        firsts = hidden.new_empty(len(sequences), size) if firsts_only else None
        kernels().maxsimd_layers(
            self._kind,
            self._table.data_ptr(),
            self._epsilons.data_ptr(),
            len(self._table),
            self._heads,
            self._scaling,
            hidden.data_ptr(),
            rows,
            sequences.data_ptr(),
            len(sequences),
            self._start,
            None if firsts is None else firsts.data_ptr(),
        )
        return hidden if firsts is None else firsts


def _sizes(layers: Sequence[Layer], heads: int) -> tuple[int, int, int]:
    """The size of hidden states, of all heads together, and of the feed-forward, the same for all layers."""
    weights = [product.weights for layer in layers for product in layer.products]
    if len({each.kind for each in weights}) != 1:
        raise ValueError("layers differ in precision")
    found = {_sizes_of(layer) for layer in layers}
    if len(found) != 1:
        raise ValueError("layers differ in size")
    sizes = found.pop()
    if sizes[1] % (heads * _HEAD_UNIT):
        raise ValueError(f"heads of {sizes[1]} / {heads} numbers are not a multiple of {_HEAD_UNIT}")
    return sizes


def _sizes_of(layer: Layer) -> tuple[int, int, int]:
    hidden, wide = layer.query.weights.inputs, layer.widened.weights.columns
    attended = layer.query.weights.columns
    expected = [*[(hidden, attended)] * 3, (attended, hidden), (hidden, wide), (wide, hidden)]
    if [(each.weights.inputs, each.weights.columns) for each in layer.products] != expected:
        raise ValueError("the products of a layer do not fit together")
    for each in layer.products:
        _check_numbers(each.bias, each.weights.columns)
    for norm in layer.norms:
        _check_numbers(norm.weight, hidden)
        _check_numbers(norm.bias, hidden)
    return hidden, attended, wide


def _check_numbers(numbers: torch.Tensor | None, count: int) -> None:
    """Raises ValueError unless the library may read `count` float32 numbers there."""
    if numbers is None:
        return
    if numbers.dtype is not torch.float32 or numbers.shape != (count,) or not numbers.is_contiguous():
        raise ValueError(f"a bias or norm is not {count} float32 numbers")


def _addresses(layer: Layer) -> list[int]:
    """A row of the library's table."""
    row = []
    for product in layer.products:
        weights = product.weights
        row += [weights.packed.data_ptr(), weights.packed.shape[1]]
        row += [_address(weights.scales), _address(weights.sums), _address(product.bias)]
        row += [weights.inputs, weights.columns]
    for norm in layer.norms:
        row += [norm.weight.data_ptr(), norm.bias.data_ptr()]
    return row


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
