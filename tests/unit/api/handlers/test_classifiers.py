"""Answers of the routes for a classifier of three labels."""

from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from maxsimd.engine import EngineConfig
from tests.nearly import nearly
from tests.unit.calling_handlers import Caller, RecordingEngine

TEXTS = ["some text", "another one", "and a last text that is longer"]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(three_label_classifier: str) -> AsyncIterator[RecordingEngine]:
    config = EngineConfig(model=three_label_classifier, dtype="float32", threads=1)
    async with RecordingEngine(config) as engine:
        yield engine


@pytest.fixture
def caller(engine: RecordingEngine) -> Caller:
    return Caller(engine, served_model_name=("mine",))


async def test_classify_gives_the_engines_rows_with_labels(caller: Caller) -> None:
    for activated in (True, False, None):
        result = await caller.engine.classify(TEXTS, use_activation=activated is not False)
        answer = await caller.json("/classify", {"input": TEXTS, "use_activation": activated})
        assert set(answer) == {"id", "object", "created", "model", "data", "usage"}
        assert (answer["object"], answer["model"], answer["id"][:9]) == ("list", "mine", "classify-")
        assert answer["usage"] == {"prompt_tokens": 17, "total_tokens": 17}
        assert [item["index"] for item in answer["data"]] == [0, 1, 2]
        for item, row in zip(answer["data"], result.scores, strict=True):
            assert set(item) == {"index", "label", "probs", "num_classes"}
            np.testing.assert_allclose(item["probs"], row, atol=1e-5)
            assert (item["label"], item["num_classes"]) == (f"LABEL_{np.argmax(row)}", 3)
            assert (sum(item["probs"]) == pytest.approx(1, abs=1e-4)) == (activated is not False)
        for task in ({}, {"task": "classify"}):
            answer = await caller.json("/pooling", {"input": TEXTS, "use_activation": activated} | task)
            np.testing.assert_allclose([item["data"] for item in answer["data"]], result.scores, atol=1e-5)
            assert answer["usage"]["prompt_tokens"] == 17


async def test_labels_are_no_more_than_there_is_room_for(engine: RecordingEngine) -> None:
    small = Caller(engine, max_bodies_mb=1)
    texts = ["a"] * 2185
    for path, body in (
        ("/classify", {"input": texts}),
        ("/pooling", {"input": texts, "task": "classify"}),
        ("/predict", {"inputs": [[text] for text in texts]}),
    ):
        shown = "2185 texts would have 3 labels each, and there is room for 2184 such texts"
        await small.refused(path, body, 413, says=shown)


async def test_predict_gives_all_labels_best_first(caller: Caller) -> None:
    for raw in (True, False, None):
        row = (await caller.engine.classify(TEXTS[0], use_activation=not raw)).scores[0]
        answer = await caller.json("/predict", {"inputs": TEXTS[0], "raw_scores": raw})
        order = sorted(range(3), key=lambda i: -row[i])
        assert [item["label"] for item in answer] == [f"LABEL_{i}" for i in order]
        np.testing.assert_allclose([item["score"] for item in answer], row[order], atol=1e-5)
        assert [set(item) for item in answer] == [{"score", "label"}] * 3
    one = await caller.json("/predict", {"inputs": ["some text"]})
    many = await caller.json("/predict", {"inputs": [["some text"], ["another one"]]})
    single = await caller.json("/predict", {"inputs": [["some text"]]})
    assert [len(many), len(one), many[0], single] == nearly([2, 3, one, [one]])
    pair = await caller.json("/predict", {"inputs": ["a premise", "a hypothesis"]})
    assert await caller.json("/predict", {"inputs": [["a premise", "a hypothesis"]]}) == nearly([pair])
    assert await caller.json("/predict", {"inputs": ["a hypothesis", "a premise"]}) != pair
    windowing = Caller(caller.engine, long_documents="window")
    pairs = [["a premise", "word " * 900], ["a premise", "a hypothesis"]]
    assert (await windowing.json("/predict", {"inputs": pairs}))[1:] == nearly([pair])
    rows = await caller.engine.classify("a premise", text_pairs=[b for _, b in pairs], truncation="window")
    assert (len(rows.scores), rows.truncated) == (2, 1)
    # Hugging Face's clients get a list for each text.
    assert await caller.json("/predict", {"inputs": ["some text"], "parameters": {"top_k": 2}}) == [one[:2]]


async def test_hugging_faces_and_infinitys_clients_get_all_labels(caller: Caller) -> None:
    logits = (await caller.engine.classify(TEXTS[0], use_activation=False)).scores[0]
    powers = np.exp(logits)
    cases = {"none": logits, "sigmoid": powers / (1 + powers), "softmax": powers / powers.sum()}
    for name, expected in cases.items():
        body = {"inputs": TEXTS[0], "parameters": {"function_to_apply": name}}
        (answer,) = await caller.json("/predict", body)
        given = {item["label"]: item["score"] for item in answer}
        np.testing.assert_allclose([given[f"LABEL_{i}"] for i in range(3)], expected, atol=1e-5)
    for raw in (True, False):
        answer = await caller.json("/classify", {"input": TEXTS, "raw_scores": raw})
        assert (answer["object"], answer["model"]) == ("classify", "mine")
        plain = await caller.json("/predict", {"inputs": [[text] for text in TEXTS], "raw_scores": raw})
        assert answer["data"] == plain


async def test_over_long_texts_are_cut_unless_the_request_forbids_it(caller: Caller) -> None:
    long = "word " * 600
    assert len((await caller.json("/classify", {"input": long}))["warnings"]) == 1
    await caller.refused("/classify", {"input": long, "long_documents": "error"}, 400, "input")
    for inputs in (long, ["a", long], [long, "a"]):
        body = {"inputs": inputs, "truncate": False}
        await caller.refused("/predict", body, 400, "inputs", "inputs[0] has")


async def test_a_classifier_of_three_labels_does_not_score_or_embed(caller: Caller) -> None:
    for path, body, message in (
        ("/score", {"queries": "a", "documents": ["b"]}, "3 labels"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "3 labels"),
        ("/v1/embeddings", {"input": "a"}, "this model cannot embed; it can classify"),
        ("/pooling", {"input": "a", "task": "embed"}, "this model cannot embed; it can classify"),
    ):
        await caller.refused(path, body, 400, says=message)
