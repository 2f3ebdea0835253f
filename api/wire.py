"""The wire types that several routes share, as msgspec structs. Those of one family are beside its handlers.

msgspec checks each field. Fields that a type lacks are dropped, and `reading` reports them.
"""

from hashlib import sha256
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


def about(description: str, *examples: Any, schema: "Schema | None" = None) -> msgspec.Meta:
    """Description and examples of a field for /openapi.json and /docs. A field that holds other structs takes
    its example from theirs. `schema` is for fields of type Any. Decoding ignores all of these."""
    return msgspec.Meta(
        description=description, examples=list(examples) or None, extra_json_schema=schema or None
    )


# A text, or an object that holds one: {"text": ...}, {"content": ...}, or a record with fields.
Content = str | dict[str, Any]
Contents = str | dict[str, Any] | list[Content]
# A name of a model, a prompt, a task or a kind of number. Errors repeat it.
Name = Annotated[str, msgspec.Meta(max_length=4096)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
LongDocuments = Literal["truncate", "window", "error"]
Direction = Literal["left", "right", "Left", "Right"]

# Largest number. Infinity and NaN have no JSON.
_LARGEST = 1e30

# Fields that clients always send and that have no effect.
Ignored = Annotated[Any, about("Accepted and ignored.", "anything")]
IGNORED_FIELDS = frozenset({"user", "request_id", "options", "wait_for_model", "use_cache", "use_gpu"})

# The schemas below are for /openapi.json alone: `reading` checks these fields, with its own messages.
Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_IDS: Schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_ONE_OR_TWO: Schema = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 2}


def _list_of_any(*schemas: Schema) -> Schema:
    return {"anyOf": [{"type": "array", "items": each, "minItems": 1} for each in schemas]}


DOCUMENTS = ["Berlin lies on the Spree.", "Paris is the capital of France."]
QUERY = "What is the capital of France?"

# Fields that several requests have.
Query = Annotated[Content, about("Text, or an object with a text, pictures or an embedding.", QUERY)]
Documents = Annotated[
    Contents,
    about(
        "Texts, or objects with a text, pictures, an embedding of at most `max_vectors` vectors, or the "
        "`digest` of a document that was added.",
        DOCUMENTS,
    ),
]
ModelField = Annotated[
    Name | None,
    about(
        "Name of a served model. Default: the server's. `MODEL:query`, `MODEL:document` and "
        "`MODEL@PROMPT_NAME` also say how texts to embed are read.",
        "all-MiniLM-L6-v2",
    ),
]
TopN = Annotated[NotNegative | None, about("Number of results. Default: all.", 3)]
RankFields = Annotated[
    list[str] | None,
    about("Fields of document objects to rank by, as YAML. Default: the text.", ["title", "text"]),
]
Truncate = Annotated[
    bool | None, about("Truncate long texts; false refuses them. Default: as the server is set.", True)
]
VoyageTruncation = Annotated[bool | None, about("Voyage's: truncate long texts; false refuses them.", True)]
Dimensions = Annotated[Positive | None, about("Length of the vectors. Default: the model's.", 128)]
TruncationDirection = Annotated[
    Direction | None, about("Side that loses tokens. Default: as the tokenizer is set.", "right")
]
InputType = Annotated[
    Name | None, about("`query` or `document`, for models that read them differently.", "document")
]
Priority = Annotated[
    int | Literal["interactive", "batch"] | None,
    about("Class, or -8 to 8; each lower number doubles the share. Default: interactive.", "batch"),
]
Timeout = Annotated[
    Annotated[float, msgspec.Meta(gt=0)] | None,
    about("Seconds that the request may take. Default: no limit.", 10),
]
PromptName = Annotated[Name | None, about("Name of a prompt of the model, put before the text.", "query")]
# A text, texts, token ids or lists of those; or objects that hold a text, as Jina's clients send.
Texts = Annotated[
    Any,
    about(
        "Text, texts, or objects with text or pictures. Token ids need `--accept-token-ids`.",
        DOCUMENTS,
        schema={"anyOf": [_TEXT, _IDS, _list_of_any(_TEXT, {"type": "object"}, _IDS)]},
    ),
]
# A text, a pair of texts, or a list of lists of either.
Sequences = Annotated[
    Any,
    about(
        "Text, a pair of texts, or a list of lists of one text or two.",
        [["I liked it."], ["It was dull."]],
        schema={"anyOf": [_TEXT, _ONE_OR_TWO, _list_of_any(_ONE_OR_TWO)]},
    ),
]

# Fields that several answers have.
Id = Annotated[str, about("Id of the answer.", "rerank-0b5f0c5a6f7d4e0e9c3b8f1d2a4c6e80")]
Created = Annotated[int, about("Unix time of the answer, in seconds.", 1767225600)]
Model = Annotated[str, about("Name of the model that answered.", "all-MiniLM-L6-v2")]
Index = Annotated[int, about("Place in the request, from 0.", 1)]
AlwaysList = Annotated[Literal["list"], about("Always `list`.", "list")]
RelevanceScore = Annotated[float, about("Relevance; higher is better.", 7.5092)]
Milliseconds = Annotated[float, about("Time taken, in milliseconds.", 12.5)]
# Numbers that are written already: lists, or base64 of little-endian bytes.
NUMBERS_OR_BASE64: Schema = {"anyOf": [{"type": "array"}, {"type": "string"}]}
OneVector = Annotated[
    Any, about("Vector, as a list or base64.", [0.12, -0.05, 0.4], schema=NUMBERS_OR_BASE64)
]


Warnings = list[str] | UnsetType


