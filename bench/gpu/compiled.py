"""`maxsimd bench kernels --compiled`: registers, shared memory and bounds of compiled kernels, without a GPU.

A kernel of ours joins the table by a function in `KERNELS`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from operator import itemgetter
from typing import Any

from maxsimd.bench.gpu.ahead_of_time import (
    H100,
    H200,
    POINTERS,
    VARYING,
    Gpu,
    MachineCode,
    Source,
    compiled,
    most_tflops,
    resident_programs,
    turn_cycles,
)
from maxsimd.bench.report import Figures
from maxsimd.engine.ops.triton.launch import Limits, next_power_of_two
from maxsimd.engine.ops.triton.maxsim_tiles import QUERY_CLASSES, Tiles, row_alignment, tiles_for

CAPABILITIES = (80, 90, 100)
GPUS = (H100, H200)

ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2, "i8": 1}
LIMITS = {80: Limits(8, 163 * 1024, 108), 86: Limits(8, 99 * 1024, 84)}
LIMITS |= {90: Limits(9, 227 * 1024, 132), 100: Limits(10, 227 * 1024, 148)}

_TYPES = {"bounds": "*i32"} | dict.fromkeys(("scales", "best_of_split", "scores"), "*fp32")

# Microseconds from a launch to its first instruction, while the launch before ends; and of the loads before a
# program multiplies: the pair, the place of its texts, the first tile.
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
    """The kernel for queries of up to `longest_query` tokens, by the precision of queries and documents, with
    the table's tiles, and for documents that are `split`."""

    capability: int
    longest_query: int
    dim: int = 128
    documents: str = "bf16"
    queries: str = "bf16"
    split: bool = False

    @property
    def whole(self) -> bool:
        """Whether all programs score whole pairs."""
        return not self.split and self.longest_query <= min(self.tiles.query, QUERY_CLASSES[-1])

    @property
    def tiles(self) -> Tiles:
        of_query, of_document = ITEMSIZE[self.queries], ITEMSIZE[self.documents]
        return tiles_for(LIMITS[self.capability], self.dim, of_query, of_document, self.longest_query)

    @property
    def name(self) -> str:
        tiles = self.tiles
        return f"{self.documents} {self.dim} dims, {tiles.query} query x {tiles.document} document tokens"

    @property
    def shapes(self) -> dict[str, MaxSimShape]:
        """Shapes whose time is forecast."""
        if self.dim != COLBERT.dim or self.queries != "bf16":
            return {}
        if self.longest_query == COLBERT.query:
            return {"10,000 documents of 180 tokens, 32 query tokens": COLBERT}
        is_long = self.longest_query > 128
        return {"500 pages of 1,024 tokens, 1,024 query tokens": COLPALI} if is_long else {}

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
    """Every tile of a GPU for 128 dimensions, and the first tile for other dimensions."""
    lengths = (*QUERY_CLASSES, QUERY_CLASSES[-1] + 1)
    dtypes = ("bf16", "i8")
    found = [MaxSimLaunch(capability, query, documents=dtype) for dtype, query in product(dtypes, lengths)]
    dims = (96, 256, 512, 1024)
    found += [MaxSimLaunch(capability, 32, dim, dtype) for dim, dtype in product(dims, dtypes)]
    found += [MaxSimLaunch(capability, 129, 1024), MaxSimLaunch(capability, 32, 128, "fp32", "fp32")]
    different: dict[tuple[object, ...], MaxSimLaunch] = {}
    for launch in found:  # a device may have fewer tiles than there are classes of queries
        different.setdefault((launch.documents, launch.dim, launch.tiles), launch)
    yield from different.values()


@dataclass(frozen=True, slots=True)
class Forecast:
    """Microseconds of a shape, those of memory alone, and the part that limits it."""

    us: float
    floor_us: float
    tflops: float
    held_up_by: str

    @property
    def over_floor(self) -> float:
        return self.us / self.floor_us - 1


