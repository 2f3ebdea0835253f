"""Vision-language models as sentence-transformers saves them: Qwen2-VL, Qwen2.5-VL and Qwen3-VL. What they
make of a text or a picture is the language model's; pictures come in as features of a tower."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.checkpoint.model import RoleRules
from maxsimd.engine.checkpoint.visual.chat import ChatRole
from maxsimd.engine.checkpoint.visual.grids import GridReader, GridTower
from maxsimd.engine.checkpoint.visual.pixels import PixelScale, check_numbers
from maxsimd.engine.checkpoint.visual.processor import blank, for_pictures_alone, without_videos
from maxsimd.engine.checkpoint.visual.vision import (
    Page,
    Tower,
    Vision,
    attention_a_patch,
    tokens_a_patch,
)
from maxsimd.engine.errors import ModelLoadError
from maxsimd.scheduler import Sequence

# By the type in a config. All count positions in time, height and width.
VISION_LANGUAGE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_PROBES = ("a", "What is this?", "two\nlines, and numbers: 1.5", " a space in front", "spaces behind  ", "\n")


def reads_pictures(files: CheckpointFiles) -> bool:
    """Whether a checkpoint is one of the vision-language models that can be served."""
    return files.config.get("model_type") in VISION_LANGUAGE


@contextmanager
def by_pillow(path: str, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The options with which sentence-transformers reads a checkpoint whose pictures Pillow is to read.

    Raises ModelLoadError where Pillow is missing."""
    if find_spec("PIL") is None:
        raise ModelLoadError(f"{path!r} reads pictures, for which Pillow is missing: pip install pillow")
    with ExitStack() as stack:
        stack.enter_context(without_videos())
        yield {**options, "processor_kwargs": {"backend": "pil"}}


def with_pictures(path: str, transformer: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """The parts of a `LoadedModel` as they are for a model that reads pictures too; unchanged for others.

    Raises ModelLoadError for a checkpoint whose texts or pictures are not read as expected here."""
    model = _without_output(transformer)
    if not hasattr(model, "visual"):
        return parts
    vision = _vision(path, transformer)
    inputs = PictureInputs(vision.tower, next(model.visual.parameters()).device)
    for task in parts["tasks"].values():
        task.reference.pictures = inputs
    rules = {role: parts.get(role, RoleRules()) for role in ("query", "document", "text")}
    return parts | {
        "backbone": model.language_model,
        "vision": vision,
        "query": with_chat(transformer, "query", rules["query"]),
        "document": with_chat(transformer, "document", rules["document"]),
        "text": with_chat(transformer, None, rules["text"]),
    }


def _without_output(transformer: Any) -> Any:
    """A transformer's model without an output layer."""
    whole = transformer.auto_model
    return getattr(whole, "model", whole)


class PictureInputs:
    """What the model's own code takes for the pictures of a sequence, beside its token ids."""

    def __init__(self, tower: Tower, device: torch.device) -> None:
        self._tower = tower
        self._device = device

    def __call__(self, sequence: Sequence) -> dict[str, torch.Tensor]:
        types = np.zeros((1, len(sequence)), dtype=np.int64)
        for image in sequence.tokens.images:
            types[0, image.positions] = 1
        inputs = {"mm_token_type_ids": torch.from_numpy(types).to(self._device)}
        if sequence.tokens.images:
            images = [image.inputs for image in sequence.tokens.images]
            inputs |= self._tower.inputs(images, self._device)
        return inputs


def _vision(path: str, transformer: Any) -> Vision:
    """How a model that sentence-transformers has read reads pictures."""
    model, processor = _without_output(transformer), for_pictures_alone(transformer.processor)
    image_processor = processor.image_processor
    if not type(image_processor).__name__.endswith("Pil"):
        raise ModelLoadError(
            f"{path!r} reads pictures by a {type(image_processor).__name__}, not by Pillow; install pillow"
        )
    if "message" not in transformer.modality_config or not processor.chat_template:
        raise ModelLoadError(f"{path!r} has no chat template, which says how pictures are written")
    scale = PixelScale.of(image_processor)
    token = processor.image_token_id
    reader = GridReader(image_processor, Page(np.array([token], dtype=np.int32), np.zeros(1, dtype=np.int64)))
    tower = GridTower(model.visual, scale, image_processor.temporal_patch_size)
    check_numbers(path, image_processor, reader, tower)
    modules = (model.visual,)
    return Vision(
        reader,
        tower,
        modules,
        tokens_a_patch(modules, model.language_model),
        attention_a_patch(model.visual, modules),
        mrope=True,
        image_token_id=token,
        image_token=processor.image_token,
    )


def with_chat(transformer: Any, role: str | None, rules: RoleRules) -> RoleRules:
    """Rules by which texts become what sentence-transformers makes of them, through the chat template.

    Raises ModelLoadError where they do not."""
    chat, tokenizer = ChatRole(transformer, role), transformer.tokenizer
    if chat.after and not chat.after.startswith(tuple(tokenizer.added_tokens_encoder)):
        raise ModelLoadError(
            f"the chat template writes {chat.after!r} behind texts, which may merge with them"
        )
    trailing = np.array(tokenizer(chat.after, add_special_tokens=False)["input_ids"], dtype=np.int32)
    if rules.expansion is not None:
        raise ModelLoadError("query expansion beside a chat template is not supported")
    for text in _PROBES:
        before = tokenizer(chat.before(rules.prompt) + text, add_special_tokens=False)["input_ids"]
        made = transformer.preprocess([text], prompt=rules.prompt or None, task=role)
        if [*before, *trailing.tolist()] != made["input_ids"][0].tolist():
            raise ModelLoadError("the chat template writes texts in a way that is not known here")
    picture = transformer.preprocess([blank(56, 56)], prompt=rules.prompt or None, task=role)
    written = tokenizer(chat.content([None], rules.prompt), add_special_tokens=False)["input_ids"]
    found = picture["input_ids"][0]
    token = transformer.processor.image_token_id
    if written.count(token) != 1 or [i for i in written if i != token] != found[found != token].tolist():
        raise ModelLoadError("the chat template writes pictures in a way that is not known here")
    return RoleRules(
        rules.prompt,
        trailing_ids=trailing if len(trailing) else None,
        max_tokens=rules.max_tokens,
        skipped_ids=rules.skipped_ids,
        chat=chat,
    )
