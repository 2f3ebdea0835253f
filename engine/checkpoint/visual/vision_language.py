"""Vision-language models as sentence-transformers saves them: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Idefics3.
What they make of a text or a picture is the language model's; pictures come in as features of a tower."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.checkpoint.model import RoleRules
from maxsimd.engine.checkpoint.score_template import ScoreTemplate
from maxsimd.engine.checkpoint.text_settings import leave_special_tokens_out
from maxsimd.engine.checkpoint.visual.chat import ChatRole
from maxsimd.engine.checkpoint.visual.pixels import check_as_called
from maxsimd.engine.checkpoint.visual.processor import (
    apply_settings,
    blank,
    for_pictures_alone,
    settings_for_pictures,
    without_videos,
)
from maxsimd.engine.checkpoint.visual.qwen_vl import PICTURE, PictureInputs, vision_of
from maxsimd.engine.checkpoint.visual.tiles import vision_of_tiles
from maxsimd.engine.checkpoint.visual.vision import Vision
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.media import Picture
from maxsimd.scheduler.sequence import TokenIds

# By the type in a config.
VISION_LANGUAGE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3")
# Of pictures: width and height.
_PROBE_SIZE, _LARGE = (90, 60), (700, 500)
_PROBES = ("a", "What is this?", "two\nlines, and numbers: 1.5", " a space in front", "spaces behind  ", "\n")


def reads_pictures(files: CheckpointFiles) -> bool:
    """Whether a checkpoint is one of the vision-language models that can be served."""
    return files.config.get("model_type") in VISION_LANGUAGE


@contextmanager
def by_pillow(path: str, files: CheckpointFiles, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The options with which sentence-transformers reads a checkpoint: the same, but for one that reads
    pictures, which Pillow is to read.

    Raises ModelLoadError where Pillow is missing."""
    if not reads_pictures(files):
        yield options
        return
    if find_spec("PIL") is None:
        raise ModelLoadError(f"{path!r} reads pictures, for which Pillow is missing: pip install pillow")
    with without_videos():
        yield {**options, "processor_kwargs": {"backend": "pil"}}


