"""Loads rerankers that were published with code of their own, which is not run.

Sources: the cards of BAAI/bge-reranker-v2-minicpm-layerwise and bge-reranker-v2.5-gemma2-lightweight, with
FlagEmbedding; of nvidia/llama-nemotron-rerank-1b-v2 and llama-3.2-nv-rerankqa-1b-v2; of
jinaai/jina-reranker-v3 (arXiv 2509.25085) and jinaai/jina-reranker-m0."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModel, AutoProcessor, LlamaForSequenceClassification, Qwen2VLModel, Qwen3Model

from maxsimd.engine.checkpoint.cross_encoder import (
    FAMILIES,
    ids_around,
    parts_by_template,
    read_bare,
    special_tokens,
)
from maxsimd.engine.checkpoint.detect import COST_WISE
from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.checkpoint.heads import capped, linear_of
from maxsimd.engine.checkpoint.model import Compression, ListwiseRules, Task
from maxsimd.engine.checkpoint.reading import TokenizerReader
from maxsimd.engine.checkpoint.reference import StatesReference
from maxsimd.engine.checkpoint.settings import stated_activation
from maxsimd.engine.checkpoint.templates import ScoreTemplate
from maxsimd.engine.checkpoint.translate import POOLING
from maxsimd.engine.checkpoint.visual_loaders import PICTURE, PictureInputs, for_pictures_alone, vision_of
from maxsimd.engine.checkpoint.weights import read_tensors
from maxsimd.engine.config import EngineConfig, compress_layers_of
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.models.gemma2 import CompressingGemma2
from maxsimd.pooling.methods import MODES

log = logging.getLogger(__name__)
_PREDICT = "Predict whether passage B contains an answer to query A."


def load_layerwise(
    path: str,
    files: CheckpointFiles,
    template: ScoreTemplate | None,
    config: EngineConfig,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Reads the checkpoint, whose config is in transformers' terms at `path` and as published in `files`, up
    to the layer, and with the compression, that the configuration asks for."""
    is_gemma = files.architecture == COST_WISE
    layers = _scored_layers(files.config, is_gemma)
    last = int(files.config["num_hidden_layers"])
    layer = last if config.cutoff_layer is None else config.cutoff_layer
    if layer not in layers:
        every = "" if layers.step == 1 else f", every {layers.step}"
        raise ModelLoadError(
            f"cutoff_layer={layer}: this model has scores behind the layers {layers.start} to {last}{every}"
        )
    compression = _compression(config, last, layer) if is_gemma else None
    kind = AutoModel if compression is None else CompressingGemma2
    backbone, tokenizer = read_bare(path, kind, options | {"device": "cpu"})
    backbone.layers = backbone.layers[:layer]
    backbone.config.num_hidden_layers = layer
    if compression is not None:
        log.info("token compression: %s", compression)
        backbone.config.compress_ratio = compression.ratio
        backbone.config.compress_layers = list(compression.layers)
    if kinds := getattr(backbone.config, "layer_types", None):
        backbone.config.layer_types = list(kinds[:layer])
    backbone = backbone.to(options["device"])
    head = _head(path, files.config, is_gemma, layer).to(options["device"])
    family = FAMILIES["GemmaForCausalLM"]
    instruction = _PREDICT if is_gemma else family.instruction
    template = template or ScoreTemplate(family.segments, instruction, special_tokens(tokenizer))
    template = replace(template, marks_document=compression is not None)
    task = Task("last", head, 1, False, StatesReference(backbone, tokenizer, head, "last"))
    parts = parts_by_template(backbone, tokenizer, task, ("LABEL_0",), template)
    return parts | {"compression": compression}


def _compression(config: EngineConfig, last: int, cutoff: int) -> Compression | None:
    """The compression that is asked for, of a model with `last` layers that stops behind `cutoff`. Raises
    ModelLoadError for one that is impossible or would have no effect."""
    given = None if config.compress_layers is None else compress_layers_of(config.compress_layers)
    if config.compress_ratio == 1:
        if given is not None:
            raise ModelLoadError(
                "compress_layers has no effect with compress_ratio=1; set that to 2, 4 or 8, or leave "
                "compress_layers out"
            )
        return None
    if config.score_template is not None:
        raise ModelLoadError(
            "compress_ratio needs the model's own template, which says what the passage is; leave out "
            "score_template, or compress_ratio"
        )
    layers = given or (8,)  # as in FlagEmbedding
    wrong = [layer for layer in layers if layer >= last]
    if wrong:
        raise ModelLoadError(
            f"compress_layers: no layer follows the layer {wrong[0]} of this model; it compresses behind the "
            f"layers 1 to {last - 1}"
        )
    effective = tuple(layer for layer in layers if layer < cutoff)
    if not effective:
        raise ModelLoadError(
            f"compress_layers: of the layers {', '.join(map(str, layers))} none is before the layer "
            f"{cutoff}, behind which the model stops; name an earlier one"
        )
    if len(effective) < len(layers):
        ignored = ", ".join(map(str, layers[len(effective) :]))
        log.info("not compressed behind layers that are not run, as in FlagEmbedding: %s", ignored)
    return Compression(config.compress_ratio, effective)


