"""Linear layers with the operation after them, all layers of a BERT-like encoder in one call, and its
embeddings, compiled: float32 with float32 weights, bfloat16 with bfloat16 or int8 weights.

A row's bits do not depend on other rows in the call, on the number of threads, or on whether layers run in
one call."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from maxsimd.engine.ops.cpu.blocks import BlockTensor
from maxsimd.engine.ops.cpu.library import (
    INT8,
    KINDS,
    address,
    check_float32,
    kernels,
    may_use,
    strided,
    with_close_columns,
)
from maxsimd.engine.ops.cpu.memory import empty_in_large_pages
from maxsimd.engine.ops.elementwise import ACTIVATIONS, Activation

LANES = 16  # columns of a packed block; columns are padded to a multiple of this many units
PANEL = 32  # layers are padded to a multiple of this many columns
INT8_MAX = 127
# Numbers of activations in the kernel: 0 for none, 1 for GELU, then gates in the order of ACTIVATIONS.
GELU, FIRST_GATE = 1, 2


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
    return _packed(weight.float(), torch.float32)


def pack_bfloat16(weight: torch.Tensor) -> Weights:
    """Packs [columns, inputs] for bfloat16 inputs; weights in blocks stay in them."""
    if isinstance(weight, BlockTensor):
        return Weights(weight, weight.shape[1], len(weight), torch.bfloat16)
    return _packed(weight.to(torch.bfloat16), torch.bfloat16)


def pack_int8(weight: torch.Tensor) -> Weights:
    """Rounds [columns, inputs] to int8, each column with its own scale, and packs it for bfloat16 inputs."""
    scales = weight.float().abs().amax(dim=1) / INT8_MAX
    # A column of zeros has the scale 0, and may be divided by any number.
    rounded = (weight.float() / scales.clamp(min=1e-30)[:, None]).round().to(torch.int8)
    return _packed(rounded, torch.bfloat16, scales, rounded.sum(dim=1, dtype=torch.int32))


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A layer norm: float32 weight and bias [columns], and epsilon."""

    weight: torch.Tensor
    bias: torch.Tensor
    epsilon: float

    def checked(self, columns: int) -> tuple[int, int, float]:
        """The addresses of weight and bias, and epsilon. Raises ValueError unless it is of `columns`."""
        check_float32(columns, self.weight, self.bias)
        return self.weight.data_ptr(), self.bias.data_ptr(), self.epsilon


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A linear layer: its packed weights, and its float32 bias. Inputs have the dtype that the weights were
    packed for. With int8 weights, each row is rounded to int8 with its own scale."""

    weights: Weights
    bias: torch.Tensor | None

    @property
    def addresses(self) -> list[int]:
        """The product as tables of layers have it; for packed weights."""
        weights = self.weights
        read = [
            weights.packed.data_ptr(),
            weights.packed.shape[1],
            address(weights.scales),
            address(weights.sums),
        ]
        return [*read, address(self.bias), weights.inputs, weights.columns]

    def linear(self, x: torch.Tensor, gelu: bool = False) -> torch.Tensor:
        """`x @ weight.T + bias`, then exact GELU if `gelu` is set: [..., inputs] -> [..., columns]."""
        return self._run(x, int(gelu))

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """`activation(gate) * up` of a layer that makes both: [..., inputs] -> [..., columns / 2]. Weights
        and bias are in the order of `gated_order`."""
        if self.weights.columns % PANEL:
            raise ValueError(f"a gated layer of {self.weights.columns} columns is not a multiple of {PANEL}")
        return self._run(x, FIRST_GATE + ACTIVATIONS.index(activation))

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`linear(x) + residual`, rounded once; `residual` is [..., columns] with the rows and dtype of x."""
        return self._run(x, added=residual)

    def linear_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        """`norm(linear(x) + residual)`; `residual` is [..., columns] with the rows and dtype of x."""
        return self._run(x, residual=residual, norm=norm)

    def _run(
        self,
        x: torch.Tensor,
        activation: int = 0,
        added: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        norm: Norm | None = None,
    ) -> torch.Tensor:
        weights = self.weights
        rows = as_rows(x, weights.inputs, weights.dtype)
        columns = weights.columns // 2 if activation >= FIRST_GATE else weights.columns
        added = None if added is None else rows_like(added, x, weights.columns)
        residual = None if residual is None else rows_like(residual, x, weights.columns)
        of_norm = (0, 0, 0.0) if norm is None else norm.checked(weights.columns)
        out = torch.empty(len(rows), columns, dtype=weights.dtype)
        x_args, packed = (*strided(rows), *rows.shape), weights.packed
        added_args = (*strided(added), *strided(residual), *of_norm)
        end = (address(self.bias), weights.columns, activation, *added_args, out.data_ptr())
        if isinstance(packed, BlockTensor):
            blocks = (packed.kinds.data_ptr(), packed.addresses.data_ptr())
            kernels().maxsimd_linear_blocks(*x_args, *blocks, *end)
        else:
            others = (packed.shape[1], address(weights.scales), address(weights.sums))
            kernels().maxsimd_linear(weights.kind, *x_args, packed.data_ptr(), *others, *end)
        return out.view(*x.shape[:-1], columns)


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


