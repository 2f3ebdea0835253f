"""The routes that score and rank, /score and /rerank: their wire types, and the way from a JSON body to the
engine and back to JSON.

The fields of a request to /rerank tell the shape of its answer: Jina's and Cohere's,
text-embeddings-inference's or Voyage's. With `stream` the answer comes line by line, and with `cascade`
several models rank in stages.
"""

import math
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from maxsimd.api import reading, wire
from maxsimd.api.answer import Answer, new_id, now, usage_of, wire_answer
from maxsimd.api.handlers.route import Fields, Form, Group, Shown, answer_of, field_of, post, tei_headers
from maxsimd.api.models import SeveralModels, Wanted
from maxsimd.api.state import ServerState, naming_lost_model
from maxsimd.api.wire import about
from maxsimd.engine import InvalidRequestError, RankedDocument, RerankResult, ScoreResult, Stage, Truncation
from maxsimd.engine import requests as engine_requests
from maxsimd.engine.explanations import Explanation, Patch, TokenMatch, WindowScore
from maxsimd.engine.requests import DocumentDigest, Item, ScoreOptions, Timings
from maxsimd.engine.several.cascade import CascadeDocument, CascadeOptions
from maxsimd.engine.workers import run_in_thread_if_large

T = TypeVar("T")
LINES = "application/x-ndjson"

ToScore = tuple[list[Item], list[Item]]
ToRank = tuple[Item, list[Item]]

# The names under which queries and documents come.
_PAIRS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
PAIRED_FIELDS = frozenset(name for pair in _PAIRS for name in pair)

# Fields that text-embeddings-inference lacks in requests with `texts`, and fields that only it has.
WINDOW_FIELDS = frozenset({*reading.LIMITS, "truncation_side", "long_documents", "window_overlap"})
NOT_OF_TEI = WINDOW_FIELDS | {"documents", "top_k", "truncation", "rank_fields"}
OF_TEI = frozenset({"return_text", "truncate", "truncation_direction"})

_MOST_STAGES = 8


class ScoreRequest(wire.Scoring, kw_only=True):
    """One query for all documents, or as many queries as documents."""

    queries: Annotated[wire.Contents | None, about("A query, or one for each document.", wire.QUERY)] = None
    documents: wire.Documents | None = None
    items: Annotated[wire.Contents | None, about("Alias of `documents`.", wire.DOCUMENTS)] = None
    text_1: Annotated[wire.Contents | None, about("vLLM's name for `queries`.", wire.QUERY)] = None
    text_2: Annotated[wire.Contents | None, about("vLLM's name for `documents`.", wire.DOCUMENTS)] = None
    data_1: Annotated[wire.Contents | None, about("vLLM's new name for `queries`.", wire.QUERY)] = None
    data_2: Annotated[wire.Contents | None, about("vLLM's new name for `documents`.", wire.DOCUMENTS)] = None

    @property
    def pair(self) -> tuple[str, str] | None:
        """The first pair of fields that are both there, for queries and for documents."""
        return next(
            (pair for pair in _PAIRS if None not in (getattr(self, pair[0]), getattr(self, pair[1]))), None
        )

    @property
    def field_names(self) -> tuple[str, str]:
        """The names under which queries and documents came."""
        return self.pair or _PAIRS[0]

    def unused_fields(self) -> frozenset[str]:
        return PAIRED_FIELDS - {*self.field_names}


class CascadeStage(msgspec.Struct, kw_only=True):
    """A stage of a cascade."""

    model: Annotated[wire.Name, about("Name of the model that ranks.", "all-MiniLM-L6-v2")]
    keep: Annotated[
        wire.Positive | None,
        about("How many of the best documents go on to the next stage. Leave it out in the last.", 100),
    ] = None
    instruction: Annotated[
        str | None, about("Instruction of this stage. Default: the request's.", "Find passages that answer.")
    ] = None


