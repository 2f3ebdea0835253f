"""Loads models that read pictures: vision-language models as sentence-transformers saves them (Qwen-VL,
Idefics3), transformers' `*ForRetrieval` models (ColPali, arXiv 2407.01449), and two towers: CLIP (arXiv
2103.00020) and SigLIP (arXiv 2303.15343). Pictures are read as grids of patches, squares or tiles; pixels
wait in a byte each until a tower makes features of them."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from math import isqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from tokenizers import Tokenizer
from transformers.modeling_outputs import BaseModelOutput
from transformers.processing_utils import ProcessorMixin

from maxsimd.engine.checkpoint import heads
from maxsimd.engine.checkpoint.detect import COLMODERNVBERT, COLPALI
from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.checkpoint.model import Expansion, RoleRules, Task
from maxsimd.engine.checkpoint.reading import LibraryReader, ProcessorReader
from maxsimd.engine.checkpoint.reference import ModulesReference, VisualReference
from maxsimd.engine.checkpoint.settings import leave_special_tokens_out
from maxsimd.engine.checkpoint.templates import ChatRole, ScoreTemplate
from maxsimd.engine.checkpoint.visual import ImageInputs, Page, PictureReader, Tower, Vision
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.media import Picture, pillow_of
from maxsimd.pooling.ragged import to_device
from maxsimd.scheduler import TokenSequence
from maxsimd.scheduler.sequence import TokenIds

CLIP, SIGLIP = "clip", "siglip"
# Text of a picture in the models' prompts.
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
# Pixels that a processor with nothing but `shortest_edge` may make of a picture.
_MOST_RESIZED = 20_000_000
# For numbers around 1: float32 may be rounded otherwise.
_TOLERANCE = 1e-5
# Settings of processors of pictures that may be given with a call.
_SETTINGS = frozenset(
    {
        *("size", "do_resize", "resample", "do_center_crop", "crop_size", "do_convert_rgb"),
        *("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"),
        *("do_image_splitting", "max_image_size"),
    }
)
# Pictures that the tower encodes together: some, or as many as have this many patches; and tiles.
_TOGETHER, _PATCHES, _TILES_TOGETHER = 4, 4096, 8
# Width and height of pictures that are tried.
_PROBE_SIZE, _LARGE, _TALL = (90, 60), (700, 500), (40, 90)
_PLAIN_PROBES = ("a", "What is this?", "two\nlines, and numbers: 1.5", " a space in front")
_PROBES = (*_PLAIN_PROBES, "spaces behind  ", "\n")


class PixelScale:
    """Scale of a processor's pixels: times a factor, minus the channel's mean, divided by its deviation."""

    def __init__(self, image_processor: Any) -> None:
        self._factor = float(image_processor.rescale_factor) if image_processor.do_rescale else 1.0
        mean, deviation = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        if image_processor.do_normalize:
            mean, deviation = image_processor.image_mean, image_processor.image_std
        self._scale = torch.tensor([[*mean], [*deviation]], dtype=torch.float32)

    def __call__(self, arrays: Sequence[NDArray[Any]], device: torch.device) -> torch.Tensor:
        """Float32 numbers of arrays of pixels in a byte each, joined: [n, 3, ...]."""
        pixels = _joined(arrays, device)
        shape = (1, -1, *[1] * (pixels.dim() - 2))
        mean, deviation = (to_device(each, pixels.device).view(shape) for each in self._scale)
        numbers = pixels.to(torch.float32, copy=True)
        return numbers.mul_(self._factor).sub_(mean).div_(deviation)


def _joined(arrays: Sequence[NDArray[Any]], device: torch.device) -> torch.Tensor:
    return to_device(np.concatenate(arrays), device)


def _resized(image_processor: Any, picture: Picture, **options: Any) -> Any:
    """The processor's output for a picture, with pixels in a byte each in place of numbers. Raises ValueError
    for a picture that it would make too large."""
    size = dict(image_processor.size)
    if image_processor.do_resize and size.keys() == {"shortest_edge"}:
        longest = size["shortest_edge"] * max(picture.pixels.shape[:2]) // min(picture.pixels.shape[:2])
        if size["shortest_edge"] * longest > _MOST_RESIZED:
            raise ValueError(
                f"it would become {size['shortest_edge']:,} x {longest:,} pixels; send one that is less long"
            )
    return image_processor(
        images=[picture.pixels],
        input_data_format="channels_last",
        do_convert_rgb=False,
        do_rescale=False,
        do_normalize=False,
        return_tensors="np",
        **options,
    )


def _noise(width: int, height: int) -> Picture:
    return Picture(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


def _blank(width: int, height: int) -> Any:
    return pillow_of(np.zeros((height, width, 3), dtype=np.uint8))


def _reads(reader: PictureReader, tower: Tower, picture: Picture, made: Mapping[str, Any]) -> bool:
    """Whether a tower reads the numbers of a picture that a library `made`."""
    for name, numbers in tower.inputs([reader.read(picture)], torch.device("cpu")).items():
        expected = torch.as_tensor(made[name]).to(numbers.dtype)
        if numbers.shape != expected.shape or float((numbers - expected).abs().max()) > _TOLERANCE:
            return False
    return True


def _check_as_called(path: str, transformer: Any, vision: Vision, in_pairs: bool = False) -> None:
    """Raises ModelLoadError unless a tower reads what sentence-transformers' module makes of a large and a
    small picture; as queries of pairs, for a module that reads pairs alone."""
    for size in (_LARGE, _TALL):
        picture = _noise(*size)
        image = pillow_of(picture.pixels)
        made = transformer.preprocess([(image, "a") if in_pairs else image])
        if not _reads(vision.reader, vision.tower, picture, made):
            raise ModelLoadError(f"pictures of {path!r} are not read as sentence-transformers reads them")


def _page_of(ids: Any, image_token_id: int) -> Page:
    """The tokens that a processor makes of a picture. In place of the image's token, which may be none of
    the model's, stands the first of the vocabulary."""
    made = np.asarray(ids)
    positions = np.flatnonzero(made == image_token_id)
    return Page(np.where(made == image_token_id, 0, made).astype(np.int32), positions)


