"""A cascade: one model ranks all documents, the next those that ranked best, within one deadline."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypedDict, cast

from maxsimd.engine.engine import SCORE_DEFAULTS, Engine
from maxsimd.engine.errors import (
    InvalidRequestError,
    RequestFailedError,
    RequestTimeoutError,
    RequestTooLargeError,
)
from maxsimd.engine.media import Content
from maxsimd.engine.requests import (
    CacheMode,
    Item,
    LongInputPolicy,
    Priority,
    RerankResult,
    Scorable,
    ScoreOptions,
    as_scored,
)

# Hardly any text has fewer tokens.
_SHORTEST_TEXT = "a"
# Texts that are tried for a stage before the cascade runs, and characters of a query and a text: trials are
# not counted as work, so they must be small.
_MOST_TRIED, _LONGEST_TRIED = 4, 1 << 17


async def check_stage(
    engine: Engine, query: Scorable, documents: Sequence[Item], num_coming: int, options: ScoreOptions
) -> None:
    """Raises InvalidRequestError where a model refuses the query, the options, or one of any `num_coming` of
    the documents.

    Tries the longest text that is sure to come: shorter ones are readable if it is. Where it is not, tries
    texts from the longest down to the first readable one, but only a few. The stage itself checks the rest,
    and the total of tokens: cached documents have none to run."""
    found: dict[int, InvalidRequestError] = {}
    # The model takes all embeddings or none, and all pictures or none.
    one_of_each = {type(document): document for document in documents if not isinstance(document, str)}
    kinds = {kind: await _refusal(engine, query, one, options) for kind, one in one_of_each.items()}
    texts: list[tuple[int, str]] = []
    for i, document in enumerate(documents):
        if isinstance(document, str):
            texts.append((i, document))
        elif (refusal := kinds[type(document)]) is not None:
            found[i] = refusal
    if not texts:
        await _refusal(engine, query, _SHORTEST_TEXT, options)
    most = len(documents) - num_coming
    texts.sort(key=lambda each: -len(each[1]))
    room = min(most - len(found), len(texts) - 1)
    if room > 0 and await _refusal(engine, query, texts[room][1], options) is None:
        return
    for i, text in texts[:_MOST_TRIED]:
        if len(found) > most or (refusal := await _refusal(engine, query, text, options)) is None:
            break
        found[i] = refusal
    if len(found) > most:
        first = min(found)
        message = str(found[first]).replace("documents[0]", f"documents[{first}]")
        raise InvalidRequestError(message, found[first].param)


async def _refusal(
    engine: Engine, query: Scorable, document: Item, options: ScoreOptions
) -> InvalidRequestError | None:
    """Why the model refuses a document, as far as is known without opening pictures. Raises
    InvalidRequestError for anything else."""
    try:
        complete: ScoreOptions = {**SCORE_DEFAULTS, **options}
        if isinstance(document, str):
            complete["cache"] = "bypass"
        request = engine.score_processor.read(query, [document], complete)
        if isinstance(document, str):
            # A picture leaves no more room than the shortest text.
            queries = [_SHORTEST_TEXT if isinstance(each, Content) else each for each in request.queries]
            if request.reading > _LONGEST_TRIED:
                return None
            await engine.check_readable(replace(request, queries=tuple(queries)))
    except RequestTooLargeError:
        return None
    except InvalidRequestError as error:
        if error.param != "documents":
            raise
        return error
    return None


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a cascade: the `model` that ranks, how many of its best documents go on to the next stage or
    into the result (`keep`; None for all), and the `instruction` for a model that takes one."""

    model: str
    keep: int | None = None
    instruction: str | None = None


_OF_LAST = "use_activation", "normalize"
_DOCUMENT = re.compile(r"\bdocuments\[(\d+)\]")


class CascadeOptions(TypedDict, total=False):
    """Those options of `Engine.score` that a cascade takes: for all stages, but `use_activation` and
    `normalize` for the last alone. They change scores, and in earlier stages equal scores would pass by
    index."""

    use_activation: bool
    normalize: bool
    truncation: LongInputPolicy
    cache: CacheMode
    priority: Priority
    tenant: str


