"""Loads language models for the scores of labels: the probabilities of tokens that a request names, as the
next one behind a prompt."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from maxsimd.engine.checkpoint.cross_encoder import ids_around, parts_by_template, read_bare
from maxsimd.engine.checkpoint.model import LABEL_SCORES, Task
from maxsimd.engine.checkpoint.output_layer import QUERY_FIRST, OutputLayer
from maxsimd.engine.checkpoint.reading import TokenizerReader
from maxsimd.engine.checkpoint.reference import StatesReference
from maxsimd.engine.checkpoint.templates import ScoreTemplate
from maxsimd.engine.checkpoint.weights import hold_in_memory


def load_language_model(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Reads a `*ForCausalLM` with transformers. A prompt is a query and a document, one behind the other,
    between the special tokens that the tokenizer puts around a text."""
    model, tokenizer = read_bare(path, AutoModelForCausalLM, options, options["trust_remote_code"])
    backbone = model.base_model
    output = model.get_output_embeddings()
    if isinstance(output, torch.nn.Linear) and output.weight is not backbone.get_input_embeddings().weight:
        hold_in_memory([output])
    head = OutputLayer(model)
    before, after = ids_around(tokenizer)
    leading = "".join(tokenizer.convert_ids_to_tokens(before))
    segments = (f"{{{{ {leading!r} }}}}", QUERY_FIRST) if leading else (QUERY_FIRST,)
    template = ScoreTemplate(segments, trailing_ids=after)
    task = Task("last", head, head.columns, False, StatesReference(backbone, tokenizer, head, "last"))
    parts = parts_by_template(backbone, tokenizer, task, (), template)
    return parts | {
        "tasks": {LABEL_SCORES: task},
        "score_task": LABEL_SCORES,
        "reader": TokenizerReader(tokenizer, "{query}{document}"),
    }
