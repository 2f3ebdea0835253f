"""LoRA folders, as peft saves them; `merged` beside each is its base with the weights it stands for."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2ForSequenceClassification

from tests.checkpoints import cross_encoders
from tests.checkpoints.tokenizers import byte_level_bpe
from tests.checkpoints.weights import SIZES, save_tensors, spread

Tensors = dict[str, torch.Tensor]
_QUERY, _VALUE = (f"bert.encoder.layer.1.attention.self.{part}" for part in ("query", "value"))

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rsLoRA": {"use_rslora": True},
    "patterns": {"rank_pattern": {"value": 6}, "alpha_pattern": {"query": 3}},
    "DoRA": {"use_dora": True},
    "a classifier and a bias": {"modules_to_save": ["classifier", "score"], "bias": "all"},
}
SETTINGS["DoRA with rsLoRA and patterns"] = SETTINGS["DoRA"] | SETTINGS["rsLoRA"] | SETTINGS["patterns"]


def bert(folder: Path, **settings: Any) -> str:
    """Two layers changed. `settings` are those of the adapter; with `modules_to_save` the classifier is
    replaced, with `bias` a bias, with `use_dora` rows have lengths of their own."""
    base, adapter, merged = folder / "base", folder / "adapter", folder / "merged"
    cross_encoders.bert(base)
    said = {"r": 4, "lora_alpha": 6, "base_model_name_or_path": str(base)} | settings
    torch.manual_seed(3)
    tensors, saved = load_file(base / "model.safetensors"), {}
    for name in (_QUERY, _VALUE):
        rank = said.get("rank_pattern", {}).get(name.rpartition(".")[2], said["r"])
        alpha = said.get("alpha_pattern", {}).get(name.rpartition(".")[2], said["lora_alpha"])
        scale = alpha / (rank**0.5 if said.get("use_rslora") else rank)
        first, second = torch.randn(rank, 128) * 0.2, torch.randn(128, rank) * 0.2
        changed = tensors[f"{name}.weight"] + scale * second @ first
        saved |= {f"{name}.lora_A.weight": first, f"{name}.lora_B.weight": second}
        if said.get("use_dora"):
            lengths = torch.rand(128) + 0.5
            saved[f"{name}.lora_magnitude_vector"] = lengths
            changed = lengths[:, None] * changed / changed.norm(dim=1, keepdim=True)
        tensors[f"{name}.weight"] = changed
    replaced = {"classifier.weight", "classifier.bias"} if "modules_to_save" in said else set()
    replaced |= {f"{_QUERY}.bias"} if said.get("bias") else set()
    for name in sorted(replaced):
        tensors[name] = torch.randn_like(tensors[name])
        saved[name.replace("query.", "query.base_layer.")] = tensors[name]
    return _written(folder, said, saved, tensors, (base, adapter, merged))


def saved_by_name(folder: Path) -> str:
    """The same with a classifier, saved with the adapter's name and the layer that it replaces."""
    adapter = bert(folder, modules_to_save=["classifier"])
    path = Path(adapter) / "adapter_model.safetensors"
    named = {}
    for name, tensor in load_file(path).items():
        saved = re.sub(r"(lora_[AB])", r"\1.default", name)
        named[saved.replace(".classifier.", ".classifier.modules_to_save.default.")] = tensor
    named["base_model.model.classifier.original_module.weight"] = torch.ones(1, 128)
    save_file(named, path)
    return adapter


def without_classifier(source: Path, adapter: Path, base: Path) -> None:
    """Copies an adapter, and its base as a BertModel alone."""
    shutil.copytree(source, adapter)
    shutil.copytree(source.parent / "base", base)
    tensors = load_file(base / "model.safetensors")
    own = {name.removeprefix("bert."): tensor for name, tensor in tensors.items() if name.startswith("bert.")}
    save_tensors(own, base)
    for path, said in (
        (base / "config.json", {"architectures": ["BertModel"]}),
        (adapter / "adapter_config.json", {"base_model_name_or_path": str(base)}),
    ):
        stated = {name: value for name, value in json.loads(path.read_text()).items() if "label" not in name}
        path.write_text(json.dumps(stated | said))


def gpt2(folder: Path) -> str:
    """A layer whose weight lies the other way round, and the score at the end, replaced."""
    base, adapter, merged = folder / "base", folder / "adapter", folder / "merged"
    size = byte_level_bpe(base, {"eos_token": "<|endoftext|>", "pad_token": "<pad>"}, "$A", "$A $B")
    sizes = {"n_embd": SIZES["hidden_size"], "n_layer": 2, "n_head": 4, "n_positions": 512}
    config = GPT2Config(vocab_size=size, num_labels=1, pad_token_id=1, **sizes)
    spread(GPT2ForSequenceClassification(config)).save_pretrained(base)
    said = {"r": 4, "lora_alpha": 8, "fan_in_fan_out": True, "base_model_name_or_path": str(base),
            "modules_to_save": ["classifier", "score"]}  # fmt: skip
    torch.manual_seed(3)
    tensors, name = load_file(base / "model.safetensors"), "transformer.h.1.attn.c_attn"
    first, second = torch.randn(4, 128) * 0.2, torch.randn(384, 4) * 0.2
    tensors[f"{name}.weight"] += 2 * (second @ first).T
    tensors["score.weight"] = torch.randn_like(tensors["score.weight"])
    saved = {f"{name}.lora_A.weight": first, f"{name}.lora_B.weight": second}
    saved["score.weight"] = tensors["score.weight"]
    return _written(folder, said, saved, tensors, (base, adapter, merged))


def _written(folder: Path, said: Any, saved: Tensors, tensors: Tensors, folders: tuple[Path, ...]) -> str:
    base, adapter, merged = folders
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps(_USUAL | {"task_type": "SEQ_CLS" if "modules_to_save" in said else None} | said)
    )
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in saved.items()}
    save_file(named, adapter / "adapter_model.safetensors")
    shutil.copytree(base, merged)
    save_tensors(tensors, merged)
    return str(adapter)


_USUAL = {
    "peft_type": "LORA", "task_type": None, "bias": "none", "inference_mode": True,
    "target_modules": ["query", "value", "c_attn"], "init_lora_weights": True,
}  # fmt: skip
