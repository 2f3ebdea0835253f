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
from maxsimd.engine import EngineConfig
from tests.checkpoints import bi_encoders, cross_encoders, language_models, late_interaction, sparse_encoders
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity.changes import Build, Edit, added, settings

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
    "the document behind": "{{ messages[1].content | trim }}\n{{ messages[0].content }}<|im_end|>",
}

CASES = [
    # Lengths and truncation.
    *(
        Case(f"texts: {', '.join(said)} of {name}", build, kind, (_reads(**said),))
        for name, build, kind in [
            ("a bi-encoder", bi_encoders.gte, SentenceTransformer),
            ("a sparse encoder", sparse_encoders.splade, SparseEncoder),
            ("late interaction", late_interaction.native, MultiVectorEncoder),
        ]
        for said in [{"max_length": 20}, {"add_special_tokens": False}, {"truncation": False}]
    ),
    Case("texts: only the first is cut", partial(cross_encoders.scored_by_modules), CrossEncoder,
         (_reads(max_length=120, truncation="only_second"),)),
    Case("lengths of roles", bi_encoders.gte,
         edits=(settings(_OF_TEXTS, query_length=8, document_length=16),)),
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
    *(Case(name, _bert(behind=name)) for name in bi_encoders.BEHIND_POOLING if "concatenated" not in name),
    Case("dense of concatenated rows", _bert(pooling="mean+max+cls", behind="dense of concatenated rows")),
    *(Case(f"{name}, late", _bert(behind=name), MultiVectorEncoder, options=_LATE)
      for name in ("a residual", "a residual of another width")),
    Case("a residual of tokens", late_interaction.native, MultiVectorEncoder,
         (settings("1_Dense/config.json", use_residual=True),
          added("residual.weight", torch.randn(48, 64, generator=torch.Generator().manual_seed(6)),
                "1_Dense/model.safetensors"))),
    Case("transformers' activation of tokens", late_interaction.native, MultiVectorEncoder,
         (settings("1_Dense/config.json", activation_function=_GELU),)),
    Case("transformers' activation of scores", cross_encoders.scored_by_modules, CrossEncoder,
         (settings(_OF_ALL, activation_fn=_GELU),)),
    Case("transformers' activation of logits", cross_encoders.bert, CrossEncoder,
         (settings(sentence_transformers={"activation_fn": _GELU}),)),
    Case("scored by modules", cross_encoders.scored_by_modules, CrossEncoder),
    # Pooling.
    *(Case(f"pooled by {mode}", _bert(pooling=mode))
      for mode in ("mean+max+cls", "max", "mean_sqrt_len_tokens", "weightedmean+lasttoken")),
    Case("the first token behind the prompt", _bert(
        pooling="cls+max", include_prompt=False, prompts={"query": "Represent it: ", "document": "Read: "})),
    Case("the first token without a prompt", _bert(pooling="cls", include_prompt=False)),
    # Similarities.
    *(Case(f"{name} of vectors", _bert(similarity_fn_name=name)) for name in ("euclidean", "manhattan")),
    *(Case(f"{name} of sparse vectors", sparse_encoders.splade, SparseEncoder,
           (settings(_OF_ALL, similarity_fn_name=name),))
      for name in ("cosine", "euclidean", "manhattan")),
    # Tensors that are left out.
    Case("a loss", bi_encoders.gte, edits=(added("loss_fct.weight", torch.ones(2)),)),
    Case("fewer layers", bi_encoders.gte, edits=(settings(num_hidden_layers=2),)),
    Case("fewer layers of a classifier", cross_encoders.bert, CrossEncoder, (settings(num_hidden_layers=2),)),
    # Chat templates.
    Case("texts in a chat", bi_encoders.qwen3_in_chat),
    *(Case(f"{name}, {build.__name__}", build, CrossEncoder, (_with_template(template),))
      for name, template in _TEMPLATES.items()
      for build in (language_models.zerank_2, cross_encoders.qwen3_in_chat)),
    Case("a pair without its end", language_models.zerank_2, CrossEncoder,
         (_SHORT, settings(_OF_TEXTS, processing_kwargs={"chat_template": {"restore_suffix": False}}))),
]  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(each, id=each.name) for each in CASES])
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
    expected = _expected(case.kind, path, few)
    assert expected.std() > 0.002, "the checkpoint must tell pairs apart, or this test shows nothing"
    np.testing.assert_allclose(await engines.scores(config, few), expected, atol=1e-5, rtol=1e-5)


def _expected(kind: type[Any], path: str, pairs: list[Pair]) -> Any:
    """One by one, so that nothing is padded. Activations are imported, which takes trust there."""
    model = kind(path, device="cpu", trust_remote_code=True)
    queries, documents = [pair.query for pair in pairs], [pair.document for pair in pairs]
    if kind is CrossEncoder:
        return np.asarray(model.predict([*zip(queries, documents, strict=True)], batch_size=1))
    encoded = model.encode_query(queries, batch_size=1), model.encode_document(documents, batch_size=1)
    return model.similarity_pairwise(*encoded).numpy()
