"""Loads rerankers that read a pair with an encoder and answer with the first word of a decoder: monoT5 and
its mT5 kin (Nogueira et al. 2020, arXiv 2003.06713)."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from maxsimd.engine.checkpoint.answering_decoder import AnsweringDecoder
from maxsimd.engine.checkpoint.files import CheckpointFiles
from maxsimd.engine.checkpoint.heads import TokenLogitsHead
from maxsimd.engine.checkpoint.language_model import token_id
from maxsimd.engine.checkpoint.model import PairRules, RoleRules, Task
from maxsimd.engine.checkpoint.reading import TemplateReader
from maxsimd.engine.checkpoint.reference import FirstWordReference
from maxsimd.engine.checkpoint.score_template import ScoreTemplate
from maxsimd.engine.errors import ModelLoadError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Family:
    """The words with which published rerankers of an architecture answer, and the width from which on they
    answer with others."""

    example: str
    true: str
    false: str
    widest: int | None = None


# By architecture, because a checkpoint says no more about itself. The words are pygaggle's
# (pygaggle/rerank/transformer.py); of mT5 the models of 3B and 13B parameters have other ones there.
_FAMILIES = {
    "T5ForConditionalGeneration": _Family("castorini/monot5-base-msmarco", "\u2581true", "\u2581false"),
    "MT5ForConditionalGeneration": _Family("unicamp-dl/mt5-base-mmarco-v2", "\u2581yes", "\u2581no", 1024),
}
_TEMPLATE = "Query: {{ query }} Document: {{ document }} Relevant:"


def load_encoder_decoder(
    path: str, files: CheckpointFiles, template: ScoreTemplate | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Reads a `T5ForConditionalGeneration` or `MT5ForConditionalGeneration`.

    Its score is what pygaggle's `MonoT5` gives: the logarithm of the probability of the true word, of these
    two words. Returns the parts of a `LoadedModel` that depend on the kind of checkpoint."""
    family = _FAMILIES[files.architecture]
    common = {"revision": options["revision"], "trust_remote_code": options["trust_remote_code"]}
    tokenizer = AutoTokenizer.from_pretrained(path, **common)
    model = AutoModelForSeq2SeqLM.from_pretrained(path, **common, **options["model_kwargs"])
    model = model.to(options["device"]).eval()
    _refuse_other_words(path, family, model.config)
    log.info("%r is asked %r and answers %s or %s", path, _TEMPLATE, family.true, family.false)
    words = [token_id(tokenizer, word, path) for word in (family.true, family.false)]
    if template is None:
        template = ScoreTemplate((_TEMPLATE,), trailing_ids=_trailing_ids(path, tokenizer))
    # Before the reference, which leaves only the rows of the two words in the model's output layer.
    head = TokenLogitsHead(model, words, (family.true, family.false))
    return {
        "backbone": AnsweringDecoder(model),
        "tokenizer": tokenizer,
        "tasks": {"classify": Task("cls", head, 1, False, FirstWordReference(model, tokenizer, head.output))},
        "score_task": "classify",
        "query": RoleRules(),
        "document": RoleRules(),
        "activation": torch.nn.LogSigmoid(),
        "labels": (family.true,),
        "pairs": PairRules("only_second", template),
        "reader": TemplateReader(tokenizer, template),
    }


def _refuse_other_words(path: str, family: _Family, config: Any) -> None:
    if config.decoder_start_token_id is None:
        raise ModelLoadError(f"{path!r} has no decoder_start_token_id in its config; set it (T5's is 0)")
    if family.widest is not None and config.d_model > family.widest:
        raise ModelLoadError(
            f"{path!r} is wider than the rerankers that answer {family.true} or {family.false}, such as "
            f"{family.example}; published ones of its size answer with other words, which are not served"
        )


def _trailing_ids(path: str, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that the tokeniser puts behind every text, which is </s>."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = tokenizer("a")["input_ids"]
    if ids[: len(plain)] != plain:
        raise ModelLoadError(f"the tokeniser of {path!r} puts tokens before a text; T5's do not")
    return tuple(ids[len(plain) :])
