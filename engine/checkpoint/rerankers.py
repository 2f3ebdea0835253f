"""Loads rerankers that were published with code of their own, which is not run.

Sources: the cards of BAAI/bge-reranker-v2-minicpm-layerwise and bge-reranker-v2.5-gemma2-lightweight, with
FlagEmbedding; of nvidia/llama-nemotron-rerank-1b-v2 and llama-3.2-nv-rerankqa-1b-v2; of
jinaai/jina-reranker-v3 (arXiv 2509.25085) and jinaai/jina-reranker-m0."""

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoProcessor,
    AutoTokenizer,
    LlamaForSequenceClassification,
    Qwen2VLModel,
    Qwen3Model,
)

from maxsimd.engine.checkpoint.cross_encoder import special_tokens
from maxsimd.engine.checkpoint.detect import COST_WISE
from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.checkpoint.heads import ModuleHead
from maxsimd.engine.checkpoint.language_model import FAMILIES, NEWLINE
from maxsimd.engine.checkpoint.model import Compression, ListwiseRules, PairRules, Task
from maxsimd.engine.checkpoint.reading import TemplateReader, TokenizerReader
from maxsimd.engine.checkpoint.reference import HiddenStatesReference, LastStateReference, PooledReference
from maxsimd.engine.checkpoint.templates import ScoreTemplate
from maxsimd.engine.checkpoint.translate import POOLING
from maxsimd.engine.checkpoint.visual_readers import PICTURE, PictureInputs, for_pictures_alone, vision_of
from maxsimd.engine.checkpoint.weights import read_tensors, refuse_not_finite
from maxsimd.engine.config import EngineConfig, compress_layers_of
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.models.gemma2 import CompressingGemma2
from maxsimd.pooling.methods import MODES

log = logging.getLogger(__name__)
_SEGMENTS = ("{{ bos_token }}", "A: {{ query }}", NEWLINE, "B: {{ document }}", NEWLINE, "{{ instruction }}")
_PREDICT = "Predict whether passage B contains an answer to query A."
# FlagEmbedding's, for a ratio without layers.
_COMPRESS_LAYERS = (8,)


@dataclass(frozen=True, slots=True)
class _Layers:
    """The layers behind which there is a score."""

    first: int
    last: int
    step: int

    def number_of(self, layer: int | None) -> int:
        """The layer to stop behind: the one asked for, or the last. Raises ModelLoadError for one without a
        score."""
        wanted = self.last if layer is None else layer
        if wanted not in range(self.first, self.last + 1, self.step):
            every = "" if self.step == 1 else f", every {self.step}"
            raise ModelLoadError(
                f"cutoff_layer={wanted}: this model has scores behind the layers {self.first} to {self.last}"
                f"{every}"
            )
        return wanted


