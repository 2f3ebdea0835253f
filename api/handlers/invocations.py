"""SageMaker's one route: what a request wants is told by its fields."""

from maxsimd.api import wire
from maxsimd.api.answer import Answer
from maxsimd.api.handlers import classification, embedding, scoring, tei
from maxsimd.api.handlers.route import Fields, Form, answered_as, post_texts
from maxsimd.api.models import Wanted
from maxsimd.api.reading import inputs_of, texts_to_score
from maxsimd.api.reading_messages import inputs_or_chat_of
from maxsimd.api.state import ServerState
from maxsimd.engine import InvalidRequestError

_SCORE = Form(wire.ScoreRequest, texts_to_score, scoring.score)
_POOL = Form(wire.PoolingRequest, inputs_or_chat_of, embedding.pooling)
_CLASSIFY = Form(wire.ClassifyRequest, inputs_of, classification.classify)
_EMBED = Form(wire.EmbeddingsRequest, inputs_or_chat_of, embedding.embeddings)

_PAIRED = {"queries", "documents", "items", "text_1", "text_2", "data_1", "data_2"}


async def invocations(state: ServerState, body: Fields, nothing: None, tenant: str) -> Answer:
    return await answered_as(_form_of(state, body), state, body, tenant, "/invocations")


def _form_of(state: ServerState, fields: Fields) -> Form:
    """As vLLM and text-embeddings-inference tell what is wanted."""
    if "query" in fields:
        return tei.RANK
    if _PAIRED & fields.keys():
        return _SCORE
    classifies = state.engine.facts.score_task == "classify"
    if "inputs" in fields:
        return tei.PREDICT if classifies else tei.VECTORS
    if "input" in fields or "messages" in fields:
        if "task" in fields:
            return _POOL
        return _CLASSIFY if classifies and "input" in fields else _EMBED
    raise InvalidRequestError(
        "send query and documents to rank, queries and documents to score, inputs or input to embed or "
        "classify"
    )


def _wanted(state: ServerState, fields: Fields) -> Wanted:
    if "query" in fields:
        return Wanted.RANKING if fields.get("cascade") is None else Wanted.CASCADE
    if _PAIRED & fields.keys():
        return Wanted.RANKING
    return Wanted.VECTORS


ROUTES = (post_texts("/invocations", Fields, lambda body, most: None, invocations, wanted=_wanted),)
