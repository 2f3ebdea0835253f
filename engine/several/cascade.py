"""A cascade: one model ranks all documents, the next those that ranked best, within one deadline."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict, cast

from maxsimd.engine.engine import Engine
from maxsimd.engine.errors import InvalidRequestError, RequestTimeoutError
from maxsimd.engine.requests import CacheMode, Item, LongInputPolicy, Priority, RerankResult, ScoreOptions
from maxsimd.engine.validation import Scorable, as_scored


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
    `normalize` for the last alone. They say what its scores are; in others, what they make alike would go on
    by its index."""

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
    """What a stage did: how many `documents` its `model` ranked, in how many `milliseconds`, and its own
    ranking as `Engine.rerank` returned it, in which documents have their index in this stage."""

    model: str
    documents: int
    milliseconds: float
    ranking: RerankResult


@dataclass(frozen=True, slots=True)
class CascadeResult:
    """The documents that came to the end, best first, ties by index in the last stage."""

    results: list[CascadeDocument]
    stages: tuple[StageResult, ...]


def check_stages(stages: Sequence[Stage]) -> None:
    """Raises InvalidRequestError for stages that make no cascade."""
    if not stages:
        raise InvalidRequestError("a cascade needs a stage at least", "stages")
    for i, stage in enumerate(stages):
        if stage.keep is not None and stage.keep < 1:
            raise InvalidRequestError(f"keep must be at least 1, not {stage.keep}", f"stages[{i}].keep")


def _of_stage(error: InvalidRequestError, stage: Stage, indexes: Sequence[int]) -> InvalidRequestError:
    """The error of a stage with the documents' indexes among those that came in, and the model's name."""
    message = _DOCUMENT.sub(lambda found: f"documents[{indexes[int(found[1])]}]", str(error))
    return InvalidRequestError(f"{message} (the model {stage.model!r} of the cascade)", error.param)


async def run_cascade(
    engine_of: Callable[[str], Engine],
    query: Scorable,
    documents: Sequence[Scorable],
    stages: Sequence[Stage],
    deadline: float | None,
    options: CascadeOptions,
) -> CascadeResult:
    """Runs the stages one after the other, all within `deadline` seconds from now. Raises what
    `Engine.rerank` does, and RequestTimeoutError when the time is up between two stages."""
    check_stages(stages)
    begun = time.perf_counter()
    engines = [engine_of(stage.model) for stage in stages]  # a model that is missing is found out at once
    given: Sequence[Scorable] = as_scored(documents, "documents", takes_vectors=True, takes_pictures=True)
    indexes: Sequence[int] = range(len(given))
    done: list[StageResult] = []
    for i, (stage, engine) in enumerate(zip(stages, engines, strict=True), start=1):
        started = time.perf_counter()
        left = None if deadline is None else deadline - (started - begun)
        if deadline is not None and left is not None and left <= 0:
            raise RequestTimeoutError.after(deadline)
        own = {**options, "instruction": stage.instruction, "timeout": left}
        if i < len(stages):
            own = {option: value for option, value in own.items() if option not in _OF_LAST}
        try:
            ranking = await engine.rerank(query, given, top_n=stage.keep, **cast("ScoreOptions", own))
        except RequestTimeoutError:
            assert deadline is not None
            raise RequestTimeoutError.after(deadline) from None
        except InvalidRequestError as error:
            raise _of_stage(error, stage, indexes) from error
        milliseconds = 1000 * (time.perf_counter() - started)
        done.append(StageResult(stage.model, len(given), milliseconds, ranking))
        if i < len(stages):
            best = [one.index for one in ranking.results]
            indexes, given = [indexes[each] for each in best], [given[each] for each in best]
    last = done[-1]
    results = [
        CascadeDocument(indexes[one.index], one.score, one.document, last.model)
        for one in last.ranking.results
    ]
    return CascadeResult(results, tuple(done))
