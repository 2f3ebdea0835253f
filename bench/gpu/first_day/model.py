"""The model that is run: a ColBERT of XLM-RoBERTa large's shape with random weights, saved once."""

import os
import shutil
import tempfile
from pathlib import Path

from maxsimd.bench.gpu.serving import Shape, save_colbert

LARGE = Shape()
SMALL = Shape(layers=2, hidden=32, heads=2, vocabulary=30_600, dim=16)


def checkpoint(shape: Shape) -> str:
    """The path of the model, which is saved where it is not there yet. Processes may ask at the same time."""
    folder = Path(tempfile.gettempdir()) / f"maxsimd-first-day-{os.getuid()}-{shape.layers}x{shape.hidden}"
    if not folder.exists():
        made = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        save_colbert(made, shape)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return str(folder / "saved")
