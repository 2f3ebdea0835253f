"""Checkpoints that were published with code of their own, and whose architecture transformers has by now:
their config is translated into transformers' terms, and their code is not run. transformers renames the
tensors as it reads them.
"""

import json
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.checkpoint.retrained import files_beside, retrained
from maxsimd.engine.checkpoint.translations import (
    Config,
    flash_xlm_roberta,
    gte,
    is_flash_xlm_roberta,
    jina_bert,
    nomic_bert,
)
from maxsimd.engine.checkpoint.weights import tensor_names
from maxsimd.engine.errors import ModelLoadError


def _rotary_xlm_roberta(config: Config) -> Config:
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


def _translation(config: Config, tensors: Collection[str] = ()) -> Callable[[Config], Config] | None:
    """What translates a config, if it must be; `tensors` are the names in the checkpoint's files, where they
    are at hand."""
    kind, flash = config.get("model_type"), is_flash_xlm_roberta(config)
    positions = config.get("position_embedding_type")
    if positions == "rotary" and (flash or kind in ("xlm-roberta", "xlm_roberta")):
        return _rotary_xlm_roberta
    if flash:
        return flash_xlm_roberta
    if kind == "bert" and positions == "alibi":
        return partial(jina_bert, tensors=tensors)
    if kind == "nomic_bert" and "n_embd" in config:
        return nomic_bert
    if kind == "new" or (kind == "gte" and "rope_theta" in config):
        return gte
    return None


def runs_as(files: CheckpointFiles) -> Any:
    """The type of model that a checkpoint's config is read as. Raises ModelLoadError for a config that
    cannot be translated."""
    translate = _translation(files.config) if files.config_at_root else None
    config = files.config if translate is None else translate(files.config)
    return config.get("model_type")


def translated_type(config: Config) -> tuple[Any, bool]:
    """The type of model that a config.json is read as, and whether the config is translated for that. Raises
    ModelLoadError for a config that cannot be translated."""
    translate = retrained(config) or _translation(config)
    return (config if translate is None else translate(config)).get("model_type"), translate is not None


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
    is_ours = not trust_remote_code and _translation(files.config) is not None
    if of_language_model is None and not is_ours and not files.is_restated:
        yield model
        return
    source = Path(model) if Path(model).is_dir() else downloaded(model, revision)
    config = files.config
    if of_language_model is not None or is_ours:
        translate = of_language_model or _translation(config, tensor_names(model, revision))
        assert translate is not None
        config = {name: value for name, value in translate(config).items() if name != "auto_map"}
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