ReturnDocuments = Annotated[
    bool | None,
    about("Give the documents' texts. Default: true; false in shapes that are not Jina's or Cohere's.", True),
]


class RerankRequest(wire.Scoring, kw_only=True):
    """For Jina, Cohere and vLLM with `documents`, text-embeddings-inference with `texts`, and Voyage with
    `top_k` or `truncation`. With a `cascade`, several models rank."""

    query: wire.Query
    documents: wire.Documents | None = None
    texts: Annotated[
        list[str] | None, about("text-embeddings-inference's name for `documents`.", wire.DOCUMENTS)
    ] = None
    top_n: wire.TopN = None
    top_k: Annotated[wire.NotNegative | None, about("Voyage's name for `top_n`.", 3)] = None
    truncation: wire.VoyageTruncation = None
    return_documents: ReturnDocuments = None
    return_text: Annotated[
        bool | None, about("text-embeddings-inference's `return_documents`. Default: false.", True)
    ] = None
    rank_fields: wire.RankFields = None
    truncate: wire.Truncate = None
    truncation_direction: wire.TruncationDirection = None
    cascade: Annotated[
        list[CascadeStage] | None,
        about("Stages, each with a model, on a server of several models. Default: one model ranks."),
    ] = None

    def unused_fields(self) -> frozenset[str]:
        if self.texts is not None:
            return NOT_OF_TEI
        return OF_TEI if self.top_k is None else OF_TEI | {"top_n"}


# Descriptions in /openapi.json of the engine's types that an explanation holds.
ENGINE_FIELDS: dict[type, dict[str, msgspec.Meta]] = {
    TokenMatch: {
        "query_token": about("Token of the query; null for vectors.", "capital"),
        "query_span": about("Its first character and the one after the last; null for markers.", [12, 19]),
        "document_token": about("Most similar token of the document.", "capital"),
        "document_span": about("Its place in the document.", [13, 20]),
        "document_row": about("Index of the document's vector.", 4),
        "similarity": about("Dot product of the two vectors.", 0.9597),
        "share": about("Part of the score.", 0.1278),
        "patch": about("Part of a picture, in place of a token."),
    },
    Patch: {
        "row": about("Row in the model's grid.", 3),
        "column": about("Column in the model's grid.", 5),
        "box": about("Left, top, right and bottom, in pixels.", [140, 84, 168, 112]),
        "picture": about("Place of the picture in the document, from 0.", 0),
    },
    WindowScore: {
        "span": about("First character of the window and the one after the last.", [0, 1800]),
        "score": about("Score of the document by this window alone.", 6.1),
    },
}


# This many similarities are as much work as a match or a window.
_NUMBERS_AN_ENTRY = 20


class WireExplanation(msgspec.Struct, omit_defaults=True):
    """Why a document has its score. Empty parts are left out."""

    tokens: Annotated[
        int, about("Tokens read of the document, with its query where both are read together.", 9)
    ]
    truncated: Annotated[bool, about("Whether the document was truncated.", False)]
    cached: Annotated[bool, about("Whether all of it came from the cache.", False)]
    matches: Annotated[
        tuple[TokenMatch, ...], about("Late interaction: the best document token of each query vector.")
    ] = ()
    windows: Annotated[tuple[WindowScore, ...], about("The windows that a long document was read in.")] = ()
    passage: Annotated[WindowScore | None, about("The best window.")] = None
    maps: Annotated[
        list[list[list[list[float | None]]]],
        about(
            "For each picture and query vector, rows of similarities; null for patches that take no part.",
            [[[[0.31, 0.12], [0.08, None]]]],
        ),
    ] = []
    read_span: Annotated[
        tuple[int, int] | None, about("Of a truncated document, the part that was read.", [0, 1800])
    ] = None
    similarities: Annotated[
        list[list[float]],
        about(
            "With `explain` maps, for texts: for each query vector, its similarity to each document vector.",
            [[0.31, 0.12, 0.08]],
        ),
    ] = []
    document_tokens: Annotated[
        tuple[str | None, ...],
        about("The document's tokens, as `similarities` has them.", ["[CLS]", "Paris", "[SEP]"]),
    ] = ()


