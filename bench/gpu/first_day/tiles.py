"""Times MaxSim with other tiles than those of its table, for each shape that the table tells apart."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import click
import torch

from maxsimd.bench.gpu.first_day.found import show
from maxsimd.bench.gpu.kernels import prepared
from maxsimd.bench.gpu.limits import copies_beyond_cache
from maxsimd.bench.gpu.maxsim_contenders import OURS, contenders, draw, rounded_contenders
from maxsimd.bench.gpu.shapes import MaxSimShape
from maxsimd.bench.timing import medians
from maxsimd.engine.ops.triton import maxsim

_SHAPES = (
    MaxSimShape("32 query tokens", 32, 10_000, (180, 180)),
    MaxSimShape("64 query tokens", 64, 10_000, (180, 180)),
    MaxSimShape("128 query tokens", 128, 2000, (512, 512)),
    MaxSimShape("1,024 query tokens", 1024, 500, (1024, 1024)),
    MaxSimShape("32 query tokens, documents in int8", 32, 10_000, (180, 180), rounded=True),
    MaxSimShape("64 query tokens, documents in int8", 64, 10_000, (180, 180), rounded=True),
    MaxSimShape("1,024 query tokens, documents in int8", 1024, 500, (1024, 1024), rounded=True),
)

# (query tokens, document tokens, warps, stages, fold) of a tile.
Variant = tuple[int, int, int, int, int]

_SHORT: tuple[Variant, ...] = ((32, 64, 4, 2, 2), (32, 64, 4, 3, 2), (32, 128, 4, 2, 2))
_MIDDLE: tuple[Variant, ...] = ((64, 64, 4, 2, 2), (64, 64, 4, 3, 2), (64, 128, 4, 2, 2))
_LONG: tuple[Variant, ...] = ((128, 64, 4, 2, 2), (128, 64, 4, 3, 2))
_PAGES: tuple[Variant, ...] = ((256, 64, 4, 2, 2), (256, 64, 4, 3, 2), (128, 64, 4, 3, 2))
_SHORT_INT8 = _SHORT[:2]
_MIDDLE_INT8 = _MIDDLE[:2]
_PAGES_INT8 = _LONG
# Those of documents in 16 bits, and in int8: any of them may become the table's.
VARIANTS = dict.fromkeys((*_SHORT, *_MIDDLE, *_LONG, *_PAGES))
INT8_VARIANTS = dict.fromkeys((*_SHORT_INT8, *_MIDDLE_INT8, *_PAGES_INT8))
_TILES = (_SHORT, _MIDDLE, _LONG, _PAGES, _SHORT_INT8, _MIDDLE_INT8, _PAGES_INT8)

_DRY = (MaxSimShape("few", 4, 3, (9, 9), 16), MaxSimShape("few, in int8", 4, 3, (9, 9), 16, rounded=True))
_DRY_TILES: tuple[tuple[Variant, ...], ...] = (((16, 16, 4, 2, 1), (16, 32, 4, 2, 2)),) * 2


@click.command()
@click.option("--dry", is_flag=True, help="Small, on the CPU.")
@click.option("--rounds", default=10, show_default=True)
@torch.inference_mode()
def main(dry: bool, rounds: int) -> None:
    """Prints milliseconds for each tile; a tile that does not fit into the device is named as such. Exits
    with 1 where none could be run."""
    device = torch.device("cpu" if dry else "cuda")
    shapes = zip(_DRY if dry else _SHAPES, _DRY_TILES if dry else _TILES, strict=True)
    for shape, tiles in shapes:
        show_best(f"tiles for {shape.name}", dict(_times(shape, tiles, device, 1 if dry else rounds)))


def show_best(name: str, milliseconds: Mapping[str, float]) -> None:
    """Prints which of some tiles is the fastest. Exits with 1 where there are none."""
    if not milliseconds:
        raise SystemExit(1)
    best = min(milliseconds, key=milliseconds.__getitem__)
    show(f"{name}: best", best)
    show(f"{name}: best_ms", milliseconds[best])


def _times(
    shape: MaxSimShape, tiles: tuple[Variant, ...], device: torch.device, rounds: int
) -> Iterator[tuple[str, float]]:
    """The name of each tile that runs and is right, with its milliseconds."""
    first = draw(shape, device, 0)
    copies = min(8, copies_beyond_cache(first.nbytes, device))
    scored = [first, *(draw(shape, device, seed) for seed in range(1, copies))]
    offered = contenders
    if shape.rounded:
        scored, offered = [each.rounded() for each in scored], rounded_contenders
    exact = scored[0].exact(20)
    ours = {OURS: offered(shape, device)[OURS]}
    for variant in tiles:
        name = name_of(variant)
        with tiled(variant):
            ready = prepared(ours, scored, exact)
            if OURS in ready.failures:
                show(f"tiles for {shape.name}: {name}", ready.failures[OURS][:200])
                continue
            taken = round(medians(ready.runs, device, rounds)[OURS] * 1e3, 4)
        show(f"tiles for {shape.name}: {name}_ms", taken)
        yield name, taken


def name_of(variant: Variant) -> str:
    query, document, warps, stages, fold = variant
    return f"{query} x {document}, {warps} warps, {stages} stages, fold {fold}"


def tiled(variant: Variant) -> AbstractContextManager[Any]:
    """MaxSim by these tiles instead of the table's, with the table's dimensions."""
    names = ("query", "document", "warps", "stages", "fold")
    wanted = dict(zip(names, variant, strict=True))
    table = vars(maxsim)["tiles_for"]
    return mock.patch.object(maxsim, "tiles_for", lambda *asked: dataclasses.replace(table(*asked), **wanted))


if __name__ == "__main__":
    main()
