"""Processors of models that read pictures: what they make of one, and all that decides it."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np
from transformers.processing_utils import ProcessorMixin

from maxsimd.engine.checkpoint.visual.vision import Page
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.media.decoding import pillow_of

# Settings of processors of pictures that may be given with a call.
_SETTINGS = frozenset(
    {
        *("size", "do_resize", "resample", "do_center_crop", "crop_size", "do_convert_rgb"),
        *("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"),
        *("do_image_splitting", "max_image_size"),
    }
)


def page_of(ids: Any, image_token_id: int) -> Page:
    """The tokens that a processor makes of a picture. In place of the image's token, which may be none of
    the model's, stands the first of the vocabulary."""
    made = np.asarray(ids)
    positions = np.flatnonzero(made == image_token_id)
    return Page(np.where(made == image_token_id, 0, made).astype(np.int32), positions)


def settings_of(image_processor: Any, page: Page) -> str:
    """All that decides what is made of a picture, another version of Pillow included."""
    kind, settings = type(image_processor).__qualname__, image_processor.to_dict()
    said = json.dumps([kind, version("pillow"), settings], sort_keys=True, default=str)
    return f"{said} {page.ids.tolist()} {page.positions.tolist()}"


@contextmanager
def without_videos() -> Iterator[None]:
    """Inside this context processors of pictures and videos are made for pictures alone: for videos they want
    torchvision."""
    original = vars(ProcessorMixin)["get_attributes"]

    def attributes(cls: type[ProcessorMixin]) -> list[str]:
        return [name for name in original.__func__(cls) if name != "video_processor"]

    ProcessorMixin.get_attributes = classmethod(attributes)
    try:
        yield
    finally:
        ProcessorMixin.get_attributes = original


def for_pictures_alone(processor: Any) -> Any:
    """A processor that was made `without_videos`, as it can be called and saved."""
    processor.get_attributes = lambda: ["image_processor", "tokenizer"]
    return processor


def apply_settings(path: str, image_processor: Any, settings: Mapping[str, Any]) -> None:
    """Makes settings with which sentence-transformers calls a processor of pictures the processor's own.
    Raises ModelLoadError for one that is not known here."""
    for name, value in settings.items():
        if name in ("min_pixels", "max_pixels"):
            edge = "shortest_edge" if name == "min_pixels" else "longest_edge"
            image_processor.size = {**dict(image_processor.size), edge: value}
        elif name in _SETTINGS and hasattr(image_processor, name):
            setattr(image_processor, name, value)
        else:
            raise ModelLoadError(f"{path!r} has the setting {name} for pictures, which is not known here")


def settings_for_pictures(transformer: Any) -> dict[str, Any]:
    """The settings with which sentence-transformers calls a checkpoint's processor of pictures."""
    settings = dict(transformer.processing_kwargs or {})
    common = {
        name: value for name, value in (settings.get("common") or {}).items() if name != "return_tensors"
    }
    return {**(settings.get("image") or {}), **common}


def refuse_other_readers(path: str, image_processor: Any) -> None:
    """Raises ModelLoadError for pictures that are not read by Pillow: another library makes other pixels."""
    kind = type(image_processor).__name__
    if not kind.endswith("Pil"):
        raise ModelLoadError(f"{path!r} reads pictures by a {kind}, not by Pillow; install pillow")


def blank(width: int, height: int) -> Any:
    """A black picture."""
    return pillow_of(np.zeros((height, width, 3), dtype=np.uint8))
