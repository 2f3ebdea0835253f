"""Parts of checkpoints that no library of ours can write: random tensors of stated shapes, and the files that
make sentence-transformers of them."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints.weights import save_module_list, save_tensors


class RandomTensors:
    """Random weights under which different inputs give clearly different outputs."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        """A matrix that about keeps the size of what it multiplies, or a bias."""
        scale = 1.2 / shape[-1] ** 0.5 if len(shape) > 1 else 0.2
        return scale * torch.randn(*shape, generator=self._random)

    def embedding(self, *shape: int) -> torch.Tensor:
        return 0.5 * torch.randn(*shape, generator=self._random)

    def linear(self, name: str, outputs: int, inputs: int, *, bias: bool = True) -> dict[str, torch.Tensor]:
        """The weight and the bias of a linear layer."""
        made = {f"{name}.weight": self(outputs, inputs)}
        return made | {f"{name}.bias": self(outputs)} if bias else made

    def norm(self, name: str, width: int) -> dict[str, torch.Tensor]:
        """The weight and the bias of a layer norm, about one and zero."""
        return {f"{name}.weight": 1 + self(width), f"{name}.bias": self(width)}


def save(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], prefix: str = "") -> str:
    """Writes a model whose tensors' names have a prefix in front; returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_tensors({f"{prefix}{name}": tensor for name, tensor in tensors.items()}, folder)
    return str(folder)


def save_modules(
    folder: Path,
    pooling: str,
    *,
    normalize: bool = True,
    prompts: dict[str, str] | None = None,
    longest: int = 512,
    dim: int | None = None,
) -> str:
    """Writes modules.json and what it names beside a transformer in `folder`, as older sentence-transformers
    did; returns the path."""
    paths = {"": "Transformer", "1_Pooling": "Pooling"} | ({"2_Normalize": "Normalize"} if normalize else {})
    save_module_list(folder, {path: f"sentence_transformers.models.{kind}" for path, kind in paths.items()})
    for path in paths:
        (folder / path).mkdir(exist_ok=True)
    transformer = {"max_seq_length": longest, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(transformer))
    config = json.loads((folder / "config.json").read_text())
    modes = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "lasttoken": "lasttoken"}
    settings = {f"pooling_mode_{mode}": pooling == name for name, mode in modes.items()}
    settings["word_embedding_dimension"] = dim or config.get("hidden_size") or config["n_embd"]
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    if prompts is not None:
        said = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
    return str(folder)
