"""What callers ask of the engine and what they get back.

Plain data: texts in, numbers out. The engine turns a request into sequences; see `processors`.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypedDict, cast

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.media import (
    AnyPicture,
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

InputType = Literal["query", "document"]

# Numbers in an array that are as much work as one value by itself.
_NUMBERS_A_VALUE = 200
# What unpacking a picture may take, as characters of a text would.
_PICTURE = 1 << 20
# A query or a document to score: a text, an embedding, or content with pictures.
Item: TypeAlias = str | Vectors | Content

# The chunks of a text: the first character of each and the one after its last.
Chunks: TypeAlias = tuple[tuple[int, int], ...]

# The result of one sequence or pair: a score, or an embedding, float32 [tokens, dim] or [1, dim].
Value: TypeAlias = float | NDArray[np.float32]

# Called on the event loop with how many of a request's values are there so far, and how many there will be.
Progress: TypeAlias = Callable[[int, int], None]

# error: a request whose time is up fails; partial: it has the scores that there are by then.
OnTimeout = Literal["error", "partial"]

# fail: a document that cannot be read or run fails its request; report: its result says so.
OnError = Literal["fail", "report"]

# use: take documents from the cache, and cache new ones; bypass: neither; refresh: run all and cache them.
CacheMode = Literal["use", "bypass", "refresh"]


# interactive: someone waits for it; batch: it takes what is left.
PriorityClass = Literal["interactive", "batch"]
# A class, or a number, of which a lower one gets a larger share.
Priority: TypeAlias = int | PriorityClass

# What each class is as a number. Beside batches of 10,000 documents, requests of 1 to 100 documents take no
# longer at 4 than at any higher number, but at 2 up to 1.6 times as long and at 1 up to 8 times
# (`maxsimd bench beside-batches`). Whatever the number, the oldest request gets its part.
_NUMBERS = {"interactive": 0, "batch": 4}


def priority_number(priority: Priority) -> int:
    """A priority as a number. Raises InvalidRequestError for one that there is not."""
    number = _NUMBERS.get(priority) if isinstance(priority, str) else priority
    if number is None:
        raise InvalidRequestError(
            f"priority {priority!r} is not known; use interactive, batch or a number", "priority"
        )
    return number


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a request is run: whose share of the device it uses (`tenant`; a lower `priority` gets a larger
    share), within how many seconds (`timeout`) and what is done when they have passed (`on_timeout`), what
    is done about a part of it that fails (`on_error`), and who is called with its `progress`."""

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
    """Where a request's time went, in seconds: until its texts were being prepared and until its first step
    (`queue`), in tokenising and preparing its texts (`tokenise`), in steps (`model`), and of these in scoring
    (`score`)."""

    queue: float = 0.0
    tokenise: float = 0.0
    model: float = 0.0
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class Values:
    """What came of a request's sequences, by index: values, or None for those that were not run in time or
    that have an error."""

    values: list[Value | None]
    errors: Mapping[int, str]
    timings: Timings = Timings()

    @property
    def work(self) -> int:
        """How much work it is to make a result of these values, which may be arrays, in values."""
        numbers = sum(value.size if isinstance(value, np.ndarray) else 1 for value in self.values)
        return max(len(self.values), numbers // _NUMBERS_A_VALUE)

    def with_preparation(self, timings: Timings) -> "Values":
        """The same, with the time that preparing the request took."""
        spent = self.timings
        spent = Timings(spent.queue + timings.queue, timings.tokenise, spent.model, spent.score)
        return Values(self.values, self.errors, spent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """What to do with inputs that are too long for the model. The length that a checkpoint itself sets for
    queries or documents (ColBERT's) is how these are meant to be read: more than that is left out without a
    word, except by `windows`.

    `max_tokens` None makes an over-long input an error, -1 cuts it to the model's maximum and any other
    number cuts it to that many tokens, special tokens included. `side` says which end is cut off; None is
    the one that the checkpoint's tokenizer cuts. `max_query_tokens` and `max_document_tokens` cut the texts
    themselves, special tokens not counted. With `refuse` a text that is longer than any of these numbers is
    an error.

    With `windows` an over-long document is not cut but read through windows of as many tokens as fit, which
    share `window_overlap` with their neighbours (the engine's setting where None). Its score is the best
    window's, or MaxSim over the tokens of all windows.
    """

    max_tokens: int | None = None
    side: Literal["left", "right"] | None = None
    max_query_tokens: int | None = None
    max_document_tokens: int | None = None
    windows: bool = False
    window_overlap: int | None = None
    refuse: bool = False


REFUSE_LONG = Truncation()
CUT_LONG = Truncation(max_tokens=-1)
WINDOW_LONG = Truncation(max_tokens=-1, windows=True)

# What to do with inputs that are too long, in a word or in full.
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
    def size(self) -> int:
        """How many characters there are to read; each text counts as some more."""
        return _size(self.queries) + _size(self.documents)

    @property
    def reading(self) -> int:
        """How much there is to read in a thread, as `size` counts it."""
        return self.size + _unpacking((*self.queries, *self.documents))

    @property
    def num_texts(self) -> int:
        return len(self.queries) + len(self.documents)

    @property
    def query_texts(self) -> tuple[str, ...]:
        """The queries of a request to a model that takes no embeddings."""
        return cast("tuple[str, ...]", self.queries)

    @property
    def document_texts(self) -> tuple[str, ...]:
        """The documents of a request to a model that takes no embeddings."""
        return cast("tuple[str, ...]", self.documents)

    def query_of(self, document: int) -> int:
        return 0 if len(self.queries) == 1 else document

    def only(self, positions: Sequence[int]) -> "ScoreRequest":
        """Returns the request with some of its documents, and their queries."""
        documents = tuple(self.documents[i] for i in positions)
        if len(self.queries) == 1:
            return replace(self, documents=documents)
        return replace(self, documents=documents, queries=tuple(self.queries[i] for i in positions))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """Texts to embed, each to one vector (`embed`), one vector a token (`token_embed`), weights of words
    (`sparse_embed`) or to labels (`classify`), behind the prompt of `input_type` or the one named
    `prompt_name`. A text may come as token ids, special tokens included, which are run as they are; for a
    model that reads them there may be pictures. Texts that have more than `max_tokens` together are refused.
    Of one text with `chunks` each of these has a vector (late chunking). With `takes_cached` the token
    vectors of texts that are cached as documents, by the same `cache_owner`, are taken from there, in the
    precision that they have. What is made of the vectors afterwards costs `more_tokens`."""

    texts: tuple[str | tuple[int, ...] | Content, ...]
    task: Literal["embed", "token_embed", "sparse_embed", "classify"]
    input_type: InputType | None = None
    prompt_name: str | None = None
    truncation: Truncation = REFUSE_LONG
    max_tokens: int | None = None
    chunks: Chunks | None = None
    takes_cached: bool = False
    cache_owner: str = ""
    more_tokens: int = 0

    @property
    def size(self) -> int:
        """How many characters or token ids there are to read; each text counts as some more."""
        return _size(self.texts)

    @property
    def reading(self) -> int:
        """How much there is to read in a thread, as `size` counts it."""
        return self.size + _unpacking(self.texts)

    @property
    def num_texts(self) -> int:
        return len(self.texts)


def _unpacking(texts: Sequence[Item | tuple[int, ...]]) -> int:
    """One picture may take a thread as long as the largest text, during which it does nothing else."""
    return sum([_PICTURE for text in texts if isinstance(text, Content) and text.has_pictures])


def _size(texts: Sequence[Item | tuple[int, ...]]) -> int:
    """Vectors take so little that they count as nothing beside texts."""
    return sum([len(text) for text in texts if not isinstance(text, Vectors)]) + 64 * len(texts)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request: a query that is scored late counts once, a pair counts whole, and a document that
    a request has twice counts once. Those that were not run, because the documents' embeddings were cached or
    all pairs began with them, are also in `cached_tokens`. Of the `prompt_tokens` those of queries that are
    scored late are also in `query_tokens`."""

    prompt_tokens: int
    cached_tokens: int = 0
    cached_documents: int = 0
    query_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """One score a document, in input order; higher is more relevant. `truncated` counts the inputs that were
    cut, `truncated_queries` the queries among them. `unscored` are the documents that there was no time for,
    and `errors` says of others why they have no score; instead of one these have NaN. `explanations`,
    of those that have one, are there where they were asked for. The `raw_scores` are those before an
    activation or bounds that may make different ones alike; None where the scores are these."""

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
        """What documents are ranked by."""
        return self.scores if self.raw_scores is None else self.raw_scores


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """`document` is a text, or `Vectors` where an embedding was given in its place, or content with pictures.
    The `explanation` is there where it was asked for."""

    index: int
    score: float
    document: Item
    explanation: Explanation | None = None

    @property
    def text(self) -> str | None:
        return self.document if isinstance(self.document, str) else None


def rank(
    scores: Sequence[float],
    documents: Sequence[Item],
    top_n: int | None,
    threshold: float | None = None,
    by: Sequence[float] | None = None,
) -> list[RankedDocument]:
    """Ranks documents best first, ties in input order: the first `top_n`, or all for None or 0.

    They are ranked `by` these numbers if given, else by their scores. Documents whose score is NaN or below
    the `threshold` are left out."""
    keys = np.asarray(scores if by is None else by, dtype=np.float64)
    order = np.argsort(-keys, kind="stable").tolist()  # NaN last
    least = -math.inf if threshold is None else threshold
    scored = [i for i in order if scores[i] >= least]
    return [RankedDocument(i, scores[i], documents[i]) for i in scored[: top_n or None]]


@dataclass(frozen=True, slots=True)
class RerankResult:
    """Documents best first, ties by index; `truncated` counts the inputs that were cut. Left out are those
    that there was no time for (`unscored`), and those of which `errors` says why they have no score."""

    results: list[RankedDocument]
    usage: Usage
    truncated: int
    unscored: tuple[int, ...] = ()
    errors: Mapping[int, str] = field(default_factory=dict)
    timings: Timings = Timings()


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """One vector a text: float32 [texts, dim]. `truncated` counts the texts that were cut. Where a vector was
    made of a text's token vectors, `encoding` says how."""

    embeddings: NDArray[np.float32]
    usage: Usage
    truncated: int = 0
    timings: Timings = Timings()
    encoding: Muvera | None = None


@dataclass(frozen=True, slots=True)
class ClassifyResult:
    """One score a text and label: float32 [texts, labels], with the labels in the order of the columns.
    Probabilities, or logits where these were asked for. `truncated` counts the inputs that were cut."""

    scores: NDArray[np.float32]
    labels: tuple[str, ...]
    usage: Usage
    truncated: int = 0
    timings: Timings = Timings()


@dataclass(frozen=True, slots=True)
class TokenEmbedResult:
    """One matrix a text: float32 [tokens, dim] each. `truncated` counts the texts that were cut."""

    embeddings: list[NDArray[np.float32]]
    usage: Usage
    truncated: int = 0
    timings: Timings = Timings()


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """Weights of some words of a vocabulary: their token ids `indices`, int64 [n] and ascending, and the
    `values` float32 [n], none of which is 0."""

    indices: NDArray[np.int64]
    values: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SparseEmbedResult:
    """One sparse vector a text. `truncated` counts the texts that were cut."""

    embeddings: list[SparseVector]
    usage: Usage
    truncated: int = 0
    timings: Timings = Timings()


# A text, its embedding, or a picture: content with one, a file's bytes, or one that was opened with Pillow.
Scorable: TypeAlias = str | Embedding | Content | Picture | PictureFile | OpenImage
Scored: TypeAlias = Scorable | Sequence[Scorable]

_POLICIES = {"cut": CUT_LONG, "error": REFUSE_LONG, "window": WINDOW_LONG}


def as_texts(texts: str | Sequence[str], param: str) -> tuple[str, ...]:
    """One text or many as a tuple. Raises InvalidRequestError for none, or for anything but strings."""
    texts = (texts,) if isinstance(texts, str) else tuple(_in_order(texts, param))
    if not texts:
        raise InvalidRequestError(f"{param} is empty; give at least one text", param)
    if set(map(type, texts)) != {str}:  # else each of thousands of texts would be looked at in Python
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise InvalidRequestError(f"{param}[{i}] is not a string but {type(text).__name__}", param)
    return texts


def as_scored(items: Any, param: str, takes_vectors: bool, takes_pictures: bool) -> tuple[Item, ...]:
    """Texts, embeddings or pictures, one or many, as a tuple: an array of one or two dimensions is one
    embedding. Raises InvalidRequestError for none, for anything else, for embeddings unless the model
    `takes_vectors`, and for pictures unless it `takes_pictures`."""
    if isinstance(items, str | Vectors) or (_is_array(items) and items.ndim < 3) or _is_content(items):
        given: tuple[Any, ...] = (items,)
    else:
        given = tuple(items if _is_array(items) else _in_order(items, param))
    if not set(map(type, given)) - {str}:
        return as_texts(given, param)
    scored = tuple(
        Vectors(item) if _is_array(item) else as_content(item, f"{param}[{i}]", param, takes_pictures)
        for i, item in enumerate(given)
    )
    for i, item in enumerate(scored):
        if not isinstance(item, str | Vectors | Content):
            kind = type(item).__name__
            raise InvalidRequestError(
                f"{param}[{i}] is neither a string nor an array nor a picture but {kind}", param
            )
        if isinstance(item, QueryRows) and param == "documents":
            raise InvalidRequestError(f"{param}[{i}] is a query's embedding; give it as the query", param)
        if isinstance(item, Vectors) and not takes_vectors:
            raise InvalidRequestError(
                f"{param}[{i}] is an embedding, but this model reads query and document together; give texts",
                param,
            )
    return scored


def as_query(query: Any, takes_pictures: bool) -> tuple[Item, ...]:
    """One text or picture to encode, as a tuple. Raises InvalidRequestError for anything else."""
    queries = as_scored(query, "queries", takes_vectors=True, takes_pictures=takes_pictures)
    if len(queries) != 1:
        raise InvalidRequestError(f"give one query to encode, not {len(queries)}", "queries")
    if isinstance(queries[0], Vectors):
        raise InvalidRequestError("the query is an embedding already; give a text", "queries")
    return queries


def as_content(item: Any, where: str, param: str, takes_pictures: bool) -> Any:
    """A picture as content, content without pictures as its text, and anything else as it is. Raises
    InvalidRequestError for pictures unless the model `takes_pictures`."""
    if not _is_content(item):
        return item
    content = item if isinstance(item, Content) else Content.of([_as_picture(item)])
    if not content.pictures:
        return "\n".join(content.texts)
    if not takes_pictures:
        raise InvalidRequestError(f"{where} is a picture; this model reads only text", param)
    return content


def _is_content(item: Any) -> bool:
    if isinstance(item, str | list | tuple):
        return False
    return isinstance(item, Content | Picture | PictureFile) or is_pillow(item)


def _as_picture(item: Any) -> AnyPicture:
    return PillowPicture(item) if is_pillow(item) else cast("AnyPicture", item)


def _is_array(item: Any) -> bool:
    """Whether something is an array of numbers: an embedding, if its shape fits."""
    return isinstance(item, torch.Tensor) or (isinstance(item, np.ndarray) and item.dtype.kind not in "OSU")


def as_inputs(inputs: Any, takes_pictures: bool) -> tuple[str | tuple[int, ...] | Content, ...]:
    """Texts, lists of token ids or pictures, as a tuple. Raises InvalidRequestError for pictures unless the
    model `takes_pictures`."""
    given = [inputs] if isinstance(inputs, str) or _is_content(inputs) else _in_order(inputs, "input")
    contents = [as_content(item, f"input[{i}]", "input", takes_pictures) for i, item in enumerate(given)]
    each = tuple(item if isinstance(item, str | Content) else tuple(item) for item in contents)
    if not each:
        raise InvalidRequestError("input is empty; give at least one text", "input")
    return each


def _in_order(items: Any, param: str) -> Any:
    """A list or something like one. Raises InvalidRequestError for what has no order, or would give something
    else than its items: a table gives the names of its columns."""
    is_column = getattr(items, "ndim", None) == 1  # of numpy, pandas or torch
    if is_column or (isinstance(items, Sequence | Iterator) and not isinstance(items, bytes)):
        return items
    raise InvalidRequestError(
        f"{param} must be a string or a list of strings, not {type(items).__name__}; give a list, such as "
        "one column of a table",
        param,
    )


def as_truncation(policy: LongInputPolicy) -> Truncation:
    """What to do with inputs that are too long. Raises InvalidRequestError for a word that is not known."""
    found = policy if isinstance(policy, Truncation) else _POLICIES.get(policy)
    if found is None:
        raise InvalidRequestError(
            f"truncation {policy!r} is not known; use cut, error, window or a Truncation", "truncation"
        )
    return found


def check_options(method: str, options: Mapping[str, Any]) -> None:
    """Raises TypeError for an argument that `Engine.score` does not have, where a method passes its on."""
    if unknown := options.keys() - ScoreOptions.__annotations__.keys():
        raise TypeError(f"{method}() has no argument {' or '.join(sorted(unknown))}")


def check_paired(queries: Sequence[object], documents: Sequence[object]) -> None:
    """Refuses queries and documents in a shape that cannot be scored: it is 1:1, 1:N or N:N."""
    if len(queries) not in (1, len(documents)):
        raise InvalidRequestError(
            "Input lengths must be either 1:1, 1:N or N:N; "
            f"there are {len(queries)} queries and {len(documents)} documents",
            "documents",
        )


def check_dimensions(dimensions: int | None, dim: int) -> None:
    """Refuses more embedding columns than the model has, and fewer than one."""
    if dimensions is not None and not 1 <= dimensions <= dim:
        raise InvalidRequestError(f"dimensions must be from 1 to {dim}, not {dimensions}", "dimensions")


def check_task(task: str, tasks: Collection[str]) -> None:
    """Raises InvalidRequestError for a task that a model cannot do."""
    if task not in tasks:
        raise InvalidRequestError(f"this model cannot {task}; it can {' and '.join(sorted(tasks))}", "task")
