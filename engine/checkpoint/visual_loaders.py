"""Loads models that read pictures: vision-language models as sentence-transformers saves them (Qwen-VL,
Idefics3), transformers' `*ForRetrieval` models (ColPali, arXiv 2407.01449), and two towers: CLIP (arXiv
2103.00020) and SigLIP (arXiv 2303.15343)."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from tokenizers.processors import TemplateProcessing
from transformers.modeling_outputs import BaseModelOutput

from maxsimd.engine.checkpoint.detect import COLMODERNVBERT, COLPALI
from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.checkpoint.heads import ModuleHead
from maxsimd.engine.checkpoint.model import Expansion, RoleRules, Task
from maxsimd.engine.checkpoint.reading import LibraryReader, ProcessorReader
from maxsimd.engine.checkpoint.reference import ModulesReference, VisualReference
from maxsimd.engine.checkpoint.settings import leave_special_tokens_out
from maxsimd.engine.checkpoint.templates import ChatRole, ScoreTemplate
from maxsimd.engine.checkpoint.visual import (
    Page,
    PictureReader,
    Tower,
    Vision,
    attention_a_patch,
    tokens_a_patch,
)
from maxsimd.engine.checkpoint.visual_readers import (
    PICTURE,
    GridReader,
    GridTower,
    PictureInputs,
    PixelScale,
    SquareReader,
    SquareTower,
    apply_settings,
    blank,
    check_as_called,
    check_numbers,
    for_pictures_alone,
    page_of,
    refuse_other_readers,
    settings_for_pictures,
    vision_of,
    vision_of_tiles,
    without_videos,
)
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.media import Picture
from maxsimd.scheduler import TokenSequence
from maxsimd.scheduler.sequence import TokenIds

# By the type in a config.
VISION_LANGUAGE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3")
# Width and height of pictures.
_PROBE_SIZE, _LARGE = (90, 60), (700, 500)
_PLAIN_PROBES = ("a", "What is this?", "two\nlines, and numbers: 1.5", " a space in front")
_PROBES = (*_PLAIN_PROBES, "spaces behind  ", "\n")


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


# PaliGemma counts positions from 1.
_FIRST_POSITION = {COLPALI: 1}


def load_retrieval(path: str, architecture: str, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the checkpoint with sentence-transformers. Raises ModelLoadError."""
    if find_spec("PIL") is None:
        raise ModelLoadError(f"{path!r} reads pictures, for which Pillow is missing: pip install pillow")
    model = MultiVectorEncoder(path, **options, processor_kwargs={"backend": "pil"})
    transformer: Any = model[0]
    processor, retrieval = _processor_of(path, model), transformer.model
    vlm, projection = retrieval.vlm, retrieval.embedding_proj_layer
    head = ModuleHead([_as_dense(projection), Normalize("token_embeddings")], "token_embeddings")
    vision = _vision(path, architecture, processor, vlm)
    reference = VisualReference(retrieval, vision.tower)
    task = Task("all", head, projection.out_features, True, reference)
    rules = _rules(path, processor)
    return {
        "backbone": _language_model(vlm),
        "tokenizer": _without_template(processor.tokenizer),
        "position_offset": _FIRST_POSITION.get(architecture, 0),
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


def _vision(path: str, architecture: str, processor: Any, vlm: Any) -> Vision:
    if architecture == COLMODERNVBERT:
        # Its contents are written without a chat template.
        return replace(vision_of_tiles(path, vlm, processor), image_token_id=None, image_token="")
    scale = PixelScale.of(processor.image_processor)
    reader: PictureReader
    tower: Tower
    modules: tuple[torch.nn.Module, ...]
    if architecture == COLPALI:
        page = page_of(processor(images=[blank(8, 8)])["input_ids"][0], processor.image_token_id)
        reader = SquareReader(processor.image_processor, page, len(page.positions))
        tower = SquareTower(vlm, vlm.vision_tower, scale)
        modules = (vlm.vision_tower, vlm.multi_modal_projector)
        attention = attention_a_patch(vlm.vision_tower, modules)
    else:
        image_processor = processor.image_processor
        page = page_of(processor(images=[blank(56, 56)])["input_ids"][0], processor.image_token_id)
        reader = GridReader(image_processor, page)
        tower = GridTower(vlm.visual, scale, image_processor.temporal_patch_size)
        modules = (vlm.visual,)
        attention = attention_a_patch(vlm.visual, modules)
    check_numbers(path, processor.image_processor, reader, tower)
    return Vision(reader, tower, modules, tokens_a_patch(modules, _language_model(vlm)), attention)


def _processor_of(path: str, model: MultiVectorEncoder) -> Any:
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
    refuse_other_readers(path, transformer.processor.image_processor)
    return transformer.processor


def _as_dense(projection: torch.nn.Linear) -> Dense:
    dense = Dense(
        projection.in_features,
        projection.out_features,
        bias=projection.bias is not None,
        activation_function=torch.nn.Identity(),
        module_input_name="token_embeddings",
    )
    dense.linear = projection
    return dense


def _language_model(vlm: Any) -> Any:
    return vlm.text_model if hasattr(vlm, "text_model") else vlm.language_model


def _without_template(tokenizer: Any) -> Any:
    """A copy of a tokenizer that adds no special tokens: the rules have them."""
    bare = copy.deepcopy(tokenizer)
    bare.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    return bare


def _rules(path: str, processor: Any) -> RoleRules:
    """Rules for texts: behind a prefix, with tokens for augmentation behind them. Raises
    ModelLoadError where the checkpoint's own processor makes other tokens of a text than these rules."""
    tokenizer = processor.tokenizer
    rendered = {
        text: (
            np.asarray(processor.process_queries(text=[text])["input_ids"])[0].tolist(),
            tokenizer(processor.query_prefix + text, add_special_tokens=False)["input_ids"],
        )
        for text in _PLAIN_PROBES
    }
    whole, inside = rendered[_PLAIN_PROBES[0]]
    starts = [i for i in range(len(whole)) if whole[i : i + len(inside)] == inside]
    if starts:
        leading, trailing = whole[: starts[0]], whole[starts[0] + len(inside) :]
        if all([*leading, *within, *trailing] == made for made, within in rendered.values()):
            before, behind = (np.array(ids, dtype=np.int32) for ids in (leading, trailing))
            return RoleRules(processor.query_prefix, before, behind)
    raise ModelLoadError(
        f"the processor of {path!r} renders texts in a way that is not known here; save it as its class in "
        "transformers does"
    )


CLIP, SIGLIP = "clip", "siglip"


def has_two_towers(files: CheckpointFiles) -> bool:
    """Whether a checkpoint is one of the models with a tower for texts and one for pictures."""
    return files.config.get("model_type") in (CLIP, SIGLIP)


def load_two_towers(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the checkpoint with sentence-transformers. Raises ModelLoadError."""
    if find_spec("PIL") is None:
        raise ModelLoadError(f"{path!r} reads pictures, for which Pillow is missing: pip install pillow")
    encoder = SentenceTransformer(path, **options, processor_kwargs={"backend": "pil"})
    transformer, *after = list(encoder)
    other = [type(module).__name__ for module in after if not isinstance(module, Normalize)]
    if other or encoder.similarity_fn_name not in ("cosine", "dot"):
        what = ", ".join(other) or f"the similarity {encoder.similarity_fn_name}"
        raise ModelLoadError(f"{path!r} has {what}, which is not supported for pictures")
    model, kind = transformer.auto_model, transformer.config.model_type
    if kind == SIGLIP:
        _fill_up(transformer)
    vision = _vision_of_towers(path, transformer)
    projection = model.text_projection if kind == CLIP else model.text_model.head
    backbone = TextTower(model.text_model, projection)
    reference = ModulesReference([transformer, *after], transformer.tokenizer, "sentence_embedding")
    reference.pictures = _PictureInputs(vision.tower, next(model.parameters()).device)
    dim = projection.out_features
    head = ModuleHead(after, "sentence_embedding")
    prompts = {name: prompt for name, prompt in encoder.prompts.items() if prompt}
    rules = _rules_of_towers(path, transformer, prompts.get(encoder.default_prompt_name or "", ""))
    return {
        "backbone": backbone,
        "tokenizer": transformer.tokenizer,
        "tasks": {"embed": Task("last", head, dim, bool(after), reference)},
        "score_task": "embed",
        "query": _rules_of_towers(path, transformer, prompts.get("query", "")),
        "document": _rules_of_towers(path, transformer, prompts.get("document", "")),
        "text": rules,
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
    """The embeddings of tokens and positions. Those of the model refuse more tokens than a text may have,
    which several texts in one pass have together."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        if position_ids is None:
            alone: torch.Tensor = self.inner(input_ids=input_ids)
            return alone
        words, positions = self.inner.token_embedding, self.inner.position_embedding
        rows: torch.Tensor = words(input_ids) + positions(position_ids)
        return rows


class _PictureInputs:
    """The inputs of sentence-transformers' module for a picture, in place of a text's."""

    def __init__(self, tower: Tower, device: torch.device) -> None:
        self._tower = tower
        self._device = device

    def __call__(self, sequence: TokenSequence) -> dict[str, Any]:
        images = [image.inputs for image in sequence.tokens.images]
        return {"modality": "image", **self._tower.inputs(images, self._device)} if images else {}


def _vision_of_towers(path: str, transformer: Any) -> Vision:
    model, image_processor = transformer.auto_model, transformer.processor.image_processor
    refuse_other_readers(path, image_processor)
    apply_settings(path, image_processor, settings_for_pictures(transformer))
    config = model.config.vision_config
    # A picture stands for one token, which is never looked up.
    page = Page(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int64))
    reader = SquareReader(image_processor, page, (config.image_size // config.patch_size) ** 2)
    tower = SquareTower(model, model.vision_model, PixelScale.of(image_processor))
    check_numbers(path, image_processor, reader, tower)
    check_as_called(path, transformer, reader, tower)
    modules = [model.vision_model]
    if hasattr(model, "visual_projection"):
        modules.append(model.visual_projection)
    return Vision(
        reader,
        tower,
        tuple(modules),
        tokens_a_patch(modules, model.text_model),
        attention_a_patch(model.vision_model, modules),
        is_result=True,
    )


def _fill_up(transformer: Any) -> None:
    """SigLIP was trained on texts that are all filled up to one length, which its processor does only if it
    is told to."""
    length = transformer.config.text_config.max_position_embeddings
    settings = dict(transformer.processing_kwargs or {})
    settings["text"] = {"padding": "max_length", "max_length": length, **(settings.get("text") or {})}
    transformer.processing_kwargs = settings


def _rules_of_towers(path: str, transformer: Any, prompt: str) -> RoleRules:
    """Rules for texts. Raises ModelLoadError where the checkpoint's own processor makes other tokens
    of a text than these rules."""
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
