"""Reads the machine code of the kernels as this machine's triton compiles them: registers in memory, and the
bounds that follow. Another triton may make other code of the same source."""

from itertools import islice

import click
import torch

from maxsimd.bench.gpu.compiled import as_text, rows
from maxsimd.bench.gpu.first_day.found import show

_DRY_ROWS = 2


@click.command()
@click.option("--dry", is_flag=True, help="A few kernels, compiled for an H100.")
def main(dry: bool) -> None:
    """Prints what compiled kernels take. Exits with 1 where one has registers in memory."""
    major, minor = (9, 0) if dry else torch.cuda.get_device_capability()
    found = list(islice(rows((10 * major + minor,)), _DRY_ROWS if dry else None))
    print(as_text(found), flush=True)
    for row in found:
        for gpu, tflops in row.most_tflops.items():
            show(f"compiled, {row.variant}: most TFLOP/s on an {gpu}", round(tflops, 1))
    spilled = [row.variant for row in found if row.spills]
    show("compiled: kernels with registers in memory", len(spilled))
    if spilled:
        print(f"registers in memory: {', '.join(spilled)}")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