class RequestBody(msgspec.Struct):
    """A request whose type also has fields for requests of another shape."""

    def unused_fields(self) -> frozenset[str]:
        """Fields of the type that a request of this shape does not use."""
        return frozenset()


class Common(RequestBody, kw_only=True):
    """Options that all requests share. Clients send null for what they leave open, so all of them take it."""

    model: ModelField = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, msgspec.Meta(ge=-1)] | None,
        about(
            "Most tokens of an input; -1: as many as the model reads. Default: as `long_documents` says.", 512
        ),
    ] = None
    truncation_side: Annotated[
        Literal["left", "right"] | None,
        about("Side that loses tokens. Default: as the tokenizer is set.", "right"),
    ] = None
    long_documents: Annotated[
        LongDocuments | None,
        about("Truncate, read in windows, or refuse. Default: the server's `--long-documents`.", "truncate"),
    ] = None
    priority: Priority = None
    timeout: Timeout = None
    # OpenAI's, and vLLM's name of a request in its log.
    user: Ignored = None
    request_id: Ignored = None


class Scoring(Common, kw_only=True):
    """Options that /score and /rerank share."""

    max_tokens_per_query: Annotated[
        NotNegative | None, about("Most tokens of a query; 0: no limit of its own. Default: 0.", 64)
    ] = None
    max_tokens_per_doc: Annotated[
        NotNegative | None, about("Most tokens of a document; 0: no limit of its own. Default: 0.", 512)
    ] = None
    use_activation: Annotated[
        bool | None, about("Apply the classifier's activation. Default: true.", True)
    ] = None
    raw_scores: Annotated[
        bool | None,
        about(
            "Give logits: the opposite of `use_activation`. Default: false; true on NVIDIA's routes.", False
        ),
    ] = None
    normalize: Annotated[
        bool | None, about("Give scores from 0 to 1. Default: the server's `--normalize-scores`.", True)
    ] = None
    score_threshold: Annotated[
        Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)] | None,
        about("Leave out results with a lower score. Default: none.", 0.5),
    ] = None
    instruction: Annotated[
        str | None,
        about("Instruction, for models that take one. Default: the model's.", "Find passages that answer."),
    ] = None
    # The same as SGLang and DashScope call it.
    instruct: Annotated[str | None, about("Alias of `instruction`.", "Find passages that answer.")] = None
    window_overlap: Annotated[
        NotNegative | None,
        about("Tokens that two windows of a long document share. Default: the server's.", 64),
    ] = None
    cache: Annotated[
        Literal["use", "bypass", "refresh"] | None,
        about("Use, bypass or refresh the cached documents. Default: use.", "bypass"),
    ] = None
    on_timeout: Annotated[
        Literal["error", "partial"] | None,
        about("At the timeout, fail or give the results so far. Default: error.", "partial"),
    ] = None
    on_error: Annotated[
        Literal["fail", "report"] | None,
        about("For a bad document, fail or report it in `errors`. Default: fail.", "report"),
    ] = None
    explain: Annotated[
        bool | Literal["maps"] | None,
        about(
            "Explain each score; `maps` also gives the similarity to each patch of a picture or token of a "
            "text. Default: false.",
            True,
        ),
    ] = None
    stream: Annotated[
        bool | None, about("Send each result as a line of JSON once it is scored. Default: false.", False)
    ] = None


class HubOptions(msgspec.Struct, kw_only=True):
    """Options of Hugging Face's inference API. They have no effect: a served model is loaded."""

    wait_for_model: Ignored = None
    use_cache: Ignored = None
    use_gpu: Ignored = None


Options = Annotated[HubOptions | None, about("Hugging Face's options, without effect.")]


class TokensDetails(msgspec.Struct):
    """Counts of the prompt's tokens that were not run, and of documents found in the cache."""

    cached_tokens: Annotated[int, about("Tokens that were not run, because of the cache.", 9)]
    cached_documents: Annotated[int, about("Documents whose embeddings or scores were in the cache.", 1)]


class Usage(msgspec.Struct, omit_defaults=True):
    prompt_tokens: Annotated[int, about("Tokens of all inputs.", 27)]
    total_tokens: Annotated[int, about("The same: nothing is generated.", 27)]
    prompt_tokens_details: Annotated[
        TokensDetails | None, about("What came from the cache. Left out if nothing did.")
    ] = None


UsageField = Annotated[Usage, about("Tokens that the request took.")]


class Warned(msgspec.Struct, kw_only=True):
    """An answer with warnings about the request's fields and inputs."""

    warnings: Annotated[
        Warnings,
        about(
            "Fields that are not read, truncated texts. Left out if there are none.",
            ["the field `topn` is not read here; did you mean `top_n`?"],
        ),
    ] = UNSET


_MESSAGE = "timeout: expected `float` > 0.0"
_DIGEST = sha256(DOCUMENTS[1].encode()).hexdigest()
Digest = Annotated[str, about("SHA-256 of a document's text, in hexadecimal.", _DIGEST)]
DocumentId = Annotated[str | int, about("The document's `id`, if the request gives it one.", "doc-2")]


class ErrorBody(msgspec.Struct):
    message: Annotated[str, about("What is wrong, and what to change.", _MESSAGE)]
    type: Annotated[str, about("Kind of error.", "BadRequestError")]
    param: Annotated[str | None, about("The field that is wrong; null if none is.", "timeout")]
    code: Annotated[int, about("Status of the answer.", 400)]
    unknown_digests: Annotated[
        list[str] | UnsetType, about("With status 409: the documents to send, by their digests.", [_DIGEST])
    ] = UNSET


class ErrorResponse(msgspec.Struct):
    error: Annotated[ErrorBody, about("The error.")]
    detail: Annotated[str, about("The error's message, for clients of Voyage.", _MESSAGE)]