def product_peak(kind: int) -> float:
    """Operations a second of products of a kind (`Weights.kind`) whose operands are in registers, on all
    threads: a multiplication and an addition are two. Layers have to load theirs, and stay below."""
    peak: float = kernels().maxsimd_product_peak(kind)
    return peak


def as_rows(x: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """x as [rows, columns], each row contiguous."""
    if x.dtype is not dtype:
        raise TypeError(f"a layer that reads {dtype} was given {x.dtype}")
    return with_close_columns(x.reshape(-1, columns))


def rows_like(added: torch.Tensor, x: torch.Tensor, columns: int) -> torch.Tensor:
    """An addend to the output for x, as rows. Raises ValueError unless it has the rows of x."""
    if added.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"rows of {tuple(added.shape)} cannot be added to those of {tuple(x.shape)}")
    return as_rows(added, columns, x.dtype)


def _packed(weight: torch.Tensor, dtype: torch.dtype, *scales_and_sums: torch.Tensor) -> Weights:
    """Weights [columns, inputs] in units of 32 bits, padded to whole tiles, in blocks of 16 columns."""
    columns, inputs = weight.shape
    per_unit = 4 // weight.element_size()
    filled = torch.nn.functional.pad(weight, (0, -inputs % (LANES * per_unit), 0, -columns % PANEL))
    units = filled.contiguous().view(torch.int32)  # [columns, units]
    packed = empty_in_large_pages((len(units) // LANES, units.shape[1], LANES), torch.int32)
    kernels().maxsimd_pack(units.data_ptr(), *units.shape, packed.data_ptr())
    return Weights(packed, inputs, columns, dtype, *scales_and_sums)


HEAD_UNIT = 16  # the kernel takes head sizes that are multiples of this
_LINE = 64  # bytes


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

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes of hidden states, of all heads together, and of the feed-forward. Raises ValueError for
        products and norms that do not fit together."""
        hidden, wide = self.query.weights.inputs, self.widened.weights.columns
        attended = self.query.weights.columns
        expected = [*[(hidden, attended)] * 3, (attended, hidden), (hidden, wide), (wide, hidden)]
        if [(each.weights.inputs, each.weights.columns) for each in self.products] != expected:
            raise ValueError("the products of a layer do not fit together")
        for each in self.products:
            check_float32(each.weights.columns, each.bias)
        for norm in self.norms:
            norm.checked(hidden)
        return hidden, attended, wide

    @property
    def addresses(self) -> list[int]:
        """The layer as `maxsimd_layers` reads it."""
        row = [number for product in self.products for number in product.addresses]
        for norm in self.norms:
            row += [norm.weight.data_ptr(), norm.bias.data_ptr()]
        return row


def aligned_workspace(values: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Memory for so many values, and the address where its first cache line starts. Takes no memory before
    steps touch it."""
    memory = empty_in_large_pages((values + _LINE,), dtype)
    return memory, -(-memory.data_ptr() // _LINE) * _LINE


class Layers:
    """The layers of an encoder, for steps of at most `most_rows` rows. Owns the memory of a step, so it runs
    one step at a time. Raises ValueError for layers that differ in size or precision, or do not fit
    together."""

    def __init__(self, layers: Sequence[Layer], heads: int, scaling: float, most_rows: int) -> None:
        weights = [product.weights for layer in layers for product in layer.products]
        if len({each.kind for each in weights}) != 1:
            raise ValueError("layers differ in precision")
        if len({layer.sizes for layer in layers}) != 1:
            raise ValueError("layers differ in size")
        self.hidden_size, attended, _ = layers[0].sizes
        if attended % (heads * HEAD_UNIT):
            raise ValueError(f"heads of {attended} / {heads} numbers are not a multiple of {HEAD_UNIT}")
        self.most_rows = most_rows
        self.dtype, self._kind = weights[0].dtype, weights[0].kind
        self._layers = tuple(layers)  # keeps the tensors of the table alive
        self._heads, self._scaling = heads, scaling
        self._table = torch.tensor([layer.addresses for layer in layers])
        epsilons = [[norm.epsilon for norm in layer.norms] for layer in layers]
        self._epsilons = torch.tensor(epsilons, dtype=torch.float32)
        values = kernels().maxsimd_layers_workspace(self._table.data_ptr(), most_rows)
        self._workspace, self._start = aligned_workspace(values, self.dtype)

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
    # As the kernel reads them.
    word_ids, position_ids = (ids.to(torch.int64).contiguous() for ids in (word_ids, position_ids))
    type_ids = None if type_ids is None else type_ids.to(torch.int64).contiguous()
    rows, columns = word_ids.shape[0], words.shape[1]
    out = words.new_empty(rows, columns)
    failed = kernels().maxsimd_embed(
        KINDS[words.dtype],
        word_ids.data_ptr(),
        address(type_ids),
        position_ids.data_ptr(),
        rows,
        *(number for table in (words, types, positions) for number in (table.data_ptr(), len(table))),
        columns,
        *norm.checked(columns),
        out.data_ptr(),
    )
    if failed:
        raise IndexError("a token, type or position is not in its table of embeddings")
    return out
