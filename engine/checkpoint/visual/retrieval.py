"""Loads transformers' `*ForRetrieval` models: a vision-language model and a projection, by which texts and
pages become one vector a token. ColPali, ColModernVBERT, and ColQwen2 with plain positions.

Source: Faysse et al. 2024 (arXiv 2407.01449)."""

import copy
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from tokenizers.processors import TemplateProcessing

from maxsimd.engine.checkpoint.detect import COLMODERNVBERT, COLPALI
from maxsimd.engine.checkpoint.heads import ModuleHead
from maxsimd.engine.checkpoint.model import RoleRules, Task
from maxsimd.engine.checkpoint.reading import ProcessorReader
from maxsimd.engine.checkpoint.reference import VisualReference
from maxsimd.engine.checkpoint.visual.grids import GridReader, GridTower
from maxsimd.engine.checkpoint.visual.pixels import PixelScale, check_numbers
from maxsimd.engine.checkpoint.visual.processor import blank, page_of, refuse_other_readers
from maxsimd.engine.checkpoint.visual.squares import SquareReader, SquareTower
from maxsimd.engine.checkpoint.visual.tiles import vision_of_tiles
from maxsimd.engine.checkpoint.visual.vision import (
    PictureReader,
    Tower,
    Vision,
    attention_a_patch,
    tokens_a_patch,
)
from maxsimd.engine.errors import ModelLoadError

_PROBES = ("a", "What is this?", "two\nlines, and numbers: 1.5", " a space in front")
# PaliGemma counts positions from 1.
_FIRST_POSITION = {COLPALI: 1}


def load_retrieval(path: str, architecture: str, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the checkpoint with sentence-transformers.

    Returns the parts of a `LoadedModel` that depend on the kind of checkpoint. Raises ModelLoadError."""
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
        "activation": torch.nn.Identity(),
        "similarity": model.similarity_fn_name,
        "vision": vision,
        "reader": ProcessorReader(processor),
    }


def _vision(path: str, architecture: str, processor: Any, vlm: Any) -> Vision:
    if architecture == COLMODERNVBERT:
        # No chat template writes its contents.
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
    """A copy of a tokeniser that adds no special tokens: the rules have them."""
    bare = copy.deepcopy(tokenizer)
    bare.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    return bare


def _rules(path: str, processor: Any) -> RoleRules:
    """How texts are rendered: behind a prefix, with tokens for augmentation behind them. Raises
    ModelLoadError where the checkpoint's own processor makes other tokens of a text than these rules."""
    tokenizer = processor.tokenizer
    rendered = {
        text: (
            np.asarray(processor.process_queries(text=[text])["input_ids"])[0].tolist(),
            tokenizer(processor.query_prefix + text, add_special_tokens=False)["input_ids"],
        )
        for text in _PROBES
    }
    whole, inside = rendered[_PROBES[0]]
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