def load_layerwise(
    path: str,
    files: CheckpointFiles,
    template: ScoreTemplate | None,
    config: EngineConfig,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Reads the checkpoint, whose config is in transformers' terms at `path` and as published in `files`, up
    to the layer, and with the compression, that the configuration asks for."""
    published, revision = files.config, options["revision"]
    default = 28 if files.architecture == COST_WISE else 8
    layers = _Layers(
        int(published.get("start_layer", default)), int(published["num_hidden_layers"]), _step(files, default)
    )
    layer = layers.number_of(config.cutoff_layer)
    compression = None
    if files.architecture == COST_WISE:
        compression = _compression(config, layers.last, layer)
    tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    kind = AutoModel if compression is None else CompressingGemma2
    backbone = kind.from_pretrained(
        path, revision=revision, trust_remote_code=False, **options["model_kwargs"]
    )
    backbone.layers = backbone.layers[:layer]
    backbone.config.num_hidden_layers = layer
    if compression is not None:
        log.info("token compression: %s", compression)
        backbone.config.compress_ratio = compression.ratio
        backbone.config.compress_layers = list(compression.layers)
    kinds = getattr(backbone.config, "layer_types", None)
    if kinds:
        backbone.config.layer_types = list(kinds[:layer])
    backbone = backbone.to(options["device"]).eval()
    head = _head(path, files, layers, layer).to(options["device"])
    instruction = FAMILIES["GemmaForCausalLM"].instruction
    if files.architecture == COST_WISE:
        instruction = _PREDICT
    template = template or ScoreTemplate(_SEGMENTS, instruction, special_tokens(tokenizer))
    template = replace(template, marks_document=compression is not None)
    reference = LastStateReference(backbone, tokenizer, head)
    return {
        "backbone": backbone,
        "tokenizer": tokenizer,
        "tasks": {"classify": Task("last", head, 1, False, reference)},
        "score_task": "classify",
        "labels": ("LABEL_0",),
        "pairs": PairRules("only_second", template),
        "compression": compression,
        "reader": TemplateReader(tokenizer, template),
    }


def _compression(config: EngineConfig, last: int, cutoff: int) -> Compression | None:
    """The compression that is asked for, of a model with `last` layers that is cut off behind one. Raises
    ModelLoadError for one that cannot be, or that would have no effect."""
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
    layers = given or _COMPRESS_LAYERS
    wrong = [layer for layer in layers if layer >= last]
    if wrong:
        raise ModelLoadError(
            f"compress_layers: no layer follows the layer {wrong[0]} of this model; it compresses behind the "
            f"layers 1 to {last - 1}"
        )
    effective = tuple(layer for layer in layers if layer < cutoff)
    if not effective:
        named = ", ".join(map(str, layers))
        raise ModelLoadError(
            f"compress_layers: of the layers {named} none is before the layer {cutoff}, behind which the "
            "model stops; name an earlier one"
        )
    if len(effective) < len(layers):
        ignored = ", ".join(map(str, layers[len(effective) :]))
        log.info("not compressed behind layers that are not run, as in FlagEmbedding: %s", ignored)
    return Compression(config.compress_ratio, effective)


def _step(files: CheckpointFiles, default: int) -> int:
    return int(files.config.get("layer_sep", default)) if files.architecture == COST_WISE else 1


class _LayerScore(torch.nn.Module):
    """The score [n, 1] of rows [n, hidden] behind a layer, capped where the config says so."""

    def __init__(self, weight: torch.Tensor, layer: int, softcap: float | None) -> None:
        super().__init__()
        self.score = torch.nn.Linear(weight.shape[1], 1, bias=False, device="meta")
        self.score.weight = torch.nn.Parameter(weight, requires_grad=False)
        self._layer = layer
        self._softcap = softcap

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.score(rows)
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def extra_repr(self) -> str:
        return f"layer={self._layer}, softcap={self._softcap}"

    def __str__(self) -> str:
        return f"the score behind layer {self._layer}"


def _head(path: str, files: CheckpointFiles, layers: _Layers, layer: int) -> _LayerScore:
    """The score behind a layer. Raises ModelLoadError unless each layer has one, of the right shape."""
    tensors = read_tensors(path, None, "lm_head.")
    expected = range(layers.first, layers.last + 1, layers.step)
    names = {f"{i}.linear_head.weight" for i in range(len(expected))}
    if tensors.keys() != names:
        different = ", ".join(f"lm_head.{name}" for name in sorted(tensors.keys() ^ names)[:4])
        raise ModelLoadError(f"{path!r} has other scores than for its {len(expected)} layers: {different}")
    hidden = int(files.config["hidden_size"])
    for name, tensor in tensors.items():
        if tensor.shape != (1, hidden):
            raise ModelLoadError(
                f"{path!r} has lm_head.{name} {list(tensor.shape)} in place of [1, {hidden}]"
            )
    refuse_not_finite(path, [(f"lm_head.{name}", tensor) for name, tensor in tensors.items()])
    if files.architecture == COST_WISE:
        # FlagEmbedding counts the scores by the layers asked for: for a single one it takes the first.
        softcap = files.config.get("final_logit_softcapping")
        return _LayerScore(
            tensors["0.linear_head.weight"], layer, None if softcap is None else float(softcap)
        )
    return _LayerScore(tensors[f"{layer - layers.first}.linear_head.weight"], layer, None)


_ACTIVATIONS = {"Identity": torch.nn.Identity, "Sigmoid": torch.nn.Sigmoid}
_QUESTION = "question:{{ query }} \n \n passage:{{ document }}"


def load_bidirectional_reranker(
    path: str, files: CheckpointFiles, template: ScoreTemplate | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Reads the checkpoint, whose config is in transformers' terms at `path` and as published in `files`."""
    if files.modules:
        raise ModelLoadError(f"{path!r} has modules beside its classifier, which are not read; remove them")
    revision = options["revision"]
    tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    model = LlamaForSequenceClassification.from_pretrained(path, revision=revision, **options["model_kwargs"])
    model = model.to(options["device"]).eval()
    labels = tuple(str(model.config.id2label[i]) for i in range(model.config.num_labels))
    as_one = TokenizerReader(tokenizer, "question:{query} \n \n passage:{document}")
    head = _Score(model.score, float(files.config.get("temperature") or 1.0))
    pooling = MODES[POOLING[files.config.get("pooling", "avg")]]
    reference = PooledReference(model.model, tokenizer, pooling, head)
    return {
        "backbone": model.model,
        "tokenizer": tokenizer,
        "tasks": {"classify": Task(pooling, head, len(labels), False, reference)},
        "score_task": "classify",
        "activation": _activation(path, files),
        "labels": labels,
        "probabilities": torch.sigmoid if len(labels) == 1 else torch.nn.Softmax(dim=-1),
        "pairs": PairRules("only_second", template or _question(tokenizer)),
        "reader": TemplateReader(tokenizer, template) if template else as_one,
    }


class _Score(torch.nn.Module):
    """The classifier's logits [n, labels] of pooled rows [n, hidden], divided by the temperature."""

    def __init__(self, score: torch.nn.Linear, temperature: float) -> None:
        super().__init__()
        self.score = torch.nn.Linear(score.in_features, score.out_features, bias=False, device="meta")
        self.score.weight = torch.nn.Parameter(score.weight.detach().float(), requires_grad=False)
        self.temperature = temperature

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.score(rows) / self.temperature
        return logits

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"

    def __str__(self) -> str:
        divided = "" if self.temperature == 1 else f", divided by {self.temperature:g}"
        return f"a linear score{divided}"


def _question(tokenizer: Any) -> ScoreTemplate:
    """The card's template, between the special tokens that the tokenizer puts around a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    around = tokenizer("a")["input_ids"]
    first = next(i for i in range(len(around)) if around[i : i + len(bare)] == bare)
    leading = "".join(tokenizer.convert_ids_to_tokens(around[:first]))
    segments = (f"{{{{ {leading!r} }}}}", _QUESTION) if leading else (_QUESTION,)
    return ScoreTemplate(segments, trailing_ids=tuple(around[first + len(bare) :]))


def _activation(path: str, files: CheckpointFiles) -> torch.nn.Module:
    """The activation that the config names, or none, as the card has it."""
    of_sentence_transformers = files.config.get("sentence_transformers") or {}
    named = of_sentence_transformers.get("activation_fn") or files.config.get(
        "sbert_ce_default_activation_function"
    )
    if named is None:
        return torch.nn.Identity()
    name = str(named).rsplit(".", 1)[-1]
    if name not in _ACTIVATIONS:
        raise ModelLoadError(f"{path!r} asks for the activation {named}; supported are Identity and Sigmoid")
    return _ACTIVATIONS[name]()


_QUERY_MARKER, _DOCUMENT_MARKER = "<|rerank_token|>", "<|embed_token|>"


def load_listwise(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the backbone with transformers and the projection beside it."""
    revision = options["revision"]
    # The published code is not needed: its backbone is transformers' Qwen3, and the projection is below.
    tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    backbone = Qwen3Model.from_pretrained(path, config=config, revision=revision, **options["model_kwargs"])
    projection = read_tensors(path, revision, "projector.")
    refuse_not_finite(path, [(f"projector.{name}", tensor) for name, tensor in projection.items()])
    head = ModuleHead(
        [_Projection(projection, path, config.hidden_size).to(options["device"])], "token_embeddings"
    )
    for marker in (_QUERY_MARKER, _DOCUMENT_MARKER):
        if tokenizer.convert_tokens_to_ids(marker) in (None, tokenizer.unk_token_id):
            raise ModelLoadError(f"the tokenizer of {path!r} lacks the marker {marker}")
    dim = projection["2.weight"].shape[0]
    context = min(int(tokenizer.model_max_length), config.max_position_embeddings)
    return {
        "backbone": backbone.to(options["device"]),
        "tokenizer": tokenizer,
        "tasks": {"rank": Task("all", head, dim, False, HiddenStatesReference(backbone, tokenizer, head))},
        "score_task": "rank",
        "listwise": ListwiseRules(_QUERY_MARKER, _DOCUMENT_MARKER, context),
        "reader": TokenizerReader(tokenizer),
    }


class _Projection(torch.nn.Module):
    """Linear, ReLU, linear, without biases: maps hidden states at markers to the space in which they are
    compared."""

    def __init__(self, tensors: dict[str, torch.Tensor], path: str, hidden: int) -> None:
        super().__init__()
        if tensors.keys() != {"0.weight", "2.weight"}:
            different = ", ".join(
                f"projector.{name}" for name in sorted(tensors.keys() ^ {"0.weight", "2.weight"})
            )
            raise ModelLoadError(
                f"{path!r} has another projector than jina-reranker-v3: it differs in {different}"
            )
        first, second = tensors["0.weight"], tensors["2.weight"]
        if (first.ndim, second.ndim, first.shape[-1], second.shape[-1]) != (2, 2, hidden, first.shape[0]):
            raise ModelLoadError(
                f"{path!r} has a projector that does not fit: projector.0.weight {list(first.shape)} behind "
                f"{hidden} dimensions, then projector.2.weight {list(second.shape)}"
            )
        self.first = torch.nn.Linear(hidden, first.shape[0], bias=False, device="meta")
        self.second = torch.nn.Linear(first.shape[0], second.shape[0], bias=False, device="meta")
        self.first.weight = torch.nn.Parameter(first, requires_grad=False)
        self.second.weight = torch.nn.Parameter(second, requires_grad=False)

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows = features["token_embeddings"]
        projected = self.second(torch.relu(self.first(rows)))
        return features | {"token_embeddings": projected}


# All from the card of jina-reranker-m0.
_TEMPLATE = "**Document**:\n{{ document }}\n**Query**:\n{{ query }}"
_SCORE_TOKEN = 100
_PIXELS = {"shortest_edge": 3_136, "longest_edge": 602_112}
_LONGEST = 10_240
_BIAS = 2.65
_SHAPES = {"0.weight": 2, "0.bias": 1, "2.weight": 2, "2.bias": 1}


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
    tensors = read_tensors(path, options["revision"], "score.")
    refuse_not_finite(path, [(f"score.{name}", tensor) for name, tensor in tensors.items()])
    head = _score_layers(path, tensors, model.config.get_text_config().hidden_size).to(options["device"])
    vision = vision_of(path, model, processor)
    reference = LastStateReference(model, tokenizer, head)
    reference.pictures = PictureInputs(vision, next(model.parameters()).device)
    template = template or ScoreTemplate((_TEMPLATE,))
    template = replace(template, picture=PICTURE, trailing_ids=(_SCORE_TOKEN,))
    return {
        "backbone": model.language_model,
        "tokenizer": tokenizer,
        "tasks": {"classify": Task("last", head, 1, False, reference)},
        "score_task": "classify",
        "activation": _Shifted(),
        "labels": ("relevance",),
        "pairs": PairRules("only_second", template),
        "vision": vision,
        "reader": TemplateReader(tokenizer, template),
    }


class _Shifted(torch.nn.Module):
    """The sigmoid, with the bias of scores that the card names."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(logits - _BIAS)


def _score_layers(path: str, tensors: dict[str, torch.Tensor], hidden: int) -> torch.nn.Sequential:
    """Linear, ReLU, linear, in float32."""
    shapes = {name: len(tensor.shape) for name, tensor in tensors.items()}
    if shapes != _SHAPES or tensors["0.weight"].shape != (hidden, hidden) or len(tensors["2.weight"]) != 1:
        raise ModelLoadError(
            f"{path!r} has other tensors score.* than jina-reranker-m0: two layers, of {hidden} and 1, with "
            "biases"
        )
    head = torch.nn.Sequential(torch.nn.Linear(hidden, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1))
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return head
