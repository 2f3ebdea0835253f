"""What a front asks of an engine, and what it is answered: values, as msgpack. Errors are answers too."""

from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.facts import ModelFacts
from maxsimd.engine.requests import (
    CacheMode,
    ClassifyResult,
    EmbedResult,
    InputType,
    OnError,
    OnTimeout,
    Priority,
    ScoreResult,
    SparseEmbedResult,
    TokenEmbedResult,
    Truncation,
)
from maxsimd.engine.tenants import Tenant
from maxsimd.pooling.muvera import Muvera


class SentBroken(msgspec.Struct, tag="broken", frozen=True):
    """A text that is not Unicode: messages have none as a string."""

    text: bytes


class SentVectors(msgspec.Struct, tag="vectors", frozen=True):
    """An embedding that came along, and its scales."""

    values: np.ndarray[Any, Any]
    scales: np.ndarray[Any, Any] | None
    is_bfloat16: bool = False


class SentQuery(msgspec.Struct, tag="query", frozen=True):
    """A query that an engine has encoded, as in `QueryRows`."""

    rows: SentVectors
    tokens: int
    truncated: bool
    fingerprint: str


class SentPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """One part of a content: a text, or a picture by its file, by its file in base64, or by why there is
    none."""

    text: str | None = None
    file: bytes | None = None
    base64: str | None = None
    missing: str | None = None


class SentContent(msgspec.Struct, tag="content", frozen=True):
    """A query or document with pictures."""

    parts: list[SentPart]


SentItem: TypeAlias = str | SentBroken | SentVectors | SentQuery | SentContent
SentInput: TypeAlias = str | list[int] | SentContent


class Run(msgspec.Struct, frozen=True):
    """How a request is run, as in `RunOptions`; `timeout` is what is left of it."""

    truncation: Truncation
    priority: Priority
    tenant: str
    timeout: float | None = None