@dataclass(frozen=True, slots=True)
class CascadeDocument:
    """A document at the end of a cascade: its `index` among those that came in, its `score`, and the `model`
    that gave it."""

    index: int
    score: float
    document: Item
    model: str


@dataclass(frozen=True, slots=True)
class StageResult:
    """The outcome of a stage: how many `documents` its `model` ranked, in how many `milliseconds`, and its
    own ranking as `Engine.rerank` returned it, in which documents have their index in this stage."""

    model: str
    documents: int
    milliseconds: float
    ranking: RerankResult


@dataclass(frozen=True, slots=True)
class CascadeResult:
    """The documents that came to the end, best first, ties by index in the last stage."""

    results: list[CascadeDocument]
    stages: tuple[StageResult, ...]


def _of_stage(
    error: InvalidRequestError | RequestFailedError, stage: Stage, indexes: Sequence[int]
) -> InvalidRequestError | RequestFailedError:
    """The error with the indexes of the request's documents, and the model's name."""
    message = _DOCUMENT.sub(lambda found: f"documents[{indexes[int(found[1])]}]", str(error))
    message = f"{message} (the model {stage.model!r} of the cascade)"
    if isinstance(error, RequestFailedError):
        return RequestFailedError(message)
    return InvalidRequestError(message, error.param)


async def run_cascade(
    engine_of: Callable[[str], Engine],
    query: Scorable,
    documents: Sequence[Scorable],
    stages: Sequence[Stage],
    deadline: float | None,
    options: CascadeOptions,
) -> CascadeResult:
    """Runs the stages within `deadline` seconds. Raises `Engine.rerank`'s errors, where possible before any
    stage runs, and RequestTimeoutError between stages."""
    if not stages:
        raise InvalidRequestError("a cascade needs at least one stage", "stages")
    for i, stage in enumerate(stages):
        if stage.keep is not None and stage.keep < 1:
            raise InvalidRequestError(f"keep must be at least 1, not {stage.keep}", f"stages[{i}].keep")
    begun = time.perf_counter()
    for_all = {name: value for name, value in options.items() if name not in _OF_LAST}
    own: list[Mapping[str, object]] = [*[for_all] * (len(stages) - 1), options]
    plan = [  # raises UnknownModelError and the like
        (stage, engine_of(stage.model), cast("ScoreOptions", {**given, "instruction": stage.instruction}))
        for stage, given in zip(stages, own, strict=True)
    ]
    items = as_scored(documents, "documents", takes_vectors=True, takes_pictures=True)
    num_coming = len(items)
    try:
        async with asyncio.timeout(deadline):
            for (before, *_), (stage, engine, of_stage) in pairwise(plan):
                num_coming = min(num_coming, before.keep or num_coming)
                try:
                    await check_stage(engine, query, items, num_coming, of_stage)
                except InvalidRequestError as error:
                    raise _of_stage(error, stage, range(len(items))) from error
    except TimeoutError:
        assert deadline is not None
        raise RequestTimeoutError.after(deadline) from None
    left_over: Sequence[Scorable] = items
    indexes: Sequence[int] = range(len(items))
    done: list[StageResult] = []
    for stage, engine, of_stage in plan:
        started = time.perf_counter()
        left = None if deadline is None else deadline - (started - begun)
        if deadline is not None and left is not None and left <= 0:
            raise RequestTimeoutError.after(deadline)
        try:
            in_time: ScoreOptions = {**of_stage, "timeout": left}
            ranking = await engine.rerank(query, left_over, top_n=stage.keep, **in_time)
        except RequestTimeoutError:
            assert deadline is not None
            raise RequestTimeoutError.after(deadline) from None
        except (InvalidRequestError, RequestFailedError) as error:
            raise _of_stage(error, stage, indexes) from error
        milliseconds = 1000 * (time.perf_counter() - started)
        done.append(StageResult(stage.model, len(left_over), milliseconds, ranking))
        if len(done) < len(plan):
            best = [one.index for one in ranking.results]
            indexes, left_over = [indexes[each] for each in best], [left_over[each] for each in best]
    last = done[-1]
    results = [
        CascadeDocument(indexes[one.index], one.score, one.document, last.model)
        for one in last.ranking.results
    ]
    return CascadeResult(results, tuple(done))
