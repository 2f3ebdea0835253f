"""Explanations where query and document are read together: what was read, and the scores of windows."""

from collections.abc import Callable, Sequence
from itertools import accumulate

from maxsimd.engine.explanations import Explanation, Span, WindowScore
from maxsimd.engine.processors.prepared import Explain, PairFacts
from maxsimd.engine.requests import Values


def explain_pairs(facts: PairFacts, windows_of: Callable[[int], Sequence[Span]]) -> Explain:
    """Explains documents of which each window has a value. `windows_of` gives the characters of each window
    of a document that has several."""
    first_values = [*accumulate(facts.windows, initial=0)]

    def explain(values: Values, index: int) -> Explanation | None:
        first, count = first_values[index], facts.windows[index]
        scores = [score for score in values.values[first : first + count] if isinstance(score, float)]
        if len(scores) < count:
            return None
        spans = windows_of(index) if count > 1 else []
        windows = tuple(WindowScore(span, score) for span, score in zip(spans, scores, strict=False))
        return Explanation(facts.tokens[index], bool(facts.truncated[index]), False, (), windows)

    return explain


def renumbered(explain: Explain, positions: Sequence[int]) -> Explain:
    """Explains the documents of a whole request, for which `explain` goes by their numbers among those at
    `positions`; the others have no explanation."""
    number = {position: i for i, position in enumerate(positions)}
    return lambda values, index: explain(values, number[index]) if index in number else None