_EXPLAINED = about("Why the document has its score, with `explain`.")


class Score(msgspec.Struct):
    index: wire.Index
    score: wire.RelevanceScore
    object: Annotated[str, about("Always `score`.", "score")] = "score"
    explanation: Annotated[WireExplanation | UnsetType, _EXPLAINED] = UNSET


class DocumentError(msgspec.Struct):
    index: wire.Index
    error: Annotated[str, about("Why the document has no score.", "half of a character, like \\ud83d alone")]


class ScoreScale(msgspec.Struct):
    transform: Annotated[str, about("How the model's outputs become scores.", "maxsim")]
    min: Annotated[float | None, about("Lowest score; null for no bound.", 0)]
    max: Annotated[float | None, about("Highest score; null for no bound.", 1)]


ScaleField = Annotated[ScoreScale, about("What the scores mean.")]


class Completeness(wire.Warned, kw_only=True):
    """The documents without a score, for requests that want them reported."""

    complete: Annotated[
        bool | UnsetType,
        about("With `on_timeout` partial: whether all documents have a score.", True),
    ] = UNSET
    unscored: Annotated[
        tuple[int, ...] | UnsetType, about("The documents that ran out of time, by `index`.", [2, 3])
    ] = UNSET
    errors: Annotated[
        list[DocumentError] | UnsetType, about("With `on_error` report: the bad documents.")
    ] = UNSET


class ScoreResponse(Completeness):
    id: wire.Id
    created: wire.Created
    model: wire.Model
    data: Annotated[list[Score], about("A score for each document, in the request's order.")]
    usage: wire.UsageField
    score_scale: ScaleField
    object: wire.AlwaysList = "list"


class Document(msgspec.Struct, omit_defaults=True):
    text: Annotated[
        str | UnsetType, about("Text of the document, if it came as text.", wire.DOCUMENTS[1])
    ] = UNSET
    digest: wire.Digest | UnsetType = UNSET
    id: wire.DocumentId | UnsetType = UNSET


_NOTHING_SHOWN = Document()
DocumentText = Annotated[
    str | None, about("Text of the document, if the request asks for it.", wire.DOCUMENTS[1])
]


class Ranked(msgspec.Struct, omit_defaults=True):
    index: wire.Index
    relevance_score: wire.RelevanceScore
    document: Annotated[
        Document | None, about("The document, if it came as text or digest, or with an id.")
    ] = None
    explanation: Annotated[WireExplanation | None, _EXPLAINED] = None
    model: Annotated[
        str | None, about("In a cascade, the model that gave the score.", "all-MiniLM-L6-v2")
    ] = None


class StageDone(msgspec.Struct):
    """A stage of a cascade."""

    model: wire.Model
    documents: Annotated[int, about("Number of documents that it ranked.", 100)]
    milliseconds: wire.Milliseconds


class RerankResponse(Completeness, omit_defaults=True):
    """Jina's and Cohere's."""

    id: wire.Id
    model: wire.Model
    results: Annotated[list[Ranked], about("The documents, best first.")]
    usage: wire.UsageField
    meta: Annotated[
        dict[str, Any],
        about(
            "What Cohere's clients read.", {"api_version": {"version": "2"}, "tokens": {"input_tokens": 27}}
        ),
    ]
    score_scale: ScaleField
    stages: Annotated[list[StageDone] | UnsetType, about("The stages of a cascade.")] = UNSET


class TeiRanked(msgspec.Struct, omit_defaults=True):
    index: wire.Index
    score: wire.RelevanceScore
    text: DocumentText = None


class VoyageRanked(msgspec.Struct, omit_defaults=True):
    index: wire.Index
    relevance_score: wire.RelevanceScore
    document: DocumentText = None


