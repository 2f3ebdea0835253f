"""Late chunking: a document as one sequence, and which of its tokens belong to which of its chunks.

A token belongs to the chunk that holds its first visible character. What stands before the text, special
tokens and a prompt, goes with its first token where it is pooled at all, and what stands behind the text with
its last: of a document that is one chunk, the vector is that of the whole text.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.processors.text.origins import Spans
from maxsimd.engine.requests import Chunks, EmbedRequest

# Chunks may overlap, but have together at most this many times the tokens of their document.
_MOST_TIMES = 8

_REASONS = {
    "cls": "this model's vector of a text is that of its first token, which only the first chunk has",
    "last": "this model's vector of a text is that of its last token, which only the last chunk has",
    "weighted-mean": "this model weighs tokens by where they stand, which differs from chunk to chunk",
}


def as_document(texts: Sequence[Any], chunks: Any, late_chunking: bool) -> tuple[str, Chunks] | None:
    """A document and its chunks, where a request asks for late chunking, else None: of several texts, which
    are its chunks, or of one text with `chunks`, the first character of each and the one after its last.
    Raises InvalidRequestError for anything else."""
    if not late_chunking:
        if chunks is not None:
            raise InvalidRequestError("chunks are for late_chunking; set that, or leave them out", "chunks")
        return None
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(
            "late_chunking reads the texts as the chunks of one document; give strings", "input"
        )
    if chunks is None:
        return "".join(texts), tuple(pairwise(accumulate(map(len, texts), initial=0)))
    if len(texts) != 1:
        raise InvalidRequestError(
            f"chunks are parts of one text, and there are {len(texts)}; give one, or leave chunks out",
            "chunks",
        )
    return texts[0], _checked(chunks, len(texts[0]))


def _checked(chunks: Any, length: int) -> Chunks:
    if not isinstance(chunks, Iterable):
        raise InvalidRequestError("chunks must be pairs of numbers of characters", "chunks")
    pairs = [tuple(pair) if isinstance(pair, Iterable) else () for pair in chunks]
    if not pairs:
        raise InvalidRequestError("chunks is empty; give at least one", "chunks")
    for i, pair in enumerate(pairs):
        if (
            len(pair) != 2
            or not all(isinstance(each, Integral) for each in pair)
            or not 0 <= pair[0] < pair[1] <= length
        ):
            raise InvalidRequestError(
                f"chunks[{i}] must be the first character of a chunk and the one after its last, from 0 to "
                f"{length}",
                "chunks",
            )
    return tuple((int(start), int(stop)) for start, stop in pairs)


def check_late_chunking(request: EmbedRequest, pooling: str) -> None:
    """Raises InvalidRequestError for a model whose `pooling` is not the mean, and for truncation."""
    if pooling != "mean":
        reason = _REASONS.get(pooling, f"this model pools by {pooling}")
        raise InvalidRequestError(
            f"late_chunking is for models that pool by the mean: {reason}; leave it out", "late_chunking"
        )
    if request.truncation.max_tokens not in (None, -1):
        raise InvalidRequestError(
            "late_chunking reads the whole document; leave out truncate_prompt_tokens",
            "truncate_prompt_tokens",
        )


def passages_of(text: str, spans: Spans, chunks: Chunks) -> NDArray[np.int64]:
    """The first token of each chunk and the one after its last, int64 [chunks, 2], by the characters [tokens,
    2] in the text that the tokens stand for, -1 for those that are not the text's. Raises InvalidRequestError
    for a chunk that has none, and for chunks that overlap so much that they have many times the text's
    tokens."""
    first_characters = _first_characters(text, spans)
    bounds = np.array(chunks, dtype=np.int64)
    passages = np.searchsorted(first_characters, bounds)  # [chunks, 2]
    lengths = passages[:, 1] - passages[:, 0]
    if not lengths.all():
        raise InvalidRequestError(
            f"chunk {int(np.argmin(lengths))} of the document has no token of its own; "
            "join it to the one beside it",
            "input",
        )
    if int(lengths.sum()) > _MOST_TIMES * len(spans):
        raise InvalidRequestError(
            f"the chunks have together more than {_MOST_TIMES} times the tokens of the text; "
            "let them overlap less",
            "chunks",
        )
    return passages


def _first_characters(text: str, spans: Spans) -> NDArray[np.int64]:
    """Returns the first visible character of each token, or its first if none is visible, ascending. Raises
    InvalidRequestError for a text without tokens."""
    own = np.flatnonzero(spans[:, 0] >= 0)
    if not len(own):
        raise InvalidRequestError("the document has no tokens; leave it out", "input")
    visible = np.array([not character.isspace() for character in text])
    position = np.arange(len(text))
    next_visible = np.minimum.accumulate(np.where(visible, position, len(text))[::-1])[::-1]
    starts = np.minimum(spans[own, 0], len(text) - 1)
    found = np.where(next_visible[starts] < spans[own, 1], next_visible[starts], starts)
    characters = np.empty(len(spans), dtype=np.int64)
    characters[own] = np.maximum.accumulate(found)
    # Tokens that are not the text's go with the token of the text before it, or with the first.
    nearest = np.searchsorted(own, np.arange(len(spans)), side="right") - 1
    return characters[own[np.maximum(nearest, 0)]]