def forecast(launch: MaxSimLaunch, code: MachineCode, shape: MaxSimShape, gpu: Gpu) -> Forecast:
    """The slowest of memory, second-level cache and multiprocessors, and the parts that do not overlap with
    it: the launch, the first program's wait and the last one's end."""
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
        """One program's part of a multiprocessor's time, of `together` programs on it."""
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


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """The kernel for heads of `head_dim` numbers, by kinds of sequences."""

    capability: int
    head_dim: int
    dtype: str = "bf16"
    causal: bool = False
    windowed: bool = False
    prefixed: bool = False

    @property
    def name(self) -> str:
        parts = ("causal", "windowed", "prefixed")
        return ", ".join([f"{self.dtype}, heads of {self.head_dim}", *(x for x in parts if getattr(self, x))])

    @property
    def source(self) -> Source:
        from maxsimd.engine.ops.triton import attention
        from maxsimd.engine.ops.triton.attention import attention_kernel

        limits = LIMITS[self.capability]
        tiles = attention.tiles_for(limits, self.head_dim, ITEMSIZE[self.dtype], self.windowed)
        types = dict.fromkeys(("q", "k", "v", "prefix_k", "prefix_v", "out"), POINTERS[self.dtype])
        types |= {"blocks": "*i32", "scale": "fp32"}
        constants: dict[str, Any] = {"CAUSAL": self.causal, "WINDOWED": self.windowed}
        constants |= {"PREFIXED": self.prefixed, "HEAD_DIM": self.head_dim}
        constants |= {"BLOCK_DIM": next_power_of_two(self.head_dim)}
        constants |= {"BLOCK_Q": tiles.queries, "BLOCK_K": tiles.keys}
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        options |= {} if tiles.registers is None else {"maxnreg": tiles.registers}
        return Source(attention_kernel, types, constants, options)


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with one choice of tiles and types. The `launch` of MaxSim has well-known shapes."""

    name: str
    source: Source
    launch: MaxSimLaunch | None = None


def maxsim_variants(capability: int) -> Iterator[Variant]:
    sums = {}
    for launch in maxsim_launches(capability):
        yield Variant(launch.name, launch.source, launch)
        sums[launch.tiles.query] = launch
    for query, launch in sorted(sums.items()):
        yield Variant(f"sum over splits, {query} query tokens", launch.sum_source)


def projection_source(capability: int, dim: int, dtype: str) -> Source:
    """With bias and normalization."""
    from maxsimd.engine.ops.triton import projection

    tiles = projection.tiles_for(LIMITS[capability], dim, ITEMSIZE[dtype])
    types = dict.fromkeys(("hidden", "weight", "out"), POINTERS[dtype])
    types |= {"rows": "*i64", "bias": "*fp32", "epsilon": "fp32"}
    constants = {"BIASED": True, "NORMALIZED": True, "BLOCK_ROWS": tiles.rows}
    constants |= {"BLOCK_HIDDEN": tiles.hidden, "BLOCK_DIM": dim}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return Source(projection.projection_kernel, types, constants, options)


def layer_variants(dtype: str = "bf16") -> Iterator[Variant]:
    """The kernels of fused layers as well-known models launch them."""
    from maxsimd.engine.ops.triton import elementwise

    pointer, epsilon = POINTERS[dtype], {"epsilon": "fp32"}

    def norms(width: int, *kinds: str, biased: bool, centered: bool) -> Iterator[Variant]:
        block, warps = elementwise.row_tile(width)
        types = dict.fromkeys(("x", "residual", "weight", "bias", "total", "out"), pointer) | epsilon
        for kind in kinds:
            constants = {"CENTERED": centered, "BIASED": biased, "BLOCK": block}
            constants |= {"ADDED": " and " in kind, "SUMMED": kind.startswith("sum")}
            source = Source(elementwise.norm_kernel, types, constants, {"num_warps": warps})
            yield Variant(f"{kind} {width}{', no bias' if centered and not biased else ''}", source)

    def layer_norms(width: int, biased: bool) -> Iterator[Variant]:
        kinds = ("layer norm", "add and layer norm", "sum and layer norm")
        return norms(width, *kinds, biased=biased, centered=True)

    def rms_norms(width: int) -> Iterator[Variant]:
        return norms(width, "RMS norm", "sum and RMS norm", biased=False, centered=False)

    for width in (384, 768, 1024, 4096, 8192):
        yield from layer_norms(width, biased=True)
        yield from rms_norms(width)
    *_, gemma = rms_norms(2048)
    yield replace(gemma, source=replace(gemma.source, types={**gemma.source.types, "weight": "*fp32"}))
    yield from layer_norms(768, biased=False)  # ModernBERT
    # Qwen3-0.6B and 8B, Llama-3.2-1B, a head of 256, jina-colbert-v2, ModernBERT and gte-multilingual-base.
    for heads, head_dim in ((24, 128), (40, 128), (40, 64), (24, 256), (32, 64), (24, 64)):
        normed, (block, half) = head_dim > 64, elementwise.blocks_for(heads, head_dim)
        types = dict.fromkeys(("qkv", "cos", "sin", "query_weight", "key_weight"), pointer) | epsilon
        constants = {"NORMED": normed, "BLOCK_HEADS": block, "BLOCK_HALF": half}
        options, varying = {"num_warps": elementwise.WARPS}, VARYING | {"queries", "heads"}
        source = Source(elementwise.norm_rotary_kernel, types, constants, options, varying)
        yield Variant(f"{'norm and ' * normed}rotary {heads} heads of {head_dim}", source)
    for width, activation in (
        (3072, "silu"),  # Qwen3, nomic-bert
        (3072, "gelu"),  # gte-multilingual-base
        (1152, "gelu"),  # ModernBERT
        (16384, "gelu_tanh"),  # Gemma
        (512, "relu"),
    ):
        size = elementwise.block_for(width)
        options = {"num_warps": size // elementwise.NUMBERS_OF_A_WARP}
        types = dict.fromkeys(("gate_up", "out"), pointer)
        gated = {"ACTIVATION": activation, "BLOCK": size}
        source = Source(elementwise.gated_kernel, types, gated, options)
        yield Variant(f"gated {activation} {width}", source)


def attention_variants(capability: int) -> Iterator[Variant]:
    """The kernels of encoders and rerankers in 16 bits."""
    for head_dim, causal in product((64, 128, 256), (False, True)):
        launch = AttentionLaunch(capability, head_dim, causal=causal)
        yield Variant(launch.name, launch.source)


def projection_variants(capability: int) -> Iterator[Variant]:
    for dtype, dim in product(("bf16", "fp32"), (128, 1024)):
        yield Variant(f"{dtype}, to {dim} dims", projection_source(capability, dim, dtype))


# By kernel, its variants on a GPU of a compute capability.
KERNELS: dict[str, Callable[[int], Iterator[Variant]]] = {
    "MaxSim": maxsim_variants,
    "attention": attention_variants,
    "projection": projection_variants,
    "layers": lambda capability: layer_variants(),
}


def rows(capabilities: tuple[int, ...] = CAPABILITIES) -> Iterator[Figures]:
    for kernel, variants in KERNELS.items():
        for capability in capabilities:
            for variant in variants(capability):
                yield _row(kernel, variant, capability)


def _row(kernel: str, variant: Variant, capability: int) -> Figures:
    """One variant compiled for one capability. Programs, bounds and shapes are by the name of a GPU."""
    code = compiled(variant.source, capability)
    loop = code.main_loop if code.loops else None
    gpus = [gpu for gpu in GPUS if gpu.capability == capability]
    multiplying = gpus if loop is not None and loop.tensor else []
    launch = variant.launch
    forecasts = {
        gpu.name: {name: asdict(forecast(launch, code, shape, gpu)) for name, shape in launch.shapes.items()}
        for gpu in gpus
        if launch is not None and launch.shapes
    }
    return {
        "kernel": kernel,
        "variant": variant.name,
        "capability": capability,
        "registers": code.registers,
        "spills": code.spills,
        "shared_bytes": code.shared,
        "instructions": code.instructions,
        "turn_instructions": None if loop is None else len(loop),
        "turn_tensor_instructions": None if loop is None else len(loop.tensor),
        "programs": {gpu.name: resident_programs(code, gpu) for gpu in gpus},
        "most_tflops": {gpu.name: round(most_tflops(code, gpu), 1) for gpu in multiplying},
        "expected_tflops": {
            gpu.name: round(most_tflops(code, gpu, takes_turns=False), 1) for gpu in multiplying
        },
        "shapes": forecasts,
    }


_HEADINGS = ("registers", "spills", "KiB shared", "programs", "instructions", "a turn", "tensor")
_BOUNDS = ("most TFLOP/s", "expected")


def as_text(found: list[Figures]) -> str:
    """A table a capability, and below it the forecasts of shapes."""
    tables = (list(group) for _, group in groupby(sorted(found, key=_capability), _capability))
    return "\n\n".join(map(_table, tables))


_capability = itemgetter("capability")


def _table(found: list[Figures]) -> str:
    width = max(len(row["variant"]) for row in found)
    headings = (*_HEADINGS, *_BOUNDS)
    lines = [f"sm_{found[0]['capability']}", f"{'':11} {'':{width}}  {'  '.join(headings)}"]
    for row in found:
        programs, *bounds = (
            next(iter(row[name].values()), None) for name in ("programs", "most_tflops", "expected_tflops")
        )
        numbers = [row["registers"], row["spills"], row["shared_bytes"] / 1024, programs, row["instructions"]]
        numbers += [row["turn_instructions"], row["turn_tensor_instructions"], *bounds]
        cells = (
            f"{'-' if number is None else format(number, '.0f'):>{len(heading)}}"
            for number, heading in zip(numbers, headings, strict=True)
        )
        lines.append(f"{row['kernel']:11} {row['variant']:{width}}  {'  '.join(cells)}")
    lines += [
        f"{gpu:11} {row['variant']:{width}}  {shape}: {_sentence(figures)}"
        for row in found
        for gpu, shapes in row["shapes"].items()
        for shape, figures in shapes.items()
    ]
    return "\n".join(lines)


def _sentence(figures: Figures) -> str:
    us, floor, held_up_by = figures["us"], figures["floor_us"], figures["held_up_by"]
    rate = f"{figures['tflops']:.0f} TFLOP/s; memory alone"
    if held_up_by == "memory":
        rate = f"{us / floor - 1:.0%} above"
    return f"{us:.1f} us, held up by {held_up_by}, {rate} {floor:.1f}"
