"""Weights that are stored in a form which transformers does not read here: GGUF and quantised safetensors.
They become float32 tensors under the names of the published checkpoint, and transformers is handed those."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """`read` makes all tensors of the backbone, float32 on the CPU, by the names that the checkpoint was
    published with; it raises ModelLoadError for what it cannot read. `form` says how they are stored."""

    read: Callable[[], dict[str, torch.Tensor]]
    form: str

    def in_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options of `from_pretrained`, called without a path, so that it takes these weights."""
        config = options["config"]
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        rest = {name: value for name, value in options.items() if name != "use_safetensors"}
        return rest | {"state_dict": self.read(), "dtype": torch.float32}