def _scored_layers(config: Mapping[str, Any], is_gemma: bool) -> range:
    """The layers behind which there is a score."""
    default = 28 if is_gemma else 8
    step = int(config.get("layer_sep", default)) if is_gemma else 1
    return range(int(config.get("start_layer", default)), int(config["num_hidden_layers"]) + 1, step)


def _head(path: str, config: Mapping[str, Any], is_gemma: bool, layer: int) -> "_LinearScore":
    """The score behind a layer. Raises ModelLoadError unless each layer has one, of the right shape."""
    tensors, layers = read_tensors(path, None, "lm_head."), _scored_layers(config, is_gemma)
    names = [f"{i}.linear_head.weight" for i in range(len(layers))]
    if tensors.keys() != {*names}:
        different = ", ".join(f"lm_head.{name}" for name in sorted(tensors.keys() ^ {*names})[:4])
        raise ModelLoadError(f"{path!r} has other scores than for its {len(layers)} layers: {different}")
    hidden = int(config["hidden_size"])
    for name, tensor in tensors.items():
        if tensor.shape != (1, hidden):
            raise ModelLoadError(
                f"{path!r} has lm_head.{name} {list(tensor.shape)} in place of [1, {hidden}]"
            )
    # FlagEmbedding counts the scores by the layers asked for: for a single one of Gemma2 it takes the first.
    weight = tensors[names[0 if is_gemma else layers.index(layer)]]
    softcap = config.get("final_logit_softcapping") if is_gemma else None
    return _LinearScore(weight, f"the score behind layer {layer}", softcap=softcap)


class _LinearScore(torch.nn.Module):
    """The logits [n, labels] of rows [n, hidden], within `softcap` where there is one, divided by the
    `temperature`. Messages call it `name`."""

    def __init__(
        self, weight: torch.Tensor, name: str, *, softcap: float | None = None, temperature: float = 1.0
    ) -> None:
        super().__init__()
        self.score = linear_of(weight)
        self._name, self._softcap, self._temperature = name, softcap, temperature

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return capped(self.score(rows), self._softcap) / self._temperature

    def extra_repr(self) -> str:
        return f"{self._name}, softcap={self._softcap}, temperature={self._temperature}"

    def __str__(self) -> str:
        return self._name


_QUESTION = "question:{{ query }} \n \n passage:{{ document }}"