class VoyageResponse(wire.Warned, kw_only=True):
    object: wire.AlwaysList = "list"
    data: Annotated[list[VoyageRanked], about("The documents, best first.")]
    model: wire.Model
    usage: wire.UsageField


def texts_to_score(request: ScoreRequest, most: int) -> ToScore:
    """The queries and documents of a score request, under whichever names they came."""
    if request.pair is not None:
        return read_pairs(request, most, *request.pair)
    for first, second in _PAIRS:
        if getattr(request, first) is not None:
            raise InvalidRequestError(f"{second} is missing", second)
    raise InvalidRequestError("queries and documents are missing", "queries")


def read_pairs(request: Any, most: int, first: str = "queries", second: str = "documents") -> ToScore:
    """The queries and documents in the fields of these names."""
    queries, documents = getattr(request, first), getattr(request, second)
    reading.check_count(documents, second, most)
    reading.check_count(queries, first, most)
    return reading.as_items(queries, first), reading.as_items(documents, second)


def texts_to_rank(request: RerankRequest, most: int) -> ToRank:
    """The query and the documents of a rerank request, `texts` before `documents`."""
    if request.texts is None and request.documents is None:
        raise InvalidRequestError("documents is missing", "documents")
    return query_and_documents(request, most, "documents" if request.texts is None else "texts")


def query_and_documents(request: Any, most: int, name: str = "documents") -> ToRank:
    """The query and the documents in the field `name`."""
    item, documents = reading.as_item(request.query, "query", "query"), getattr(request, name)
    reading.check_count(documents, name, most)
    return item, reading.as_items(documents, name, getattr(request, "rank_fields", None))


def _wants_activation(request: wire.Scoring) -> bool:
    return not request.raw_scores if request.use_activation is None else request.use_activation


def _wants_normalized(state: ServerState, request: wire.Scoring) -> bool:
    """Whether scores are to be from 0 to 1. `--normalize-scores` holds for requests that mention neither this
    nor raw scores, and for models whose scores have bounds."""
    raw = not _wants_activation(request)
    if request.normalize is None:
        return state.config.normalize_scores and state.engine.facts.normalizes and not raw
    if request.normalize and raw:
        raise InvalidRequestError("normalize and raw scores exclude each other; leave out one", "normalize")
    return request.normalize


def _instruction_of(request: wire.Scoring) -> str | None:
    """The instruction, under either of its names."""
    if None not in (request.instruction, request.instruct) and request.instruction != request.instruct:
        raise InvalidRequestError("instruction and instruct say different things; leave out one", "instruct")
    return request.instruct if request.instruction is None else request.instruction


def score_options(
    state: ServerState, body: wire.Scoring, truncation: Truncation | None = None
) -> ScoreOptions:
    """The request's options for the engine. Without `truncation` the request says how it truncates."""
    return {
        "truncation": truncation or reading.truncation_of(body, state.config.long_documents),
        "use_activation": _wants_activation(body),
        "normalize": _wants_normalized(state, body),
        "instruction": _instruction_of(body),
        "cache": body.cache or "use",
        "priority": body.priority or 0,
        "tenant": state.tenant,
        "timeout": state.timeout if body.timeout is None else body.timeout,
        "on_timeout": body.on_timeout or "error",
        "on_error": body.on_error or "fail",
        "explain": body.explain or False,
    }


def with_fields_of(
    body: wire.Scoring, queries: str = "query", documents: str = "documents"
) -> AbstractContextManager[None]:
    """Errors name the request's fields."""
    instruction = "instruction" if body.instruct is None else "instruct"
    return reading.with_request_field_names(queries=queries, documents=documents, instruction=instruction)


def scale_of(state: ServerState, body: wire.Scoring) -> ScoreScale:
    """The scale of the scores that a request gets."""
    scales = state.engine.facts.scales
    scale = scales.default if _wants_activation(body) else scales.raw
    if _wants_normalized(state, body):
        scale = scales.normalized
    return ScoreScale(scale.transform, scale.least, scale.most)


