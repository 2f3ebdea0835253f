"""Scores are those that a checkpoint's files mean, as sentence-transformers or transformers has them:
prompts, padding tokens in texts, classifiers that config.json does not name."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from maxsimd.engine import Engine, EngineConfig
from maxsimd.engine.checkpoint.detect import with_architecture
from maxsimd.engine.checkpoint.files import read_files
from maxsimd.engine.several.cascade import Stage, run_cascade
from tests.checkpoints import architectures, bi_encoders, cross_encoders, language_models, sparse_encoders
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity import references
from tests.parity.changes import Build, Edit, added, settings, without_settings
from tests.parity.selection import with_names
from tests.unit.calling_handlers import Caller, RecordingEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUERY = "where do swallows sleep"
DOCUMENTS = ("in the reeds", "Swallows sleep in reeds, by the thousand.", "It is late in the year")


def by_transformers(path: str, queries: list[str], documents: list[str]) -> Any:
    """The probabilities of transformers' classifier with one label, one pair at a time."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.inference_mode():
        logits = [
            model(**tokenizer(query, document, return_tensors="pt")).logits[0, 0]
            for query, document in zip(queries, documents, strict=True)
        ]
    return references.sigmoid(torch.stack(logits).numpy())


@dataclass(frozen=True, eq=False)
class Case:
    """A checkpoint, and documents that show whether it is read as it is meant."""

    name: str
    build: Build
    documents: tuple[str, ...] = DOCUMENTS
    edits: tuple[Edit, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    reference: references.Reference = references.cross_encoder
    execution: str = "packed"
    exhaustive: bool = False


_EOS = "<|im_end|>"
_ENDING = (f"in the reeds{_EOS}", f"in{_EOS} the reeds", f"by the thousand {_EOS}{_EOS}{_EOS}", "late", _EOS)
_PADDED = ("in <pad> the reeds", "<pad><pad> by the thousand", "late in the year", "<pad>")
_PROMPTS = settings("config_sentence_transformers.json", **cross_encoders.PROMPTS)


CASES = [
    Case("prompts of a LogitScore", language_models.zerank_2, edits=(_PROMPTS,)),
    Case("prompts beside a chat template that ends in padding",
         partial(cross_encoders.chatting, pad=_EOS, **cross_encoders.PROMPTS)),
    *(
        Case(f"documents that end in padding: {kind}", partial(cross_encoders.padded_by_eos, kind=kind),
             _ENDING, exhaustive=kind != "qwen2")
        for kind in ("qwen2", "llama", "gpt2")
    ),
    Case("documents that end in padding, read both ways", partial(cross_encoders.padded_by_eos, kind="qwen3"),
         _ENDING, (settings(is_causal=False),)),
    Case("documents that end in padding, padded", cross_encoders.padded_by_eos, _ENDING,
         options={"packing": "off"}, execution="padded", exhaustive=True),
    *(
        Case(f"padding in texts: {kind}", partial(architectures.classifier, model_type=kind), _PADDED,
             execution=execution, exhaustive=kind not in ("xlm-roberta", "mpnet"))
        for execution, kinds in {
            "packed": ("roberta", "xlm-roberta", "xlm-roberta-xl", "mpnet", "camembert", "data2vec-text",
                       "xmod", "roberta-prelayernorm", "esm"),
            "padded": ("ibert", "lilt"),
            "one by one": ("longformer", "luke"),
        }.items()
        for kind in kinds
    ),
    Case("padding in texts, plain torch", cross_encoders.xlm_roberta, _PADDED, options={"kernels": "torch"},
         exhaustive=True),
    Case("padding in texts, padded", cross_encoders.xlm_roberta, _PADDED, options={"packing": "off"},
         execution="padded", exhaustive=True),
    Case("no padding token", cross_encoders.without_pad_id, (*DOCUMENTS, f"in{_EOS}")),
    *(
        Case(f"architectures {said}", cross_encoders.bert, edits=(edit,), options=options,
             reference=by_transformers, exhaustive=said not in ("absent", "of another head"))
        for said, edit, options in (
            ("null", settings(architectures=None), {}),
            ("empty", settings(architectures=[]), {}),
            ("absent", without_settings("architectures"), {"score_type": "cross-encoder"}),
            ("a string", settings(architectures="BertForSequenceClassification"), {}),
            ("of the base", settings(architectures=["BertModel"]), {}),
            ("of another head", settings(architectures=["BertForMaskedLM"]), {}),
        )
    ),
    *(
        Case(f"architectures null: {build.__name__}", build, edits=(settings(architectures=None),),
             reference=by_transformers, exhaustive=build is not cross_encoders.qwen2)
        for build in (cross_encoders.qwen2, cross_encoders.roberta, cross_encoders.distilbert,
                      cross_encoders.deberta_v2, cross_encoders.modernbert)
    ),
    Case("architectures null: a save with prompts", cross_encoders.prompted,
         edits=(settings(architectures=None),)),
]  # fmt: skip


@pytest.mark.parametrize("case", with_names(CASES))
async def test_scores_are_those_that_are_meant(
    case: Case, checkpoints: SharedCheckpoints, changed: Callable[..., str], engines: Engines
) -> None:
    path = changed(case.build, *case.edits) if case.edits else checkpoints(case.build)
    config = EngineConfig(model=path, **{"dtype": "float32", **case.options})
    engine = await engines(config)
    found = await engine.score(QUERY, list(case.documents))
    expected = case.reference(path, [QUERY] * len(case.documents), list(case.documents))
    np.testing.assert_allclose(found.scores, expected, atol=1e-5)
    assert engine.device_model.prepared.execution == case.execution


async def test_equal_scores_are_ranked_by_their_logits(changed: Callable[..., str]) -> None:
    """Of logits above 17, whose sigmoids are all 1 in float32."""
    path = changed(cross_encoders.bert, added("classifier.bias", torch.tensor([40.0])))
    documents = DOCUMENTS[::-1]
    logits = references.loaded(CrossEncoder, path).predict(
        [(QUERY, document) for document in documents], activation_fn=torch.nn.Identity()
    )
    best = np.argsort(-logits).tolist()
    assert best != [0, 1, 2]
    body = {"query": QUERY, "documents": [*documents], "top_n": 2}
    async with RecordingEngine(EngineConfig(model=path, dtype="float32")) as engine:
        caller = Caller(engine)
        found = [(await engine.rerank(QUERY, documents, normalize=each)).results for each in (False, True)]
        assert {one.score for results in found for one in results} == {1.0}
        orders = [[one.index for one in results] for results in found]
        stages = [Stage("one", keep=2), Stage("one")]
        cascade = await run_cascade(lambda _: engine, QUERY, documents, stages, None, {})
        orders.append([one.index for one in cascade.results] + best[2:])
        for more in ({}, {"stream": True}):
            last = (await caller.post("/rerank", body | more)).body.splitlines()[-1]
            orders.append([one["index"] for one in json.loads(last)["results"]] + best[2:])
    assert orders == [best] * 5


async def test_labels_are_those_of_the_weights(changed: Callable[..., str]) -> None:
    edits = settings(architectures=None), without_settings("id2label", "label2id")
    path = changed(partial(cross_encoders.bert, labels=3), *edits)
    async with Engine(EngineConfig(model=path, dtype="float32")) as engine:
        found = await engine.classify([*DOCUMENTS], use_activation=False)
    assert found.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=3).eval()
    with torch.inference_mode():
        expected = [model(**tokenizer(each, return_tensors="pt")).logits[0].numpy() for each in DOCUMENTS]
    np.testing.assert_allclose(found.scores, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "architecture"),
    [
        (bi_encoders.bge, "BertModel"),
        (bi_encoders.qwen3, "Qwen3Model"),
        (language_models.qwen3_reranker, "Qwen3ForCausalLM"),
        (sparse_encoders.plain, "BertForMaskedLM"),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
async def test_other_classes_are_found_by_their_weights(
    changed: Callable[..., str], build: Build, architecture: str
) -> None:
    path = changed(build, settings(architectures=None))
    assert with_architecture(path, None, read_files(path, None)).architecture == architecture
