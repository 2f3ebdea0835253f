"""Times MaxSim with other tiles than those of its table, for each shape that the table tells apart."""

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import product
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
)
# (query tokens, document tokens, warps, stages) of a tile.
_SHORT = tuple(product((32,), (32, 64, 128), (4,), (2, 3, 4)))
_MIDDLE = tuple(product((64,), (64, 128), (4, 8), (2, 3, 4)))
_LONG = tuple(product((128, 256), (64, 128), (4, 8), (2, 3)))
_TILES = (_SHORT, _MIDDLE, _LONG, (*_LONG, (128, 256, 8, 2), (128, 256, 8, 3)), _SHORT)

_DRY = (MaxSimShape("few", 4, 3, (9, 9), 16), MaxSimShape("few, in int8", 4, 3, (9, 9), 16, rounded=True))
_DRY_TILES = (((16, 16, 4, 2), (16, 32, 4, 2)),) * 2


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
    shape: MaxSimShape, tiles: tuple[tuple[int, int, int, int], ...], device: torch.device, rounds: int
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
    table = vars(maxsim)["tiles_for"]
    for query, document, warps, stages in tiles:
        wanted = {"query": query, "document": document, "warps": warps, "stages": stages}
        name = f"{query} x {document}, {warps} warps, {stages} stages"
        with mock.patch.object(maxsim, "tiles_for", lambda *asked, of=wanted: _changed(table(*asked), of)):
            ready = prepared(ours, scored, exact)
            if OURS in ready.failures:
                show(f"tiles for {shape.name}: {name}", ready.failures[OURS][:200])
                continue
            taken = round(medians(ready.runs, device, rounds)[OURS] * 1e3, 4)
        show(f"tiles for {shape.name}: {name}_ms", taken)
        yield name, taken


def _changed(tiles: Any, wanted: dict[str, int]) -> Any:
    """The tiles with other numbers; those that the kernel has no choice of are left out."""
    names = {field.name for field in dataclasses.fields(tiles)}
    return dataclasses.replace(tiles, **{name: value for name, value in wanted.items() if name in names})


if __name__ == "__main__":
    main()