class Score(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Asks for scores, by the options of `Engine.score`. With `streams`, `Arrived` come before the answer."""

    queries: list[SentItem]
    documents: list[SentItem]
    run: Run
    use_activation: bool = True
    normalize: bool = False
    instruction: str | None = None
    cache: CacheMode = "use"
    on_timeout: OnTimeout = "error"
    on_error: OnError = "fail"
    explain: bool | str = False
    streams: bool = False


class EncodeQuery(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Asks for a query's embedding, by the options of `Engine.encode_query`."""

    query: SentItem
    run: Run
    instruction: str | None = None


class Rank(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Asks for the best documents of a request that is not split, as `Engine.rerank` ranks them: explained
    are only these."""

    score: Score
    top_n: int | None
    score_threshold: float | None


class Embed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Asks for vectors: one a text, one a token, or sparse ones."""

    texts: list[SentInput]
    run: Run
    task: Literal["embed", "token_embed", "sparse_embed"] = "embed"
    input_type: InputType | None = None
    prompt_name: str | None = None
    dimensions: int | None = None
    max_tokens: int | None = None
    late_chunking: bool = False
    chunks: list[tuple[int, int]] | None = None
    encoding: Muvera | None = None


class Classify(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Asks for labels' probabilities or logits."""

    texts: list[SentInput]
    text_pairs: list[str] | None
    run: Run
    use_activation: bool = True


class Converse(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Asks for messages as the checkpoint's template writes them."""

    messages: list[dict[str, str]]
    add_generation_prompt: bool
    continue_final_message: bool


class ClearCache(msgspec.Struct, tag=True, frozen=True):
    """Asks an engine to forget what it has cached."""


class ShowMetrics(msgspec.Struct, tag=True, frozen=True):
    """Asks for the page of /metrics that a process has by itself."""


class SetTenants(msgspec.Struct, tag=True, frozen=True):
    """Names the tenants and their weights."""

    tenants: dict[str, Tenant]


class Introduce(msgspec.Struct, tag=True, frozen=True):
    """Asks an engine what it serves."""


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Asks a process whether it answers."""


Question: TypeAlias = (
    Score
    | EncodeQuery
    | Rank
    | Embed
    | Classify
    | Converse
    | ClearCache
    | ShowMetrics
    | SetTenants
    | Introduce
    | Ping
)


class Scored(msgspec.Struct, tag=True, frozen=True):
    """The whole result of `Score`."""

    result: ScoreResult


class EncodedQuery(msgspec.Struct, tag=True, frozen=True):
    """The answer to `EncodeQuery`."""

    query: SentQuery


class Arrived(msgspec.Struct, tag=True, frozen=True):
    """Scores of some documents, by their index, while more are to come, and explanations if they were asked
    for."""

    result: ScoreResult
    indices: list[int]


class Ranked(msgspec.Struct, tag=True, frozen=True):
    """The answer to `Rank`: the scores of the best documents, in their order, with their indices."""

    result: ScoreResult
    indices: list[int]


class Embedded(msgspec.Struct, tag=True, frozen=True):
    """The result of `Embed`, one vector a text."""

    result: EmbedResult


class EmbeddedTokens(msgspec.Struct, tag=True, frozen=True):
    """The result of `Embed`, one vector a token."""

    result: TokenEmbedResult


class EmbeddedSparse(msgspec.Struct, tag=True, frozen=True):
    """The result of `Embed`, a sparse vector a text."""

    result: SparseEmbedResult


class Classified(msgspec.Struct, tag=True, frozen=True):
    """The result of `Classify`."""

    result: ClassifyResult


class Conversation(msgspec.Struct, tag=True, frozen=True):
    """The result of `Converse`: the text, and whether it has its special tokens."""

    text: str
    is_complete: bool


class Done(msgspec.Struct, tag=True, frozen=True):
    """There is no more to say."""


class Metrics(msgspec.Struct, tag=True, frozen=True):
    """A page in Prometheus's text format."""

    page: bytes


class Introduction(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What an engine serves: the model's facts, the configuration that it runs by, its tokeniser (pickled: it
    comes from a process of our own), and a digest of all that decides its scores."""

    facts: ModelFacts
    config: EngineConfig
    tokenizer: bytes
    fingerprint: str


class Failed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The question was refused or failed; see `failures`."""

    kind: str
    message: str
    param: str | None = None
    retry_after: float = 0.0
    reason: str = ""


Answer: TypeAlias = (
    Scored
    | EncodedQuery
    | Arrived
    | Ranked
    | Embedded
    | EmbeddedTokens
    | EmbeddedSparse
    | Classified
    | Conversation
    | Done
    | Metrics
    | Introduction
    | Failed
)


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """A question under a number; all answers to it bear the number."""

    number: int
    question: Question


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Nobody waits for the answer to a question any more."""

    number: int


class Reply(msgspec.Struct, frozen=True):
    """An answer to a question; its last unless it is `Arrived`. `queued_tokens` wait at the engine."""

    number: int
    answer: Answer
    queued_tokens: int = 0


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).data
    raise NotImplementedError(type(value).__name__)


def _decoded(kind: Any, value: Any) -> Any:
    """An array of its own: the message is not held for it."""
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape).copy()


_encoder = msgspec.msgpack.Encoder(enc_hook=_encoded)
_to_engine = msgspec.msgpack.Decoder(Ask | Cancel, dec_hook=_decoded)
_to_front = msgspec.msgpack.Decoder(Reply, dec_hook=_decoded)

encode = _encoder.encode


def decode_to_engine(message: bytes) -> Ask | Cancel:
    """Raises msgspec.DecodeError for anything else."""
    decoded: Ask | Cancel = _to_engine.decode(message)
    return decoded


def decode_to_front(message: bytes) -> Reply:
    """Raises msgspec.DecodeError for anything else."""
    return _to_front.decode(message)
