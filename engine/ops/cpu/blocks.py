"""Matrices that stay in the blocks of a GGUF file: 4 to 8 bits a weight, where expanding them takes 16 or
more. Our kernels take weights out of their blocks as they multiply."""

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch

from maxsimd.engine.ops.cpu.library import is_available, kernels

# Kinds of blocks by ggml's names: its number for each, and the values and bytes of a block.
KINDS = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "BF16": (30, 1, 2),
}
# The kernels take this many values out at a time.
STRIP = 32
# Values of the rows that are expanded to float32 at a time.
_AT_ONCE = 4 << 20
_FLOAT32 = torch.float32


def can_stay(kind: str, inputs: int) -> bool:
    """Whether the kernels here multiply with rows of `inputs` values in blocks of a kind."""
    return is_available() and kind in KINDS and inputs % max(STRIP, KINDS[kind][1]) == 0


class BlockTensor(torch.Tensor):
    """A matrix [rows, inputs] in blocks. Rows that are chosen or put below each other stay in their blocks,
    and so do those that are said to be of another dtype. A linear layer takes the numbers out in parts, any
    other operation all of them, in that dtype, and keeps them only while it runs. Raises RuntimeError for an
    operation that would change them."""

    kinds: torch.Tensor  # uint8 [rows], by ggml's numbers
    addresses: torch.Tensor  # int64 [rows]
    storages: tuple[torch.Tensor, ...]  # the bytes that the addresses are in

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        kinds: torch.Tensor,
        addresses: torch.Tensor,
        storages: tuple[torch.Tensor, ...],
        inputs: int,
        dtype: torch.dtype,
    ) -> "BlockTensor":
        with torch.inference_mode(False):  # a tensor made in that mode cannot be a parameter
            made: BlockTensor = torch.Tensor._make_wrapper_subclass(cls, (len(kinds), inputs), dtype=dtype)
        made.kinds, made.addresses, made.storages = kinds, addresses, storages
        return made

    @classmethod
    def of(cls, kind: str, stored: torch.Tensor) -> Self:
        """Rows of bytes [rows, bytes] in blocks of a kind, as a float32 matrix."""
        number, values, size = KINDS[kind]
        rows, width = stored.shape
        addresses = stored.data_ptr() + torch.arange(rows, dtype=torch.int64) * stored.stride(0)
        kinds = torch.full((rows,), number, dtype=torch.uint8)
        return cls(kinds, addresses, (stored,), width // size * values, _FLOAT32)

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"BlockTensor({tuple(self.shape)}, {self.dtype})"

    def __setitem__(self, index: Any, value: Any) -> None:
        raise RuntimeError("weights that are in blocks do not change")

    def data_ptr(self) -> int:
        """The address of the first row's blocks, which no kernel for plain numbers can read."""
        raise RuntimeError("weights that are in blocks have no address as numbers")

    def rows(self, index: torch.Tensor) -> "BlockTensor":
        """The rows of an index [n]."""
        return BlockTensor(self.kinds[index], self.addresses[index], self.storages, self.shape[1], self.dtype)

    def joined(self, others: Sequence["BlockTensor"]) -> "BlockTensor":
        """The matrix with others below it."""
        together = (self, *others)
        storages = {id(each): each for one in together for each in one.storages}
        return BlockTensor(
            torch.cat([one.kinds for one in together]),
            torch.cat([one.addresses for one in together]),
            tuple(storages.values()),
            self.shape[1],
            self.dtype,
        )

    def numbers(self) -> torch.Tensor:
        """The matrix without blocks, as a plain tensor."""
        with torch.inference_mode(False), torch.no_grad():  # so that it may be seen otherwise in that mode
            out = torch.empty(self.shape, dtype=self.dtype)
            for first in range(0, len(self), self._rows_at_once):
                part = out[first : first + self._rows_at_once]
                numbers = part if self.dtype is _FLOAT32 else torch.empty(part.shape, dtype=_FLOAT32)
                tables = (self.kinds[first:].data_ptr(), self.addresses[first:].data_ptr())
                kernels().maxsimd_unpack(*tables, *part.shape, numbers.data_ptr())
                if numbers is not part:
                    part.copy_(numbers)
            return out

    @property
    def _rows_at_once(self) -> int:
        return max(1, _AT_ONCE // self.shape[1])

    @property
    def num_bytes(self) -> int:
        """The bytes of the blocks."""
        sizes = {number: self.shape[1] // values * size for number, values, size in KINDS.values()}
        return sum(sizes[number] for number in self.kinds.tolist())

    def is_finite(self) -> bool:
        return all(bool(part.numbers().isfinite().all()) for part in self.parts())

    def parts(self) -> Iterator["BlockTensor"]:
        """Consecutive rows, as many as are expanded at a time."""
        return map(self.rows, torch.arange(len(self)).split(self._rows_at_once))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        kept = _kept(func, args, kwargs)
        if kept is not None:
            return kept
        if func._schema.is_mutable and any(
            isinstance(given, BlockTensor)
            and argument.alias_info is not None
            and argument.alias_info.is_write
            for given, argument in zip(args, func._schema.arguments, strict=False)
        ):
            raise RuntimeError(f"{func} would change weights that are in blocks")
        args, kwargs = torch.utils._pytree.tree_map_only(
            BlockTensor, lambda each: each.numbers(), (args, kwargs)
        )
        return func(*args, **kwargs)


_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default}


def _kept(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation that needs no numbers, or those of few rows; None for another."""
    aten = torch.ops.aten
    matrix: Any = args[0] if args else None
    if func is aten.linear.default and not isinstance(matrix, BlockTensor):
        x, weight, *bias = args
        parts = [torch.nn.functional.linear(x, part.numbers()) for part in weight.parts()]
        product = torch.cat(parts, dim=-1)
        return product if not bias or bias[0] is None else product + bias[0]
    if func is aten.cat.default:
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        widths = {tuple(each.shape[1:]) for each in matrix}
        if dim == 0 and len(widths) == 1 and all(isinstance(each, BlockTensor) for each in matrix):
            return matrix[0].joined(matrix[1:])
        return None
    if not isinstance(matrix, BlockTensor):
        return None
    is_copy = func is aten._to_copy.default and str(kwargs.get("device") or "cpu") == "cpu"
    if func in _SAME or is_copy:
        dtype = kwargs.get("dtype") or matrix.dtype
        if matrix.dtype not in (_FLOAT32, dtype):
            return None  # numbers that have been rounded
        return BlockTensor(matrix.kinds, matrix.addresses, matrix.storages, matrix.shape[1], dtype)
    everything = torch.arange(len(matrix))
    if func is aten.slice.Tensor and (len(args) < 2 or args[1] == 0):
        return matrix.rows(everything[slice(*args[2:])])
    if func is aten.index.Tensor and len(args[1]) == 1 and args[1][0].dim() == 1:
        return matrix.rows(args[1][0])
    if func is aten.select.int and args[1] == 0:
        return matrix.rows(everything[args[2]][None]).numbers()[0]
    if func is aten.embedding.default:
        ids = args[1]
        return matrix.rows(ids.reshape(-1)).numbers().view(*ids.shape, matrix.shape[1])
    if func is aten.empty_like.default:
        return func(torch.empty(matrix.shape, dtype=matrix.dtype, device="meta"), **kwargs)
    return None
