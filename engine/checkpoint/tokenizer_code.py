"""Tokenisers that come with code of their own, which is not run, and what it does."""

import json
from typing import Any

from maxsimd.engine.checkpoint.files import find_file
from maxsimd.engine.errors import ModelLoadError

_SETTINGS = "tokenizer_config.json"


def follow_settings(path: str, revision: str | None, tokenizer: Any) -> None:
    """Has a tokeniser of which the settings name code of its own end each text with the end-of-text token, if
    the settings say so (gte-Qwen2): that code does it, and tokenizer.json says nothing of it.

    Raises ModelLoadError where it cannot be done."""
    found = find_file(path, _SETTINGS, revision)
    settings = json.loads(found.read_text(encoding="utf-8")) if found is not None else {}
    mapped = settings.get("auto_map") if isinstance(settings, dict) else None
    has_code = isinstance(mapped, dict) and "AutoTokenizer" in mapped
    if not has_code or settings.get("add_eos_token") is not True or _ends(tokenizer):
        return
    tokenizer.add_eos_token = True
    if not _ends(tokenizer):
        raise ModelLoadError(
            f"the tokeniser of {path!r} is to end texts with {tokenizer.eos_token!r}, which its class does "
            "not do; save a tokenizer.json whose post-processor does"
        )


def _ends(tokenizer: Any) -> bool:
    return bool(tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id)
