"""In which directions a checkpoint reads: what its files say, what its model does, and language models that
read in both directions, which transformers runs with the causal mask taken away."""

import logging
from typing import Any

import torch

from maxsimd.engine.checkpoint.backbone import is_causal
from maxsimd.engine.checkpoint.detect import JINA_M0, LISTWISE
from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.checkpoint.retrained import retrained
from maxsimd.engine.errors import ModelLoadError

log = logging.getLogger(__name__)

# Part of the names of classes that read in both directions: LlamaBidirectionalModel, Qwen3BidirectionalModel.
_IN_NAMES = "bidirec"


def says_both_ways(files: CheckpointFiles) -> bool:
    """Whether a checkpoint's config says that it reads in both directions, by a field or by the name of the
    class that it is run by."""
    return config_says_both_ways(files.config)


def config_says_both_ways(config: dict[str, Any]) -> bool:
    """The same of a config alone."""
    if config.get("is_causal") is False or config.get("use_bidirectional_attention") is True:
        return True
    return any(_IN_NAMES in name.lower() for name in (str(config.get("model_type")), *_classes(config)))


def _classes(config: dict[str, Any]) -> list[str]:
    """The names of the classes that a config names for its model."""
    named, mapped = config.get("architectures"), config.get("auto_map")
    names = [str(name) for name in named] if isinstance(named, list) else []
    if isinstance(mapped, dict):
        names += [str(name) for kind, name in mapped.items() if str(kind).startswith("AutoModel")]
    return names


def take_mask_away(model: torch.nn.Module) -> None:
    """Has a causal language model of transformers attend in both directions, unless it does so already.

    transformers makes no causal mask where the config says `is_causal: false`; kernels that are given no mask
    ask the attention modules."""
    backbone: Any = getattr(model, "base_model", model)
    if not is_causal(backbone):
        return
    backbone.config.is_causal = False
    for module in backbone.modules():
        if getattr(module, "is_causal", None) is True:
            module.is_causal = False


def check_direction(path: str, files: CheckpointFiles, causal: bool, runs_own_code: bool) -> None:
    """Compares what a checkpoint says of its direction with what its model does. Raises ModelLoadError where
    they differ, and logs a warning where a causal model has code of its own that is not run and that might
    read otherwise."""
    if says_both_ways(files) and causal:
        raise ModelLoadError(
            f"{path!r} says that it reads in both directions, and its {files.architecture} reads in one "
            "here; name a model of which transformers' class can be run without a causal mask"
        )
    if files.config.get("is_causal") is True and not causal:
        raise ModelLoadError(
            f"{path!r} says that it is causal, and its {files.architecture} is not; take is_causal out of "
            "its config.json if that is wrong"
        )
    mapped = files.config.get("auto_map")
    named = isinstance(mapped, dict) and any(str(kind).startswith("AutoModel") for kind in mapped)
    has_loader = retrained(files.config) is not None or files.architecture in (LISTWISE, JINA_M0)
    if causal and named and not runs_own_code and not has_loader:
        log.warning(
            "%s comes with code of its own, which is not run: transformers' class reads it, in one direction;"
            ' say "is_causal": false in its config.json if its own code reads in both',
            path,
        )
