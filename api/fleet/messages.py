"""Questions of fronts to engines and their answers, as msgpack. Errors are answers too."""

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from enum import Enum
from functools import cache
from typing import Any, Literal, Self, TypeAlias, cast

import msgspec
import msgspec.inspect
import numpy as np
import torch
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.samples import Sample

from maxsimd import __version__
from maxsimd.engine import (
    EngineDeadError,
    EngineNotReadyError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    RequestTimeoutError,
    RequestTooLargeError,
    UnknownDocumentsError,
)
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.facts import ModelFacts
from maxsimd.engine.errors import Refusal
from maxsimd.engine.media import Content, EncodedPicture, MissingPicture, PictureFile
from maxsimd.engine.processors.text.tokenization import is_broken
from maxsimd.engine.requests import (
    AggregationStrategy,
    CacheMode,
    ClassifyResult,
    DocumentDigest,
    EmbedResult,
    InputType,
    Item,
    LabelScores,
    OnError,
    OnTimeout,
    Priority,
    ScoreResult,
    SparseEmbedResult,
    Timings,
    TokenClassifyResult,
    TokenEmbedResult,
    Truncation,
    Usage,
)
from maxsimd.engine.tenants import Tenant
from maxsimd.pooling.muvera import Muvera
from maxsimd.pooling.query_rows import QueryRows
from maxsimd.pooling.vectors import Vectors


class SentBroken(msgspec.Struct, tag="broken", frozen=True):
    """A text that is not valid Unicode."""

    text: bytes


class SentVectors(msgspec.Struct, tag="vectors", frozen=True):
    """An embedding and its scales."""

    values: np.ndarray[Any, Any]
    scales: np.ndarray[Any, Any] | None
    is_bfloat16: bool = False


class SentQuery(msgspec.Struct, tag="query", frozen=True):
    """An encoded query, see `QueryRows`, and the answer to `EncodeQuery`."""

    rows: SentVectors
    tokens: int
    truncated: bool
    fingerprint: str


class SentContent(msgspec.Struct, tag="content", frozen=True):
    """A query or document with pictures."""

    # Kinds by their places in `_PARTS`, and a text, a picture's file or its file in base64, or why there is
    # none.
    parts: list[tuple[int, Any]]


class SentDigest(msgspec.Struct, tag="digest", frozen=True):
    """A document that the engine has."""

    value: bytes


SentItem: TypeAlias = str | SentBroken | SentVectors | SentQuery | SentContent | SentDigest
SentInput: TypeAlias = str | list[int] | SentContent
EmbedTask = Literal["embed", "token_embed", "sparse_embed"]


class Run(msgspec.Struct, frozen=True):
    """`RunOptions`; `timeout` is the rest of it."""

    truncation: Truncation
    priority: Priority
    tenant: str
    timeout: float | None = None