def _signature(image_processor: Any, page: Page) -> str:
    """All that decides what is made of a picture, another version of Pillow included."""
    kind, settings = type(image_processor).__qualname__, image_processor.to_dict()
    said = json.dumps([kind, version("pillow"), settings], sort_keys=True, default=str)
    return f"{said} {page.ids.tolist()} {page.positions.tolist()}"


@contextmanager
def without_videos() -> Iterator[None]:
    """Has processors read pictures alone, without videos, for which they need torchvision."""
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


def _apply_settings(path: str, transformer: Any) -> None:
    """Gives a processor the settings with which sentence-transformers calls it. Raises ModelLoadError for one
    that is not known here."""
    image_processor, settings = transformer.processor.image_processor, transformer.processing_kwargs or {}
    for name, value in {**(settings.get("image") or {}), **(settings.get("common") or {})}.items():
        if name in ("min_pixels", "max_pixels"):
            edge = "shortest_edge" if name == "min_pixels" else "longest_edge"
            image_processor.size = {**dict(image_processor.size), edge: value}
        elif name in _SETTINGS and hasattr(image_processor, name):
            setattr(image_processor, name, value)
        elif name != "return_tensors":
            raise ModelLoadError(f"{path!r} has the setting {name} for pictures, which is not known here")


def _vision(
    path: str,
    image_processor: Any,
    reader: PictureReader,
    tower: Tower,
    modules: Sequence[torch.nn.Module],
    language_model: torch.nn.Module,
    **others: Any,
) -> Vision:
    """The picture reader of a model, whose first module encodes patches. Raises ModelLoadError for pictures
    that its own processor reads in another way."""
    kind = type(image_processor).__name__
    if not kind.endswith("Pil"):  # another library than Pillow makes other pixels
        raise ModelLoadError(f"{path!r} reads pictures by a {kind}, not by Pillow; install pillow")
    picture = _noise(*_PROBE_SIZE)
    made = image_processor(images=[pillow_of(picture.pixels)], return_tensors="np")
    if not _reads(reader, tower, picture, made):
        raise ModelLoadError(
            f"the processor of {path!r} makes numbers of pixels in a way that is not known here"
        )
    work = sum(map(_multiplied, modules))
    config: Any = modules[0].config
    width = getattr(config, "embed_dim", None) or config.hidden_size
    depth = getattr(config, "depth", None) or config.num_hidden_layers
    # Attending to a patch takes its products with queries and with values, in each layer.
    attention = 2 * width * depth / max(1, work)
    tokens_a_patch = work / max(1, _multiplied(language_model))
    return Vision(reader, tower, tuple(modules), tokens_a_patch, attention, **others)