def with_pictures(path: str, transformer: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """The parts of a `LoadedModel` as they are for a model that reads pictures too, or texts through a chat
    template; unchanged for others.

    Raises ModelLoadError for a checkpoint whose texts or pictures are not read as expected here."""
    model = _without_output(transformer)
    if not (hasattr(model, "visual") or hasattr(model, "vision_model")):
        in_chat = parts["score_task"] != "classify" and "message" in transformer.modality_config
        return parts | _in_chat(path, transformer, None, parts) if in_chat else parts
    if "message" not in transformer.modality_config or not transformer.processor.chat_template:
        raise ModelLoadError(f"{path!r} has no chat template, which says how pictures are written")
    processor = transformer.processor
    apply_settings(path, processor.image_processor, settings_for_pictures(transformer))
    if hasattr(model, "visual"):
        vision, backbone = vision_of(path, model, for_pictures_alone(processor)), model.language_model
    else:
        vision, backbone = vision_of_tiles(path, model, processor), model.text_model
    in_pairs = parts["score_task"] == "classify"
    check_as_called(path, transformer, vision.reader, vision.tower, in_pairs)
    inputs = PictureInputs(vision, next(backbone.parameters()).device)
    for task in parts["tasks"].values():
        task.reference.pictures = inputs
    parts |= {"backbone": backbone, "vision": vision}
    if parts["score_task"] == "classify":
        template = parts["pairs"].template
        if template.in_parts:
            _check_pairs(transformer, template, vision)
            return parts
        pairs = replace(parts["pairs"], template=replace(template, picture=PICTURE))
        return parts | {"pairs": pairs}
    return parts | _in_chat(path, transformer, vision, parts)


def _in_chat(
    path: str, transformer: Any, vision: Vision | None, parts: dict[str, Any]
) -> dict[str, RoleRules]:
    """The rules of all roles, whose texts a chat template writes."""
    if vision is None:
        leave_special_tokens_out(transformer.tokenizer)
    roles = {"query": "query", "document": "document", "text": None}
    try:
        return {
            name: with_chat(transformer, vision, role, parts.get(name, RoleRules()))
            for name, role in roles.items()
        }
    except ModelLoadError as error:
        raise ModelLoadError(f"the chat template of {path!r} is not supported: {error}") from error


def _without_output(transformer: Any) -> Any:
    """A transformer's model without an output layer."""
    whole = transformer.auto_model
    return getattr(whole, "model", whole)


def _check_pairs(transformer: Any, template: ScoreTemplate, vision: Vision) -> None:
    """Raises ModelLoadError unless a template writes pairs with pictures as sentence-transformers does."""
    small, large = blank(*_PROBE_SIZE), blank(*_LARGE)
    for pair in ((small, "a b"), ("a b", small), (small, large), (large, small)):
        query, document = ([item if isinstance(item, str) else None] for item in pair)
        written = template.pair(query, document, None, vision.image_token)
        sides = pair if written.query_first else pair[::-1]
        pictures = [item.size for item in sides if not isinstance(item, str)]
        _check_written(transformer, vision, written.text, pictures, transformer.preprocess([pair]))


def _check_written(
    transformer: Any, vision: Vision, text: str, sizes: Sequence[tuple[int, int]], made: Any
) -> None:
    """Raises ModelLoadError unless a text with black pictures of some sizes has the tokens that were made of
    it."""
    pixels = [np.zeros((height, width, 3), dtype=np.uint8) for width, height in sizes]
    images = [vision.reader.read(Picture(each)) for each in pixels]

    def encoded(text: str) -> TokenIds:
        return np.array(transformer.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

    tokens = vision.with_features(text, images, encoded)
    if tokens is None or tokens.ids.tolist() != made["input_ids"][0].tolist():
        raise ModelLoadError("the chat template writes pictures in a way that is not known here")


def with_chat(transformer: Any, vision: Vision | None, role: str | None, rules: RoleRules) -> RoleRules:
    """Rules by which texts, and pictures where there is a `vision`, become what sentence-transformers makes
    of them, through the chat template.

    Raises ModelLoadError where they do not."""
    chat, tokenizer = ChatRole(transformer, role), transformer.tokenizer
    if chat.after and not chat.after.startswith(tuple(tokenizer.added_tokens_encoder)):
        raise ModelLoadError(
            f"the chat template writes {chat.after!r} behind texts, which may merge with them"
        )
    trailing = np.array(tokenizer(chat.after, add_special_tokens=False)["input_ids"], dtype=np.int32)
    if rules.expansion is not None:
        raise ModelLoadError("query expansion beside a chat template is not supported")
    settings = transformer.processing_kwargs or {}
    own_length = (settings.get("text") or {}).get("max_length", rules.max_tokens)
    if own_length is not None and (settings.get("chat_template") or {}).get("restore_suffix") is False:
        raise ModelLoadError("texts that are cut without what stands behind them are not supported")
    for text in _PROBES:
        before = tokenizer(chat.before(rules.prompt) + text, add_special_tokens=False)["input_ids"]
        made = transformer.preprocess([text], prompt=rules.prompt or None, task=role)
        if [*before, *trailing.tolist()] != made["input_ids"][0].tolist():
            raise ModelLoadError("the chat template writes texts in a way that is not known here")
    if vision is not None:
        picture = transformer.preprocess([blank(*_PROBE_SIZE)], prompt=rules.prompt or None, task=role)
        _check_written(transformer, vision, chat.content([None], rules.prompt), [_PROBE_SIZE], picture)
    return RoleRules(
        rules.prompt,
        trailing_ids=trailing if len(trailing) else None,
        max_tokens=own_length,
        skipped_ids=rules.skipped_ids,
        chat=chat,
    )
