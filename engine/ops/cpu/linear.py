"""Linear layers with the operation after them, all layers of a BERT-like encoder in one call, and its
embeddings, compiled: float32 with float32 weights, bfloat16 with bfloat16 or int8 weights.

A row's bits do not depend on other rows in the call, on the number of threads, or on whether layers run in
one call."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from maxsimd.engine.ops.cpu.blocks import BlockTensor
from maxsimd.engine.ops.cpu.library import INT8, KINDS, address, check_float32, kernels, may_use
from maxsimd.engine.ops.elementwise import ACTIVATIONS, Activation

LANES = 16  # columns of a packed block; columns are padded to a multiple of this many units
PANEL = 32  # layers are padded to a multiple of this many columns
INT8_MAX = 127
# Numbers of activations in the kernel: 0 for none, 1 for GELU, then gates in the order of ACTIVATIONS.
_FIRST_GATE = 2


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The packed weights [columns, inputs] of a layer, and the dtype of its inputs and outputs. int8 weights
    have a scale for each column, and a sum, which cancels the offset of unsigned activations."""

    # int32 [columns / 16, units, 16], padded with zeros, or [columns, inputs] in blocks
    packed: torch.Tensor | BlockTensor
    inputs: int
    columns: int
    dtype: torch.dtype
    scales: torch.Tensor | None = None  # float32 [columns]
    sums: torch.Tensor | None = None  # int32 [columns]

    @property
    def kind(self) -> int:
        return KINDS[self.dtype] if self.scales is None else INT8


def pack_float32(weight: torch.Tensor) -> Weights:
    """Packs [columns, inputs] for float32 inputs."""
    columns, inputs = weight.shape
    return Weights(_pack(weight.float()), inputs, columns, torch.float32)


def pack_bfloat16(weight: torch.Tensor) -> Weights:
    """Packs [columns, inputs] for bfloat16 inputs; weights in blocks stay in them."""
    columns, inputs = weight.shape
    if isinstance(weight, BlockTensor):
        return Weights(weight, inputs, columns, torch.bfloat16)
    return Weights(_pack(weight.to(torch.bfloat16)), inputs, columns, torch.bfloat16)


def pack_int8(weight: torch.Tensor) -> Weights:
    """Rounds [columns, inputs] to int8, each column with its own scale, and packs it for bfloat16 inputs."""
    columns, inputs = weight.shape
    scales = weight.float().abs().amax(dim=1) / INT8_MAX
    # A column of zeros has the scale 0, and may be divided by any number.
    rounded = (weight.float() / scales.clamp(min=1e-30)[:, None]).round().to(torch.int8)
    sums = rounded.sum(dim=1, dtype=torch.int32)
    return Weights(_pack(rounded), inputs, columns, torch.bfloat16, scales, sums)


