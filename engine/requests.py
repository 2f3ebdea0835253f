"""Requests to the engine, their results, and the checks of what callers pass in. Errors name the argument."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypedDict, cast, get_args, overload

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine import display
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.media import (
    Content,
    OpenImage,
    Picture,
    PictureFile,
    PillowPicture,
    is_pillow,
)
from maxsimd.pooling.muvera import Muvera
from maxsimd.pooling.query_rows import QueryRows
from maxsimd.pooling.vectors import Embedding, Vectors
from maxsimd.scheduler import Share, share_of

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from rich.table import Table

InputType = Literal["query", "document"]

# This many numbers in an array are as much work as one value.
_NUMBERS_A_VALUE = 200
# The work of unpacking a picture, and about that of reading a text named by its digest, in characters.
_PICTURE, _NAMED_TEXT = 1 << 20, 1 << 12


@dataclass(frozen=True, slots=True)
class DocumentDigest:
    """Stands for a document that the engine has: the SHA-256 of its text in UTF-8, 32 bytes.

    `Engine.add_documents` makes texts known by their digests. A request with an unknown one raises
    UnknownDocumentsError."""

    value: bytes

    def __post_init__(self) -> None:
        if len(self.value) != sha256().digest_size:
            raise ValueError(f"a digest has 32 bytes, not {len(self.value)}")

    @classmethod
    def of(cls, text: str) -> Self:
        return cls(digest_of(text))

    def __str__(self) -> str:
        return self.value.hex()


def digest_of(text: str) -> bytes:
    """The SHA-256 of a text in UTF-8, which any client can compute."""
    return sha256(text.encode("utf-8", "surrogatepass")).digest()


# A query or document: a text, an embedding, content with pictures, or a document's digest.
Item: TypeAlias = str | Vectors | Content | DocumentDigest

# Token ids: a caller's, or an array of ids that tokens have.
Ids: TypeAlias = tuple[int, ...] | NDArray[np.int32]

# The chunks of a text: start and end of each in characters.
Chunks: TypeAlias = tuple[tuple[int, int], ...]

# The result of one sequence or pair: a score, or an embedding, float32 [tokens, dim] or [1, dim].
Value: TypeAlias = float | NDArray[np.float32]

# Called on the event loop with the number of values so far and in all.
Progress: TypeAlias = Callable[[int, int], None]

# error: a request that times out fails; partial: it returns the scores so far.
OnTimeout = Literal["error", "partial"]

# fail: a document that cannot be read or run fails the request; report: the result says so.
OnError = Literal["fail", "report"]

# use: read documents from the cache and cache new ones; bypass: neither; refresh: run all and cache them.
CacheMode = Literal["use", "bypass", "refresh"]

# Rules by which tokens become entities, as transformers' pipeline names them.
AggregationStrategy = Literal["none", "simple", "first", "average", "max"]


# interactive: someone waits for it; batch: it uses the rest.
PriorityClass = Literal["interactive", "batch"]
# A class name or an integer. Lower values get a larger share.
Priority: TypeAlias = int | PriorityClass

# The number of each class. Beside batches of 10,000 documents at 4, requests of 1 to 100 documents take no
# longer than at higher numbers, but at 2 up to 1.6 times and at 1 up to 8 times as long (`maxsimd bench
# beside-batches`).
_NUMBERS = {"interactive": 0, "batch": 4}


def priority_number(priority: Priority) -> int:
    """A priority as a number. Raises InvalidRequestError for unknown ones."""
    number = _NUMBERS.get(priority) if isinstance(priority, str) else priority
    if number is None:
        raise InvalidRequestError(
            f"priority {priority!r} is not known; use interactive, batch or a number", "priority"
        )
    return number


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a request's run: its share of the device (`tenant`, and `priority`, where lower gets more),
    its `timeout` in seconds, and what happens on timeouts, errors and progress."""

    priority: Priority = 0
    tenant: str = ""
    timeout: float | None = None
    progress: Progress | None = None
    on_timeout: OnTimeout = "error"
    on_error: OnError = "fail"

    @property
    def share(self) -> Share:
        return share_of(self.tenant, priority_number(self.priority))


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of a request: waiting to be prepared and for its first step (`queue`), tokenizing and preparing
    (`tokenise`), in steps (`model`), and of these scoring (`score`). `device` is its share of the steps that
    it was part of, by tokens."""

    queue: float = 0.0
    tokenise: float = 0.0
    model: float = 0.0
    score: float = 0.0
    device: float = 0.0

    def __add__(self, other: "Timings") -> "Timings":
        return Timings(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @property
    def whole(self) -> float:
        return self.queue + self.tokenise + self.model


@dataclass(frozen=True, slots=True)
class Values:
    """The values of a request's sequences by index; None for those that timed out or have an error."""

    values: list[Value | None]
    errors: Mapping[int, str]
    timings: Timings = Timings()

    @property
    def work(self) -> int:
        """The work of making a result from these values, counted in values."""
        numbers = sum(value.size if isinstance(value, np.ndarray) else 1 for value in self.values)
        return max(len(self.values), numbers // _NUMBERS_A_VALUE)

    def with_preparation(self, timings: Timings) -> "Values":
        """The same values with the time of preparing the request."""
        queue = self.timings.queue + timings.queue
        return replace(self, timings=replace(self.timings, queue=queue, tokenise=timings.tokenise))


@dataclass(frozen=True, slots=True)
class OptionNames:
    """The names that errors have for a caller's options. `allow` is the one that lets texts be truncated."""

    allow: str = 'truncation="cut"'
    max_tokens: str = "max_tokens"
    max_query_tokens: str = "max_query_tokens"
    max_document_tokens: str = "max_document_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """The policy for inputs that are too long for the model. Lengths that the checkpoint itself sets for
    queries or documents (ColBERT's) always truncate silently, except with `windows`.

    With `max_tokens` None a longer input is an error; -1 truncates to the model's maximum, any other number
    to that many tokens, special tokens included. `side` is the end that is cut off, None the one of the
    checkpoint's tokenizer. `max_query_tokens` and `max_document_tokens` truncate the texts themselves,
    special tokens not counted. With `refuse` a text longer than any of these numbers is an error.

    With `windows` a longer document is read through windows of as many tokens as fit, which overlap by
    `window_overlap` tokens (None: the engine's setting). Its score is the best window's, or MaxSim over the
    tokens of all windows. Errors call options by their `option_names`.
    """

    max_tokens: int | None = None
    side: Literal["left", "right"] | None = None
    max_query_tokens: int | None = None
    max_document_tokens: int | None = None
    windows: bool = False
    window_overlap: int | None = None
    refuse: bool = False
    option_names: OptionNames = field(default=OptionNames(), compare=False, repr=False)


REFUSE_LONG = Truncation()
CUT_LONG = Truncation(max_tokens=-1)
WINDOW_LONG = Truncation(max_tokens=-1, windows=True)

# The policy for inputs that are too long, as a word or in full.
LongInputPolicy: TypeAlias = Truncation | Literal["cut", "error", "window"]


class ScoreOptions(TypedDict, total=False):
    """The options of `Engine.score`."""

    truncation: LongInputPolicy
    use_activation: bool
    normalize: bool
    instruction: str | None
    cache: CacheMode
    priority: Priority
    tenant: str
    timeout: float | None
    on_timeout: OnTimeout
    on_error: OnError
    progress: Progress | None
    explain: bool | Literal["maps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Query i is scored against document i; one query is scored against every document. Either may come as
    its embedding, or have pictures. At most `explain` of the documents will have their scores explained, with
    `maps` also by maps of their pictures. Only requests with the same `cache_owner` share cached entries.
    With `skip_unreadable` documents that cannot be read have errors, and the others scores."""

    queries: tuple[Item, ...]
    documents: tuple[Item, ...]
    truncation: Truncation = REFUSE_LONG
    instruction: str | None = None
    use_activation: bool = True
    normalize: bool = False
    cache: CacheMode = "use"
    cache_owner: str = ""
    explain: int = 0
    maps: bool = False
    skip_unreadable: bool = False

    @property
    def num_documents(self) -> int:
        return len(self.documents)

    @property
    def has_vectors(self) -> bool:
        """Whether documents came as embeddings."""
        return any(issubclass(kind, Vectors) for kind in {*map(type, self.documents)})

    @property
    def has_digests(self) -> bool:
        """Whether documents came as digests."""
        return DocumentDigest in {*map(type, self.documents)}

    @property
    def num_digests(self) -> int:
        return sum(isinstance(each, DocumentDigest) for each in self.documents) if self.has_digests else 0

    @property
    def size(self) -> int:
        """The characters to read; each text counts as some more."""
        return _size(self.queries) + _size(self.documents)

    @property
    def reading(self) -> int:
        """The amount to read in a thread, as `size` counts it."""
        instructions = len(self.instruction or "") * len(self.queries)
        return self.size + instructions + _unpacking((*self.queries, *self.documents))

    @property
    def num_texts(self) -> int:
        return len(self.queries) + len(self.documents)

    @property
    def query_texts(self) -> tuple[str, ...]:
        """The queries, for models that take no embeddings."""
        return cast("tuple[str, ...]", self.queries)

    @property
    def document_texts(self) -> tuple[str, ...]:
        """The documents, for models that take no embeddings."""
        return cast("tuple[str, ...]", self.documents)

    def query_of(self, document: int) -> int:
        return 0 if len(self.queries) == 1 else document

    def only(self, positions: Sequence[int]) -> "ScoreRequest":
        documents, queries = tuple(self.documents[i] for i in positions), self.queries
        if len(queries) > 1:
            queries = tuple(queries[i] for i in positions)
        return replace(self, documents=documents, queries=queries)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """Texts to turn into one vector (`embed`), one vector per token (`token_embed`), weights of words
    (`sparse_embed`), labels (`classify`) or labels of tokens (`token_classify`), behind the prompt of
    `input_type` or the one named `prompt_name`.

    A text may also be token ids, special tokens included, or have pictures. Texts with more than `max_tokens`
    together are refused. With `chunks` one text has a vector per chunk (late chunking). With `takes_cached`
    token vectors of documents that the same `cache_owner` has cached are read from the cache, in its
    precision. Later work on the vectors costs `more_tokens`. With a `stride`, long texts to label are read in
    windows that share this many tokens."""

    texts: tuple[str | tuple[int, ...] | Content, ...]
    task: Literal["embed", "token_embed", "sparse_embed", "classify", "token_classify"]
    input_type: InputType | None = None
    prompt_name: str | None = None
    truncation: Truncation = REFUSE_LONG
    max_tokens: int | None = None
    chunks: Chunks | None = None
    takes_cached: bool = False
    cache_owner: str = ""
    more_tokens: int = 0
    stride: int | None = None

    @property
    def size(self) -> int:
        """The characters or token ids to read; each text counts as some more."""
        return _size(self.texts)

    @property
    def reading(self) -> int:
        """The amount to read in a thread, as `size` counts it."""
        return self.size + _unpacking(self.texts)

    @property
    def num_texts(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, slots=True)
class LabelRequest:
    """Prompts of a language model, each of the query and a document, all texts or all token ids: a caller's,
    or arrays of known ones. The query comes first unless `document_first`. A prompt is one text between
    special tokens, or with `tokenized_apart` the tokens of the query, with those around it, beside the
    document's; `add_special_tokens` says whether there are special tokens."""

    query: str | Ids
    documents: tuple[str, ...] | tuple[Ids, ...]
    document_first: bool = False
    tokenized_apart: bool = False
    add_special_tokens: bool = True

    @property
    def size(self) -> int:
        """The characters or token ids to run; each text counts as some more. A shared query runs once."""
        queries = len(self.documents) if self.document_first else 1
        return _size(self.documents) + len(self.query) * queries

    @property
    def reading(self) -> int:
        """The amount to read in a thread, as `size` counts it."""
        return self.size

    @property
    def num_texts(self) -> int:
        return len(self.documents) + 1


def are_texts(items: Sequence[Any]) -> bool:
    """Whether all items are strings, without a look at each of thousands in Python."""
    return set(map(type, items)) == {str}


def _unpacking(texts: Sequence[Item | tuple[int, ...]]) -> int:
    """The work of unpacking pictures, where one may take as long as the largest text, and of finding texts
    by their digests."""
    if are_texts(texts):
        return 0
    pictures = sum([_PICTURE for text in texts if isinstance(text, Content) and text.has_pictures])
    return pictures + sum([_NAMED_TEXT for text in texts if isinstance(text, DocumentDigest)])


def _size(texts: Sequence[Item | Ids]) -> int:
    """The size of texts. Vectors and digests take so little time that they do not count."""
    if are_texts(texts):
        return sum(map(len, cast("Sequence[str]", texts))) + 64 * len(texts)
    return sum([len(text) for text in texts if not isinstance(text, Vectors | DocumentDigest)]) + 64 * len(
        texts
    )


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of a request: pairs count whole, and a late-interaction query or a repeated document counts
    once. `cached_tokens` of them did not run, because they were cached or all pairs start with them.
    `query_tokens` are those of late-interaction queries."""

    prompt_tokens: int
    cached_tokens: int = 0
    cached_documents: int = 0
    query_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """One score per document, in input order; higher is more relevant. `truncated` counts the truncated
    inputs, `truncated_queries` the queries among them. Documents without a score have NaN: `unscored` timed
    out, and `errors` has the reasons of others. `raw_scores` are those before an activation or bounds that
    may make different scores equal; None if there is neither."""

    scores: list[float]
    usage: Usage
    truncated: int
    unscored: tuple[int, ...] = ()
    errors: Mapping[int, str] = field(default_factory=dict)
    timings: Timings = Timings()
    explanations: Mapping[int, Explanation] = field(default_factory=dict)
    truncated_queries: int = 0
    raw_scores: list[float] | None = None

    @property
    def ranking_scores(self) -> list[float]:
        """The scores that rank the documents."""
        return self.scores if self.raw_scores is None else self.raw_scores


@dataclass(frozen=True, slots=True)
class AddedDocuments:
    """Documents that may be named by their `digests` from now on, in input order. `not_kept` has the indexes
    of those that are unknown all the same: too large for the cache, or beyond what could be written.
    `truncated` counts the truncated documents."""

    digests: list[DocumentDigest]
    usage: Usage
    truncated: int = 0
    not_kept: tuple[int, ...] = ()
    timings: Timings = Timings()


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document with its score. `document` is as it was given: a text, `Vectors`, content with pictures, or
    a `DocumentDigest`."""

    index: int
    score: float
    document: Item
    explanation: Explanation | None = None

    @property
    def text(self) -> str | None:
        return self.document if isinstance(self.document, str) else None

    @property
    def shown(self) -> str:
        """The document in words."""
        if isinstance(self.document, str):
            return self.document
        if isinstance(self.document, Vectors):
            return f"[{len(self.document)} vectors]"
        if isinstance(self.document, DocumentDigest):
            return str(self.document)
        return " ".join([part if isinstance(part, str) else "[picture]" for part in self.document.parts])


def rank(
    scores: Sequence[float],
    documents: Sequence[Item],
    top_n: int | None,
    threshold: float | None = None,
    by: Sequence[float] | None = None,
) -> list[RankedDocument]:
    """Ranks documents best first, ties in input order: the first `top_n`, or all for None or 0. The order is
    `by` these numbers if given. Documents whose score is NaN or below the `threshold` are left out."""
    keys = np.asarray(scores if by is None else by, dtype=np.float64)
    order = np.argsort(-keys, kind="stable").tolist()  # NaN last
    least = -math.inf if threshold is None else threshold
    scored = [i for i in order if scores[i] >= least]
    return [RankedDocument(i, scores[i], documents[i]) for i in scored[: top_n or None]]


@dataclass(frozen=True, slots=True)
class RerankResult:
    """Documents best first, ties by index, without those that timed out (`unscored`) or have `errors`.
    `truncated` counts the truncated inputs.

    It is a sequence of its `results`: `for document in result`, `len(result)`, `result[0]`. A slice, as
    `result[:3]`, is a result of these documents alone. Notebooks and rich show it as a table."""

    results: list[RankedDocument]
    usage: Usage
    truncated: int
    unscored: tuple[int, ...] = ()
    errors: Mapping[int, str] = field(default_factory=dict)
    timings: Timings = Timings()

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[RankedDocument]:
        return iter(self.results)

    @overload
    def __getitem__(self, key: int) -> RankedDocument: ...
    @overload
    def __getitem__(self, key: slice) -> "RerankResult": ...
    def __getitem__(self, key: int | slice) -> "RankedDocument | RerankResult":
        return replace(self, results=self.results[key]) if isinstance(key, slice) else self.results[key]

    def to_pandas(self) -> "pandas.DataFrame":
        """Makes a table of pandas with a row a document, best first, and the columns `index`, `score` and
        `document`. Raises ImportError if pandas is not installed."""
        frame: pandas.DataFrame = display.library("pandas", "to_pandas()").DataFrame(
            {
                "index": np.array([one.index for one in self.results], dtype=np.int64),
                "score": np.array([one.score for one in self.results], dtype=np.float64),
                "document": [one.document for one in self.results],
            }
        )
        return frame

    def plot(self, rank: int = 0, ax: "Axes | None" = None) -> "Axes":
        """Draws the tokens' similarities of one document, as `Explanation.plot` does.

        Args:
            rank: Position of the document in this result. Default: 0, the best.
            ax: matplotlib's axes to draw on. None makes a new figure. Default: None.
        """
        one = self.results[rank]
        explanation = Explanation(0, False, False) if one.explanation is None else one.explanation
        return explanation.plot(ax, title=f"document {one.index}, score {one.score:.4f}")

    def _repr_html_(self) -> str:
        return self._table().as_html()

    def __rich__(self) -> "Table":
        return self._table().as_rich()

    def _table(self) -> display.TextTable:
        rows = [
            (str(place), f"{one.score:.4f}", str(one.index), one.shown)
            for place, one in enumerate(self.results, 1)
        ]
        without = {"timed out": len(self.unscored), "failed": len(self.errors)}
        caption = ", ".join(f"{number} {why}" for why, number in without.items() if number)
        return display.TextTable(("rank", "score", "index", "document"), rows, caption)


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """One vector per text: float32 [texts, dim]. `truncated` counts texts, `encoding` made them."""

    embeddings: NDArray[np.float32]
    usage: Usage
    truncated: int = 0
    timings: Timings = Timings()
    encoding: Muvera | None = None


@dataclass(frozen=True, slots=True)
class ClassifyResult:
    """One score per text and label, float32 [texts, labels] in the order of `labels`: probabilities, or
    logits if requested. `truncated` counts the truncated inputs."""

    scores: NDArray[np.float32]
    labels: tuple[str, ...]
    usage: Usage
    truncated: int = 0
    timings: Timings = Timings()


@dataclass(frozen=True, slots=True)
class LabelScores:
    """The probability of each label behind each prompt, float32 [documents, labels]. `labels` are the token
    ids."""

    scores: NDArray[np.float32]
    labels: tuple[int, ...]
    usage: Usage
    timings: Timings = Timings()

    @property
    def truncated(self) -> int:
        """The number of truncated inputs: 0, because prompts that are too long are refused."""
        return 0


@dataclass(frozen=True, slots=True)
class TokenEntity:
    """A token, word or group of words with its `label` and probability. `start` is its first character in the
    text, `end` the one after its last, and `word` how the tokenizer writes it. Tokens have the `index` of
    their row."""

    label: str
    score: float
    word: str
    start: int
    end: int
    index: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogits:
    """The `logits` of a text's tokens, special ones included, float32 [tokens, labels], with their `ids`,
    int32 [tokens], and characters `spans`, int32 [tokens, 2], which are -1 for special tokens."""

    logits: NDArray[np.float32]
    ids: NDArray[np.int32]
    spans: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TokenClassifyResult:
    """The entities of each text, in the order of the text. `truncated` counts the truncated texts. Requests
    for `logits` get those of each text in place of entities."""

    entities: list[list[TokenEntity]]
    labels: tuple[str, ...]
    usage: Usage
    truncated: int = 0
    timings: Timings = Timings()
    logits: list[TokenLogits] | None = None


@dataclass(frozen=True, slots=True)
class TokenEmbedResult:
    """One matrix per text: float32 [tokens, dim] each. `truncated` counts the truncated texts. `tokens` has a
    string per row of each matrix, as the vocabulary writes it; None if not asked for, and for models whose
    vectors are merged (token pooling)."""

    embeddings: list[NDArray[np.float32]]
    usage: Usage
    truncated: int = 0
    timings: Timings = Timings()
    tokens: list[list[str]] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedText:
    """The tokens of a text: `ids`, int32 [tokens], and `tokens`, their strings as the vocabulary writes them.
    `truncated` says whether there are more than the model reads, special tokens included: `embed` and
    `score` then truncate it."""

    ids: NDArray[np.int32]
    tokens: list[str]
    truncated: bool

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """Weights of words: ascending token ids `indices`, int64 [n], and `values`, float32 [n] without zeros."""

    indices: NDArray[np.int64]
    values: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SparseEmbedResult:
    """One sparse vector per text. `truncated` counts the truncated texts."""

    embeddings: list[SparseVector]
    usage: Usage
    truncated: int = 0
    timings: Timings = Timings()


# A text, its embedding, or a picture: content with one, a file's bytes, or one opened with Pillow.
Scorable: TypeAlias = str | Embedding | Content | Picture | PictureFile | OpenImage | DocumentDigest
Scored: TypeAlias = Scorable | Sequence[Scorable]

_POLICIES = {"cut": CUT_LONG, "error": REFUSE_LONG, "window": WINDOW_LONG}


def as_texts(texts: str | Sequence[str], param: str) -> tuple[str, ...]:
    """One text or many as a tuple. Raises InvalidRequestError for none, or for anything but strings."""
    texts = (texts,) if isinstance(texts, str) else tuple(_in_order(texts, param))
    if not texts:
        raise InvalidRequestError(f"{param} is empty; give at least one text", param)
    if not are_texts(texts):
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise InvalidRequestError(f"{param}[{i}] is not a string but {type(text).__name__}", param)
    return texts


def as_scored(items: Any, param: str, takes_vectors: bool, takes_pictures: bool) -> tuple[Item, ...]:
    """Texts, embeddings or pictures, one or many, as a tuple. An array of one or two dimensions is one
    embedding. Raises InvalidRequestError for none, or for anything that the model does not take."""
    is_one = isinstance(items, str | Vectors | DocumentDigest) or _is_content(items)
    if is_one or (_is_array(items) and items.ndim < 3):
        given: tuple[Any, ...] = (items,)
    else:
        given = tuple(items if _is_array(items) else _in_order(items, param))
    kinds = {*map(type, given)}
    if kinds <= {str}:
        return as_texts(given, param)
    known = {str, Vectors} if takes_vectors else {str}
    if kinds <= (known | {DocumentDigest} if param == "documents" else known):
        return given
    return tuple([_as_item(item, i, param, takes_vectors, takes_pictures) for i, item in enumerate(given)])


def _as_item(item: Any, i: int, param: str, takes_vectors: bool, takes_pictures: bool) -> Item:
    if isinstance(item, str):
        return item
    if isinstance(item, DocumentDigest):
        if param != "documents":
            raise InvalidRequestError(f"{param}[{i}] is a digest, which only documents may be", param)
        return item
    if not isinstance(item, Vectors | Content) and _is_array(item):
        item = Vectors(item)
    if not isinstance(item, Vectors):
        content = as_content(item, i, param, takes_pictures)
        if not isinstance(content, str | Content):
            kind = type(content).__name__
            raise InvalidRequestError(
                f"{param}[{i}] is neither a string nor an array nor a picture but {kind}", param
            )
        return content
    if isinstance(item, QueryRows) and param == "documents":
        raise InvalidRequestError(f"{param}[{i}] is a query's embedding; give it as the query", param)
    if not takes_vectors:
        raise InvalidRequestError(
            f"{param}[{i}] is an embedding, but this model reads query and document together; give texts",
            param,
        )
    return item


def as_query(query: Any, takes_pictures: bool) -> tuple[Item, ...]:
    """One text or picture to encode, as a tuple. Raises InvalidRequestError for anything else."""
    queries = as_scored(query, "queries", takes_vectors=True, takes_pictures=takes_pictures)
    if len(queries) != 1:
        raise InvalidRequestError(f"give one query to encode, not {len(queries)}", "queries")
    if isinstance(queries[0], Vectors):
        raise InvalidRequestError("the query is an embedding already; give a text", "queries")
    return queries


def as_content(item: Any, i: int, param: str, takes_pictures: bool) -> Any:
    """Entry `i` of `param`: a picture as content, content without pictures as text, and anything else
    unchanged. Raises InvalidRequestError for pictures unless the model `takes_pictures`."""
    if not _is_content(item):
        return item
    content = item
    if not isinstance(item, Content):
        content = Content.of([PillowPicture(item) if is_pillow(item) else item])
    if not content.has_pictures:
        return "\n".join(content.texts)
    if not takes_pictures:
        raise InvalidRequestError(f"{param}[{i}] is a picture; this model reads only text", param)
    return content


def _is_content(item: Any) -> bool:
    if isinstance(item, str | list | tuple):
        return False
    return isinstance(item, Content | Picture | PictureFile) or is_pillow(item)


def _is_array(item: Any) -> bool:
    """Whether something is an array of numbers: an embedding, if its shape fits."""
    return isinstance(item, torch.Tensor) or (isinstance(item, np.ndarray) and item.dtype.kind not in "OSU")


def as_inputs(inputs: Any, takes_pictures: bool) -> tuple[str | tuple[int, ...] | Content, ...]:
    """Texts, lists of token ids or pictures, as a tuple. Raises InvalidRequestError for none or anything
    else, and for pictures unless the model `takes_pictures`."""
    given = [inputs] if isinstance(inputs, str) or _is_content(inputs) else [*_in_order(inputs, "input")]
    if not given:
        raise InvalidRequestError("input is empty; give at least one text", "input")
    if are_texts(given):
        return tuple(given)
    contents = [as_content(item, i, "input", takes_pictures) for i, item in enumerate(given)]
    return tuple(
        [item if isinstance(item, str | Content) else _as_ids(item, i) for i, item in enumerate(contents)]
    )


def _as_ids(item: Any, i: int) -> tuple[int, ...]:
    if (ids := _ids_in(item)) is not None:
        return ids
    kind = type(item).__name__
    raise InvalidRequestError(f"input[{i}] is neither text nor picture nor token ids but {kind}", "input")


def _ids_in(item: Any) -> tuple[int, ...] | None:
    """A list of integers as a tuple; None for anything else."""
    given = item.tolist() if _is_array(item) else item
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | bytearray):
        ids = tuple(given)
        if all(issubclass(kind, Integral) for kind in {*map(type, ids)}):
            return ids
    return None


def as_prompts(
    query: Any, documents: Any
) -> tuple[str | tuple[int, ...], tuple[str, ...] | tuple[tuple[int, ...], ...]]:
    """A query and documents that are all texts, or all token ids. Raises InvalidRequestError for others."""
    if isinstance(query, str):
        return query, as_texts(documents, "documents")
    ids = _ids_in(query)
    if ids is None:
        raise InvalidRequestError(f"query is neither text nor token ids but {type(query).__name__}", "query")
    found = [_ids_in(document) for document in _in_order(documents, "documents")]
    if not found:
        raise InvalidRequestError("documents is empty; give at least one", "documents")
    if None in found:
        raise InvalidRequestError(
            f"documents[{found.index(None)}] must be token ids, as the query is; give texts in both, or ids",
            "documents",
        )
    return ids, tuple(each for each in found if each is not None)


def _in_order(items: Any, param: str) -> Any:
    """A list or similar. Refuses unordered collections, and tables, which iterate over names of columns."""
    is_column = getattr(items, "ndim", None) == 1  # of numpy, pandas or torch
    if is_column or (isinstance(items, Sequence | Iterator) and not isinstance(items, bytes)):
        return items
    raise InvalidRequestError(
        f"{param} must be a string or a list of strings, not {type(items).__name__}; give a list, such as "
        "one column of a table",
        param,
    )


def as_truncation(policy: LongInputPolicy) -> Truncation:
    """The policy for inputs that are too long. Raises InvalidRequestError for unknown words."""
    found = policy if isinstance(policy, Truncation) else _POLICIES.get(policy)
    if found is None:
        raise InvalidRequestError(
            f"truncation {policy!r} is not known; use cut, error, window or a Truncation", "truncation"
        )
    for name in ("max_query_tokens", "max_document_tokens", "window_overlap"):
        if (number := getattr(found, name)) is not None and number < 0:
            raise InvalidRequestError(f"{name} must not be negative, not {number}; leave it out", name)
    return found


def check_options(method: str, options: Mapping[str, Any]) -> None:
    """Raises TypeError for options that `Engine.score` does not have."""
    if unknown := options.keys() - ScoreOptions.__annotations__.keys():
        raise TypeError(f"{method}() has no argument {' or '.join(sorted(unknown))}")


def check_paired(queries: Sequence[object], documents: Sequence[object]) -> None:
    """Raises InvalidRequestError unless there are 1:1, 1:N or N:N queries and documents."""
    if len(queries) not in (1, len(documents)):
        raise InvalidRequestError(
            "Input lengths must be either 1:1, 1:N or N:N; "
            f"there are {len(queries)} queries and {len(documents)} documents",
            "documents",
        )


def check_dimensions(dimensions: int | None, dim: int) -> None:
    """Raises InvalidRequestError for more columns than the model has, or fewer than one."""
    if dimensions is not None and not 1 <= dimensions <= dim:
        raise InvalidRequestError(f"dimensions must be from 1 to {dim}, not {dimensions}", "dimensions")


def as_labels(labels: Sequence[str]) -> frozenset[str]:
    """Names of labels as a set. Raises InvalidRequestError for anything but a list of strings."""
    if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
        raise InvalidRequestError("ignore_labels must be a list of strings", "ignore_labels")
    return frozenset(labels)


def check_strategy(strategy: str, stride: int | None, return_logits: bool) -> None:
    """Raises InvalidRequestError for an unknown strategy, for a stride without entities to join, and for
    logits of joined tokens."""
    known = get_args(AggregationStrategy)
    if strategy not in known:
        raise InvalidRequestError(
            f"aggregation_strategy {strategy!r} is not known; use {', '.join(known)}", "aggregation_strategy"
        )
    if return_logits and strategy != "none":
        raise InvalidRequestError(
            "return_logits gives tokens, and aggregation_strategy joins them; leave out one", "return_logits"
        )
    if stride is not None and strategy == "none":
        raise InvalidRequestError(
            "stride joins the entities of several windows, and tokens have no entities; leave it out, or set "
            "aggregation_strategy to simple, first, average or max",
            "stride",
        )


def check_task(task: str, tasks: Collection[str]) -> None:
    """Raises InvalidRequestError for a task that a model cannot do."""
    if task not in tasks:
        raise InvalidRequestError(f"this model cannot {task}; it can {' and '.join(sorted(tasks))}", "task")
