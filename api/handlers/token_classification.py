"""The routes that label tokens: /v1/token-classify, and /predict_tokens of Baseten and Hugging Face."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from maxsimd.api import reading, wire
from maxsimd.api.answer import Answer, new_id, now, usage_of
from maxsimd.api.handlers.embeddings import encode_entries, most_labeled, read_inputs
from maxsimd.api.handlers.route import Form, Group, Shown, answer_of, post, tei_headers
from maxsimd.api.models import Wanted
from maxsimd.api.state import ServerState
from maxsimd.api.wire import about
from maxsimd.engine import InvalidRequestError, TokenClassifyResult
from maxsimd.engine.processors.token_classification import probabilities
from maxsimd.engine.requests import AggregationStrategy, TokenEntity, TokenLogits

# Bytes of an entity while it is made and as text, without its label, and of a logit of one of its labels.
_BYTES_AN_ENTITY, _BYTES_A_LOGIT = 400, 8
# The same of a label with its logit, without its name.
_BYTES_A_RESULT = 120
# The labels that are left out by default, as by transformers' pipeline.
_OUTSIDE = ["O"]

_TEXT = "Sarah lives in London."
_Strategy = Annotated[
    AggregationStrategy | None,
    about("Rule that joins tokens to entities. Default: none, a label for each token.", "simple"),
]
_IgnoreLabels = Annotated[list[str] | None, about("Labels to leave out. Default: O.", ["O"])]
_Stride = Annotated[
    wire.NotNegative | None,
    about("Read long texts in windows that share this many tokens. Default: truncate them.", 64),
]


class TokenClassifyRequest(wire.Common, kw_only=True):
    """Texts, and how their tokens become entities."""

    input: wire.Texts
    aggregation_strategy: _Strategy = None
    ignore_labels: _IgnoreLabels = None
    stride: _Stride = None


class EntityParameters(msgspec.Struct, kw_only=True):
    """Hugging Face's options."""

    aggregation_strategy: Annotated[
        AggregationStrategy | None, about("Rule that joins tokens to entities. Default: simple.", "simple")
    ] = None
    ignore_labels: _IgnoreLabels = None
    stride: _Stride = None


class PredictTokensRequest(wire.RequestBody, kw_only=True):
    """Baseten's: a text, texts, or a list of lists of one text. Hugging Face's has `parameters`, which its
    client always sends, and is answered by the entities alone."""

    model: wire.ModelField = None
    parameters: Annotated[EntityParameters | None, about("Hugging Face's options.")] = None
    options: wire.Options = None
    inputs: Annotated[
        Any,
        about(
            "Text, texts, or a list of lists of one text.",
            [[_TEXT]],
            schema={
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1},
                    {
                        "type": "array",
                        "items": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1},
                        "minItems": 1,
                    },
                ]
            },
        ),
    ]
    raw_scores: Annotated[bool | None, about("Give the logits of all labels. Default: false.", False)] = None
    aggregation_strategy: _Strategy = None
    truncate: wire.Truncate = None
    truncation_direction: wire.TruncationDirection = None

    def unused_fields(self) -> frozenset[str]:
        return frozenset() if self.parameters is None else frozenset({"raw_scores", "aggregation_strategy"})


_Score = Annotated[float, about("Probability of the label.", 0.9971)]
_Start = Annotated[int, about("First character, from 0.", 0)]
_End = Annotated[int, about("The character after the last.", 5)]
_Word = Annotated[str, about("Tokens as the tokenizer writes them.", "Sarah")]


class Entity(msgspec.Struct):
    label: Annotated[str, about("Label, without B- and I- if tokens are joined.", "PER")]
    score: _Score
    word: _Word
    start: _Start
    end: _End


class TokenClassification(msgspec.Struct):
    index: wire.Index
    entities: Annotated[list[Entity], about("Entities of the text, in its order.")]


class TokenClassifyResponse(wire.Warned):
    id: wire.Id
    created: wire.Created
    model: wire.Model
    data: Annotated[list[TokenClassification], about("The entities of each text.")]
    usage: wire.UsageField
    object: wire.AlwaysList = "list"


