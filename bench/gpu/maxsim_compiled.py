"""MaxSim as it is compiled for a GPU, and how long a launch of it takes by arithmetic."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from maxsimd.bench.gpu.ahead_of_time import POINTERS, MachineCode, Source
from maxsimd.bench.gpu.bounds import Gpu, resident_programs, turn_cycles
from maxsimd.engine.ops.triton.launch import Limits
from maxsimd.engine.ops.triton.maxsim_tiles import QUERY_CLASSES, Tiles, row_alignment, tiles_for

ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2, "i8": 1}
LIMITS = {80: Limits(8, 163 * 1024, 108), 86: Limits(8, 99 * 1024, 84)}
LIMITS |= {90: Limits(9, 227 * 1024, 132), 100: Limits(10, 227 * 1024, 148)}

_TYPES = {"bounds": "*i32"} | dict.fromkeys(("scales", "best_of_split", "scores"), "*fp32")

# Microseconds from a launch to its first instruction, with the launch before it still ending; and those of a
# chain of loads that a program waits for before it multiplies: the pair, where its texts lie, the first tile.
_LAUNCH_US = 3.0
_CHAIN_US = 1.6


@dataclass(frozen=True, slots=True)
class MaxSimShape:
    """One query of `query` tokens, and `documents` of `tokens` tokens each."""

    query: int
    documents: int
    tokens: int
    dim: int = 128


COLBERT = MaxSimShape(32, 10_000, 180)
COLPALI = MaxSimShape(1024, 500, 1024)


@dataclass(frozen=True, slots=True)
class MaxSimLaunch:
    """The kernel for queries of at most `longest_query` tokens, in the precision of queries and of documents;
    with `other` tiles than those of its table, if there are any, and for documents that are `split`."""

    capability: int
    longest_query: int
    dim: int = 128
    documents: str = "bf16"
    queries: str = "bf16"
    other: Tiles | None = None
    split: bool = False

    @property
    def whole(self) -> bool:
        """Whether all programs score whole pairs."""
        return not self.split and self.longest_query <= min(self.tiles.query, QUERY_CLASSES[-1])

    @property
    def tiles(self) -> Tiles:
        if self.other is not None:
            return self.other
        of_query, of_document = ITEMSIZE[self.queries], ITEMSIZE[self.documents]
        return tiles_for(LIMITS[self.capability], self.dim, of_query, of_document, self.longest_query)

    @property
    def name(self) -> str:
        tiles = self.tiles
        return f"{self.documents} {self.dim} dims, {tiles.query} query x {tiles.document} document tokens"

    @property
    def source(self) -> Source:
        from maxsimd.engine.ops.triton.maxsim import maxsim_kernel

        tiles = self.tiles
        types = {"queries": POINTERS[self.queries], "documents": POINTERS[self.documents], **_TYPES}
        constants = {"EMPTY": -1e9, "SCALED": self.documents == "i8", "DIM": self.dim, "FOLD": tiles.fold}
        constants |= {"QUERY_ALIGNMENT": row_alignment(self.dim * ITEMSIZE[self.queries])}
        constants |= {"DOCUMENT_ALIGNMENT": row_alignment(self.dim * ITEMSIZE[self.documents])}
        constants |= {"BLOCK_Q": tiles.query, "BLOCK_D": tiles.document, "BLOCK_DIM": tiles.dim}
        constants |= {"WHOLE": self.whole}
        return Source(maxsim_kernel, types, constants, {"num_warps": tiles.warps, "num_stages": tiles.stages})

    @property
    def sum_source(self) -> Source:
        from maxsimd.engine.ops.triton.maxsim import sum_kernel, summed_splits

        tiles = self.tiles
        constants = {"EMPTY": -1e9, "BLOCK_Q": tiles.query, "BLOCK_SPLITS": summed_splits(tiles)}
        return Source(sum_kernel, _TYPES, constants, {"num_warps": 4})


def maxsim_launches(capability: int) -> Iterator[MaxSimLaunch]:
    """Every tile of a GPU for 128 dimensions, and what larger embeddings make of the first."""
    lengths = (*QUERY_CLASSES, QUERY_CLASSES[-1] + 1)
    found = [
        MaxSimLaunch(capability, query, documents=dtype) for dtype in ("bf16", "i8") for query in lengths
    ]
    found += [
        MaxSimLaunch(capability, 32, dim, dtype) for dim in (96, 256, 512, 1024) for dtype in ("bf16", "i8")
    ]
    found += [MaxSimLaunch(capability, 129, 1024), MaxSimLaunch(capability, 32, 128, "fp32", "fp32")]
    different: dict[tuple[object, ...], MaxSimLaunch] = {}
    for launch in found:  # a device may have fewer tiles than there are classes of queries
        different.setdefault((launch.documents, launch.dim, launch.tiles), launch)
    yield from different.values()


@dataclass(frozen=True, slots=True)
class Forecast:
    """Microseconds that a shape takes, those that memory alone needs, and by what it is held up most."""

    us: float
    floor_us: float
    tflops: float
    held_up_by: str

    @property
    def over_floor(self) -> float:
        return self.us / self.floor_us - 1


def forecast(launch: MaxSimLaunch, code: MachineCode, shape: MaxSimShape, gpu: Gpu) -> Forecast:
    """How long a shape takes: the slowest of memory, second-level cache and multiprocessors, and what cannot
    overlap with it, the launch, the first program's wait and the last one's end."""
    tiles, itemsize = launch.tiles, ITEMSIZE[launch.documents]
    query_tiles, turns = -(-shape.query // tiles.query), -(-shape.tokens // tiles.document)
    programs, residents = shape.documents * query_tiles, resident_programs(code, gpu)
    row = shape.dim * itemsize + (4 if itemsize == 1 else 0)
    memory_us = shape.documents * shape.tokens * row / gpu.bandwidth * 1e6

    of_query = tiles.query * shape.dim * ITEMSIZE[launch.queries]
    # One query's tile stays in the first-level cache where shared memory leaves twice its size: documents
    # pass that cache by.
    is_near = query_tiles == 1 and 2 * of_query <= gpu.first_level - residents * (code.shared + 1024)
    of_document = turns * tiles.document * row
    cache_us = programs * (of_document + (0 if is_near else of_query)) / gpu.cache_bandwidth * 1e6

    cycles = turn_cycles(code, code.main_loop, gpu)
    outside = (code.instructions - len(code.main_loop)) * code.warps / 4

    def program_us(together: int) -> float:
        """Of a multiprocessor's time, the part of one of `together` programs on it."""
        taken = turns * cycles.alone() + outside
        return taken / gpu.clock / 1e3 + _CHAIN_US / together

    waves, left = divmod(programs, gpu.multiprocessors * residents)
    last = math.ceil(left / gpu.multiprocessors)
    computing_us = waves * residents * program_us(residents) + (last * program_us(last) if last else 0.0)
    parts = {"memory": memory_us, "cache": cache_us, "multiprocessors": computing_us}
    held_up_by = max(parts, key=lambda name: parts[name])
    beside = _LAUNCH_US + (0.0 if held_up_by == "multiprocessors" else _CHAIN_US + program_us(1))
    if query_tiles > 1:  # the second launch, which sums over tiles
        beside += _LAUNCH_US + _CHAIN_US
    us = parts[held_up_by] + beside
    flops = 2.0 * shape.documents * shape.tokens * shape.query * shape.dim
    return Forecast(us, memory_us, flops / us / 1e6, held_up_by)
