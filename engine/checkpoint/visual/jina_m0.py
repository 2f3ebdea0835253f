"""Loads jina-reranker-m0: a Qwen2-VL that reads a document and then the query, and two layers that make a
score of the last state.

Source: the model card, https://huggingface.co/jinaai/jina-reranker-m0, whose code is not run."""

from dataclasses import replace
from typing import Any

import torch
from transformers import AutoProcessor, Qwen2VLModel

from maxsimd.engine.checkpoint.fit import refuse_not_finite
from maxsimd.engine.checkpoint.model import PairRules, RoleRules, Task
from maxsimd.engine.checkpoint.reading import TemplateReader
from maxsimd.engine.checkpoint.reference import LastStateReference
from maxsimd.engine.checkpoint.score_template import ScoreTemplate
from maxsimd.engine.checkpoint.visual.processor import for_pictures_alone
from maxsimd.engine.checkpoint.visual.qwen_vl import PICTURE, PictureInputs, vision_of
from maxsimd.engine.checkpoint.weights import read_tensors
from maxsimd.engine.errors import ModelLoadError

# As the card has it, all of these.
_TEMPLATE = "**Document**:\n{{ document }}\n**Query**:\n{{ query }}"
_SCORE_TOKEN = 100
_PIXELS = {"shortest_edge": 3_136, "longest_edge": 602_112}
_LONGEST = 10_240
_BIAS = 2.65

_SHAPES = {"0.weight": 2, "0.bias": 1, "2.weight": 2, "2.bias": 1}


def load_jina_m0(path: str, template: ScoreTemplate | None, options: dict[str, Any]) -> dict[str, Any]:
    """Reads the model with transformers and the layers beside it; with a `template`, pairs are written by
    that. Returns the parts of a `LoadedModel` that depend on the kind of checkpoint."""
    common = {"revision": options["revision"], "trust_remote_code": False}
    processor = AutoProcessor.from_pretrained(path, **options["processor_kwargs"], **common)
    for_pictures_alone(processor).image_processor.size = _PIXELS
    tokenizer = processor.tokenizer
    tokenizer.model_max_length = min(_LONGEST, int(tokenizer.model_max_length))
    model = Qwen2VLModel.from_pretrained(path, **common, **options["model_kwargs"])
    model = model.to(options["device"]).eval()
    tensors = read_tensors(path, options["revision"], "score.")
    refuse_not_finite(path, [(f"score.{name}", tensor) for name, tensor in tensors.items()])
    head = _head(path, tensors, model.config.get_text_config().hidden_size).to(options["device"])
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
        "query": RoleRules(),
        "document": RoleRules(),
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


def _head(path: str, tensors: dict[str, torch.Tensor], hidden: int) -> torch.nn.Sequential:
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