def load_bidirectional_reranker(
    path: str, files: CheckpointFiles, template: ScoreTemplate | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Reads the checkpoint, whose config is in transformers' terms at `path` and as published in `files`."""
    if files.modules:
        raise ModelLoadError(f"{path!r} has modules beside its classifier, which are not read; remove them")
    model, tokenizer = read_bare(path, LlamaForSequenceClassification, options)
    labels = tuple(str(model.config.id2label[i]) for i in range(model.config.num_labels))
    temperature = float(files.config.get("temperature") or 1.0)
    divided = "" if temperature == 1 else f", divided by {temperature:g}"
    head = _LinearScore(model.score.weight, f"a linear score{divided}", temperature=temperature)
    # The card's template, between the special tokens that the tokenizer puts around a text.
    before, trailing_ids = ids_around(tokenizer)
    leading = "".join(tokenizer.convert_ids_to_tokens(before))
    segments = (f"{{{{ {leading!r} }}}}", _QUESTION) if leading else (_QUESTION,)
    pooling = MODES[POOLING[files.config.get("pooling", "avg")]]
    reference = StatesReference(model.model, tokenizer, head, pooling)
    task = Task(pooling, head, len(labels), False, reference)
    used = template or ScoreTemplate(segments, trailing_ids=trailing_ids)
    parts = parts_by_template(model.model, tokenizer, task, labels, used) | {
        "activation": stated_activation(path, files) or torch.nn.Identity(),
        "probabilities": torch.sigmoid if len(labels) == 1 else torch.nn.Softmax(dim=-1),
    }
    if template is None:
        parts["reader"] = TokenizerReader(tokenizer, "question:{query} \n \n passage:{document}")
    return parts


_QUERY_MARKER, _DOCUMENT_MARKER = "<|rerank_token|>", "<|embed_token|>"


def load_listwise(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the backbone with transformers and the projection beside it."""
    # The published code is not needed: its backbone is transformers' Qwen3, and the projection is below.
    backbone, tokenizer = read_bare(path, Qwen3Model, options)
    config = backbone.config
    head = _two_layers(path, options["revision"], "projector.", config.hidden_size).to(options["device"])
    for marker in (_QUERY_MARKER, _DOCUMENT_MARKER):
        if tokenizer.convert_tokens_to_ids(marker) in (None, tokenizer.unk_token_id):
            raise ModelLoadError(f"the tokenizer of {path!r} lacks the marker {marker}")
    context = min(int(tokenizer.model_max_length), config.max_position_embeddings)
    reference = StatesReference(backbone, tokenizer, head)
    return {
        "backbone": backbone,
        "tokenizer": tokenizer,
        "tasks": {"rank": Task("all", head, head.columns, False, reference)},
        "score_task": "rank",
        "listwise": ListwiseRules(_QUERY_MARKER, _DOCUMENT_MARKER, context),
        "reader": TokenizerReader(tokenizer),
    }


class _TwoLayers(torch.nn.Sequential):
    """Linear, ReLU, linear, in float32."""

    def __init__(self, first: torch.nn.Linear, second: torch.nn.Linear) -> None:
        super().__init__(first, torch.nn.ReLU(), second)
        self.columns = second.out_features

    def __str__(self) -> str:
        return "two linear layers"


def _two_layers(
    path: str, revision: str | None, prefix: str, hidden: int, columns: int | None = None
) -> _TwoLayers:
    """Layers that the files name with a prefix, which map states of `hidden` numbers: with `columns` to as
    many, and by biases, too."""
    tensors = read_tensors(path, revision, prefix)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    inner, made = (shapes.get(name, ())[:1] for name in ("0.weight", "2.weight"))
    wanted = {"0.weight": (*inner, hidden), "2.weight": (*made, *inner)}
    if columns is not None:
        wanted |= {"0.bias": inner, "2.weight": (columns, *inner), "2.bias": (columns,)}
    if shapes != wanted:
        different = sorted({name for name, _ in shapes.items() ^ wanted.items()})
        named = ", ".join(f"{prefix}{name} {list(shapes.get(name, ()))}" for name in different)
        raise ModelLoadError(f"{path!r} has tensors that do not fit states of {hidden} numbers: {named}")
    return _TwoLayers(*(linear_of(tensors[f"{i}.weight"], tensors.get(f"{i}.bias")) for i in (0, 2)))


# All from the card of jina-reranker-m0.
_TEMPLATE = "**Document**:\n{{ document }}\n**Query**:\n{{ query }}"
_SCORE_TOKEN = 100
_PIXELS = {"shortest_edge": 3_136, "longest_edge": 602_112}
_LONGEST = 10_240
_BIAS = 2.65


def load_jina_m0(path: str, template: ScoreTemplate | None, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the model with transformers and the layers beside it; with a `template`, pairs are written by
    that."""
    common = {"revision": options["revision"], "trust_remote_code": False}
    processor = AutoProcessor.from_pretrained(path, **options["processor_kwargs"], **common)
    for_pictures_alone(processor).image_processor.size = _PIXELS
    tokenizer = processor.tokenizer
    tokenizer.model_max_length = min(_LONGEST, int(tokenizer.model_max_length))
    model = Qwen2VLModel.from_pretrained(path, **common, **options["model_kwargs"])
    model = model.to(options["device"]).eval()
    hidden = model.config.get_text_config().hidden_size
    head = _two_layers(path, options["revision"], "score.", hidden, columns=1).to(options["device"])
    vision = vision_of(path, model, processor)
    reference = StatesReference(model, tokenizer, head, "last")
    reference.pictures = PictureInputs(vision, next(model.parameters()).device)
    task = Task("last", head, 1, False, reference)
    template = template or ScoreTemplate((_TEMPLATE,))
    template = replace(template, picture=PICTURE, trailing_ids=(_SCORE_TOKEN,))
    parts = parts_by_template(model.language_model, tokenizer, task, ("relevance",), template)
    return parts | {"activation": _Shifted(), "vision": vision}


class _Shifted(torch.nn.Module):
    """The sigmoid, with the bias of scores that the card names."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(logits - _BIAS)
