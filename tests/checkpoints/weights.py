"""Random weights under which different inputs give clearly different outputs."""

from typing import Any

import torch

# Sizes that most families' configs share.
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}


def spread(model: Any, weight: float = 0.2, attention: float = 0.12, embedding: float = 0.5) -> Any:
    """Larger weights than a fresh model has."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                attends = any(part in name for part in ("query", "key", "q_proj", "k_proj", "q_lin", "k_lin"))
                parameter.normal_(0, embedding if "embed" in name else attention if attends else weight)
    return model.eval()