def with_scale(answer: Answer, scale: ScoreScale) -> Answer:
    """The answer with the scale of its scores in a header: not every shape has a place."""
    bounds = ", ".join("none" if bound is None else f"{bound:g}" for bound in (scale.min, scale.max))
    return answer.with_headers(x_maxsimd_score_scale=f"{scale.transform}; bounds={bounds}")


def _num_characters(ranking: Iterable[RankedDocument | CascadeDocument]) -> int:
    """The length of the ranked documents' texts."""
    return sum([len(one.document) for one in ranking if isinstance(one.document, str)])


def _num_lines(explanations: Iterable[Explanation | None]) -> int:
    """The number of entries that explanations take in an answer; some numbers count as one."""
    return sum(
        len(one.matches) + len(one.windows) + one.num_similarities // _NUMBERS_AN_ENTRY
        for one in explanations
        if one is not None
    )


def _reporting_options(body: wire.Scoring) -> list[str]:
    """The request's options for partial results, explanations and streams."""
    names = ("on_timeout", "on_error", "explain", "stream")
    return [name for name in names if getattr(body, name) not in (None, False, "error", "fail")]


def check_all_ranked(body: wire.Scoring) -> None:
    """Refuses options that most shapes have no place for."""
    for option in _reporting_options(body):
        said = f"{option} is only for /score, and for /rerank in Jina's or Cohere's shape; leave it out"
        raise InvalidRequestError(said, option)


def _on_wire(explanation: Explanation) -> WireExplanation:
    given = {name: getattr(explanation, name) for name in WireExplanation.__struct_fields__}
    given["maps"] = [each.tolist() for each in explanation.maps]
    given["similarities"] = [] if explanation.similarities is None else explanation.similarities.tolist()
    return WireExplanation(**given)


def _least_score(body: wire.Scoring) -> float:
    """Documents with a lower score are left out."""
    return -math.inf if body.score_threshold is None else body.score_threshold


def _scored(index: int, score: float, explanation: Explanation | None) -> Score:
    return Score(index, score, explanation=UNSET if explanation is None else _on_wire(explanation))


def ranked(
    document: RankedDocument, shows_document: bool, model: str | None = None, given: wire.Contents = ""
) -> Ranked:
    """A document that came as an embedding is not shown, except for the id that it was `given` with. A
    cascade names the `model` that ranked it."""
    shown = _shown_document(document, given) if shows_document else None
    explanation = None if document.explanation is None else _on_wire(document.explanation)
    return Ranked(document.index, document.score, shown, explanation, model)


def _shown_document(document: RankedDocument, given: wire.Contents) -> Document | None:
    shown = Document() if document.text is None else Document(document.text)
    if isinstance(document.document, DocumentDigest):
        shown.digest = str(document.document)
    if isinstance(given, list):
        shown.id = reading.id_of(given[document.index])
    return None if shown == _NOTHING_SHOWN else shown


def _score_response(
    body: ScoreRequest, model: str, scale: ScoreScale, result: ScoreResult, warnings: wire.Warnings
) -> ScoreResponse:
    least = _least_score(body)
    data = [
        _scored(i, score, result.explanations.get(i))
        for i, score in enumerate(result.scores)
        if score >= least
    ]
    usage, rest = usage_of(result.usage), _completeness(body, result)
    return ScoreResponse(new_id("score"), now(), model, data, usage, scale, warnings=warnings, **rest)


def _rerank_response(
    body: RerankRequest,
    scale: ScoreScale,
    with_text: bool,
    result: RerankResult,
    *,
    warnings: wire.Warnings,
    **common: Any,
) -> RerankResponse:
    return RerankResponse(
        id=new_id("rerank"),
        results=[ranked(document, with_text, given=body.documents or "") for document in result.results],
        meta=_cohere_meta(result.usage, warnings),
        score_scale=scale,
        warnings=warnings,
        **common,
        **_completeness(body, result),
    )


