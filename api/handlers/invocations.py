"""SageMaker's one route: what a request wants is told by its fields."""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from maxsimd.api import wire
from maxsimd.api.answer import Answer
from maxsimd.api.handlers import classification, embedding, scoring, tei
from maxsimd.api.handlers.route import post_texts
from maxsimd.api.models.choice import Wanted
from maxsimd.api.reading import inputs_of, sequences_of, texts_to_rank, texts_to_score
from maxsimd.api.reading_messages import inputs_or_chat_of
from maxsimd.api.state import ServerState
from maxsimd.api.wire_tei import TeiVectorsRequest
from maxsimd.engine import InvalidRequestError

Fields = dict[str, Any]


class _Form(NamedTuple):
    """A kind of request: its wire type, what is read of it, and what answers it."""

    kind: type[Any]
    read: Callable[[Any, int], Any]
    handler: Callable[[ServerState, Any, Any, str], Awaitable[Answer]]


_RANK = _Form(wire.RerankRequest, texts_to_rank, scoring.rerank)
_SCORE = _Form(wire.ScoreRequest, texts_to_score, scoring.score)
_PREDICT = _Form(wire.PredictRequest, sequences_of, classification.predict)
_TEI_VECTORS = _Form(TeiVectorsRequest, tei.inputs_or_sentences_of, tei.embed_or_compare)
_POOL = _Form(wire.PoolingRequest, inputs_or_chat_of, embedding.pooling)
_CLASSIFY = _Form(wire.ClassifyRequest, inputs_of, classification.classify)
_EMBED = _Form(wire.EmbeddingsRequest, inputs_or_chat_of, embedding.embeddings)

_PAIRED = {"queries", "documents", "items", "text_1", "text_2", "data_1", "data_2"}


async def invocations(state: ServerState, body: Fields, nothing: None, tenant: str) -> Answer:
    form, most = _form_of(state, body), state.config.max_documents

    def read() -> tuple[Any, Any]:
        request = msgspec.convert(body, type=form.kind, strict=False)
        return request, form.read(request, most)

    size = sum(len(value) for value in body.values() if isinstance(value, str | list))
    request, found = await state.engine.in_thread(read, size)
    state.check_model(getattr(request, "model", None))
    if state.reads_pictures:
        with state.bodies.hold() as held:
            found = await state.media.filled(found, held)
            return await form.handler(state, request, found, tenant)
    return await form.handler(state, request, found, tenant)


def _form_of(state: ServerState, fields: Fields) -> _Form:
    """As vLLM and text-embeddings-inference tell what is wanted."""
    if "query" in fields:
        return _RANK
    if _PAIRED & fields.keys():
        return _SCORE
    classifies = state.engine.facts.score_task == "classify"
    if "inputs" in fields:
        return _PREDICT if classifies else _TEI_VECTORS
    if "input" in fields or "messages" in fields:
        if "task" in fields:
            return _POOL
        return _CLASSIFY if classifies and "input" in fields else _EMBED
    raise InvalidRequestError(
        "send query and documents to rank, queries and documents to score, inputs or input to embed or "
        "classify"
    )


def _wanted(fields: Fields) -> Wanted:
    if "query" in fields:
        return Wanted.RANKING if fields.get("cascade") is None else Wanted.CASCADE
    if _PAIRED & fields.keys():
        return Wanted.RANKING
    return Wanted.VECTORS


ROUTES = (post_texts("/invocations", dict[str, Any], lambda body, most: None, invocations, wanted=_wanted),)
