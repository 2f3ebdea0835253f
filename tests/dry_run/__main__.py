"""Prints what a step of every model costs on a GPU; with --write, holds the tests to it."""

import sys
import tempfile
from pathlib import Path

from tests.checkpoints import cross_encoders
from tests.dry_run.entering import fake_gpu
from tests.dry_run.measured import HELD, measure_all, table_of
from tests.dry_run.models import BACKENDS, load
from tests.dry_run.shapes import SHAPES, launches_a_layer

_LIKE = {"XLM-R-large": cross_encoders.xlm_roberta, "Qwen3-0.6B": cross_encoders.qwen3}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for shape in SHAPES:
            like = load(_LIKE[shape](Path(folder) / shape)).model
            for backend in BACKENDS:
                with fake_gpu() as gpu:
                    launches = launches_a_layer(gpu, shape, like, backend)
                print(f"{shape}, attention by {backend}: {launches} kernels a layer")
        table = table_of(measure_all(Path(folder)))
    print(table, end="")
    if "--write" in sys.argv[1:]:
        HELD.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