def _cohere_meta(usage: engine_requests.Usage, warnings: wire.Warnings) -> dict[str, Any]:
    """The fields beside the results that Cohere's clients read."""
    return {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": usage.prompt_tokens},
        **({"warnings": warnings} if warnings else {}),
    }


def _completeness(body: wire.Scoring, result: ScoreResult | RerankResult) -> dict[str, Any]:
    """The documents without a score, for requests that want them reported."""
    reported: dict[str, Any] = {}
    if body.on_timeout == "partial":
        reported |= {"complete": not result.unscored, "unscored": result.unscored}
    if body.on_error == "report":
        reported["errors"] = [DocumentError(i, error) for i, error in sorted(result.errors.items())]
    return reported


async def score(state: ServerState, body: ScoreRequest, texts: ToScore) -> Answer:
    scale = scale_of(state, body)
    named = with_fields_of(body, *body.field_names)
    respond = partial(_score_response, body, state.model_name, scale)
    if body.stream:
        return await _streamed(
            *(state, body, texts, named),
            lambda one: _scored(one.index, one.score, one.explanation),
            respond,
        )
    with named:
        result = await state.engine.score(*texts, **score_options(state, body))
    items = len(result.scores) + _num_lines(result.explanations.values())
    return with_scale(await answer_of(state, body, result, partial(respond, result), items), scale)


async def rerank(state: ServerState, body: RerankRequest, texts: ToRank) -> Answer:
    if body.cascade is not None:
        return await _rerank_in_stages(state, body, body.cascade, texts)
    if body.texts is not None:
        return await rerank_as_tei(state, body, texts)
    if body.top_k is not None or body.truncation is not None:
        return await _rerank_as_voyage(state, body, texts)
    model, scale = state.model_name, scale_of(state, body)
    with_text = body.return_documents is not False
    if body.stream:

        def last(result: ScoreResult, warnings: wire.Warnings) -> RerankResponse:
            best = engine_requests.rank(
                result.scores, texts[1], body.top_n, body.score_threshold, by=result.ranking_scores
            )
            reranked = RerankResult(best, result.usage, result.truncated, result.unscored, result.errors)
            common: dict[str, Any] = {"model": model, "usage": usage_of(result.usage)}
            return _rerank_response(body, scale, False, reranked, warnings=warnings, **common)

        return await _streamed(
            *(state, body, ([texts[0]], texts[1])),
            with_fields_of(body),
            lambda one: ranked(one, with_text, given=body.documents or ""),
            last,
        )
    build = partial(_rerank_response, body, scale, with_text)
    return await rerank_in_shape(
        state, body, texts, build, top_n=body.top_n, with_text=with_text, is_jina=True
    )


async def rerank_as_tei(state: ServerState, body: RerankRequest, texts: ToRank) -> Answer:
    """text-embeddings-inference's shape: `texts` in, a bare list out."""
    # The second as others call it.
    with_text = bool(body.return_documents if body.return_text is None else body.return_text)

    def build(result: RerankResult, **common: Any) -> list[TeiRanked]:
        return [TeiRanked(one.index, one.score, one.text if with_text else None) for one in result.results]

    return await rerank_in_shape(
        *(state, body, texts, build),
        top_n=body.top_n,
        with_text=with_text,
        documents="texts",
        truncation=reading.truncation_by_switch(
            body.truncate, body.truncation_direction, state.config.long_documents, may_window=True
        ),
        tei=tei_headers(state, [texts[0], *texts[1]]),
    )


async def _rerank_as_voyage(state: ServerState, body: RerankRequest, texts: ToRank) -> Answer:
    """Voyage's shape: `data` in place of `results`, and documents as strings, given on request."""
    top_n, with_text = body.top_n if body.top_k is None else body.top_k, bool(body.return_documents)

    def build(result: RerankResult, **common: Any) -> VoyageResponse:
        data = [VoyageRanked(one.index, one.score, one.text if with_text else None) for one in result.results]
        return VoyageResponse(data=data, **common)

    return await rerank_in_shape(state, body, texts, build, top_n=top_n, with_text=with_text)


