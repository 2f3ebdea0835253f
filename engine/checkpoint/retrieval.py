"""What checkpoints of transformers' `*ForRetrieval` classes have in common: a processor that renders texts
and pictures, read here as rules and checked against what it renders itself."""

import json
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

from maxsimd.engine.checkpoint.model import RoleRules
from maxsimd.engine.checkpoint.vision import Page
from maxsimd.engine.errors import ModelLoadError

_PROBES = ("a", "What is this?", "two\nlines, and numbers: 1.5", " a space in front")


def processor_of(path: str, model: MultiVectorEncoder) -> Any:
    """The processor of a checkpoint without other modules. Raises ModelLoadError for one that has some, or
    whose pictures are not read by Pillow: another library makes other pixels of them."""
    modules = list(model)
    masks = [module for module in modules[1:] if isinstance(module, MultiVectorMask)]
    other = [type(module).__name__ for module in modules[1:] if module not in masks]
    if any(mask.keep_only_token_ids or mask._skiplist_ids is not None for mask in masks):
        other.append("MultiVectorMask with a list")
    if other:
        raise ModelLoadError(f"{path!r} has modules that are not supported: {', '.join(other)}")
    transformer: Any = modules[0]
    kind = type(transformer.processor.image_processor).__name__
    if not kind.endswith("Pil"):
        raise ModelLoadError(f"{path!r} reads pictures by a {kind}, not by Pillow; install pillow")
    return transformer.processor


def rules_as_rendered(path: str, transformer: Any, rules: RoleRules, trailing: str) -> RoleRules:
    """The rules with the tokens of what stands behind texts. Raises ModelLoadError where the checkpoint's own
    processor makes other tokens of a text than these rules."""
    tokenizer = transformer.processor.tokenizer
    behind = np.array(tokenizer(trailing, add_special_tokens=False)["input_ids"], dtype=np.int32)
    leading = np.empty(0, dtype=np.int32) if rules.leading_ids is None else rules.leading_ids
    for text in _PROBES:
        inside = tokenizer(rules.prompt + text, add_special_tokens=False)["input_ids"]
        expected = transformer.preprocess([text], task="query")["input_ids"][0].tolist()
        if [*leading.tolist(), *inside, *behind.tolist()] != expected:
            raise ModelLoadError(
                f"the processor of {path!r} renders texts in a way that is not known here; save it as its "
                "class in transformers does"
            )
    return replace(rules, trailing_ids=behind)


def settings_of(processor: Any, page: Page) -> str:
    """All that decides what a processor makes of a picture, another version of Pillow included."""
    image_processor = processor.image_processor
    kind, settings = type(image_processor).__qualname__, image_processor.to_dict()
    said = json.dumps([kind, version("pillow"), settings], sort_keys=True, default=str)
    return f"{said} {page.ids.tolist()} {page.positions.tolist()}"
