"""How a document came to its score, on the wire."""

import msgspec

from maxsimd.engine.explanations import Explanation, TokenMatch, WindowScore


class WireExplanation(msgspec.Struct, omit_defaults=True):
    """An `Explanation` with its best window as the `passage`. What there is none of is left out."""

    tokens: int
    truncated: bool
    cached: bool
    matches: tuple[TokenMatch, ...] = ()
    windows: tuple[WindowScore, ...] = ()
    passage: WindowScore | None = None
    # Of each picture: for each vector of the query a list of rows, null for a patch that takes no part.
    maps: list[list[list[list[float | None]]]] = []


def on_wire(explanation: Explanation) -> WireExplanation:
    return WireExplanation(
        explanation.tokens,
        explanation.truncated,
        explanation.cached,
        explanation.matches,
        explanation.windows,
        explanation.passage,
        [each.tolist() for each in explanation.maps],
    )