async def rerank_in_shape(
    state: ServerState,
    body: wire.Scoring,
    texts: ToRank,
    build: Callable[..., Any],
    *,
    top_n: int | None,
    with_text: bool = False,
    documents: str = "documents",
    truncation: Truncation | None = None,
    is_jina: bool = False,
    tei: Mapping[str, str] | None = None,
) -> Answer:
    """Ranks, and answers with what `build` makes of the result and the fields `model`, `usage` and
    `warnings`. `documents` is the field that they came in. Only Jina's shape has a place for partial results
    and explanations."""
    if not is_jina:
        check_all_ranked(body)
    model, scale = state.model_name, scale_of(state, body)
    with with_fields_of(body, documents=documents):
        result = await state.engine.rerank(
            *texts,
            top_n=top_n,
            score_threshold=body.score_threshold,
            **score_options(state, body, truncation),
        )

    def whole(warnings: wire.Warnings) -> Any:
        return build(result, model=model, usage=usage_of(result.usage), warnings=warnings)

    items = len(result.results) + len(result.unscored) + _num_lines(one.explanation for one in result.results)
    characters = _num_characters(result.results) if with_text else 0
    return with_scale(await answer_of(state, body, result, whole, items, characters, tei=tei), scale)


async def _streamed(
    state: ServerState,
    body: wire.Scoring,
    texts: ToScore,
    named: AbstractContextManager[None],
    line: Callable[[RankedDocument], Any],
    last: Callable[[ScoreResult, wire.Warnings], Any],
) -> Answer:
    """An answer with a line for each result as soon as it is there. The last line is the answer without
    `stream`, but for texts and explanations. Returns with the first line, so that errors of the request are
    raised before. Errors call the fields as they are `named`."""
    scale, least = scale_of(state, body), _least_score(body)

    def encoded(documents: Sequence[RankedDocument]) -> bytes:
        return b"".join(msgspec.json.encode(line(document)) + b"\n" for document in documents)

    def encoded_last(result: ScoreResult) -> bytes:
        warnings = reading.warnings_of(result.truncated, state.field_warnings, body)
        return msgspec.json.encode(last(result, warnings)) + b"\n"

    async def lines() -> AsyncGenerator[bytes]:
        """One or more at a time."""
        with named:
            async with state.engine.stream(*texts, **score_options(state, body)) as stream:
                async for new in stream:
                    documents = [document for document in new if document.score >= least]
                    if documents:
                        size = len(documents) + _num_lines(document.explanation for document in documents)
                        yield await run_in_thread_if_large(size, encoded, documents)
                state.note_used(stream.result)
                yield await run_in_thread_if_large(len(stream.result.scores), encoded_last, stream.result)

    parts = lines()
    first = await anext(parts)
    return with_scale(Answer(200, {"Content-Type": LINES}, first, parts), scale)


