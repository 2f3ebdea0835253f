"""A score request over a fleet: how it may be split, and from the answers of its parts to one result."""

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from maxsimd.api.fleet.failures import in_whole
from maxsimd.api.fleet.items import sent_items
from maxsimd.api.fleet.messages import Answer, Arrived, Run, Score, Scored
from maxsimd.api.fleet.query import SharedQuery
from maxsimd.api.fleet.spread import Job, estimated_tokens
from maxsimd.engine.config import ScoreType
from maxsimd.engine.device.facts import ModelFacts
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.media import AnyPicture, Content, EncodedPicture, PictureFile
from maxsimd.engine.requests import Item, ScoreOptions, ScoreResult, Timings, Usage, as_scored, as_truncation
from maxsimd.pooling.vectors import Vectors
from maxsimd.scheduler.fleet import Merge, Split, digest_of

# What a picture is by estimate, in characters.
_PICTURE = 4_096
# Special tokens and prompts around a text are at most as many.
MOST_AROUND = 1_024
# Called with the indices of documents, their scores, and how some of them came to theirs.
NewScores = Callable[[list[int], list[float], Mapping[int, Explanation]], None]


class ScoreJob:
    """The queries and documents of one request, and what is known of their scores so far."""

    def __init__(self, facts: ModelFacts, queries: Any, documents: Any, options: ScoreOptions) -> None:
        """Raises InvalidRequestError for what an engine would refuse at once."""
        self._facts = facts
        takes_vectors = facts.score_type not in (ScoreType.CROSS_ENCODER, ScoreType.LISTWISE)
        self.documents = as_scored(documents, "documents", takes_vectors, facts.reads_pictures)
        self.queries = as_scored(queries, "queries", takes_vectors, facts.reads_pictures)
        self._options = options
        self._query: SharedQuery | None = None
        if self.split is Split.BY_OWNER and not isinstance(self.queries[0], Vectors):
            self._query = SharedQuery(self.queries[0], size_of(self.queries[0]), options)
        self._merge = Merge(len(self.documents))
        self._ranking = Merge(len(self.documents))
        self._results: list[ScoreResult] = []
        self._errors: dict[int, str] = {}
        self._unscored: list[int] = []
        self._explanations: dict[int, Explanation] = {}

    def job(self, arrived: NewScores | None = None) -> Job:
        """What is to be spread; `arrived` is called with scores as they come, at times more than once."""

        def part_arrived(indices: NDArray[np.int64], new: Arrived) -> None:
            assert arrived is not None
            whole = [int(indices[i]) for i in new.indices]
            why = {int(indices[i]): each for i, each in new.result.explanations.items()}
            arrived(whole, new.result.scores, why)

        return Job(
            np.array([_digest(each) for each in self.documents], dtype=np.uint64),
            estimated_tokens([size_of(each) for each in self.documents]),
            self.split,
            self._options["timeout"],
            self.split is Split.BY_OWNER and self._options["cache"] != "bypass",
            lambda indices, left: self.question(indices, left, streams=arrived is not None),
            self.commit,
            None if arrived is None else part_arrived,
            None if self._query is None else self._query.job(),
            # A request that has what there is by then goes on, and each part has what it has.
            needs_first=self._options["on_timeout"] == "error",
        )

    @property
    def most_tokens(self) -> int:
        """The request has no more: a token is at least a character, and a pair has the query too."""
        of_query = max(map(size_of, self.queries))
        return sum(size_of(each) + of_query + MOST_AROUND for each in self.documents)

    @property
    def split(self) -> Split:
        """A listwise model scores documents by each other; explanations and pairs of N queries are made where
        the whole request is, and windows are counted there: they may have many times a document's tokens."""
        options = self._options
        is_listwise = self._facts.score_type is ScoreType.LISTWISE
        if (
            is_listwise
            or len(self.queries) > 1
            or options["explain"]
            or as_truncation(options["truncation"]).windows
        ):
            return Split.NEVER
        return Split.BY_TOKENS if self._facts.score_type is ScoreType.CROSS_ENCODER else Split.BY_OWNER

    def question(self, indices: NDArray[np.int64], left: float | None, *, streams: bool = False) -> Score:
        """What an engine is asked about some of the documents."""
        options = self._options
        documents = [self.documents[i] for i in indices.tolist()]
        return Score(
            queries=sent_items(self.queries) if self._query is None else [self._query.sent],
            documents=sent_items(documents),
            run=Run(as_truncation(options["truncation"]), options["priority"], options["tenant"], left),
            use_activation=options["use_activation"],
            normalize=options["normalize"],
            instruction=options["instruction"] if self._query is None else self._query.instruction,
            cache=options["cache"],
            on_timeout=options["on_timeout"],
            on_error=options["on_error"],
            explain=options["explain"],
            streams=streams,
        )

    def commit(self, indices: NDArray[np.int64], answer: Answer) -> None:
        """Takes the scores of a part."""
        result = cast("Scored", answer).result
        self._merge.commit(indices, np.array(result.scores, dtype=np.float64))
        self._ranking.commit(indices, np.array(result.ranking_scores, dtype=np.float64))
        self._results.append(result)
        self._errors |= {
            int(indices[i]): in_whole(reason, indices.tolist()) for i, reason in result.errors.items()
        }
        self._unscored += [int(indices[i]) for i in result.unscored]
        self._explanations |= {int(indices[i]): why for i, why in result.explanations.items()}

    def result(self) -> ScoreResult:
        """One score a document. The query counts once, in however many parts it was."""
        results = self._results
        # A part for which there was no time has read no query.
        of_query = max(each.usage.query_tokens for each in results)
        truncated_queries = max(each.truncated_queries for each in results)
        usage = Usage(
            sum(each.usage.prompt_tokens - each.usage.query_tokens for each in results) + of_query,
            sum(each.usage.cached_tokens for each in results),
            sum(each.usage.cached_documents for each in results),
            of_query,
        )
        return ScoreResult(
            self._merge.result().tolist(),
            usage,
            sum(each.truncated - each.truncated_queries for each in results) + truncated_queries,
            tuple(sorted(self._unscored)),
            {i: self._errors[i] for i in sorted(self._errors)},
            slowest([each.timings for each in results]),
            self._explanations,
            truncated_queries,
            self._ranking.result().tolist(),
        )


def slowest(timings: list[Timings]) -> Timings:
    """Of parts that were run side by side, the longest of each."""
    return Timings(
        max(each.queue for each in timings),
        max(each.tokenise for each in timings),
        max(each.model for each in timings),
        max(each.score for each in timings),
    )


def _digest(item: Item) -> int:
    """Of a text's content; of one that came as its embedding, which no engine caches, of its place in
    memory."""
    if isinstance(item, str):
        return digest_of(item)
    return id(item) if isinstance(item, Vectors) else digest_of_content(item)


def digest_of_content(content: Content) -> int:
    """The same in every process."""
    return digest_of("\0".join(part if isinstance(part, str) else _named(part) for part in content.parts))


def _named(picture: AnyPicture) -> str:
    match picture:
        case PictureFile():
            return blake2b(picture.data, digest_size=16).hexdigest()
        case EncodedPicture():
            return picture.text
        case _:
            return repr(picture)


def size_of(item: Item) -> int:
    """About as many characters as a text would have that is as much work."""
    if isinstance(item, str):
        return len(item)
    if isinstance(item, Vectors):
        return len(item) // 32
    return sum(map(len, item.texts)) + _PICTURE * len(item.pictures)
