"""Scores equal sentence-transformers' whatever a checkpoint's files set: modules, pooling, lengths,
truncation, activations, similarities, chat templates, and tensors that are left out."""

import re
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
from tests.parity.changes import Build, Edit, added, refusal, settings, without_settings
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
    "lower case": _ASKED % " | lower",
    "no blanks around": _ASKED % " | trim",
    "the first characters": _ASKED % " | truncate(60, True, '')",
    "a look at the length": "{% for m in messages %}{{ m.content if m.content | length < 100 "
    "else m.content[:90] }}<|im_end|>{% endfor %}",
    "the document twice": f"{_QUERY % ''} {_DOCUMENT % ''}<|im_end|>{_DOCUMENT % ''}<|im_end|>",
    "a look for a word": "{% for m in messages %}{{ m.content }}{% if 'the' in m.content %}!{% endif %}\n"
    "{% endfor %}",
    "a setting with a default": f"{{{{ instruction | default('find it') }}}}\n{_QUERY % ''} {_DOCUMENT % ''}"
    "<|im_end|>",
    "the document behind": "{{ messages[1].content | trim }}\n{{ messages[0].content }}<|im_end|>",
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
    Case("texts: only documents are cut", cross_encoders.scored_by_modules, CrossEncoder,
         (_reads(max_length=120, truncation="only_second"),)),
    Case("texts: pairs without special tokens", cross_encoders.scored_by_modules, CrossEncoder,
         (_reads(add_special_tokens=False),)),
    Case("lengths of roles", bi_encoders.gte,
         edits=(settings(_OF_TEXTS, query_length=8, document_length=16),)),
    Case("a length below those of roles", late_interaction.native, MultiVectorEncoder,
         (settings(_OF_TEXTS, max_seq_length=20),)),
    Case("a length beyond the tokenizer's", late_interaction.native, MultiVectorEncoder,
         (settings("tokenizer_config.json", model_max_length=40),)),
    Case("fewer dimensions", _bert(truncate_dim=16)),
    Case("fewer dimensions, not normalised again",
         _bert(behind="dropout", truncate_dim=16, similarity_fn_name="dot")),
    *(
        Case(f"cut on the left: {build.__name__}", build, kind, (_LEFT, *edits))
        for build, kind, edits in [
            (bi_encoders.gte, SentenceTransformer, (settings(_OF_TEXTS, max_seq_length=24),)),
            (cross_encoders.bert, CrossEncoder, (_SHORT,)),
            (late_interaction.native, MultiVectorEncoder, ()),
            (language_models.zerank_2, CrossEncoder, (_SHORT,)),
        ]
    ),
    # Modules behind pooling.
    *(Case(name, _bert(behind=name)) for name in ("residuals", "dropout")),
    Case("dense of concatenated rows", _bert(pooling="mean+max+cls", behind="dense of concatenated rows")),
    Case("residuals, late", _bert(behind="residuals"), MultiVectorEncoder, options=_LATE),
    Case("transformers' activation of tokens", late_interaction.native, MultiVectorEncoder,
         (settings("1_Dense/config.json", activation_function=_GELU),)),
    Case("transformers' activation of scores", cross_encoders.scored_by_modules, CrossEncoder,
         (settings(_OF_ALL, activation_fn=_GELU),)),
    Case("transformers' activation of logits", cross_encoders.bert, CrossEncoder,
         (settings(sentence_transformers={"activation_fn": _GELU}),)),
    # Pooling.
    *(Case(f"pooled by {mode}", _bert(pooling=mode))
      for mode in ("max", "mean_sqrt_len_tokens+weightedmean+lasttoken")),
    Case("the first token, behind a prompt or without",
         _bert(pooling="cls+max", include_prompt=False, prompts={"query": "Represent it: "})),
    # Similarities.
    *(Case(f"{name} of vectors", _bert(similarity_fn_name=name), exhaustive=name == "manhattan")
      for name in ("euclidean", "manhattan")),
    *(Case(f"{name} of sparse vectors", sparse_encoders.splade, SparseEncoder,
           (settings(_OF_ALL, similarity_fn_name=name),), exhaustive=name == "euclidean")
      for name in ("cosine", "euclidean", "manhattan")),
    # What tells the kind of a checkpoint, and tensors that are left out.
    Case("PyLate without its prefixes", late_interaction.pylate_modernbert, MultiVectorEncoder,
         (without_settings("query_prefix", "document_prefix", file=_OF_ALL),)),
    Case("buffers and a loss", bi_encoders.sgpt,
         edits=tuple(added(name, torch.ones(4)) for name in
                     ("h.0.attn.attention.bias", "h.0.attn.attention.masked_bias", "loss_fct.weight"))),
    Case("fewer layers of a classifier", cross_encoders.bert, CrossEncoder, (settings(num_hidden_layers=2),)),
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


@pytest.mark.parametrize(
    ("build", "edit", "options", "message"),
    [
        (cross_encoders.bert, None, {"score_label": "yes"}, "for classifiers of several labels"),
        (partial(cross_encoders.bert, labels=2), None, {"score_label": "yes"}, "one of: LABEL_0, LABEL_1"),
        (late_interaction.native, settings("1_Dense/config.json", activation_function="mypkg.Act"), {},
         r"1_Dense/config\.json .*'mypkg\.Act'.*trust_remote_code"),
        (cross_encoders.bert, settings(sbert_ce_default_activation_function="mypkg.Act"), {},
         r"config\.json .*'mypkg\.Act'"),
        (cross_encoders.scored_by_modules, settings(_OF_ALL, activation_fn="transformers.activations.No"), {},
         "activations.No', which cannot be imported"),
        (bi_encoders.gte, _reads(stride=4), {}, r"processing_kwargs\.text\.stride to 4"),
        (bi_encoders.gte, _reads(truncation="only_second"), {}, r"truncation to 'only_second'"),
        (bi_encoders.gte, settings(_OF_TEXTS, query_expansion={"strategy": "fixed", "length": 8}), {},
         "query_expansion, which is for late interaction"),
        (_bert(behind="a layer norm"), None, _LATE, "LayerNorm for pooled vectors"),
        (language_models.zerank_2, settings("*_LogitScore/config.json", false_token_id=True), {},
         "true_token_id and false_token_id; give token ids"),
        (cross_encoders.scored_by_modules, settings("4_Dense/config.json", module_output_name="logits"), {},
         "last module gives no scores"),
        (cross_encoders.scored_by_modules,
         settings("2_Dense/config.json", module_input_name="token_embeddings"), {},
         "sets module_input_name to 'token_embeddings'"),
        (_bert(behind="a residual"), settings("*_Dense/config.json", module_output_name="scores"), {},
         "sets module_output_name to 'scores'"),
        (bi_encoders.qwen3_in_chat, _with_template(_TEMPLATES["the document twice"]), {}, "chat template"),
        (bi_encoders.gte, added("linear.weight", torch.ones(2, 128)), {}, "unexpected: linear.weight"),
    ],
)  # fmt: skip
async def test_other_settings_are_refused_by_name(
    build: Build,
    edit: Edit | None,
    options: dict[str, Any],
    message: str,
    checkpoints: SharedCheckpoints,
    changed: Callable[..., str],
) -> None:
    path = checkpoints(build) if edit is None else changed(build, edit)
    assert re.search(message, refusal(path, **options))
