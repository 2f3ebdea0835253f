"""`maxsimd bench kernels --compiled`: what compiled kernels take of a GPU, and how fast they can be at most,
by arithmetic. Needs no GPU.

A kernel of ours joins the table by a function in `KERNELS`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from maxsimd.bench.gpu import layer_kernels
from maxsimd.bench.gpu.ahead_of_time import POINTERS, MachineCode, Source, compiled
from maxsimd.bench.gpu.attention_compiled import attention_launches
from maxsimd.bench.gpu.bounds import H100, H200, Gpu, expected_tflops, most_tflops, resident_programs
from maxsimd.bench.gpu.maxsim_compiled import (
    COLBERT,
    COLPALI,
    ITEMSIZE,
    LIMITS,
    MaxSimLaunch,
    MaxSimShape,
    forecast,
    maxsim_launches,
)

CAPABILITIES = (80, 90, 100)
GPUS = (H100, H200)


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with one choice of tiles and types. `shapes` says how long well-known shapes take, in text,
    from the compiled kernel on a GPU."""

    name: str
    source: Source
    shapes: Callable[[MachineCode, Gpu], Mapping[str, Any]] = lambda code, gpu: {}


def maxsim_variants(capability: int) -> Iterator[Variant]:
    sums = {}
    for launch in maxsim_launches(capability):
        yield Variant(launch.name, launch.source, _shapes_of(launch))
        sums[launch.tiles.query] = launch
    for query, launch in sorted(sums.items()):
        yield Variant(f"sum over splits, {query} query tokens", launch.sum_source)


def projection_variants(capability: int) -> Iterator[Variant]:
    for dtype in ("bf16", "fp32"):
        for dim in (128, 1024):
            yield Variant(f"{dtype}, to {dim} dims", projection_source(capability, dim, dtype))


def projection_source(capability: int, dim: int, dtype: str) -> Source:
    """With bias and normalisation, the most that it does."""
    from maxsimd.engine.ops.triton import projection

    tiles = projection.tiles_for(LIMITS[capability], dim, ITEMSIZE[dtype])
    types = dict.fromkeys(("hidden", "weight", "out"), POINTERS[dtype])
    types |= {"rows": "*i64", "bias": "*fp32", "epsilon": "fp32"}
    constants = {"BIASED": True, "NORMALIZED": True, "BLOCK_ROWS": tiles.rows}
    constants |= {"BLOCK_HIDDEN": tiles.hidden, "BLOCK_DIM": dim}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return Source(projection.projection_kernel, types, constants, options)


def attention_variants(capability: int) -> Iterator[Variant]:
    for launch in attention_launches(capability):
        yield Variant(launch.name, launch.source)


def layer_variants(capability: int) -> Iterator[Variant]:
    """The same on every GPU."""
    for each in layer_kernels.variants():
        yield Variant(each.name, each.source)


# By kernel: its variants on a GPU of a compute capability.
KERNELS: dict[str, Callable[[int], Iterator[Variant]]] = {
    "MaxSim": maxsim_variants,
    "attention": attention_variants,
    "projection": projection_variants,
    "layers": layer_variants,
}


@dataclass(frozen=True, slots=True)
class Row:
    """What one variant takes, compiled for one capability. Programs and bounds are those of the GPUs that
    are of this capability, by name."""

    kernel: str
    variant: str
    capability: int
    registers: int
    spills: int
    shared_bytes: int
    instructions: int
    turn_instructions: int | None
    turn_tensor_instructions: int | None
    programs: dict[str, int]
    most_tflops: dict[str, float]
    expected_tflops: dict[str, float]
    shapes: dict[str, dict[str, Any]]


def rows(capabilities: tuple[int, ...] = CAPABILITIES) -> Iterator[Row]:
    for kernel, variants in KERNELS.items():
        for capability in capabilities:
            for variant in variants(capability):
                yield _row(kernel, variant, capability)


def as_json(found: list[Row]) -> dict[str, Any]:
    return {"rows": [asdict(row) for row in found]}


def as_text(found: list[Row]) -> str:
    """A table a capability, and below it what shapes take."""
    return "\n\n".join(
        _table([row for row in found if row.capability == capability])
        for capability in sorted({row.capability for row in found})
    )


_HEADINGS = ("registers", "spills", "KiB shared", "programs", "instructions", "a turn", "tensor")
_BOUNDS = ("most TFLOP/s", "expected")


def _table(found: list[Row]) -> str:
    width = max(len(row.variant) for row in found)
    headings = "  ".join((*_HEADINGS, *_BOUNDS))
    lines = [f"sm_{found[0].capability}", f"{'':11} {'':{width}}  {headings}"]
    for row in found:
        first_gpu = [next(iter(of_gpus.values()), None) for of_gpus in (row.most_tflops, row.expected_tflops)]
        numbers = (
            row.registers,
            row.spills,
            row.shared_bytes / 1024,
            next(iter(row.programs.values()), None),
            row.instructions,
            row.turn_instructions,
            row.turn_tensor_instructions,
            *first_gpu,
        )
        cells = (
            f"{'-' if number is None else format(number, '.0f'):>{len(heading)}}"
            for number, heading in zip(numbers, (*_HEADINGS, *_BOUNDS), strict=True)
        )
        lines.append(f"{row.kernel:11} {row.variant:{width}}  {'  '.join(cells)}")
    lines += [
        f"{gpu:11} {row.variant:{width}}  {shape}: {_sentence(figures)}"
        for row in found
        for gpu, shapes in row.shapes.items()
        for shape, figures in shapes.items()
    ]
    return "\n".join(lines)


def _sentence(figures: Mapping[str, Any]) -> str:
    above = figures["us"] / figures["floor_us"] - 1
    held_up_by = figures["held_up_by"]
    rate = (
        f"{above:.0%} above" if held_up_by == "memory" else f"{figures['tflops']:.0f} TFLOP/s; memory alone"
    )
    return f"{figures['us']:.1f} us, held up by {held_up_by}, {rate} {figures['floor_us']:.1f}"


def _row(kernel: str, variant: Variant, capability: int) -> Row:
    code = compiled(variant.source, capability)
    loop = code.main_loop if code.loops else None
    multiplies = loop is not None and len(loop.tensor) > 0
    gpus = [gpu for gpu in GPUS if gpu.capability == capability]
    return Row(
        kernel,
        variant.name,
        capability,
        code.registers,
        code.spills,
        code.shared,
        code.instructions,
        None if loop is None else len(loop),
        None if loop is None else len(loop.tensor),
        {gpu.name: resident_programs(code, gpu) for gpu in gpus},
        {gpu.name: round(most_tflops(code, gpu), 1) for gpu in gpus if multiplies},
        {gpu.name: round(expected_tflops(code, gpu), 1) for gpu in gpus if multiplies},
        {gpu.name: shapes for gpu in gpus if (shapes := dict(variant.shapes(code, gpu)))},
    )


def _shapes_of(launch: MaxSimLaunch) -> Callable[[MachineCode, Gpu], dict[str, Any]]:
    wanted: dict[str, MaxSimShape] = {}
    if launch.dim == COLBERT.dim and launch.queries == "bf16":
        if launch.longest_query == COLBERT.query:
            wanted["10,000 documents of 180 tokens, 32 query tokens"] = COLBERT
        if launch.longest_query > 128:
            wanted["500 pages of 1,024 tokens, 1,024 query tokens"] = COLPALI
    return lambda code, gpu: {
        name: asdict(forecast(launch, code, shape, gpu)) for name, shape in wanted.items()
    }