async def _rerank_in_stages(
    state: ServerState, body: RerankRequest, stages: Sequence[CascadeStage], texts: ToRank
) -> Answer:
    """Ranks all documents with a model, the best of those with the next, within one deadline. The answer has
    the documents of the last stage, each with the model that scored it, and each stage's time."""
    models = _check_cascade(state, body, stages)
    names = [models.find(stage.model) for stage in stages]
    plan = [
        Stage(name, stage.keep, stage.instruction or _instruction_of(body))
        for name, stage in zip(names, stages, strict=True)
    ]
    # Refuse a model that is not served now before any stage runs.
    last = [state.serving(name, Wanted.RANKING) for name in names][-1]
    scale = scale_of(last, body)
    of_score: dict[str, Any] = {**score_options(last, body)}
    options = {name: of_score[name] for name in CascadeOptions.__annotations__}
    with ExitStack() as reported, with_fields_of(body):
        for name in names:
            reported.enter_context(naming_lost_model(models, name))
        result = await models.rerank(*texts, plan, deadline=body.timeout, **options)
    best = [one for one in result.results if one.score >= _least_score(body)][: body.top_n or None]
    rankings = [stage.ranking for stage in result.stages]
    done = [StageDone(stage.model, stage.documents, round(stage.milliseconds, 3)) for stage in result.stages]
    with_text = body.return_documents is not False
    warnings = reading.warnings_of(sum(ranking.truncated for ranking in rankings), state.field_warnings, body)
    for stage in result.stages:
        state.note_used(stage.ranking, stage.model)
    usage = _sum_of(engine_requests.Usage, [ranking.usage for ranking in rankings])
    timings = _sum_of(Timings, [ranking.timings for ranking in rankings])

    def build() -> RerankResponse:
        given = body.documents or ""
        results = [
            ranked(RankedDocument(one.index, one.score, one.document), with_text, one.model, given)
            for one in best
        ]
        meta = _cohere_meta(usage, warnings)
        return RerankResponse(
            new_id("rerank"), names[-1], results, usage_of(usage), meta, scale, warnings=warnings, stages=done
        )

    answer = await wire_answer(build, len(best), _num_characters(best) if with_text else 0)
    return with_scale(answer, scale).with_timings(timings).with_warnings(warnings)


def _sum_of(kind: type[T], parts: Sequence[T]) -> T:
    """The sums of all fields of dataclasses."""
    return kind(**{each.name: sum(getattr(one, each.name) for one in parts) for each in fields(kind)})  # type: ignore[arg-type]


def _check_cascade(state: ServerState, body: RerankRequest, stages: Sequence[CascadeStage]) -> SeveralModels:
    """Refuses stages that are no cascade, and options that a cascade's answer has no place for."""
    wrong = None
    if state.models is None:
        wrong = (
            "cascade needs a server of several models, and this one serves one; leave it out, or start a "
            "server with all of them"
        )
    elif not 2 <= len(stages) <= _MOST_STAGES:
        wrong = (
            f"cascade must have 2 to {_MOST_STAGES} stages, not {len(stages)}; name a single model as model"
        )
    elif (i := next((i for i, stage in enumerate(stages[:-1]) if stage.keep is None), None)) is not None:
        wrong = f"cascade[{i}] must say how many of its best documents go on to the next stage; set its keep"
    elif stages[-1].keep is not None:
        wrong = "the last stage of a cascade has no keep; leave it out, and set top_n for fewer results"
    if state.models is None or wrong is not None:
        raise InvalidRequestError(str(wrong), "cascade")
    of_others = [name for name in ("texts", "top_k", "truncation") if getattr(body, name) is not None]
    for option in (*of_others, *_reporting_options(body)):
        raise InvalidRequestError(f"a cascade does not support {option}; leave out one of them", option)
    return state.models


def wanted_ranking(state: ServerState, body: RerankRequest | Fields) -> Wanted:
    return Wanted.RANKING if field_of(body, "cascade") is None else Wanted.CASCADE


# The answers to requests with documents, with texts, in Voyage's words, and line by line.
RANKINGS = (RerankResponse, list[TeiRanked], VoyageResponse, LINES)

RANK = Form(RerankRequest, texts_to_rank, rerank, wanted_ranking)
SCORE = Form(ScoreRequest, texts_to_score, score, Wanted.RANKING)

ROUTES = (
    *post(
        ("/score", "/v1/score"),
        SCORE,
        Shown(
            Group.RANK,
            "Score documents, in their order",
            {"queries": wire.QUERY, "documents": wire.DOCUMENTS},
        ),
        ScoreResponse,
        LINES,
    ),
    *post(
        ("/rerank", "/v1/rerank", "/v2/rerank"),
        RANK,
        Shown(
            Group.RANK,
            "Rank documents, best first",
            {"query": wire.QUERY, "documents": wire.DOCUMENTS, "top_n": 2},
        ),
        *RANKINGS,
    ),
)
