"""The routes that score labels by a language model: /v1/label-scores in the shape of SGLang's scoring API,
and vLLM's /generative_scoring."""

from typing import Annotated, Any, Literal, cast

import msgspec

from maxsimd.api import reading, wire
from maxsimd.api.answer import Answer, new_id, now, usage_of
from maxsimd.api.handlers.embeddings import check_labels, encode_entries
from maxsimd.api.handlers.route import Form, Group, Shown, answer_of, post
from maxsimd.api.models import Wanted
from maxsimd.api.state import ServerState
from maxsimd.api.wire import about
from maxsimd.engine import InvalidRequestError, LabelScores
from maxsimd.engine.requests import are_texts

# A query and items: texts, or token ids.
Prompts = tuple[str | list[int], list[str] | list[list[int]]]

_QUERY = "Is the following city the capital of France? "
_ITEMS = ["Paris. Answer:", "Berlin. Answer:"]
_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}


class _Scoring(wire.RequestBody, kw_only=True):
    model: wire.ModelField = None
    query: Annotated[
        Any,
        about(
            "First part of each prompt: a text, or token ids with `--accept-token-ids`.",
            _QUERY,
            schema={"anyOf": [{"type": "string"}, _IDS]},
        ),
    ]
    items: Annotated[
        Any,
        about(
            "Second parts: a text, texts, or a list of token ids each.",
            _ITEMS,
            schema={"anyOf": [{"type": "string"}, _TEXTS, {"type": "array", "items": _IDS, "minItems": 1}]},
        ),
    ]
    label_token_ids: Annotated[
        list[int] | None, about("Labels: token ids of this model (POST /tokenize).", [9454, 2753])
    ] = None
    labels: Annotated[
        list[str] | None,
        about("Labels as texts of one token each, in place of their ids.", [" Yes", " No"]),
    ] = None
    item_first: Annotated[
        bool | None, about("Put the item before the query in each prompt. Default: false.", False)
    ] = None
    priority: wire.Priority = None
    timeout: wire.Timeout = None
    user: wire.Ignored = None
    request_id: wire.Ignored = None


class LabelScoresRequest(_Scoring, kw_only=True):
    """SGLang's, which gives labels as token ids; here they may be texts."""

    apply_softmax: Annotated[
        bool | None,
        about(
            "Have the scores of the labels sum to 1. Default: false, probabilities among all tokens.", True
        ),
    ] = None


class GenerativeScoringRequest(_Scoring, kw_only=True):
    """vLLM's, which tokenizes the query and the items apart."""

    apply_softmax: Annotated[
        bool | None,
        about("Have the scores of the labels sum to 1. Default: true.", True),
    ] = None
    add_special_tokens: Annotated[
        bool | None, about("Put special tokens around the query. Default: true.", True)
    ] = None


class LabelScoresResponse(wire.Warned):
    scores: Annotated[
        list[list[float]],
        about("Probabilities of the labels as the next token, for each item.", [[0.7, 0.3]]),
    ]
    model: wire.Model
    usage: wire.UsageField
    object: Annotated[Literal["scoring"], about("Always `scoring`.", "scoring")] = "scoring"


class ItemScore(msgspec.Struct):
    index: wire.Index
    score: Annotated[float, about("Probability of the first label.", 0.7)]
    object: Annotated[Literal["score"], about("Always `score`.", "score")] = "score"


class GenerativeScoringResponse(wire.Warned):
    id: wire.Id
    created: wire.Created
    model: wire.Model
    data: Annotated[list[ItemScore], about("The score of each item.")]
    usage: wire.UsageField
    object: wire.AlwaysList = "list"


def read_prompts(request: _Scoring, most: int) -> Prompts:
    """Reads a query and items, which are both texts or both token ids."""
    query, items = request.query, request.items
    reading.check_count(items, "items", most)
    if isinstance(query, str):
        given = [items] if isinstance(items, str) else items
        if isinstance(given, list) and given and are_texts(given):
            return query, given
        raise InvalidRequestError("items must be a text or a list of texts, as the query is one", "items")
    if not _are_ids(query):
        raise InvalidRequestError("query must be a text, or a list of token ids", "query")
    if isinstance(items, list) and items and all(map(_are_ids, items)):
        return query, items
    raise InvalidRequestError("items must be a list of lists of token ids, as the query is one", "items")


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and {*map(type, value)} == {int}


async def _scored(
    state: ServerState,
    body: _Scoring,
    prompts: Prompts,
    *,
    apply_softmax: bool,
    tokenize_apart: bool = False,
    add_special_tokens: bool = True,
) -> LabelScores:
    query, items = prompts
    reading.check_token_ids(cast("reading.Inputs", [query]), state.config.accept_token_ids, "query")
    labels = body.labels if body.label_token_ids is None else body.label_token_ids
    if labels is None:
        raise InvalidRequestError("label_token_ids is missing; give it, or labels", "label_token_ids")
    if body.labels is not None and body.label_token_ids is not None:
        raise InvalidRequestError("labels and label_token_ids exclude each other; leave out one", "labels")
    check_labels(state, len(items), len(labels))
    names = {"documents": "items", "query": "query"}
    names["labels"] = "labels" if body.label_token_ids is None else "label_token_ids"
    with reading.with_request_field_names(**names):
        return await state.engine.label_scores(
            query,
            items,
            labels,
            apply_softmax=apply_softmax,
            document_first=bool(body.item_first),
            tokenize_apart=tokenize_apart,
            add_special_tokens=add_special_tokens,
            priority=body.priority or 0,
            tenant=state.tenant,
            timeout=body.timeout,
        )


async def label_scores(state: ServerState, body: LabelScoresRequest, prompts: Prompts) -> Answer:
    result = await _scored(state, body, prompts, apply_softmax=bool(body.apply_softmax))
    model = state.model_name

    def build(warnings: wire.Warnings) -> LabelScoresResponse:
        rows = [encode_entries(row.tolist()) for row in result.scores]
        return LabelScoresResponse(rows, model, usage_of(result.usage), warnings=warnings)

    return await answer_of(state, body, result, build, result.scores.size)


async def generative_scoring(state: ServerState, body: GenerativeScoringRequest, prompts: Prompts) -> Answer:
    result = await _scored(
        state,
        body,
        prompts,
        apply_softmax=body.apply_softmax is not False,
        tokenize_apart=True,
        add_special_tokens=body.add_special_tokens is not False,
    )
    model = state.model_name

    def build(warnings: wire.Warnings) -> GenerativeScoringResponse:
        data = [ItemScore(i, score) for i, score in enumerate(result.scores[:, 0].tolist())]
        return GenerativeScoringResponse(
            new_id("generative-scoring"), now(), model, data, usage_of(result.usage), warnings=warnings
        )

    return await answer_of(state, body, result, build, len(result.scores))


_EXAMPLE = {"query": _QUERY, "items": _ITEMS, "labels": [" Yes", " No"], "apply_softmax": True}

ROUTES = (
    *post(
        ("/label-scores", "/v1/label-scores"),
        Form(LabelScoresRequest, read_prompts, label_scores, Wanted.LABELS),
        Shown(Group.CLASSIFY, "Score labels as the next token of prompts", _EXAMPLE),
        LabelScoresResponse,
    ),
    *post(
        ("/generative_scoring",),
        Form(GenerativeScoringRequest, read_prompts, generative_scoring, Wanted.LABELS),
        Shown(Group.CLASSIFY, "Score the first label as the next token of prompts", _EXAMPLE),
        GenerativeScoringResponse,
    ),
)