class TokenPrediction(msgspec.Struct):
    """Baseten's: a token or an entity, with its labels."""

    token: Annotated[str, about("Its characters; the name of a special token.", "Sarah")]
    token_id: Annotated[int, about("Id of the token; 0 for an entity.", 4532)]
    start: _Start
    end: _End
    results: Annotated[
        dict[str, float], about("Label with its probability, or all with logits.", {"PER": 0.9971})
    ]


class PipelineEntity(msgspec.Struct, kw_only=True):
    """Hugging Face's: an entity of its pipeline."""

    entity_group: Annotated[str | UnsetType, about("Label of joined tokens.", "PER")] = UNSET
    entity: Annotated[str | UnsetType, about("Label of a token.", "B-PER")] = UNSET
    score: _Score
    index: Annotated[int | UnsetType, about("Place of a token among all, special ones included.", 1)] = UNSET
    word: _Word
    start: _Start
    end: _End


async def token_classify(state: ServerState, body: TokenClassifyRequest, inputs: reading.Inputs) -> Answer:
    """The entities of each text."""
    reading.check_token_ids(inputs, state.config.accept_token_ids)
    model = state.model_name
    result = await state.engine.token_classify(
        reading.plain_texts(inputs, "input"),
        aggregation_strategy=body.aggregation_strategy or "none",
        ignore_labels=_OUTSIDE if body.ignore_labels is None else body.ignore_labels,
        stride=body.stride,
        max_tokens=_most_entities(state),
        truncation=reading.truncation_of(body, state.config.long_documents),
        priority=body.priority or 0,
        tenant=state.tenant,
        timeout=body.timeout,
    )

    def build(warnings: wire.Warnings) -> TokenClassifyResponse:
        data = []
        for i, found in enumerate(result.entities):
            entities = [Entity(one.label, one.score, one.word, one.start, one.end) for one in found]
            data.append(TokenClassification(i, encode_entries(entities)))
        usage = usage_of(result.usage)
        return TokenClassifyResponse(new_id("tokens"), now(), model, data, usage, warnings=warnings)

    return await answer_of(state, body, result, build, _num_entities(result))


async def predict_tokens(
    state: ServerState, body: PredictTokensRequest, given: tuple[list[str], bool]
) -> Answer:
    """Baseten's shape, or Hugging Face's if `parameters` are there."""
    texts, is_batch = given
    headers = tei_headers(state, texts)
    parameters, raw = body.parameters, bool(body.raw_scores)
    ignored: Sequence[str] = ()
    if parameters is not None:
        strategy, raw = parameters.aggregation_strategy or "simple", False
        ignored = _OUTSIDE if parameters.ignore_labels is None else parameters.ignore_labels
    else:
        strategy = body.aggregation_strategy or "none"
        ignored = () if strategy == "none" else _OUTSIDE
    if raw and strategy != "none":
        raise InvalidRequestError(
            "raw_scores are logits of tokens, which are not joined; leave it out, or set "
            "aggregation_strategy to none",
            "raw_scores",
        )
    of_tokens = parameters is None and strategy == "none"
    with reading.with_request_field_names(input="inputs"):
        result = await state.engine.token_classify(
            texts,
            aggregation_strategy=strategy,
            ignore_labels=ignored,
            stride=None if parameters is None else parameters.stride,
            return_logits=of_tokens,
            max_tokens=_most_results(state) if raw else _most_entities(state),
            truncation=reading.truncation_by_switch(
                body.truncate, body.truncation_direction, state.config.long_documents
            ),
            tenant=state.tenant,
        )

    def build(warnings: wire.Warnings) -> Any:
        if parameters is not None:
            answers = [encode_entries([*map(_pipeline_entity, found)]) for found in result.entities]
            return answers if is_batch else answers[0]
        if result.logits is not None:
            return [
                encode_entries(_predictions(state, text, tokens, result.labels, raw))
                for text, tokens in zip(texts, result.logits, strict=True)
            ]
        return [
            encode_entries([_prediction(text, one) for one in found])
            for text, found in zip(texts, result.entities, strict=True)
        ]

    size = sum(each.logits.size for each in result.logits or ()) or _num_entities(result)
    return await answer_of(state, body, result, build, size, tei=headers)


