"""Pairs that a checkpoint's score template puts together: language models that are asked about a pair."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from maxsimd.engine.checkpoint.score_template import Frame, ScoreTemplate
from maxsimd.engine.preprocess.long_inputs import Fitted, InputName, LongInputs, Room
from maxsimd.engine.preprocess.pair_joiner import JoinedPair, TypedIds
from maxsimd.engine.preprocess.strategy import SHORTEST_TEXT
from maxsimd.engine.preprocess.tokenization import TextTokenizer
from maxsimd.engine.requests import ScoreRequest
from maxsimd.scheduler.payload import TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class _Surroundings:
    """What stands around the documents of a query: token ids `before` and `after` the segment that holds the
    document, and that segment. `prefix` is what pairs of the query begin with, whatever the document."""

    before: TokenIds
    segment: Frame
    after: TokenIds
    prefix: TokenIds

    @property
    def num_tokens(self) -> int:
        """How many tokens the sequence has beside the segment."""
        return len(self.before) + len(self.after)


class TemplateJoiner:
    """Joins pairs by a score template; `instruction` is the one that the checkpoint is used with."""

    def __init__(self, tokenizer: TextTokenizer, template: ScoreTemplate, instruction: str | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._instruction = instruction

    def join(
        self, request: ScoreRequest, queries: list[Fitted[np.int32]], long_inputs: LongInputs
    ) -> Iterator[JoinedPair]:
        surroundings = []
        for query, fitted in zip(request.queries, queries, strict=True):
            text = self._tokenizer.decode(fitted.tokens.tolist()) if fitted.truncated else query
            surroundings.append(self._surroundings(self._template.frames(text, request.instruction)))
        of_document = [surroundings[request.query_of(i)] for i in range(len(request.documents))]
        segments = [
            f"{around.segment.before}{document}{around.segment.after}"
            for around, document in zip(of_document, request.documents, strict=True)
        ]
        for i, ids in enumerate(self._tokenizer.encode(segments, "documents")):
            around = of_document[i]
            fits = around.num_tokens + len(ids) <= long_inputs.limit
            if fits and long_inputs.max_document_tokens is None:
                parts, truncated = [ids], False
            else:
                start = len(around.segment.before)
                stop = start + len(request.documents[i])
                first, last = self._tokenizer.span(segments[i], start, stop, "documents")
                segment = _Segment(ids[:first], ids[last:], around.num_tokens)
                parts, truncated = segment.fitted(ids[first:last], InputName("documents", i), long_inputs)
            windows = [_untyped(np.concatenate([around.before, part, around.after])) for part in parts]
            yield JoinedPair(windows, around.prefix, truncated)

    def shortest_pair(self) -> int:
        frames = self._template.frames(SHORTEST_TEXT, self._instruction)
        segments = [
            frame.before if frame.after is None else frame.before + SHORTEST_TEXT + frame.after
            for frame in frames
        ]
        return sum(len(ids) for ids in self._tokenizer.encode(segments, "text"))

    def _surroundings(self, frames: list[Frame]) -> _Surroundings:
        position = next(i for i, frame in enumerate(frames) if frame.after is not None)
        ids = self._tokenizer.encode([frame.before for frame in frames], "queries")
        nothing = np.empty(0, dtype=np.int32)
        before = np.concatenate([nothing, *ids[:position]])
        after = np.concatenate([nothing, *ids[position + 1 :]])
        # The segment's last token may merge with a document's first characters: it is no part of the prefix.
        prefix = np.concatenate([before, ids[position][:-1]])
        return _Surroundings(before, frames[position], after, prefix)


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """The segment of a document that may have to be cut: its tokens before and after the document's, and how
    many `others` the sequence has."""

    head: TokenIds
    tail: TokenIds
    others: int

    def fitted(
        self, document: TokenIds, name: InputName, long_inputs: LongInputs
    ) -> tuple[list[TokenIds], bool]:
        """The segment for each window of the document, and whether the document was cut."""
        limited = long_inputs.document(document)
        others = self.others + len(self.head) + len(self.tail)
        windows = long_inputs.windows(limited.tokens, Room(long_inputs.limit - others, others), name)
        segments = [np.concatenate([self.head, window.tokens, self.tail]) for window in windows]
        return segments, limited.truncated or any(window.truncated for window in windows)


def _untyped(ids: TokenIds) -> TypedIds:
    return ids, np.zeros(len(ids), dtype=np.int32)
