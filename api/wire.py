"""The wire types that several routes share, as msgspec structs. Those of one family are beside its handlers.

msgspec checks each field. Fields that a type lacks are dropped, and `reading` reports them.
"""

from typing import Annotated, Any, Literal

import msgspec

# A text, or an object that holds one: {"text": ...}, {"content": ...}, or a record with fields.
Content = str | dict[str, Any]
Contents = Annotated[
    str | dict[str, Any] | list[Content],
    msgspec.Meta(
        description="Texts, or objects with text, pictures or an embedding of at most `max_vectors` vectors."
    ),
]
# A name of a model, a prompt, a task or a kind of number. Errors repeat it.
Name = Annotated[str, msgspec.Meta(max_length=4096)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
LongDocuments = Literal["truncate", "window", "error"]
Direction = Literal["left", "right", "Left", "Right"]

# Neither infinite nor NaN, which are text in JSON.
_LARGEST = 1e30

# Fields that clients always send and that have no effect.
Ignored = Annotated[Any, msgspec.Meta(description="Accepted and ignored.")]
IGNORED_FIELDS = frozenset({"user", "request_id", "options", "wait_for_model", "use_cache", "use_gpu"})

# The schemas below are for /openapi.json alone: `reading` checks these fields, with its own messages.
Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_IDS: Schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_ONE_OR_TWO: Schema = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 2}


def _list_of_any(*schemas: Schema) -> Schema:
    return {"anyOf": [{"type": "array", "items": each, "minItems": 1} for each in schemas]}


# A text, texts, token ids or lists of those; or objects that hold a text, as Jina's clients send.
Texts = Annotated[
    Any,
    msgspec.Meta(extra_json_schema={"anyOf": [_TEXT, _IDS, _list_of_any(_TEXT, {"type": "object"}, _IDS)]}),
]
# A text, a pair of texts, or a list of lists of either.
Sequences = Annotated[
    Any, msgspec.Meta(extra_json_schema={"anyOf": [_TEXT, _ONE_OR_TWO, _list_of_any(_ONE_OR_TWO)]})
]

Warnings = list[str] | msgspec.UnsetType


class RequestBody(msgspec.Struct):
    """A request whose type also has fields for requests of another shape."""

    def unused_fields(self) -> frozenset[str]:
        """Fields of the type that a request of this shape does not use."""
        return frozenset()


class Common(RequestBody, kw_only=True):
    """Options that all requests share. Clients send null for what they leave open, so all of them take it."""

    model: Name | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    long_documents: LongDocuments | None = None
    priority: int | Literal["interactive", "batch"] | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None
    # OpenAI's, and vLLM's name of a request in its log.
    user: Ignored = None
    request_id: Ignored = None


class Scoring(Common, kw_only=True):
    """Options that /score and /rerank share."""

    max_tokens_per_query: NotNegative | None = None
    max_tokens_per_doc: NotNegative | None = None
    use_activation: bool | None = None
    raw_scores: bool | None = None
    normalize: bool | None = None
    score_threshold: Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)] | None = None
    instruction: str | None = None
    # The same as SGLang and DashScope call it.
    instruct: str | None = None
    window_overlap: NotNegative | None = None
    cache: Literal["use", "bypass", "refresh"] | None = None
    on_timeout: Literal["error", "partial"] | None = None
    on_error: Literal["fail", "report"] | None = None
    explain: bool | Literal["maps"] | None = None
    stream: bool | None = None


class HubOptions(msgspec.Struct, kw_only=True):
    """Options of Hugging Face's inference API. They have no effect: a served model is loaded."""

    wait_for_model: Ignored = None
    use_cache: Ignored = None
    use_gpu: Ignored = None


class TokensDetails(msgspec.Struct):
    """How many of the prompt's tokens were not run, and how many documents' embeddings were in the cache."""

    cached_tokens: int
    cached_documents: int


class Usage(msgspec.Struct, omit_defaults=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: TokensDetails | None = None


class Warned(msgspec.Struct, kw_only=True):
    """An answer with warnings about the request's fields and inputs."""

    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(msgspec.Struct):
    """`detail` is the error's message, for clients of Voyage."""

    error: ErrorBody
    detail: str
