"""Checkpoints that were published with code of their own, and whose architecture transformers has by now:
their config is translated into transformers' terms, and their code is not run. transformers renames the
tensors as it reads them.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.checkpoint.retrained import files_beside, retrained
from maxsimd.engine.errors import ModelLoadError


def _rotary_xlm_roberta(config: dict[str, Any]) -> dict[str, Any]:
    """jina-colbert-v2: XLM-RoBERTa with rotary positions, as transformers has it (jina-embeddings-v3)."""
    if config.get("lora_adaptations"):
        raise ModelLoadError(
            "this checkpoint has adapters woven into its weights; name its version for transformers, "
            "such as jinaai/jina-embeddings-v3-hf"
        )
    theta = float(config.get("rotary_emb_base", 10_000.0))
    return config | {
        "model_type": "jina_embeddings_v3",
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": False,
    }


def _nomic_bert(config: dict[str, Any]) -> dict[str, Any]:
    """nomic-embed-text: its config has GPT-2's names."""
    for name in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm", "use_rms_norm"):
        if config.get(name):
            raise ModelLoadError(f"this NomicBERT sets {name}, which transformers' does not have")
    return config | {
        "hidden_size": config["n_embd"],
        "num_hidden_layers": config["n_layer"],
        "num_attention_heads": config["n_head"],
        "intermediate_size": config["n_inner"],
        "max_position_embeddings": config["n_positions"],
        "layer_norm_eps": config["layer_norm_epsilon"],
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": float(config["rotary_emb_base"])},
    }


def _translation(config: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    rotary = config.get("position_embedding_type") == "rotary"
    if rotary and config.get("model_type") in ("xlm-roberta", "xlm_roberta"):
        return _rotary_xlm_roberta
    if config.get("model_type") == "nomic_bert" and "n_embd" in config:
        return _nomic_bert
    return None


@contextmanager
def in_transformers_terms(
    model: str, revision: str | None, files: CheckpointFiles, trust_remote_code: bool
) -> Iterator[str]:
    """The path to load the checkpoint from: its own, or a temporary folder with links to its files and a
    config in transformers' terms.

    With `trust_remote_code` a checkpoint's own code reads it, but for language models that were retrained:
    our loaders need to see into those."""
    if not files.config_at_root:
        yield model
        return
    of_language_model = retrained(files.config)
    translate = of_language_model or _translation(files.config)
    if translate is None or (of_language_model is None and trust_remote_code):
        yield model
        return
    source = Path(model) if Path(model).is_dir() else downloaded(model, revision)
    config = {name: value for name, value in translate(files.config).items() if name != "auto_map"}
    with tempfile.TemporaryDirectory(prefix="maxsimd-") as folder:
        for entry in source.iterdir():
            if entry.name != "config.json":
                (Path(folder) / entry.name).symlink_to(entry.resolve())
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        if of_language_model is not None:
            files_beside(source, files.config, Path(folder))
        yield folder


def downloaded(model: str, revision: str | None) -> Path:
    """A hub checkpoint's files on this machine, without other frameworks' weights."""
    others = ["onnx/*", "openvino/*", "*.onnx", "*.h5", "*.msgpack", "*.gguf"]
    return Path(snapshot_download(model, revision=revision, ignore_patterns=others))
