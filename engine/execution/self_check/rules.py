"""Rules by a model's config that the short random texts of the self-check would not show."""

from collections.abc import Iterator
from typing import Any

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.models.lfm2 import short_convolutions_of

# Kinds of layers, as configs name them, that run packed.
_PACKABLE = frozenset({"full_attention", "sliding_attention"})
# Kinds of rotary positions whose frequencies depend on the longest sequence of a pass.
_BY_LENGTH = frozenset({"longrope", "dynamic"})
# Trained in bfloat16, whose range is that of float32; EmbeddingGemma's card says so of a Gemma 3.
_BEYOND_FLOAT16 = frozenset({"t5", "mt5", "umt5", "longt5", "gemma3", "gemma3_text"})
# Random texts reach beyond windows up to this many tokens.
LONGEST_WINDOW = 1024
_ORIGINAL = "original_max_position_embeddings"


def why_not_float16(model: LoadedModel) -> str | None:
    """The reason why a model cannot run in float16, or None."""
    kind = getattr(_config(model), "model_type", None)
    if kind in _BEYOND_FLOAT16:
        return f"the states of a {kind} leave the range of float16 (65504); use bfloat16 or float32"
    return None


def why_one_by_one(model: LoadedModel) -> str | None:
    """The reason why the sequences of a model must not share a pass, or None."""
    config = _config(model)
    if any(getattr(config, name, None) for name in ("index_topk", "index_topk_blocks")):
        return "it attends to a choice of keys, in which ties are broken by how a step is padded"
    for rope in _rotary_settings(config):
        if rope.get("rope_type", rope.get("type")) not in _BY_LENGTH:
            continue
        said = (rope.get(_ORIGINAL), getattr(config, _ORIGINAL, None))
        most: int = next((number for number in said if number), getattr(config, "max_position_embeddings", 0))
        if model.max_tokens > most:
            return (
                f"a sequence of more than {most} tokens changes the positions of all in its pass; "
                f"with max_model_len={most} there is none"
            )
    return None


def leaves_ends_out(model: LoadedModel) -> bool:
    """Whether queries of a model end in masked tokens."""
    return model.query.expansion is not None and not model.query.expansion.attended


def why_not_packed(model: LoadedModel, windows: set[int | None], causal_ends: bool) -> str | None:
    """The reason why a model cannot be packed, or None. `windows` are those that its layers asked for;
    `causal_ends` says whether attention masks the ends of causal sequences."""
    config = _config(model)
    packable = _PACKABLE | {"conv"} if short_convolutions_of(model.backbone) else _PACKABLE
    others = set(getattr(config, "layer_types", None) or ()) - packable
    if leaves_ends_out(model) and model.causal and not causal_ends:
        return "it is causal, and expands queries by tokens that attention on this device cannot leave out"
    if others:
        return f"it has layers of other kinds: {', '.join(sorted(map(str, others)))}"
    chunk = getattr(config, "attention_chunk_size", None)
    if isinstance(chunk, int) and chunk < model.max_tokens:
        return f"it attends within chunks of {chunk} tokens"
    window = window_of(config)
    # ModernBERT's layers ask for one more. Samples longer than a window prove it themselves.
    is_unproven = window is not None and LONGEST_WINDOW < window < model.max_tokens
    if window is not None and is_unproven and not windows & {window, window + 1}:
        return f"its layers do not ask for the window of {window} tokens that it is to have"
    return None


def window_of(config: Any) -> int | None:
    """The attention window of some layers, if a config names one."""
    kinds = getattr(config, "layer_types", None)
    if kinds and "sliding_attention" not in kinds:
        return None
    window = getattr(config, "sliding_window", None) or getattr(config, "local_attention", None)
    return window if isinstance(window, int) else None


def _config(model: LoadedModel) -> Any:
    backbone: Any = model.backbone
    return backbone.config.get_text_config()


def _rotary_settings(config: Any) -> Iterator[dict[str, Any]]:
    """The settings of rotary positions in a config: once, or for each kind of layer."""
    for said in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        if isinstance(said, dict):
            yield said
            yield from (part for part in said.values() if isinstance(part, dict))
