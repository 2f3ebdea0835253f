"""The wire types: what clients send and what they get, as msgspec structs.

Their fields are checked here, and what they mean together is worked out in `reading`. Fields that they do not
have are dropped, and reported by `request_warnings`.
"""

from typing import Annotated, Any, Literal

import msgspec

from maxsimd.api.wire_explanations import WireExplanation
from maxsimd.api.wire_texts import Sequences, Texts

# A text, or an object that holds one: {"text": ...}, {"content": ...}, or a record with fields.
Content = str | dict[str, Any]
Contents = Annotated[
    str | dict[str, Any] | list[Content],
    msgspec.Meta(
        description="Texts, or objects with text, pictures or an embedding of at most --max-vectors vectors."
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


class Common(msgspec.Struct, kw_only=True):
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


class ScoreRequest(Scoring, kw_only=True):
    queries: Contents | None = None
    documents: Contents | None = None
    items: Contents | None = None
    text_1: Contents | None = None
    text_2: Contents | None = None
    data_1: Contents | None = None
    data_2: Contents | None = None


class CascadeStage(msgspec.Struct, kw_only=True):
    """A stage of a cascade: how many of the `model`'s best documents the next stage gets."""

    model: Name
    keep: Positive | None = None
    instruction: str | None = None


class RerankRequest(Scoring, kw_only=True):
    """Jina's, Cohere's and vLLM's with `documents`, text-embeddings-inference's with `texts`. Voyage's has
    `top_k` or `truncation`, which others do not have. With a `cascade` several models rank."""

    query: Content
    documents: Contents | None = None
    texts: list[str] | None = None
    top_n: NotNegative | None = None
    top_k: NotNegative | None = None
    truncation: bool | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    rank_fields: list[str] | None = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    cascade: list[CascadeStage] | None = None


class Message(msgspec.Struct, kw_only=True):
    """Of a chat; `content` is a text or content parts."""

    role: Name
    content: str | list[Any]


class MuveraParameters(msgspec.Struct, kw_only=True):
    """What of the parameters of the encoding muvera is not as it is by default; `d_proj` 0 projects
    nothing."""

    k_sim: NotNegative | None = None
    r_reps: Positive | None = None
    d_proj: NotNegative | None = None
    d_final: Positive | None = None
    full_length: bool | None = None
    seed: NotNegative | None = None


class HubOptions(msgspec.Struct, kw_only=True):
    """Options of Hugging Face's inference API. They have no effect: a served model is loaded."""

    wait_for_model: Ignored = None
    use_cache: Ignored = None
    use_gpu: Ignored = None


class EmbeddingsRequest(Common, kw_only=True):
    """Texts as `input`, or one text as the `messages` of a chat."""

    input: Texts = msgspec.UNSET
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    # Not taken.
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # 0 is for all, as Infinity's client sends it.
    dimensions: NotNegative | None = None
    # Voyage's.
    output_dimension: Positive | None = None
    encoding_format: Literal["float", "base64", "safetensors"] | None = None
    # vLLM's, Voyage's and Jina's for the kind of numbers.
    embed_dtype: Name | None = None
    output_dtype: Name | None = None
    embedding_type: Name | list[Name] | None = None
    input_type: Name | None = None
    task: Name | None = None
    prompt_name: Name | None = None
    # Voyage's.
    truncation: bool | None = None
    # Infinity's: what the strings of `input` are.
    modality: Name | None = None
    # Jina's and mixedbread's: vectors of length 1.
    normalized: bool | None = None
    # Jina's: `input` are the chunks of one document, or it is one text with these `chunks`.
    late_chunking: bool | None = None
    chunks: list[tuple[NotNegative, NotNegative]] | None = None
    # One vector of a text's token vectors.
    encoding: Literal["muvera"] | None = None
    muvera: MuveraParameters | None = None


class PoolingRequest(EmbeddingsRequest, kw_only=True):
    task: Literal["token_embed", "embed", "classify"] | None = None
    use_activation: bool | None = None


class ClassifyRequest(Common, kw_only=True):
    """vLLM's; Infinity's has `raw_scores`, which its client always sends."""

    input: Texts
    use_activation: bool | None = None
    raw_scores: bool | None = None


class PredictParameters(msgspec.Struct, kw_only=True):
    """What Hugging Face's clients may send beside a text: how logits become scores, and how many."""

    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    top_k: Positive | None = None


class PredictRequest(msgspec.Struct, kw_only=True):
    """text-embeddings-inference's: a text, a pair of texts, or a list of lists of either. Hugging Face's has
    `parameters`, which its client always sends, and is answered by a list for each text even if it is one."""

    model: Name | None = None
    parameters: PredictParameters | None = None
    options: HubOptions | None = None
    inputs: Sequences
    raw_scores: bool | None = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """vLLM's with `text` or `prompt`, text-embeddings-inference's with `inputs`."""

    model: Name | None = None
    text: str | None = None
    prompt: str | None = None
    inputs: str | list[str] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[NotNegative]
    model: Name | None = None


class TokensDetails(msgspec.Struct):
    """How many of the prompt's tokens were not run, and how many documents' embeddings were in the cache."""

    cached_tokens: int
    cached_documents: int


class Usage(msgspec.Struct, omit_defaults=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: TokensDetails | None = None


class Score(msgspec.Struct):
    index: int
    score: float
    object: str = "score"
    explanation: WireExplanation | msgspec.UnsetType = msgspec.UNSET


class DocumentError(msgspec.Struct):
    """Why a document has no score."""

    index: int
    error: str


class ScoreScale(msgspec.Struct):
    """How scores are made of what the model computes, and their bounds, null for none."""

    transform: str
    min: float | None
    max: float | None


class Warned(msgspec.Struct, kw_only=True):
    """What a request is told of its inputs though it was answered: that some were cut."""

    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


class Completeness(Warned, kw_only=True):
    """What of a request was scored, where it asked to be told: the documents that there was no time for, and
    those that have an error."""

    complete: bool | msgspec.UnsetType = msgspec.UNSET
    unscored: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    errors: list[DocumentError] | msgspec.UnsetType = msgspec.UNSET


class ScoreResponse(Completeness):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: Usage
    score_scale: ScoreScale
    object: str = "list"


class Document(msgspec.Struct):
    text: str


class Ranked(msgspec.Struct, omit_defaults=True):
    index: int
    relevance_score: float
    document: Document | None = None
    explanation: WireExplanation | None = None
    # Of a cascade: the model that gave the score.
    model: str | None = None


class StageDone(msgspec.Struct):
    """Of a cascade: how many documents the model of a stage ranked, and how long that took."""

    model: str
    documents: int
    milliseconds: float


class RerankResponse(Completeness, omit_defaults=True):
    id: str
    model: str
    results: list[Ranked]
    usage: Usage
    meta: dict[str, Any]
    score_scale: ScoreScale
    stages: list[StageDone] | msgspec.UnsetType = msgspec.UNSET


class Embedding(msgspec.Struct):
    """`scales` are there for vectors in int8: what each is to be multiplied by."""

    index: int
    embedding: Any
    object: str = "embedding"
    scales: Any = msgspec.UNSET


class MultiVector(msgspec.Struct):
    index: int
    embeddings: Any
    object: str = "embeddings"
    scales: Any = msgspec.UNSET


class Pooling(msgspec.Struct):
    index: int
    data: Any
    object: str = "pooling"
    scales: Any = msgspec.UNSET


class Encoding(msgspec.Struct):
    """How vectors were made of token vectors. Only those with the same parameters can be compared."""

    name: str
    k_sim: int
    r_reps: int
    d_proj: int
    d_final: int | None
    full_length: bool
    seed: int


class VectorsResponse(Warned):
    """`data` are `Embedding`, `MultiVector` or `Pooling`."""

    id: str
    created: int
    model: str
    data: list[Any]
    usage: Usage
    object: str = "list"
    encoding: Encoding | msgspec.UnsetType = msgspec.UNSET


class Classification(msgspec.Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyResponse(Warned):
    id: str
    created: int
    model: str
    data: list[Classification]
    usage: Usage
    object: str = "list"


class TokenizeResponse(msgspec.Struct):
    """The tokens are lists that have been written already: of numbers, and of strings."""

    tokens: msgspec.Raw
    count: int
    max_model_len: int
    token_strs: msgspec.Raw | None = None


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(msgspec.Struct):
    """`detail` is the error's message, for clients of Voyage."""

    error: ErrorBody
    detail: str
