"""Loads NVIDIA's rerankers: a Llama that reads in both directions, and a score of the pooled states.

Source: the cards of nvidia/llama-nemotron-rerank-1b-v2 and llama-3.2-nv-rerankqa-1b-v2, and their code
(`LlamaBidirectionalForSequenceClassification`), which is not run."""

from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForSequenceClassification

from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.checkpoint.model import PairRules, RoleRules, Task
from maxsimd.engine.checkpoint.reading import TemplateReader, TokenizerReader
from maxsimd.engine.checkpoint.reference import PooledReference
from maxsimd.engine.checkpoint.retrained import POOLING
from maxsimd.engine.checkpoint.score_template import ScoreTemplate
from maxsimd.engine.errors import ModelLoadError
from maxsimd.pooling.methods import MODES

_ACTIVATIONS = {"Identity": torch.nn.Identity, "Sigmoid": torch.nn.Sigmoid}
_QUESTION = "question:{{ query }} \n \n passage:{{ document }}"


def load_bidirectional_reranker(
    path: str, files: CheckpointFiles, template: ScoreTemplate | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Reads the checkpoint, whose config is in transformers' terms at `path` and as published in `files`.

    Returns the parts of a `LoadedModel` that depend on the kind of checkpoint."""
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
        "query": RoleRules(),
        "document": RoleRules(),
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
    """The card's template, between the special tokens that the tokeniser puts around a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    around = tokenizer("a")["input_ids"]
    first = next(i for i in range(len(around)) if around[i : i + len(bare)] == bare)
    leading = "".join(tokenizer.convert_ids_to_tokens(around[:first]))
    segments = (f"{{{{ {leading!r} }}}}", _QUESTION) if leading else (_QUESTION,)
    return ScoreTemplate(segments, trailing_ids=tuple(around[first + len(bare) :]))


def _activation(path: str, files: CheckpointFiles) -> torch.nn.Module:
    """What is done with a logit: nothing, as the card has it, unless the config names an activation."""
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
