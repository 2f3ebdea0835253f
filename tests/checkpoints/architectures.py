"""Every architecture of transformers that scores or embeds text, built small with random weights, and what
sentence-transformers makes of it."""

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import CrossEncoder, SentenceTransformer
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from maxsimd.bench.datasets import Pair, docstring_pairs
from tests.checkpoints.architecture_configs import small_config
from tests.checkpoints.tokenizers import byte_level_bpe

Outputs = NDArray[np.float32]


@dataclass(frozen=True)
class Architecture:
    """A classifier (cross-encoder) or a plain model (bi-encoder), by what its config.json calls its type."""

    kind: Literal["cross-encoder", "bi-encoder"]
    model_type: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.model_type}"


def all_architectures() -> list[Architecture]:
    """All that transformers knows, those that are left out included."""
    classifiers, models = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, MODEL_MAPPING_NAMES
    return [Architecture("cross-encoder", name) for name in classifiers] + [
        Architecture("bi-encoder", name) for name in models
    ]


# Parts of a configuration, and words in the names of models, for more than text.
_OTHER_PARTS = re.compile(
    "vision|image|video|audio|acoustic|speech|codec|vocoder|vq_|flow_head|protein|backbone"
)
_OTHER_MODELS = re.compile("Vision|Video|Audio|Speech|VQ")
_LEFT_OUT = {
    "fuyu": "it sees: pieces of images take part in its texts, so it is not built from text alone",
    "layoutlmv2": "it needs the package detectron2, which is no dependency of ours",
    "mra": "its attention is a CUDA kernel; without one transformers takes zeros in its place",
    "seamless_m4t": "it hears and speaks: text is one of its four ends",
    "seamless_m4t_v2": "it hears and speaks: text is one of its four ends",
}


def left_out(architecture: Architecture) -> str | None:
    """Why an architecture is not built, or None if it is. What is not known here is built."""
    name = architecture.model_type
    if name in _LEFT_OUT:
        return _LEFT_OUT[name]
    config_class: Any = CONFIG_MAPPING[name]
    if config_class.model_type != name:
        return f"it is {config_class.model_type} by another name, and its config.json says that one"
    parts = sorted({part for part in _names_of_parts(config_class) if _OTHER_PARTS.search(part)})
    if parts:
        return f"it is not of text alone: its configuration has {parts[0]}"
    mapping: Any = MODEL_MAPPING
    if architecture.kind == "cross-encoder":
        mapping = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    try:
        found = mapping[config_class]
    except ValueError:
        return "transformers lists it, and has no class of that name"
    model_class = found[0] if isinstance(found, tuple) else found
    if _OTHER_MODELS.search(model_class.__name__):
        return f"it is not of text, as its name {model_class.__name__} says"
    takes = "input_ids" if architecture.kind == "cross-encoder" else model_class.main_input_name
    return None if takes == "input_ids" else f"it is not of text: it takes {takes}"


def _names_of_parts(config_class: Any) -> Iterator[str]:
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        yield name
        yield from _names_of_parts(part)


# What sentence-transformers does not score, built though it is.
_ENCODER_LEFT_RANDOM = "sentence-transformers finds none of its encoder's tensors, and leaves them random"
UNSCORED = {
    "blip_2_qformer": "it asks for the states of an image (query_embeds)",
    "blenderbot": _ENCODER_LEFT_RANDOM,
    "blenderbot-small": _ENCODER_LEFT_RANDOM,
    "bros": "it asks for the boxes in which the words stand (bbox)",
    "dia": "sentence-transformers reads its files with a processor of sounds",
    "dpr": "it has no hidden states, only their pooled one, of which sentence-transformers makes nothing",
    "layoutlmv3": "sentence-transformers reads its files with a processor of images",
    "lxmert": "it asks for an image, and has two kinds of hidden states",
    "m2m_100": _ENCODER_LEFT_RANDOM,
    "marian": _ENCODER_LEFT_RANDOM,
    "markuplm": "sentence-transformers reads its files with a processor of HTML",
    "neomme": "sentence-transformers reads its files with a processor of images",
    "nllb-moe": "sentence-transformers gives its decoder nothing, which it needs",
    "pegasus": _ENCODER_LEFT_RANDOM,
    "pegasus_x": _ENCODER_LEFT_RANDOM,
    "prophetnet": _ENCODER_LEFT_RANDOM,
    "udop": "sentence-transformers reads its files with a processor of images",
    "vilt": "sentence-transformers reads its files with a processor of images",
    "vits": "it makes sounds; its hidden states are not what its forward returns",
}

