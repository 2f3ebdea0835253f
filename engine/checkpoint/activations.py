"""Activations that a checkpoint's files name by their Python path."""

import importlib
from typing import Any

from torch import nn

from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.errors import ModelLoadError

# Libraries that are installed anyway, whose classes run no code of a checkpoint.
_TRUSTED = ("torch.", "transformers.", "sentence_transformers.")
_KEY = "activation_fn"


def activation_of(path: str, file: str, named: str) -> nn.Module:
    """The activation that a `file` of a checkpoint names. Raises ModelLoadError for one of another library
    than torch, transformers and sentence-transformers, and for a name that is none there."""
    where = f"{file} of {path!r} names the activation {named!r}"
    if not named.startswith(_TRUSTED):
        raise ModelLoadError(
            f"{where}, which is not in torch or transformers; set trust_remote_code=True to import it"
        )
    module, _, name = named.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(f"{where}, which cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ModelLoadError(f"{where}, which is not a torch.nn.Module; name one that is")
    try:
        return found()
    except TypeError as error:
        raise ModelLoadError(f"{where}, which needs arguments ({error}); name another") from error


def stated_activation(path: str, files: CheckpointFiles, trusts_code: bool) -> nn.Module | None:
    """The activation that a CrossEncoder's files name for its scores; None where sentence-transformers finds
    it itself. Raises ModelLoadError as `activation_of` does."""
    if trusts_code:
        return None
    nested = files.config.get("sentence_transformers")
    # In the order in which sentence-transformers looks for it.
    stated = (
        (
            "config_sentence_transformers.json",
            files.sentence_transformers.get(_KEY) if files.modules else None,
        ),
        ("config.json", nested.get(_KEY) if isinstance(nested, dict) else None),
        ("config.json", files.config.get("sbert_ce_default_activation_function")),
    )
    for file, named in stated:
        if isinstance(named, str):
            return None if named.startswith("torch.") else activation_of(path, file, named)
    return None


def set_activations(path: str, modules: list[Any], settings: list[dict[str, Any]], trusts_code: bool) -> None:
    """Gives each Dense module the activation that its `settings` name. sentence-transformers imports those of
    torch alone where it does not trust code, and takes Tanh for all others.

    Raises ModelLoadError as `activation_of` does."""
    if trusts_code:
        return
    for i, (module, said) in enumerate(zip(modules, settings, strict=False)):
        named = said.get("activation_function")
        if not hasattr(module, "activation_function") or not isinstance(named, str):
            continue
        if not named.startswith("torch."):
            file = f"{i}_{type(module).__name__}/config.json"
            module.activation_function = activation_of(path, file, named)
