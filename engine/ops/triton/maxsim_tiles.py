"""The tiles of MaxSim by device, precision and length of queries, and among how many programs a document is
divided.

Chosen by the compiled kernels' registers and shared memory: `maxsimd.bench.gpu.compiled` prints them."""

import functools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.ops.triton.launch import Limits, next_power_of_two


@dataclass(frozen=True, slots=True)
class Tiles:
    """The work of a program: `query` query tokens and `document` document tokens of `dim` dimensions at a
    time, its warps, and the tiles of the document that are loaded ahead. `fold` 2 keeps one maximum for two
    rows of a tile in the same thread."""

    query: int
    document: int
    dim: int
    warps: int
    stages: int
    fold: int


# Queries up to these lengths, and longer ones, have tiles of their own, where the device has room for them.
QUERY_CLASSES = (32, 64, 128)

# By tensor cores and shared memory: the tiles for queries up to their `query` tokens, the last for longer
# ones. For short queries, more programs on a multiprocessor help more than more tiles on their way: their
# loads then fill the memory's bandwidth. On an H200, comparing one tile while multiplying the next was
# slower: it needs registers for both (docs/performance.md).
#
# Hopper multiplies 64 rows at least, with operands from shared memory: document tokens are its rows. Products
# with 256 columns read the fewest bytes of shared memory for what they multiply; those of 64 columns would be
# held up by it.
_HOPPER = (
    Tiles(32, 64, 128, 4, 2, 2),
    Tiles(64, 64, 128, 4, 2, 2),
    Tiles(128, 64, 128, 4, 3, 2),
    Tiles(256, 64, 128, 4, 3, 2),
)
# int8 documents are read in half the time: three tiles on their way were faster.
_HOPPER_UNPACKED = tuple(replace(tiles, stages=3) for tiles in _HOPPER[:3])
# A thread gets a row of products, whose two halves are of the same document token.
_BLACKWELL = (Tiles(32, 64, 128, 4, 3, 1), Tiles(64, 64, 128, 4, 3, 1), Tiles(128, 64, 128, 8, 3, 1))
_AMPERE = (Tiles(32, 64, 128, 4, 3, 2), Tiles(64, 64, 128, 4, 3, 2), Tiles(128, 64, 128, 4, 3, 2))
_SMALL = _AMPERE[:2]
# Tensor cores do not multiply float32 exactly: threads do, and need registers for both operands.
_FLOAT32 = Tiles(32, 64, 32, 4, 2, 1)

_KIB = 1024
# Bytes of shared memory that a program may take beyond those of its tiles.
_BESIDE_TILES = 4 * _KIB
# Registers hold all bytes that a thread unpacks of a tile of int8 numbers.
_MOST_UNPACKED = 64 * 512

# Row numbers are 32-bit integers in the kernel, and so are those of the tiles behind a document's end.
MOST_ROWS = (1 << 31) - (1 << 20)

MAX_SPLIT_K = 64
# A split of fewer tiles takes less time than the second launch that splits need.
_FEWEST_TILES_OF_SPLIT = 4


# Choosing takes the host about as long as the rest of `maxsim`: it is done once.
@functools.lru_cache(maxsize=4096)
def tiles_for(
    limits: Limits, dim: int, query_itemsize: int, document_itemsize: int, longest_query: int
) -> Tiles:
    """The tiles for a device, embeddings of `dim` numbers of these bytes each, and queries of at most
    `longest_query` tokens. A tile has all dimensions unless it is too large for the device."""
    if query_itemsize == 4:
        return replace(_FLOAT32, dim=min(_FLOAT32.dim, next_power_of_two(dim)))
    shared = limits.shared_memory - _BESIDE_TILES
    is_unpacked = document_itemsize < query_itemsize
    table = _table(limits, is_unpacked)
    longest_tile = next((tiles for tiles in table if longest_query <= tiles.query), table[-1])
    whole = replace(longest_tile, dim=next_power_of_two(dim))
    for stages in (whole.stages, 2):
        tiles = replace(whole, stages=stages)
        of_document = tiles.document * tiles.dim
        fits = tiles.query * tiles.dim * query_itemsize + stages * of_document * document_itemsize <= shared
        if fits and not (is_unpacked and of_document * max(1, tiles.query // 64) > _MOST_UNPACKED):
            return tiles
    in_chunks = longest_tile if longest_tile.query <= 128 else table[2]
    # Numbers that are unpacked need registers for both forms, and fewer of them may be on their way.
    stages = 2 if is_unpacked else in_chunks.stages
    return replace(in_chunks, dim=128 if in_chunks.query <= 64 else 64, stages=stages)


def _table(limits: Limits, is_unpacked: bool) -> tuple[Tiles, ...]:
    if limits.shared_memory < 200 * _KIB:
        return _AMPERE if limits.shared_memory >= 160 * _KIB else _SMALL
    if limits.generation != 9:
        return _BLACKWELL
    # Beside numbers in both forms, registers do not hold the products of more than 128 query tokens.
    return _HOPPER_UNPACKED if is_unpacked else _HOPPER


def row_alignment(row_bytes: int) -> int:
    """The power of two, up to 16 bytes, that every row's address is a multiple of, if the first row's is."""
    return min(16, row_bytes & -row_bytes)


def choose_split_k(multiprocessors: int, programs: int, tiles_of_longest: int) -> int:
    """The splits of a document that yield about two programs a multiprocessor, for `programs` without
    splits."""
    wanted = -(-2 * multiprocessors // programs)
    return max(1, min(wanted, tiles_of_longest // _FEWEST_TILES_OF_SPLIT, MAX_SPLIT_K))


@dataclass(frozen=True, slots=True)
class PairGroup:
    """`count` pairs that follow one another, whose queries have at most `longest_query` tokens."""

    count: int
    longest_query: int


def group_by_query_length(
    query_tokens: NDArray[np.integer],
) -> tuple[NDArray[np.intp] | None, tuple[PairGroup, ...]]:
    """Sorts pairs with queries of `query_tokens` [pairs] tokens by class of `QUERY_CLASSES`, so that a long
    query does not give its tile to all pairs of a step. Returns the order, indices [pairs], or None if they
    are sorted, and the groups."""
    classes = np.searchsorted(QUERY_CLASSES, query_tokens)
    order = None if (np.diff(classes) >= 0).all() else np.argsort(classes, kind="stable")
    groups = []
    for each in np.unique(classes):
        of_class = query_tokens[classes == each]
        groups.append(PairGroup(len(of_class), max(1, int(of_class.max()))))
    return order, tuple(groups)
