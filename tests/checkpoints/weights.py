"""Random weights under which different inputs give clearly different outputs."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModel

# Sizes that most families' configs share.
SIZES: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256,
}  # fmt: skip

_ATTENDING = ("query", "key", "q_proj", "k_proj", "q_lin", "k_lin", "attn.q.", "attn.k.")


def spread(model: Any, weight: float = 0.2, attention: float = 0.12, embedding: float = 0.5) -> Any:
    """Larger weights than a fresh model has."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                attends = any(part in name for part in _ATTENDING)
                parameter.normal_(0, embedding if "embed" in name else attention if attends else weight)
    return model.eval()


def sizes_of(kind: str) -> dict[str, Any]:
    config = CONFIG_MAPPING[kind]
    known = {each.name for each in fields(config)} | config.attribute_map.keys()
    return {name: size for name, size in SIZES.items() if name in known}


def save_model(folder: Path, kind: str, auto: Any = AutoModel, options: Any = None, **settings: Any) -> Any:
    """Saves and returns a small model of the usual sizes or `settings`; `options` are for its class."""
    config = CONFIG_MAPPING[kind](**sizes_of(kind) | settings)
    model = spread(auto.from_config(config, **options or {}))
    model.save_pretrained(folder)
    return model


def change_config(folder: Path, file: str = "config.json", **settings: Any) -> str:
    """Sets keys of a config that transformers does not write; returns the folder."""
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return str(folder)


def save_module_list(folder: Path, kinds: Mapping[str, str]) -> None:
    """Writes modules.json: the kind of each module by its folder."""
    rows = enumerate(kinds.items())
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in rows]
    (folder / "modules.json").write_text(json.dumps(modules))


def save_own(model: Any, folder: Path) -> str:
    """Saves a model of sentence-transformers; returns the path."""
    model.save_pretrained(str(folder), create_model_card=False)
    return str(folder)


def save_tensors(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def save_renamed(
    model: Any, folder: Path, names: Mapping[str, str], fused: str, prefix: str = "", more: Any = None
) -> None:
    """Saves a model's tensors under the names that code of the checkpoint's own gives them: parts of names
    replaced, the projections of attention in one named `fused`, a prefix in front, and others beside."""
    tensors = model.state_dict()
    named = dict(more or {})
    for name, tensor in tensors.items():
        if ".self_attn.k_proj." in name or ".self_attn.v_proj." in name:
            continue
        if ".self_attn.q_proj." in name:
            parts = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            tensor = torch.cat(parts)
        for ours, theirs in {"self_attn.q_proj": fused, **names}.items():
            name = name.replace(ours, theirs)
        named[f"{prefix}{name}"] = tensor
    save_tensors(named, folder)


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
        return {f"{name}.weight": 1 + self(width), f"{name}.bias": self(width)}


def save(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], prefix: str = "") -> str:
    """Writes a model whose tensors' names have a prefix in front; returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_tensors({f"{prefix}{name}": tensor for name, tensor in tensors.items()}, folder)
    return str(folder)


def save_modules(
    folder: Path, pooling: str, *, normalize: bool = True, prompts: Any = None, longest: int = 512,
    dim: int = 0,
) -> str:  # fmt: skip
    """Writes the modules of an older sentence-transformers beside a transformer; returns the path."""
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