def _multiplied(module: torch.nn.Module) -> int:
    """The number of weights of linear layers and convolutions, which each multiply once."""
    layers = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d)
    return sum(each.weight.numel() for each in module.modules() if isinstance(each, layers))


class GridReader:
    """Each picture as a grid of patches, several a token, beside the other tokens of the `page` that a
    checkpoint makes of a picture alone. A token of a picture is written as `text`."""

    def __init__(self, image_processor: Any, page: Page, text: str = "") -> None:
        self._image_processor = image_processor
        self._merge = image_processor.merge_size
        self._frames = image_processor.temporal_patch_size
        first, last = int(page.positions[0]), int(page.positions[-1])
        self._before, self._after = page.ids[:first], page.ids[last + 1 :]
        self._token = int(page.ids[first])
        self._text = text
        self.signature = _signature(image_processor, Page(page.ids, page.positions[:1]))

    def read(self, picture: Picture) -> ImageInputs:
        made = _resized(self._image_processor, picture)
        # All frames of a patch have the same pixels: keep one.
        patches = made["pixel_values"].reshape(len(made["pixel_values"]), 3, self._frames, -1)
        grid = made["image_grid_thw"].astype(np.int64)  # [1, 3]
        # [patches, 3, pixels of a patch]
        arrays = {"pixels": patches[:, :, 0].astype(np.uint8), "grid": grid}
        merged = int(grid[0, 1]) // self._merge, int(grid[0, 2]) // self._merge
        return ImageInputs(arrays, len(patches), merged, picture.size, picture.digest)

    def page(self, inputs: ImageInputs) -> Page:
        count = inputs.patches // self._merge**2
        ids = np.concatenate([self._before, np.full(count, self._token, dtype=np.int32), self._after])
        return Page(ids, np.arange(count) + len(self._before))

    def written(self, inputs: ImageInputs) -> str:
        return self._text * inputs.features


