"""Scores equal sentence-transformers' whatever a checkpoint's files set: modules, pooling, lengths,
truncation, activations, similarities, chat templates, and tensors that are left out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, EngineConfig
from tests.checkpoints import bi_encoders, cross_encoders, language_models, late_interaction, sparse_encoders
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity.changes import Build, Edit, added, settings, without_settings
from tests.parity.selection import with_names

pytestmark = pytest.mark.asyncio(loop_scope="module")

_OF_TEXTS, _OF_ALL = "sentence_bert_config.json", "config_sentence_transformers.json"


@dataclass(frozen=True, eq=False)
class Case:
    """A checkpoint, edits of a copy of it, the class that reads it, and the engine's options."""

    name: str
    build: Build
    kind: type[Any] = SentenceTransformer
    edits: tuple[Edit, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    exhaustive: bool = False


def _reads(**text: Any) -> Edit:
    return settings(_OF_TEXTS, processing_kwargs={"text": text})


_SHORT = settings("tokenizer_config.json", model_max_length=60)
_LEFT = settings("tokenizer_config.json", truncation_side="left")
_LATE = {"score_type": "late-interaction"}
_GELU = "transformers.activations.GELUActivation"


def _bert(**options: Any) -> Build:
    return partial(bi_encoders.bert, **options)


def _with_template(template: str) -> Edit:
    return lambda folder: (folder / "chat_template.jinja").write_text(template)


_QUERY = "{{ messages | selectattr('role', 'equalto', 'query') | map(attribute='content') | first%s }}"
_DOCUMENT = _QUERY.replace("'query'", "'document'")
_ASKED = f"<|im_start|>user\n{_QUERY % ''}\n{_DOCUMENT}<|im_end|>\n<|im_start|>assistant\n"
_TEMPLATES = {
    "lower case, no blanks around": _ASKED % " | trim | lower",
    "the first characters": _ASKED % " | truncate(60, True, '')",
    "the document twice": f"{_QUERY % ''} {_DOCUMENT % ''}<|im_end|>{_DOCUMENT % ''}<|im_end|>",
    "a look at the length and for a word": "{% for m in messages %}{{ m.content if m.content | length < 100 "
    "else m.content[:90] }}{% if 'the' in m.content %}!{% endif %}\n{% endfor %}<|im_end|>",
    "a setting with a default, the document behind": "{{ instruction | default('find it') }}\n"
    "{{ messages[1].content | trim }}\n{{ messages[0].content }}<|im_end|>",
}

CASES = [
    # Lengths and truncation. Each setting by default of one kind.
    *(
        Case(f"texts: {', '.join(said)} of {name}", build, kind, (_reads(**said), *edits), exhaustive=i != j)
        for i, (name, build, kind) in enumerate([
            ("a bi-encoder", bi_encoders.gte, SentenceTransformer),
            ("a sparse encoder", sparse_encoders.splade, SparseEncoder),
            ("late interaction", late_interaction.native, MultiVectorEncoder),
        ])
        for j, (said, edits) in enumerate([
            ({"add_special_tokens": False}, ()),
            ({"max_length": 20}, ()),
            ({"truncation": False}, (settings(_OF_TEXTS, max_seq_length=24),)),
        ])
    ),
    Case("pairs without special tokens, transformers' activation", cross_encoders.scored_by_modules,
         CrossEncoder, (_reads(add_special_tokens=False), settings(_OF_ALL, activation_fn=_GELU))),
    Case("lengths of roles, cut on the left", bi_encoders.gte,
         edits=(_LEFT, settings(_OF_TEXTS, query_length=8, document_length=16))),
    Case("a length below those of roles, cut on the left", late_interaction.native, MultiVectorEncoder,
         (_LEFT, settings(_OF_TEXTS, max_seq_length=20))),
    Case("a length beyond the tokenizer's, transformers' activation", late_interaction.native,
         MultiVectorEncoder, (settings("tokenizer_config.json", model_max_length=40),
                              settings("1_Dense/config.json", activation_function=_GELU))),
    Case("a classifier of fewer layers, cut on the left, transformers' activation", cross_encoders.bert,
         CrossEncoder, (_LEFT, _SHORT, settings(num_hidden_layers=2,
                                                sentence_transformers={"activation_fn": _GELU}))),
    Case("a chat cut on the left", language_models.zerank_2, CrossEncoder, (_LEFT, _SHORT)),
    # Pooling, modules behind it, dimensions and similarities.
    Case("dropout and fewer dimensions, not normalised again",
         _bert(behind="dropout", truncate_dim=16, similarity_fn_name="dot")),
    Case("all poolings but max and cls, concatenated, and manhattan distances",
         _bert(pooling="mean_sqrt_len_tokens+weightedmean+lasttoken", behind="dense of concatenated rows",
               similarity_fn_name="manhattan")),
    Case("max, residuals and euclidean distances",
         _bert(pooling="max", behind="residuals", similarity_fn_name="euclidean")),
    Case("the first token, behind a prompt or without, and fewer dimensions",
         _bert(pooling="cls+max", include_prompt=False, truncate_dim=16,
               prompts={"query": "Represent it: "})),
    Case("residuals, late", _bert(behind="residuals"), MultiVectorEncoder, options=_LATE),
    *(Case(f"{name} of sparse vectors", sparse_encoders.splade, SparseEncoder,
           (settings(_OF_ALL, similarity_fn_name=name),), exhaustive=name == "euclidean")
      for name in ("cosine", "euclidean", "manhattan")),
    # What tells the kind of a checkpoint, and tensors that are left out.
    Case("PyLate without its prefixes", late_interaction.pylate_modernbert, MultiVectorEncoder,
         (without_settings("query_prefix", "document_prefix", file=_OF_ALL),)),
    Case("buffers and a loss", bi_encoders.sgpt,
         edits=tuple(added(name, torch.ones(4)) for name in
                     ("h.0.attn.attention.bias", "h.0.attn.attention.masked_bias", "loss_fct.weight"))),
    # Chat templates.
    Case("texts in a chat", bi_encoders.qwen3_in_chat),
    *(Case(f"{name}, {build.__name__}", build, CrossEncoder, (_with_template(template),),
           exhaustive=i % 2 != j)
      for i, (name, template) in enumerate(_TEMPLATES.items())
      for j, build in enumerate((language_models.zerank_2, cross_encoders.qwen3_in_chat))),
    Case("a pair without its end", language_models.zerank_2, CrossEncoder,
         (_SHORT, settings(_OF_TEXTS, processing_kwargs={"chat_template": {"restore_suffix": False}}))),
]  # fmt: skip


@pytest.mark.parametrize("case", with_names(CASES))
async def test_scores_equal_sentence_transformers(
    case: Case,
    checkpoints: SharedCheckpoints,
    changed: Callable[..., str],
    engines: Engines,
    pairs: list[Pair],
) -> None:
    path = changed(case.build, *case.edits) if case.edits else checkpoints(case.build)
    few = [Pair(pair.query, f" {pair.document[:700]} ") for pair in pairs[:4]]
    config = EngineConfig(model=path, dtype="float32", **case.options)
    # Activations are imported, which takes trust there.
    model = case.kind(path, device="cpu", trust_remote_code=True)
    expected = _expected(model, few)
    assert expected.std() > 0.002, "the checkpoint must tell pairs apart, or this test shows nothing"
    np.testing.assert_allclose(await engines.scores(config, few), expected, atol=1e-5, rtol=1e-5)
    if case.kind is SentenceTransformer:
        documents, engine = [pair.document for pair in few], await engines(config)
        ours = await engine.embed(documents, input_type="document", truncation=CUT_LONG)
        np.testing.assert_allclose(ours.embeddings, model.encode_document(documents), atol=1e-5, rtol=1e-5)


def _expected(model: Any, pairs: list[Pair]) -> Any:
    """One by one, so that nothing is padded."""
    queries, documents = [pair.query for pair in pairs], [pair.document for pair in pairs]
    if isinstance(model, CrossEncoder):
        return np.asarray(model.predict([*zip(queries, documents, strict=True)], batch_size=1))
    encoded = model.encode_query(queries, batch_size=1), model.encode_document(documents, batch_size=1)
    return model.similarity_pairwise(*encoded).numpy()


async def test_fewer_dimensions_are_only_rescaled_if_normalised(
    checkpoints: SharedCheckpoints, engines: Engines
) -> None:
    path = checkpoints(_bert(behind="dense behind normalize"))
    engine = await engines(EngineConfig(model=path, dtype="float32"))
    ours = await engine.embed(["a text"], dimensions=16)
    expected = SentenceTransformer(path, device="cpu").encode(["a text"], truncate_dim=16)
    np.testing.assert_allclose(ours.embeddings, expected, atol=1e-5)


@pytest.mark.parametrize(("label", "named", "multi"), [(None, "yes", False), ("LABEL_2", None, True)])
async def test_the_probability_of_a_label_is_a_score(
    label: str | None,
    named: str | None,
    multi: bool,
    changed: Callable[..., str],
    engines: Engines,
    pairs: list[Pair],
) -> None:
    labels = {str(i): f"LABEL_{i}" for i in range(3)} | ({"1": named} if named else {})
    kind = {"problem_type": "multi_label_classification"} if multi else {}
    path = changed(partial(cross_encoders.bert, labels=3), settings(id2label=labels, **kind))
    config = EngineConfig(model=path, dtype="float32", score_label=label)
    few = [Pair(pair.query, pair.document[:300]) for pair in pairs[:4]]
    logits = torch.from_numpy(_expected(CrossEncoder(path, device="cpu"), few))
    probabilities = torch.sigmoid(logits) if multi else torch.softmax(logits, dim=1)
    ours = await engines.scores(config, few)
    np.testing.assert_allclose(ours, probabilities[:, 2 if multi else 1], atol=1e-5)
    engine = await engines(config)
    assert engine.facts.scales.of(use_activation=True, normalize=False).most == 1