def _most_entities(state: ServerState) -> int:
    """The most tokens of a request, because each may be an entity."""
    return most_labeled(state, _BYTES_A_LOGIT, _BYTES_AN_ENTITY + _longest_label(state))


def _most_results(state: ServerState) -> int:
    """The most tokens of a request for the logits of all labels."""
    return most_labeled(state, _BYTES_A_RESULT + _longest_label(state), _BYTES_AN_ENTITY)


def _longest_label(state: ServerState) -> int:
    """The bytes of the longest name of a label."""
    return max((len(label.encode()) for label in state.engine.facts.labels), default=0)


def _num_entities(result: TokenClassifyResult) -> int:
    return sum(map(len, result.entities))


def _predictions(
    state: ServerState, text: str, tokens: TokenLogits, labels: tuple[str, ...], raw: bool
) -> list[TokenPrediction]:
    """All tokens of a text, special ones included: each with its label, or with the logits of all."""
    rows = tokens.logits if raw else probabilities(tokens.logits)
    ids, best = tokens.ids.tolist(), rows.argmax(axis=-1).tolist()
    made = []
    for i, (start, end) in enumerate(tokens.spans.tolist()):
        results = {labels[best[i]]: float(rows[i].max())}
        if raw:
            results = dict(zip(labels, rows[i].tolist(), strict=True))
        token = text[start:end] if end > 0 else state.engine.tokenizer.token(ids[i])
        made.append(TokenPrediction(token, ids[i], max(0, start), max(0, end), results))
    return made


def _prediction(text: str, one: TokenEntity) -> TokenPrediction:
    return TokenPrediction(text[one.start : one.end], 0, one.start, one.end, {one.label: one.score})


def _pipeline_entity(one: TokenEntity) -> PipelineEntity:
    entity = PipelineEntity(score=one.score, word=one.word, start=one.start, end=one.end)
    if one.index is None:
        entity.entity_group = one.label
    else:
        entity.entity, entity.index = one.label, one.index
    return entity


def read_texts(request: PredictTokensRequest, most: int) -> tuple[list[str], bool]:
    """Reads `inputs`: the texts, and whether there are many."""
    value = request.inputs
    reading.check_count(value, "inputs", most)
    if isinstance(value, str):
        return [value], False
    if isinstance(value, list) and value:
        if all(isinstance(each, str) for each in value):
            return value, True
        if all(isinstance(each, list) and len(each) == 1 and isinstance(each[0], str) for each in value):
            return [each[0] for each in value], True
    where = f"inputs[{value.index(None)}] is null: " if isinstance(value, list) and None in value else ""
    raise InvalidRequestError(
        f"{where}inputs must be a text, a list of texts, or a list of lists of one text", "inputs"
    )


CLASSIFY_TOKENS = Form(TokenClassifyRequest, read_inputs, token_classify, Wanted.TOKEN_CLASSES)
PREDICT_TOKENS = Form(PredictTokensRequest, read_texts, predict_tokens, Wanted.TOKEN_CLASSES)
# The answers of Baseten, and of Hugging Face to many texts and to one.
TOKEN_PREDICTIONS = (list[list[TokenPrediction]], list[list[PipelineEntity]], list[PipelineEntity])

ROUTES = (
    *post(
        ("/v1/token-classify", "/token-classify"),
        CLASSIFY_TOKENS,
        Shown(
            Group.CLASSIFY,
            "Find entities in texts, such as names",
            {"input": [_TEXT], "aggregation_strategy": "simple"},
        ),
        TokenClassifyResponse,
    ),
    *post(
        ("/predict_tokens",),
        PREDICT_TOKENS,
        Shown(Group.OTHERS, "Baseten, Hugging Face: label tokens", {"inputs": [[_TEXT]]}),
        *TOKEN_PREDICTIONS,
    ),
)
