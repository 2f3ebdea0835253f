"""Times attention with other tiles than those of its table."""

from collections.abc import Iterator
from itertools import product
from unittest import mock

import click
import torch

from maxsimd.bench.gpu.first_day.found import show
from maxsimd.bench.gpu.first_day.tiles import show_best
from maxsimd.bench.gpu.kernels import Drawn, drawn_attention, prepared
from maxsimd.bench.gpu.maxsim_contenders import OURS
from maxsimd.bench.gpu.shapes import ATTENTION_SHAPES, AttentionShape
from maxsimd.bench.timing import medians
from maxsimd.engine.execution.attention.triton_kernel import TritonBackend
from maxsimd.engine.ops.triton import attention
from maxsimd.engine.ops.triton.attention import Tiles

_TILES = (
    *(
        Tiles(queries, keys, warps, stages)
        for (queries, warps), keys, stages in product(((64, 4), (128, 4), (128, 8)), (32, 64, 128), (2, 3))
    ),
    Tiles(128, 32, 8, 2, registers=128),
)
_DRY = (AttentionShape("few", 2, 10, 4, 2, 32, True),)
_DRY_TILES = (Tiles(16, 16, 4, 2), Tiles(32, 16, 4, 2))


@click.command()
@click.option("--dry", is_flag=True, help="Small, on the CPU.")
@click.option("--rounds", default=10, show_default=True)
@torch.inference_mode()
def main(dry: bool, rounds: int) -> None:
    """Prints milliseconds for each tile; a tile that does not fit into the device is named as such. Exits
    with 1 where none could be run."""
    device = torch.device("cpu" if dry else "cuda")
    for shape in _DRY if dry else ATTENTION_SHAPES:
        name = f"tiles for attention, {shape.name}"
        drawn = drawn_attention(shape, device, 2)
        tried = _DRY_TILES if dry else _TILES
        show_best(name, dict(_times(name, drawn, tried, device, 1 if dry else rounds)))


def _times(
    name: str, drawn: Drawn, tried: tuple[Tiles, ...], device: torch.device, rounds: int
) -> Iterator[tuple[str, float]]:
    """The name of each tile that runs and is right, with its milliseconds."""
    for tiles in tried:
        size = f"{tiles.queries} x {tiles.keys}, {tiles.warps} warps, {tiles.stages} stages"
        size += "" if tiles.registers is None else f", {tiles.registers} registers"
        with mock.patch.object(attention, "tiles_for", lambda *asked, of=tiles: of):
            ready = prepared({OURS: drawn.by(TritonBackend())}, drawn.qkvs, drawn.exact)
            if OURS in ready.failures:
                show(f"{name}: {size}", ready.failures[OURS][:200])
                continue
            taken = round(medians(ready.runs, device, rounds)[OURS] * 1e3, 4)
        show(f"{name}: {size}_ms", taken)
        yield size, taken


if __name__ == "__main__":
    main()