_SPECIALS = {
    "bos_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "cls_token": "<s>",
    "sep_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}


def build(architecture: Architecture, folder: Path) -> str:
    """Saves it with its tokeniser, as transformers does."""
    config = small_config(architecture.model_type, save_tokenizer(architecture.model_type, folder))
    auto: Any = AutoModel
    if architecture.kind == "cross-encoder":
        config.num_labels = 1
        auto = AutoModelForSequenceClassification
    config.architectures = []
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    assert size < 20e6, f"{architecture} has {size:,} parameters; add settings that make it small"
    torch.manual_seed(0)
    randomise(auto.from_config(config)).save_pretrained(folder)
    return str(folder)


def save_tokenizer(model_type: str, folder: Path) -> int:
    """One tokeniser for all; returns its size. It tells the first text from the second where models do."""
    default: Any = CONFIG_MAPPING[model_type]()
    names = ["input_ids", "attention_mask"]
    if getattr(default, "type_vocab_size", 0) > 1 or model_type == "xlnet":
        names.insert(1, "token_type_ids")
    pair = "<s> $A </s> $B:1 </s>:1"
    return byte_level_bpe(folder, _SPECIALS, "<s> $A </s>", pair, model_input_names=names)


# What decays, mixes or measures time, and is stable about where it starts.
_KEPT_NEAR = re.compile(r"A_log|dt_bias|\.D$|time_decay|time_first|time_mix|recurrent_param")


@torch.no_grad()
def randomise(model: Any) -> Any:
    """Gives every parameter another value than a fresh model has: matrices that keep the size of what they
    multiply, norms and biases about where they were."""
    torch.manual_seed(1)
    owners = {id(weight): part for part in model.modules() for weight in part.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if _KEPT_NEAR.search(name):
            parameter.mul_(1 + 0.1 * noise)
        elif parameter.dim() < 2:
            parameter.add_(noise * (0.2 if name.endswith("weight") else 0.3))
        elif isinstance(owners[id(parameter)], nn.Embedding):
            parameter.copy_(0.3 * noise)
        else:
            gain = 3.0 if len(parameter) == 1 else 1.2  # one output is a logit
            parameter.copy_(gain / math.sqrt(_inputs(owners[id(parameter)], parameter)) * noise)
        assert parameter.isfinite().all(), f"{name} is not finite"
    return model.eval()


def _inputs(owner: nn.Module, weight: torch.Tensor) -> int:
    """How many products are summed into one output."""
    if isinstance(owner, nn.Linear | nn.Conv1d | nn.Conv2d):
        return weight[0].numel()
    return max(weight.shape[-2:])  # experts, and layers of transformers' own, either way round


@functools.cache
def sample_pairs(count: int = 8) -> list[Pair]:
    """From a few tokens to about 100, longer than any window of the small models."""
    pairs = docstring_pairs()[:count]
    return [Pair(pair.query, pair.document[: 10 + 40 * i]) for i, pair in enumerate(pairs)]


def reference(architecture: Architecture, path: str, pairs: Sequence[Pair]) -> Outputs:
    """sentence-transformers' logits of pairs, or its embeddings of their documents, one by one."""
    if architecture.kind == "cross-encoder":
        texts = [(pair.query, pair.document) for pair in pairs]
        model = CrossEncoder(path, device="cpu")
        logits = model.predict(texts, batch_size=1, activation_fn=nn.Identity(), show_progress_bar=False)
        return np.asarray(logits)
    documents = [pair.document for pair in pairs]
    encoder = SentenceTransformer(path, device="cpu")
    return np.asarray(encoder.encode(documents, batch_size=1, show_progress_bar=False))


def difference_of_inputs(outputs: Outputs) -> float:
    """By how much the logits differ, or the embeddings in their most different column."""
    return float(np.ptp(outputs, axis=0).max())
