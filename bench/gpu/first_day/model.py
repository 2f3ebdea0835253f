"""The models that are run: ColBERTs with random weights, each saved once."""

import os
import shutil
import tempfile
from pathlib import Path

from maxsimd.bench.gpu.serving import Shape, save_colbert

# jina-colbert-v2; a ColBERT on XLM-RoBERTa large, as bge-m3 is; GTE-ModernColBERT.
JINA = Shape()
XLM_ROBERTA = Shape(family="xlm-roberta")
MODERNBERT = Shape("modernbert", layers=22, hidden=768, heads=12, intermediate=1152, vocabulary=50_368)
# Small enough for a CPU, to see that every step runs.
SMALL = Shape(layers=2, hidden=32, heads=2, intermediate=64, vocabulary=30_600, dim=16)


def checkpoint(shape: Shape) -> str:
    """The path of the model, which is saved where it is not there yet. Processes may ask at the same time."""
    name = f"maxsimd-first-day-{os.getuid()}-{shape.family}-{shape.layers}x{shape.hidden}"
    folder = Path(tempfile.gettempdir()) / name
    if not folder.exists():
        made = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        save_colbert(made, shape)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return str(folder / "saved")


if __name__ == "__main__":
    for each in (JINA, XLM_ROBERTA, MODERNBERT):
        checkpoint(each)