# Address and row stride of the residual, addresses of the norm's weight and bias, epsilon.
_NormArgs = tuple[int | None, int, int | None, int | None, float]
_NO_NORM: _NormArgs = (None, 0, None, None, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A layer norm: float32 weight and bias [columns], and epsilon."""

    weight: torch.Tensor
    bias: torch.Tensor
    epsilon: float


def linear(x: torch.Tensor, weights: Weights, bias: torch.Tensor | None, gelu: bool = False) -> torch.Tensor:
    """`x @ weight.T + bias`, then exact GELU if `gelu` is set: [..., inputs] -> [..., columns]. x has the
    dtype that the weights were packed for, the bias is float32. With int8 weights, each row of x is rounded
    to int8 with its own scale."""
    return _linear(x, weights, bias, int(gelu))


def linear_gated(
    x: torch.Tensor, weights: Weights, bias: torch.Tensor | None, activation: Activation
) -> torch.Tensor:
    """`activation(gate) * up` of a layer that makes both: [..., inputs] -> [..., columns / 2]. Weights and
    bias are in the order of `gated_order`."""
    if weights.columns % PANEL:
        raise ValueError(f"a gated layer of {weights.columns} columns is not a multiple of {PANEL}")
    return _linear(x, weights, bias, _FIRST_GATE + ACTIVATIONS.index(activation))


def linear_added(
    x: torch.Tensor, weights: Weights, bias: torch.Tensor | None, added: torch.Tensor
) -> torch.Tensor:
    """`linear(x) + added`, rounded once; `added` is [..., columns] with the rows and the dtype of x."""
    rows = _rows_like(added, x, weights)
    return _linear(x, weights, bias, 0, (rows.data_ptr(), rows.stride(0)))


def linear_norm(
    x: torch.Tensor, residual: torch.Tensor, weights: Weights, bias: torch.Tensor | None, norm: Norm
) -> torch.Tensor:
    """`norm(linear(x) + residual)`; `residual` is [..., columns] with the rows and the dtype of x."""
    rows = _rows_like(residual, x, weights)
    check_float32(weights.columns, norm.weight, norm.bias)
    norm_args = (rows.data_ptr(), rows.stride(0), norm.weight.data_ptr(), norm.bias.data_ptr(), norm.epsilon)
    return _linear(x, weights, bias, 0, norm_args=norm_args)


def gated_order(width: int) -> torch.Tensor:
    """The order of the 2 `width` columns of a gated layer, gates first, for the kernel: alternately 16 gates
    and the 16 columns that they multiply. Raises ValueError for a width that is no multiple of 16."""
    if width % LANES:
        raise ValueError(f"a gated layer of {width} columns is not a multiple of {LANES}")
    return torch.arange(2 * width).view(2, -1, LANES).transpose(0, 1).reshape(-1)


def use_amx(wanted: bool) -> bool:
    """Switches AMX tiles for bfloat16 and int8 products on (the default if the processor has them) or off;
    returns whether they are used now. For tests."""
    return bool(kernels().maxsimd_use_amx(wanted and may_use("all")))


def _linear(
    x: torch.Tensor,
    weights: Weights,
    bias: torch.Tensor | None,
    activation: int,
    added: tuple[int | None, int] = (None, 0),
    norm_args: _NormArgs = _NO_NORM,
) -> torch.Tensor:
    rows = _as_rows(x, weights.inputs, weights.dtype)
    columns = weights.columns // 2 if activation >= _FIRST_GATE else weights.columns
    out = torch.empty(len(rows), columns, dtype=weights.dtype)
    x_args = (rows.data_ptr(), rows.stride(0), len(rows), weights.inputs)
    end = (address(bias), weights.columns, activation, *added, *norm_args, out.data_ptr())
    packed = weights.packed
    if isinstance(packed, BlockTensor):
        blocks = (packed.kinds.data_ptr(), packed.addresses.data_ptr())
        kernels().maxsimd_linear_blocks(*x_args, *blocks, *end)
    else:
        others = (packed.shape[1], address(weights.scales), address(weights.sums))
        kernels().maxsimd_linear(weights.kind, *x_args, packed.data_ptr(), *others, *end)
    return out.view(*x.shape[:-1], columns)


def _rows_like(added: torch.Tensor, x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """An addend to the output for x, as rows. Raises ValueError unless it has the rows of x."""
    if added.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"rows of {tuple(added.shape)} cannot be added to those of {tuple(x.shape)}")
    return _as_rows(added, weights.columns, weights.dtype)


def _as_rows(x: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """x as [rows, columns], each row contiguous."""
    if x.dtype is not dtype:
        raise TypeError(f"a layer whose weights were packed for {dtype} was given {x.dtype}")
    rows = x.reshape(-1, columns)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """Weights [columns, inputs] in units of 32 bits, padded to whole tiles, in blocks of 16 columns: int32
    [blocks, units, 16]."""
    columns, inputs = weight.shape
    per_unit = 4 // weight.element_size()
    filled = torch.nn.functional.pad(weight, (0, -inputs % (LANES * per_unit), 0, -columns % PANEL))
    units = filled.contiguous().view(torch.int32)  # [columns, units]
    columns, count = units.shape
    packed = torch.empty(columns // LANES, count, LANES, dtype=torch.int32)
    kernels().maxsimd_pack(units.data_ptr(), columns, count, packed.data_ptr())
    return packed


_HEAD_UNIT = 16  # the kernel takes head sizes that are multiples of this
_LINE = 64  # bytes


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The packed weights of a linear layer, and its float32 bias."""

    weights: Weights
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The products and norms of a BERT layer: `attended` after attention, `widened` with GELU and `narrowed`
    in the feed-forward. Norms are of the sum with the residual."""

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
    """The layers of an encoder, for steps of at most `most_rows` rows. Owns the memory of a step, so it runs
    one step at a time. Raises ValueError for layers that differ in size or precision, or do not fit
    together."""

    def __init__(self, layers: Sequence[Layer], heads: int, scaling: float, most_rows: int) -> None:
        sizes = _sizes(layers, heads)
        self.most_rows = most_rows
        self.hidden_size = sizes[0]
        self.dtype = layers[0].query.weights.dtype
        self._kind = layers[0].query.weights.kind
        self._layers = tuple(layers)  # keeps the tensors of the table alive
        self._heads, self._scaling = heads, scaling
        self._table = torch.tensor([_addresses(layer) for layer in layers])
        epsilons = [[norm.epsilon for norm in layer.norms] for layer in layers]
        self._epsilons = torch.tensor(epsilons, dtype=torch.float32)
        # Takes no memory before steps of that size touch it.
        values = kernels().maxsimd_layers_workspace(self._table.data_ptr(), most_rows)
        self._workspace = torch.empty(values + _LINE, dtype=self.dtype)
        self._start = -(-self._workspace.data_ptr() // _LINE) * _LINE

    def run(self, hidden: torch.Tensor, sequences: torch.Tensor, *, firsts_only: bool) -> torch.Tensor:
        """The result of the last layer for `hidden` [rows, hidden]; with `firsts_only` for the first row of
        each sequence alone. May change `hidden` in place and return it. `sequences`, int64 [n, 4], are those
        of `attention` and have all rows. Raises ValueError for hidden states of another shape or
        precision."""
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
            address(firsts),
        )
        return hidden if firsts is None else firsts


def _sizes(layers: Sequence[Layer], heads: int) -> tuple[int, int, int]:
    """The sizes of hidden states, of all heads together, and of the feed-forward, the same in all layers."""
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
        check_float32(each.weights.columns, each.bias)
    for norm in layer.norms:
        check_float32(hidden, norm.weight, norm.bias)
    return hidden, attended, wide


def _addresses(layer: Layer) -> list[int]:
    row = []
    for product in layer.products:
        weights = product.weights
        row += [weights.packed.data_ptr(), weights.packed.shape[1]]
        row += [address(weights.scales), address(weights.sums), address(product.bias)]
        row += [weights.inputs, weights.columns]
    for norm in layer.norms:
        row += [norm.weight.data_ptr(), norm.bias.data_ptr()]
    return row


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """The embeddings of words, types and positions, [rows, columns] each, contiguous, all float32 or all
    bfloat16; and the norm of their sum."""

    words: torch.Tensor
    types: torch.Tensor
    positions: torch.Tensor
    norm: Norm


def embed(
    tables: Tables, word_ids: torch.Tensor, position_ids: torch.Tensor, type_ids: torch.Tensor | None
) -> torch.Tensor:
    """Embeddings [rows, columns] in the dtype of the tables, for ids [rows]; without type ids of type 0.
    Raises IndexError for an id that is not in its table."""
    words, types, positions, norm = tables.words, tables.types, tables.positions, tables.norm
    word_ids, position_ids = _numbers(word_ids), _numbers(position_ids)
    type_ids = None if type_ids is None else _numbers(type_ids)
    rows, columns = word_ids.shape[0], words.shape[1]
    out = words.new_empty(rows, columns)
    failed = kernels().maxsimd_embed(
        KINDS[words.dtype],
        word_ids.data_ptr(),
        address(type_ids),
        position_ids.data_ptr(),
        rows,
        words.data_ptr(),
        words.shape[0],
        types.data_ptr(),
        types.shape[0],
        positions.data_ptr(),
        positions.shape[0],
        columns,
        norm.weight.data_ptr(),
        norm.bias.data_ptr(),
        norm.epsilon,
        out.data_ptr(),
    )
    if failed:
        raise IndexError("a token, type or position is not in its table of embeddings")
    return out


def _numbers(ids: torch.Tensor) -> torch.Tensor:
    """Ids as the kernel reads them."""
    return ids.to(torch.int64).contiguous()
