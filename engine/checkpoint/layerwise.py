"""Loads language models that have a score behind each of their later layers, and may be cut off there.

Source: the cards of BAAI/bge-reranker-v2-minicpm-layerwise and bge-reranker-v2.5-gemma2-lightweight, and
FlagEmbedding, whose classes `LayerWiseMiniCPMForCausalLM` and `CostWiseGemmaForCausalLM` they are."""

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from maxsimd.engine.checkpoint.cross_encoder import special_tokens
from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.checkpoint.fit import refuse_not_finite
from maxsimd.engine.checkpoint.language_model import FAMILIES, NEWLINE
from maxsimd.engine.checkpoint.model import PairRules, RoleRules, Task
from maxsimd.engine.checkpoint.reading import TemplateReader
from maxsimd.engine.checkpoint.reference import LastStateReference
from maxsimd.engine.checkpoint.retrained import COST_WISE
from maxsimd.engine.checkpoint.score_template import ScoreTemplate
from maxsimd.engine.checkpoint.weights import read_tensors
from maxsimd.engine.config import EngineConfig, compress_layers_of
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.models.compressing_gemma2 import CompressingGemma2
from maxsimd.engine.models.compression import Compression

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
    to the layer, and with the compression, that the configuration asks for.

    Returns the parts of a `LoadedModel` that depend on the kind of checkpoint."""
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
        "query": RoleRules(),
        "document": RoleRules(),
        "activation": torch.nn.Identity(),
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
