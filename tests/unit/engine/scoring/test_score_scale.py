"""What a server says of its scores, beside the scores that it gives."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from maxsimd.engine import EngineConfig
from maxsimd.engine.scoring.scale import ScoreScale, has_bounds, score_scale
from tests.checkpoints import language_models
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.unit.calling_handlers import Caller, RecordingEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUERY = "how is a file opened"
DOCUMENTS = ["Open a file and return a stream.", "Sort a list in place.", "x"]
MODELS = {
    "stanford_colbert": ScoreScale("maxsim", None, None),
    "qwen3_embedding": ScoreScale("cosine", -1.0, 1.0),
    "bert_cross_encoder": ScoreScale("sigmoid", 0.0, 1.0),
    "listwise": ScoreScale("cosine", -1.0, 1.0),
}


@pytest.fixture(scope="module")
def listwise(checkpoints: SharedCheckpoints) -> str:
    return checkpoints(language_models.jina_reranker_v3)


@pytest.mark.parametrize(
    "fixture",
    [*list(MODELS)[:3], pytest.param("listwise", marks=pytest.mark.exhaustive)],
)
async def test_scores_are_in_their_scale(
    fixture: str, request: pytest.FixtureRequest, engines: Engines
) -> None:
    engine = await engines(EngineConfig(model=request.getfixturevalue(fixture), dtype="float32"))
    assert score_scale(engine.model) == MODELS[fixture]
    for normalize in (False, True):
        scale = score_scale(engine.model, normalize=normalize)
        scores = (await engine.score(QUERY, DOCUMENTS, normalize=normalize)).scores
        assert scale.least is None or min(scores) >= scale.least
        assert scale.most is None or max(scores) <= scale.most
        if normalize:
            assert (scale.least, scale.most) == (0.0, 1.0)


async def test_logits_and_dots_of_vectors_have_no_bounds(
    bert_cross_encoder: str, qwen3_embedding: str, engines: Engines
) -> None:
    model = (await engines(EngineConfig(model=bert_cross_encoder, dtype="float32"))).model
    logit = ScoreScale("logit", None, None)
    assert score_scale(model, use_activation=False) == logit
    assert score_scale(replace(model, activation=torch.nn.Identity())) == logit
    assert score_scale(replace(model, activation=torch.nn.Softplus())) == ScoreScale("softplus", 0.0, None)
    model = (await engines(EngineConfig(model=qwen3_embedding, dtype="float32"))).model
    tasks = {name: replace(task, normalised=False) for name, task in model.tasks.items()}
    model = replace(model, tasks=tasks, similarity="dot")
    assert score_scale(model) == ScoreScale("dot", None, None)
    assert not has_bounds(model)
    assert has_bounds(replace(model, similarity="cosine"))


def _shown(scale: ScoreScale) -> dict[str, Any]:
    return {"transform": scale.transform, "min": scale.least, "max": scale.most}


async def _card(caller: Caller) -> Any:
    (card,) = json.loads((await caller.ask("GET", "/v1/models")).body)["data"]
    return card


async def test_models_and_answers_say_it(bert_cross_encoder: str, three_label_classifier: str) -> None:
    async with RecordingEngine(EngineConfig(model=bert_cross_encoder, dtype="float32")) as engine:
        caller = Caller(engine)
        card = await _card(caller)
        sigmoid, logit = ScoreScale("sigmoid", 0.0, 1.0), ScoreScale("logit", None, None)
        assert card["score_scale"] == card["normalized_score_scale"] == _shown(sigmoid)
        bodies = {
            "/score": {"queries": QUERY, "documents": DOCUMENTS},
            "/rerank": {"query": QUERY, "documents": DOCUMENTS},
            "/v1/rerank": {"query": QUERY, "documents": DOCUMENTS, "top_k": 1},
            "/v2/rerank": {"query": QUERY, "texts": DOCUMENTS},
            "/v1/reranking": {"query": QUERY, "input": DOCUMENTS},
            "/v1/ranking": {"query": {"text": QUERY}, "passages": [{"text": each} for each in DOCUMENTS]},
            "/infinity/rerank": {"query": QUERY, "documents": DOCUMENTS},
        }
        for path, body in bodies.items():
            for raw in (False, True):
                answer = await caller.ask("POST", path, body | {"raw_scores": raw})
                wanted = "logit; bounds=none, none" if raw else "sigmoid; bounds=0, 1"
                assert answer.headers["x-maxsimd-score-scale"] == wanted, path
        answered = await caller.json("/rerank", bodies["/rerank"] | {"raw_scores": True})
        assert answered["score_scale"] == _shown(logit)
        assert (await caller.json("/score", bodies["/score"]))["score_scale"] == _shown(sigmoid)
    async with RecordingEngine(EngineConfig(model=three_label_classifier, dtype="float32")) as engine:
        card = await _card(Caller(engine))
        assert card["score_scale"] is card["normalized_score_scale"] is None
