"""What all routes that rank have in common, whatever they call it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from maxsimd.api import wire
from maxsimd.api.answer import Answer
from maxsimd.api.reading import ToRank, in_its_words, instruction_of, wants_activation, wants_normalized
from maxsimd.api.state import ServerState
from maxsimd.engine import InvalidRequestError, RerankResult, Truncation
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.requests import ScoreOptions


async def rank(
    state: ServerState,
    body: wire.Scoring,
    texts: ToRank,
    truncation: Truncation,
    tenant: str,
    *,
    top_n: int | None,
    names: tuple[str, str] = ("query", "documents"),
) -> RerankResult:
    """Ranks as the options of the request say; `names` are those of the fields with its `texts`."""
    with in_words_of(names):
        return await state.engine.rerank(
            *texts,
            top_n=top_n,
            score_threshold=body.score_threshold,
            **score_options(state, body, truncation, tenant),
        )


def score_options(
    state: ServerState, body: wire.Scoring, truncation: Truncation, tenant: str
) -> ScoreOptions:
    """What the engine is to be told of a request's options."""
    return {
        "truncation": truncation,
        "use_activation": wants_activation(body),
        "normalize": wants_normalized(body, state.config.normalize_scores),
        "instruction": instruction_of(body),
        "cache": body.cache or "use",
        "priority": body.priority or 0,
        "tenant": tenant,
        "timeout": body.timeout,
        "on_timeout": body.on_timeout or "error",
        "on_error": body.on_error or "fail",
        "explain": body.explain or False,
    }


def scale_of(state: ServerState, body: wire.Scoring) -> wire.ScoreScale:
    """What the scores will be that a request gets."""
    scale = state.engine.facts.scales.of(
        use_activation=wants_activation(body),
        normalize=wants_normalized(body, state.config.normalize_scores),
    )
    return wire.ScoreScale(scale.transform, scale.least, scale.most)


def with_scale(answer: Answer, scale: wire.ScoreScale) -> Answer:
    """The answer with the scale of its scores in a header: not every shape has a place."""
    bounds = ", ".join("none" if bound is None else f"{bound:g}" for bound in (scale.min, scale.max))
    return answer.with_headers(x_maxsimd_score_scale=f"{scale.transform}; bounds={bounds}")


@contextmanager
def in_words_of(names: tuple[str, str]) -> Iterator[None]:
    """Errors of the engine name the fields that the request has, for its queries and for its documents."""
    try:
        yield
    except InvalidRequestError as error:
        raise in_its_words(names, error) from error


def characters_of(result: RerankResult) -> int:
    """How long the texts of the ranked documents are."""
    return sum(len(ranked.text or "") for ranked in result.results)


def check_all_ranked(body: wire.Scoring) -> None:
    """Raises InvalidRequestError for what shapes have no place for: answers that lack documents, have
    explanations or come line by line."""
    for option, value in (("on_timeout", body.on_timeout), ("on_error", body.on_error)):
        if value in ("partial", "report"):
            raise InvalidRequestError(
                f"{option} {value!r} is only for /rerank in Jina's or Cohere's shape; leave it out", option
            )
    for option, wanted in (("explain", body.explain), ("stream", body.stream)):
        if wanted:
            raise InvalidRequestError(
                f"{option} is only for /score, and for /rerank in Jina's or Cohere's shape; leave it out",
                option,
            )


def num_matches(explanations: Iterable[Explanation | None]) -> int:
    """How many lines of an answer its explanations take."""
    return sum(len(one.matches) + len(one.windows) for one in explanations if one is not None)
