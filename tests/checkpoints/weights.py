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
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}

# How models call the projections of queries and keys.
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
    """The usual sizes that the config of a kind of model knows."""
    config = CONFIG_MAPPING[kind]
    known = {each.name for each in fields(config)} | config.attribute_map.keys()
    return {name: size for name, size in SIZES.items() if name in known}


def save_model(
    folder: Path, kind: str, auto: Any = AutoModel, options: Mapping[str, Any] | None = None, **settings: Any
) -> Any:
    """Saves a small model of a kind that transformers has, of the usual sizes unless `settings` of its config
    are others, and returns it. `options` are for its class."""
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
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


def save_tensors(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def save_renamed(
    model: Any,
    folder: Path,
    names: Mapping[str, str],
    fused: str,
    prefix: str = "",
    more: Mapping[str, torch.Tensor] | None = None,
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