class GridTower:
    """Pictures of all sizes in one pass: their patches end to end. A tower with DeepStack (Meng et al. 2024,
    arXiv 2406.04334) has features for several layers of the language model, side by side."""

    def __init__(self, tower: Any, image_processor: Any) -> None:
        self._tower = tower
        self._scale = PixelScale(image_processor)
        self._frames = image_processor.temporal_patch_size

    def inputs(self, images: Sequence[ImageInputs], device: torch.device) -> dict[str, torch.Tensor]:
        """`pixel_values` [patches of all, numbers of a patch] and `image_grid_thw` [pictures, 3]."""
        numbers = self._scale([image.arrays["pixels"] for image in images], device)
        patches = numbers[:, :, None].expand(-1, -1, self._frames, -1).flatten(1)
        grids = _joined([image.arrays["grid"] for image in images], device)
        return {"pixel_values": patches, "image_grid_thw": grids}

    def __call__(self, images: Sequence[ImageInputs], device: torch.device) -> list[torch.Tensor]:
        dtype = next(self._tower.parameters()).dtype
        inputs = self.inputs(images, device)
        patches, grids = inputs["pixel_values"].to(dtype), inputs["image_grid_thw"]
        made = self._tower(patches, grid_thw=grids, return_dict=True)
        # Features for the first layers stand beside those that take the place of embeddings.
        deep = getattr(made, "deepstack_features", None) or []
        features = torch.cat([made.pooler_output, *deep], dim=-1)  # [features of all, hidden x (1 + layers)]
        merged = self._tower.spatial_merge_size**2
        return [*torch.split(features, [image.patches // merged for image in images])]


def vision_of(path: str, model: Any, processor: Any) -> Vision:
    """The picture reader of a model that reads grids. Raises ModelLoadError as `_vision` does."""
    token, text = processor.image_token_id, processor.image_token
    alone = Page(np.array([token], dtype=np.int32), np.zeros(1, dtype=np.int64))
    reader = GridReader(processor.image_processor, alone, text)
    tower = GridTower(model.visual, processor.image_processor)
    said: dict[str, Any] = {"mrope": True, "image_token_id": token, "image_token": text}
    return _vision(
        path, processor.image_processor, reader, tower, [model.visual], model.language_model, **said
    )


class PictureInputs:
    """The inputs of the model's own code for the pictures of a sequence, beside its token ids."""

    def __init__(self, vision: Vision, device: torch.device) -> None:
        self._vision = vision
        self._device = device

    def __call__(self, sequence: TokenSequence) -> dict[str, Any]:
        inputs: dict[str, Any] = {}
        if self._vision.mrope:
            types = np.zeros((1, len(sequence)), dtype=np.int64)
            for image in sequence.tokens.images:
                types[0, image.positions] = 1
            inputs["mm_token_type_ids"] = torch.from_numpy(types).to(self._device)
        if sequence.tokens.images:
            images = [image.inputs for image in sequence.tokens.images]
            inputs |= self._vision.tower.inputs(images, self._device)
            if self._vision.is_result:
                inputs["modality"] = "image"
        return inputs


class SquareReader:
    """Each picture as a square of as many `patches`, which becomes the `page`."""

    def __init__(self, image_processor: Any, page: Page, patches: int) -> None:
        self._image_processor = image_processor
        self._page = page
        self._patches = patches
        side = isqrt(len(page.positions))
        self._grid = side, side
        self.signature = _signature(image_processor, page)

    def read(self, picture: Picture) -> ImageInputs:
        made = _resized(self._image_processor, picture)
        arrays = {"pixels": made["pixel_values"].astype(np.uint8)}  # [1, 3, height, width]
        return ImageInputs(arrays, self._patches, self._grid, picture.size, picture.digest)

    def page(self, inputs: ImageInputs) -> Page:
        return self._page

    def written(self, inputs: ImageInputs) -> str:
        raise NotImplementedError("no chat template writes squares")


class SquareTower:
    """Squares of one size, some at a time. The `model` makes one or several features of each."""

    def __init__(self, model: Any, tower: torch.nn.Module, image_processor: Any) -> None:
        self._model = model
        self._tower = tower
        self._scale = PixelScale(image_processor)

    def inputs(self, images: Sequence[ImageInputs], device: torch.device) -> dict[str, torch.Tensor]:
        return {"pixel_values": self._scale([image.arrays["pixels"] for image in images], device)}

    def __call__(self, images: Sequence[ImageInputs], device: torch.device) -> list[torch.Tensor]:
        features: list[torch.Tensor] = []
        dtype = next(self._tower.parameters()).dtype
        count = max(_TOGETHER, _PATCHES // max(1, images[0].patches))
        for first in range(0, len(images), count):
            pixels = self.inputs(images[first : first + count], device)["pixel_values"]
            # [pictures, features, hidden], or [pictures, hidden]
            made = self._model.get_image_features(pixels.to(dtype)).pooler_output
            features += made if made.dim() == 3 else made[:, None]
        return features


class TileReader:
    """Each picture as tiles of one size, with as many features each, within the checkpoint's prompt."""

    def __init__(self, processor: Any, patches_a_tile: int) -> None:
        self._processor = processor
        self._image_processor = processor.image_processor
        self._tokenizer: Tokenizer = Tokenizer.from_str(processor.tokenizer.backend_tokenizer.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._patches = patches_a_tile
        self._side = isqrt(processor.image_seq_len)
        # Chat templates have a prompt of their own.
        self._prompt: str = getattr(processor, "visual_prompt_prefix", processor.image_token)
        prompt = np.array(self._tokenizer.encode(self._prompt).ids, dtype=np.int32)
        self.signature = _signature(self._image_processor, Page(prompt, np.array([processor.image_seq_len])))

    def read(self, picture: Picture) -> ImageInputs:
        made = _resized(self._image_processor, picture, return_row_col_info=True)
        tiles = made["pixel_values"].astype(np.uint8)  # [1, tiles, 3, height, width]
        rows, columns = int(made["rows"][0][0]), int(made["cols"][0][0])
        # A small picture is one tile.
        grid = max(1, rows) * self._side, max(1, columns) * self._side
        arrays = {"pixels": tiles, "tiles": np.array([rows, columns])}
        patches = tiles.shape[1] * self._patches
        return ImageInputs(arrays, patches, grid, picture.size, picture.digest, self._side)

    def page(self, inputs: ImageInputs) -> Page:
        text = self._prompt.replace(self._processor.image_token, self.written(inputs))
        return _page_of(self._tokenizer.encode(text).ids, self._processor.image_token_id)

    def written(self, inputs: ImageInputs) -> str:
        rows, columns = inputs.arrays["tiles"].tolist()
        return str(self._processor.replace_image_token({"rows": [[rows]], "cols": [[columns]]}, 0))


def vision_of_tiles(path: str, model: Any, processor: Any) -> Vision:
    """The picture reader of a model that reads tiles. Raises ModelLoadError as `_vision` does."""
    patches = _patches(model.config.vision_config)
    reader, tower = TileReader(processor, patches), TileTower(model, processor.image_processor)
    modules = [model.vision_model, model.connector]
    said: dict[str, Any] = {"image_token_id": processor.image_token_id, "image_token": processor.image_token}
    said["attends_within"] = patches
    return _vision(path, processor.image_processor, reader, tower, modules, model.text_model, **said)


def _patches(config: Any) -> int:
    """The number of patches of a square."""
    return int(config.image_size // config.patch_size) ** 2


class TileTower:
    """Tiles of one size, some at a time, whichever pictures they are of."""

    def __init__(self, vlm: Any, image_processor: Any) -> None:
        self._vlm = vlm
        self._scale = PixelScale(image_processor)

    def inputs(self, images: Sequence[ImageInputs], device: torch.device) -> dict[str, torch.Tensor]:
        """`pixel_values` [1, tiles of all, 3, height, width]."""
        pixels = [image.arrays["pixels"][0] for image in images]
        return {"pixel_values": self._scale(pixels, device)[None]}

    def __call__(self, images: Sequence[ImageInputs], device: torch.device) -> list[torch.Tensor]:
        dtype = next(self._vlm.vision_model.parameters()).dtype
        tiles = self.inputs(images, device)["pixel_values"].to(dtype)
        features = [
            torch.cat(self._vlm.get_image_features(some).pooler_output)
            for some in tiles.split(_TILES_TOGETHER, dim=1)
        ]
        counts = [image.arrays["pixels"].shape[1] for image in images]
        a_tile = sum(map(len, features)) // sum(counts)
        return [*torch.cat(features).split([count * a_tile for count in counts])]


def reads_pictures(files: CheckpointFiles) -> bool:
    """Whether a checkpoint is one of the vision-language models that can be served."""
    return files.config.get("model_type") in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3")


@contextmanager
def by_pillow(path: str, files: CheckpointFiles, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The options with which sentence-transformers reads a checkpoint; pictures are read by Pillow. Raises
    ModelLoadError where that is missing."""
    if not reads_pictures(files):
        yield options
        return
    with without_videos():
        yield _with_pillow(path, options)


def _with_pillow(path: str, options: dict[str, Any]) -> dict[str, Any]:
    if find_spec("PIL") is None:
        raise ModelLoadError(f"{path!r} reads pictures, for which Pillow is missing: pip install pillow")
    return {**options, "processor_kwargs": {"backend": "pil"}}


def with_pictures(path: str, transformer: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """The parts of a `LoadedModel` that reads pictures too, or texts through a chat template; unchanged for
    others. Raises ModelLoadError where texts or pictures are not read as expected here."""
    # Without an output layer.
    model = getattr(transformer.auto_model, "model", transformer.auto_model)
    in_pairs = parts["score_task"] == "classify"
    if not (hasattr(model, "visual") or hasattr(model, "vision_model")):
        in_chat = not in_pairs and "message" in transformer.modality_config
        return parts | _in_chat(path, transformer, None, parts) if in_chat else parts
    if "message" not in transformer.modality_config or not transformer.processor.chat_template:
        raise ModelLoadError(f"{path!r} has no chat template, which says how pictures are written")
    _apply_settings(path, transformer)
    processor, backbone = transformer.processor, _language_model(model)
    if hasattr(model, "visual"):
        vision = vision_of(path, model, for_pictures_alone(processor))
    else:
        vision = vision_of_tiles(path, model, processor)
    _check_as_called(path, transformer, vision, in_pairs)
    inputs = PictureInputs(vision, next(backbone.parameters()).device)
    for task in parts["tasks"].values():
        task.reference.pictures = inputs
    parts |= {"backbone": backbone, "vision": vision}
    if in_pairs:
        template = parts["pairs"].template
        if template.in_parts:
            _check_pairs(transformer, template, vision)
            return parts
        return parts | {"pairs": replace(parts["pairs"], template=replace(template, picture=PICTURE))}
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
            name: _with_chat(transformer, vision, role, parts.get(name, RoleRules()))
            for name, role in roles.items()
        }
    except ModelLoadError as error:
        raise ModelLoadError(f"the chat template of {path!r} is not supported: {error}") from error


def _check_pairs(transformer: Any, template: ScoreTemplate, vision: Vision) -> None:
    """Raises ModelLoadError unless a template writes pairs with pictures as sentence-transformers does."""
    small, large = _blank(*_PROBE_SIZE), _blank(*_LARGE)
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


def _with_chat(transformer: Any, vision: Vision | None, role: str | None, rules: RoleRules) -> RoleRules:
    """The rules for texts, and for pictures where there is a `vision`, that a chat template writes. Raises
    ModelLoadError where sentence-transformers makes other tokens of them."""
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
        raise ModelLoadError("texts truncated without what the template writes behind them are not supported")
    for text in _PROBES:
        before = tokenizer(chat.before(rules.prompt) + text, add_special_tokens=False)["input_ids"]
        made = transformer.preprocess([text], prompt=rules.prompt or None, task=role)
        if [*before, *trailing.tolist()] != made["input_ids"][0].tolist():
            raise ModelLoadError("the chat template writes texts in a way that is not known here")
    if vision is not None:
        picture = transformer.preprocess([_blank(*_PROBE_SIZE)], prompt=rules.prompt or None, task=role)
        _check_written(transformer, vision, chat.content([None], rules.prompt), [_PROBE_SIZE], picture)
    return RoleRules(
        rules.prompt,
        trailing_ids=trailing if len(trailing) else None,
        max_tokens=own_length,
        skipped_ids=rules.skipped_ids,
        chat=chat,
    )


def load_retrieval(path: str, architecture: str, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the checkpoint with sentence-transformers. Raises ModelLoadError."""
    model = MultiVectorEncoder(path, **_with_pillow(path, options))
    transformer, *after = list(model)
    other = [type(module).__name__ for module in after if not isinstance(module, MultiVectorMask)]
    masks = [module for module in after if isinstance(module, MultiVectorMask)]
    if any(mask.keep_only_token_ids or mask._skiplist_ids is not None for mask in masks):
        other.append("MultiVectorMask with a list")
    if other:
        raise ModelLoadError(f"{path!r} has modules that are not supported: {', '.join(other)}")
    processor, retrieval = transformer.processor, transformer.model
    vlm, projection = retrieval.vlm, retrieval.embedding_proj_layer
    dense = heads.Dense(projection, torch.nn.Identity(), use_residual=False)
    head = heads.ModuleHead([dense, heads.Normalize()], "token_embeddings")
    vision = _vision_of_pages(path, architecture, processor, vlm)
    task = Task("all", head, projection.out_features, True, VisualReference(retrieval, vision.tower))
    rules, tokenizer = _rules(path, processor), copy.deepcopy(processor.tokenizer)
    leave_special_tokens_out(tokenizer)  # the rules have them
    return {
        "backbone": _language_model(vlm),
        "tokenizer": tokenizer,
        "position_offset": int(architecture == COLPALI),  # PaliGemma counts positions from 1
        "tasks": {"token_embed": task},
        "score_task": "token_embed",
        "query": rules,
        # The checkpoint has one way to read texts, whatever they are.
        "document": rules,
        "text": rules,
        "similarity": model.similarity_fn_name,
        "vision": vision,
        "reader": ProcessorReader(processor),
    }


def _vision_of_pages(path: str, architecture: str, processor: Any, vlm: Any) -> Vision:
    if architecture == COLMODERNVBERT:
        # Its contents are written without a chat template.
        return replace(vision_of_tiles(path, vlm, processor), image_token_id=None, image_token="")
    image_processor, language_model = processor.image_processor, _language_model(vlm)
    size = 8 if architecture == COLPALI else 56
    page = _page_of(processor(images=[_blank(size, size)])["input_ids"][0], processor.image_token_id)
    if architecture == COLPALI:
        square = SquareReader(image_processor, page, len(page.positions))
        tower = SquareTower(vlm, vlm.vision_tower, image_processor)
        modules = [vlm.vision_tower, vlm.multi_modal_projector]
        return _vision(path, image_processor, square, tower, modules, language_model)
    grid, grids = GridReader(image_processor, page), GridTower(vlm.visual, image_processor)
    return _vision(path, image_processor, grid, grids, [vlm.visual], language_model)


def _language_model(vlm: Any) -> Any:
    return vlm.text_model if hasattr(vlm, "text_model") else vlm.language_model


def _rules(path: str, processor: Any) -> RoleRules:
    """Rules for texts: behind a prefix, with tokens for augmentation behind them. Raises ModelLoadError where
    the checkpoint's own processor makes other tokens."""
    tokenizer = processor.tokenizer
    rendered = []
    for text in _PLAIN_PROBES:
        made = np.asarray(processor.process_queries(text=[text])["input_ids"])[0].tolist()
        within = tokenizer(processor.query_prefix + text, add_special_tokens=False)["input_ids"]
        rendered.append((made, within))
    whole, inside = rendered[0]
    starts = [i for i in range(len(whole)) if whole[i : i + len(inside)] == inside]
    if starts:
        leading, trailing = whole[: starts[0]], whole[starts[0] + len(inside) :]
        if all([*leading, *within, *trailing] == made for made, within in rendered):
            before, behind = (np.array(ids, dtype=np.int32) for ids in (leading, trailing))
            return RoleRules(processor.query_prefix, before, behind)
    raise ModelLoadError(
        f"the processor of {path!r} renders texts in a way that is not known here; save it as its class in "
        "transformers does"
    )


def has_two_towers(files: CheckpointFiles) -> bool:
    """Whether a checkpoint is one of the models with a tower for texts and one for pictures."""
    return files.config.get("model_type") in (CLIP, SIGLIP)


def load_two_towers(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the checkpoint with sentence-transformers. Raises ModelLoadError."""
    encoder = SentenceTransformer(path, **_with_pillow(path, options))
    transformer, *after = list(encoder)
    other = [type(module).__name__ for module in after if not isinstance(module, Normalize)]
    if other or encoder.similarity_fn_name not in ("cosine", "dot"):
        what = ", ".join(other) or f"the similarity {encoder.similarity_fn_name}"
        raise ModelLoadError(f"{path!r} has {what}, which is not supported for pictures")
    model, kind = transformer.auto_model, transformer.config.model_type
    if kind == SIGLIP:  # its processor fills texts up to one length, as in training, only if told to
        own, config = dict(transformer.processing_kwargs or {}), transformer.config.text_config
        filled = {"padding": "max_length", "max_length": config.max_position_embeddings}
        transformer.processing_kwargs = own | {"text": filled | (own.get("text") or {})}
    vision = _vision_of_towers(path, transformer)
    projection = model.text_projection if kind == CLIP else model.text_model.head
    backbone = TextTower(model.text_model, projection)
    reference = ModulesReference([transformer, *after], transformer.tokenizer, "sentence_embedding")
    reference.pictures = PictureInputs(vision, next(model.parameters()).device)
    head = heads.ModuleHead(after, "sentence_embedding")
    prompts = {name: prompt for name, prompt in encoder.prompts.items() if prompt}
    names = {"query": "query", "document": "document", "text": encoder.default_prompt_name or ""}
    rules = {role: _rules_of_towers(path, transformer, prompts.get(name, "")) for role, name in names.items()}
    return {
        "backbone": backbone,
        "tokenizer": transformer.tokenizer,
        "tasks": {"embed": Task("last", head, projection.out_features, bool(after), reference)},
        "score_task": "embed",
        **rules,
        "similarity": encoder.similarity_fn_name,
        "prompts": prompts,
        "vision": vision,
        "reader": LibraryReader(encoder),
    }


class TextTower(torch.nn.Module):
    """A text model whose states are projected to where pictures are encoded."""

    def __init__(self, inner: Any, projection: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.inner.embeddings = _AtAnyLength(inner.embeddings)
        self.projection = projection
        self.config = inner.config
        self._leave_with_layers(None)
        for number, layer in enumerate(inner.encoder.layers):
            layer.self_attn.layer_idx = number

    def forward(self, step_attention: Any = None, **inputs: Any) -> BaseModelOutput:
        """The layers of SigLIP do not hand on what a pass brings for attention, so it is left with them."""
        if step_attention is not None:
            inputs["step_attention"] = step_attention
        self._leave_with_layers(step_attention)
        try:
            states = self.inner(**inputs).last_hidden_state
        finally:
            self._leave_with_layers(None)
        return BaseModelOutput(last_hidden_state=self.projection(states))

    def _leave_with_layers(self, step_attention: Any) -> None:
        for layer in self.inner.encoder.layers:
            layer.self_attn.step_attention = step_attention

    def get_input_embeddings(self) -> Any:
        return self.inner.embeddings.inner.token_embedding

    def set_attn_implementation(self, name: str) -> None:
        self.inner.set_attn_implementation(name)


class _AtAnyLength(torch.nn.Module):
    """The embeddings of tokens and positions. The model's own refuse several texts in one pass, which have
    more tokens together than one may have."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> Any:
        if position_ids is None:
            return self.inner(input_ids=input_ids)
        return self.inner.token_embedding(input_ids) + self.inner.position_embedding(position_ids)


def _vision_of_towers(path: str, transformer: Any) -> Vision:
    model, image_processor = transformer.auto_model, transformer.processor.image_processor
    _apply_settings(path, transformer)
    # A picture stands for one token, which is never looked up.
    page = Page(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int64))
    reader = SquareReader(image_processor, page, _patches(model.config.vision_config))
    tower = SquareTower(model, model.vision_model, image_processor)
    modules = [model.vision_model]
    if hasattr(model, "visual_projection"):
        modules.append(model.visual_projection)
    vision = _vision(path, image_processor, reader, tower, modules, model.text_model, is_result=True)
    _check_as_called(path, transformer, vision)
    return vision


def _rules_of_towers(path: str, transformer: Any, prompt: str) -> RoleRules:
    """Rules for texts. Raises ModelLoadError where the checkpoint's own processor makes other tokens."""
    tokenizer = transformer.tokenizer
    expansion = None
    made = transformer.preprocess(["a"], prompt=prompt or None)
    length, alone = made["input_ids"].shape[1], tokenizer(prompt + "a")["input_ids"]
    if length > len(alone):
        attended = "attention_mask" not in made or bool(made["attention_mask"].all())
        expansion = Expansion(length, int(made["input_ids"][0, -1]), attended, fixed=True)
    for text in _PLAIN_PROBES:
        expected = transformer.preprocess([text], prompt=prompt or None)["input_ids"][0].tolist()
        ids = tokenizer(prompt + text)["input_ids"]
        if expansion is not None:
            ids = [*ids, *[expansion.token_id] * (length - len(ids))]
        if ids != expected:
            raise ModelLoadError(f"the processor of {path!r} renders texts in a way that is not known here")
    end = tokenizer.eos_token_id if transformer.config.model_type == CLIP else None
    return RoleRules(prompt, expansion=expansion, last_id=end)