class Score(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """`Engine.score`. With `streams`, `Arrived` come before the answer."""

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
    """`Engine.encode_query`."""

    query: SentItem
    run: Run
    instruction: str | None = None


class Rank(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """`Engine.rerank` of a request that is not split; explains only the documents that it returns."""

    score: Score
    top_n: int | None
    score_threshold: float | None


class AddDocuments(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """`Engine.add_documents`."""

    documents: list[str | SentBroken]
    run: Run


class Embed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """`Engine.embed`, `embed_tokens` or `embed_sparse`."""

    texts: list[SentInput]
    run: Run
    task: EmbedTask = "embed"
    input_type: InputType | None = None
    prompt_name: str | None = None
    dimensions: int | None = None
    max_tokens: int | None = None
    return_tokens: bool = False
    late_chunking: bool = False
    chunks: list[tuple[int, int]] | None = None
    encoding: Muvera | None = None


class Classify(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """`Engine.classify`."""

    texts: list[SentInput]
    text_pairs: list[str] | None
    run: Run
    use_activation: bool = True


class ScoreLabels(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """`Engine.label_scores`."""

    # The query comes first.
    prompts: list[SentInput]
    labels: list[int | str]
    run: Run
    apply_softmax: bool = False
    document_first: bool = False
    tokenize_apart: bool = False
    add_special_tokens: bool = True


class TokenClassify(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """`Engine.token_classify`."""

    texts: list[str | SentBroken]
    run: Run
    aggregation_strategy: AggregationStrategy
    ignore_labels: list[str]
    stride: int | None = None
    return_logits: bool = False
    max_tokens: int | None = None


class Converse(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """`Engine.conversation`."""

    messages: list[dict[str, str]]
    add_generation_prompt: bool
    continue_final_message: bool


class SetTenants(msgspec.Struct, tag=True, frozen=True):
    """`Engine.set_tenants`."""

    tenants: dict[str, Tenant]


class Command(Enum):
    """Questions without content."""

    CLEAR_CACHE = "clear the cache"
    SHOW_METRICS = "show the process's own metrics"
    INTRODUCE = "introduce yourself"
    PING = "ping"


Question: TypeAlias = (
    Score
    | EncodeQuery
    | Rank
    | AddDocuments
    | Embed
    | Classify
    | ScoreLabels
    | TokenClassify
    | Converse
    | SetTenants
    | Command
)


class Scored(msgspec.Struct, tag=True, frozen=True):
    """Scores of all documents, or of the best ones in order, with their `indices`."""

    result: ScoreResult
    indices: list[int] = []


class Arrived(msgspec.Struct, tag=True, frozen=True):
    """Scores of some documents, while more are to come."""

    result: ScoreResult
    indices: list[int]


class Added(msgspec.Struct, tag=True, frozen=True):
    """`AddedDocuments` without their digests."""

    usage: Usage
    truncated: int
    not_kept: tuple[int, ...]
    timings: Timings


class Embedded(msgspec.Struct, tag=True, frozen=True):
    result: EmbedResult


class EmbeddedTokens(msgspec.Struct, tag=True, frozen=True):
    result: TokenEmbedResult


class EmbeddedSparse(msgspec.Struct, tag=True, frozen=True):
    result: SparseEmbedResult


class Classified(msgspec.Struct, tag=True, frozen=True):
    result: ClassifyResult


class ScoredLabels(msgspec.Struct, tag=True, frozen=True):
    result: LabelScores


class TokenClassified(msgspec.Struct, tag=True, frozen=True):
    result: TokenClassifyResult


class Conversation(msgspec.Struct, tag=True, frozen=True):
    """The text, and whether it has its special tokens."""

    text: str
    is_complete: bool


class Done(msgspec.Struct, tag=True, frozen=True):
    """The answer to all other questions."""


class Metrics(msgspec.Struct, tag=True, frozen=True):
    """A process's own metrics, each with its name, help, type and samples."""

    families: list[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]

    @classmethod
    def of(cls, registry: CollectorRegistry) -> Self:
        metrics = registry.collect()
        return cls([(m.name, m.documentation, m.type, [s[:3] for s in m.samples]) for m in metrics])

    def collect(self) -> Iterator[Metric]:
        for name, help, kind, samples in self.families:
            metric = Metric(name, help, kind)
            metric.samples = [Sample(*sample) for sample in samples]
            yield metric


class Introduction(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """An engine's model, with its pickled tokenizer, and a digest of all that decides scores."""

    facts: ModelFacts
    config: EngineConfig
    tokenizer: bytes
    fingerprint: str


class Failed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """An error, see `as_failed`."""

    kind: str
    message: str
    param: str | None = None
    retry_after: float = 0.0
    reason: str = ""
    digests: tuple[str, ...] = ()


Answer: TypeAlias = (
    Scored
    | SentQuery
    | Arrived
    | Added
    | Embedded
    | EmbeddedTokens
    | EmbeddedSparse
    | Classified
    | ScoredLabels
    | TokenClassified
    | Conversation
    | Done
    | Metrics
    | Introduction
    | Failed
)


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """A question; its answers have the same number."""

    number: int
    question: Question


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Nobody waits for the answer any more."""

    number: int


class Reply(msgspec.Struct, frozen=True):
    """An answer, the last unless it is `Arrived`. `queued_tokens` wait at the engine."""

    number: int
    answer: Answer
    queued_tokens: int = 0


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).data
    raise NotImplementedError(type(value).__name__)


def _decoded(kind: Any, value: Any) -> Any:
    """Copies the array, to free the message."""
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape).copy()


# The beginning of the first message from each side. Later versions keep it.
_GREETING = b"maxsimd "


@cache
def own_version() -> str:
    """The version of this process: that of the package, and a digest of the format of its messages."""
    format = repr(msgspec.inspect.multi_type_info([Ask, Cancel, Reply]))
    digest = hashlib.blake2b(format.encode(), digest_size=4).hexdigest()
    return f"{__version__} (messages {digest})"


def greeting(version: str) -> bytes:
    """The first message that each side sends."""
    return _GREETING + version.encode()


def difference(first_message: bytes) -> str | None:
    """The difference between the sender's version and our own, in words; None if there is none."""
    own = own_version()
    if first_message == greeting(own):
        return None
    other = "an older version"
    if first_message.startswith(_GREETING):
        other = first_message.removeprefix(_GREETING).decode(errors="replace")
    return f"it runs maxsimd {other}, and this process {own}; run the same version everywhere"


encode = msgspec.msgpack.Encoder(enc_hook=_encoded).encode
# Both raise msgspec.DecodeError.
decode_to_engine: Callable[[bytes], Ask | Cancel]
decode_to_engine = msgspec.msgpack.Decoder(Ask | Cancel, dec_hook=_decoded).decode
decode_to_front = msgspec.msgpack.Decoder(Reply, dec_hook=_decoded).decode


def sent_items(items: Sequence[Item]) -> list[SentItem]:
    if all(isinstance(item, str) and not is_broken(item) for item in items):
        return cast("list[SentItem]", list(items))
    return [sent_item(item) for item in items]


def sent_item(item: Item) -> SentItem:
    match item:
        case str():
            return SentBroken(item.encode("utf-8", "surrogatepass")) if is_broken(item) else item
        case Content():
            return _sent_content(item)
        case QueryRows():
            return sent_query(item)
        case DocumentDigest():
            return SentDigest(item.value)
    return _sent_vectors(item)


def sent_query(query: QueryRows) -> SentQuery:
    return SentQuery(_sent_vectors(query), query.tokens, query.truncated, query.fingerprint)


def sent_inputs(inputs: Sequence[str | tuple[int, ...] | Content]) -> list[SentInput]:
    return [
        _sent_content(each) if isinstance(each, Content) else each if isinstance(each, str) else list(each)
        for each in inputs
    ]


def received_item(item: SentItem) -> Item:
    match item:
        case str():
            return item
        case SentBroken():
            return item.text.decode("utf-8", "surrogatepass")
        case SentContent():
            return _received_content(item)
        case SentDigest():
            return DocumentDigest(item.value)
        case SentQuery():
            rows = torch.as_tensor(_received_vectors(item.rows).values)
            return QueryRows(rows, tokens=item.tokens, truncated=item.truncated, fingerprint=item.fingerprint)
    return _received_vectors(item)


def received_inputs(inputs: Sequence[SentInput]) -> list[str | list[int] | Content]:
    return [_received_content(each) if isinstance(each, SentContent) else each for each in inputs]


def _sent_vectors(item: Vectors) -> SentVectors:
    values, scales = item.values, item.scales
    is_bfloat16 = isinstance(values, torch.Tensor) and values.dtype == torch.bfloat16
    if isinstance(values, torch.Tensor):
        values = (values.view(torch.int16) if is_bfloat16 else values).detach().cpu().numpy()
    if isinstance(scales, torch.Tensor):
        scales = scales.detach().cpu().numpy()
    return SentVectors(np.asarray(values), None if scales is None else np.asarray(scales), is_bfloat16)


def _received_vectors(item: SentVectors) -> Vectors:
    if item.is_bfloat16:
        return Vectors(torch.from_numpy(item.values).view(torch.bfloat16), item.scales)
    return Vectors(item.values, item.scales)


# The kinds of parts that can be sent, each made of one value.
_PARTS: tuple[type, ...] = (str, PictureFile, EncodedPicture, MissingPicture)


def _sent_content(content: Content) -> SentContent:
    parts: list[tuple[int, Any]] = []
    for part in content.parts:
        if type(part) not in _PARTS:
            raise TypeError(f"{type(part).__name__} cannot be sent to another process")
        value = part if isinstance(part, str) else getattr(part, fields(part)[0].name)
        parts.append((_PARTS.index(type(part)), value))
    return SentContent(parts)


def _received_content(content: SentContent) -> Content:
    return Content.of([_PARTS[kind](value) for kind, value in content.parts])


log = logging.getLogger("maxsimd.fleet")

# The kind of an error that other parts of a request may share.
UNKNOWN = "unknown documents"
_KINDS: dict[str, type[Exception]] = {
    "invalid": InvalidRequestError,
    "full": QueueFullError,
    "too large": RequestTooLargeError,
    "timeout": RequestTimeoutError,
    UNKNOWN: UnknownDocumentsError,
    "failed": RequestFailedError,
    "not ready": EngineNotReadyError,
    "dead": EngineDeadError,
}
# A document or text as the engine's messages name it.
_DOCUMENT = re.compile(r"\b(documents|text_pairs|input|texts)\[(\d+)\]")


def as_failed(error: Exception) -> Failed:
    """An engine's error as data. Unexpected ones are logged here."""
    for kind, of_kind in _KINDS.items():
        if isinstance(error, of_kind):
            stated = {name: value for name, value in vars(error).items() if name in Failed.__struct_fields__}
            return Failed(kind=kind, message=str(error), **stated)
    log.exception("a request failed", exc_info=error)
    return Failed(kind="failed", message="the request failed inside of the engine; its log says why")


def as_error(failed: Failed) -> Exception:
    """The error as `Engine` raises it."""
    if failed.kind == "invalid":
        return InvalidRequestError(failed.message, failed.param)
    if failed.kind == "full":
        reason = cast("Refusal", failed.reason or "queue")
        return QueueFullError(failed.message, failed.retry_after, reason)
    return _KINDS.get(failed.kind, RequestFailedError)(failed.message)


def in_whole(message: str, indices: list[int]) -> str:
    """Renumbers documents in a message about a part, whose document i is `indices[i]` of the whole."""

    def whole(found: re.Match[str]) -> str:
        position = int(found[2])
        return f"{found[1]}[{indices[position]}]" if position < len(indices) else found[0]

    return _DOCUMENT.sub(whole, message, count=1)
