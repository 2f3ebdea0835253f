"""Pairs that a checkpoint's score template puts together: language models that are asked about a pair."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from maxsimd.engine.checkpoint.score_template import ScoreTemplate
from maxsimd.engine.explanations import Span
from maxsimd.engine.preprocess.long_inputs import Fitted, InputName, LongInputs, Room
from maxsimd.engine.preprocess.origins import extent
from maxsimd.engine.preprocess.pair_joiner import JoinedPair
from maxsimd.engine.preprocess.strategy import SHORTEST_TEXT
from maxsimd.engine.preprocess.tokenization import PART_TEXTS, Around, TextTokenizer
from maxsimd.engine.requests import ScoreRequest
from maxsimd.scheduler import JoinedTokens
from maxsimd.scheduler.payload import TokenIds

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class _Surroundings:
    """What stands around the documents of a query: the token ids `before` and `after` a text of which the
    document is a part, because it may merge with what is `left` and `right` of it there. `prefix` is what
    pairs of the query begin with, whatever the document. `types` are the type ids of what is before, of the
    text, and of what is after."""

    before: TokenIds
    left: str
    right: str
    after: TokenIds
    prefix: TokenIds
    types: tuple[TokenIds | int, int, TokenIds | int]

    @property
    def num_tokens(self) -> int:
        """How many tokens the sequence has beside that text."""
        return len(self.before) + len(self.after)


@dataclass(frozen=True, slots=True)
class _Pair:
    name: InputName
    around: _Surroundings
    document: str

    @property
    def text(self) -> str:
        return f"{self.around.left}{self.document}{self.around.right}"

    @property
    def span(self) -> range:
        """Where the document is in the text."""
        start = len(self.around.left)
        return range(start, start + len(self.document))


class _Heads:
    """Segments begin alike for all queries, with the instruction: that part is tokenised once."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._heads: dict[int, tuple[str, TokenIds]] = {}
        self._last: dict[int, str] = {}

    def of(self, segment: int, text: str) -> tuple[str, TokenIds]:
        """The part with which a segment's text begins as it did for an earlier query, and its tokens; none
        for the first."""
        head, ids = self._heads.get(segment, ("", _NONE))
        if not head or not text.startswith(head):
            common = _common_start(self._last.get(segment, ""), text)
            head = common[: max(self._tokenizer.breaks(common), default=0)]
            ids = self._tokenizer.encode([head], "queries")[0]
            self._heads[segment] = head, ids
        self._last[segment] = text
        return head, ids


def _common_start(first: str, second: str) -> str:
    different = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return first[: next(different, min(len(first), len(second)))]


class TemplateJoiner:
    """Joins pairs by a score template; `instruction` is the one that the checkpoint is used with."""

    def __init__(self, tokenizer: TextTokenizer, template: ScoreTemplate, instruction: str | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._instruction = instruction
        self._trailing = np.array(template.trailing_ids, dtype=np.int32)

    def join(
        self, request: ScoreRequest, queries: list[Fitted[np.int32]], long_inputs: LongInputs
    ) -> Iterator[JoinedPair]:
        heads = _Heads(self._tokenizer)
        around = self._surroundings(request, 0, queries[0], heads)
        # Some at a time, because what stands around each document may be long.
        for start in range(0, len(request.documents), PART_TEXTS):
            pairs = []
            for i, document in enumerate(request.document_texts[start : start + PART_TEXTS], start):
                if i and request.query_of(i) == i:
                    around = self._surroundings(request, i, queries[i], heads)
                pairs.append(_Pair(InputName("documents", i), around, document))
            for pair, (parts, truncated) in zip(pairs, self._fitted(pairs, long_inputs), strict=True):
                before, after = pair.around.before, pair.around.after
                windows = [JoinedTokens.of((before, part, after), pair.around.types) for part in parts]
                yield JoinedPair(windows, pair.around.prefix, truncated)

    def shortest_pair(self) -> int:
        frames = self._template.frames(SHORTEST_TEXT, self._instruction)
        segments = [
            frame.before if frame.after is None else frame.before + SHORTEST_TEXT + frame.after
            for frame in frames
        ]
        return sum(len(ids) for ids in self._tokenizer.encode(segments, "text")) + len(self._trailing)

    def _surroundings(
        self, request: ScoreRequest, query: int, fitted: Fitted[np.int32], heads: "_Heads"
    ) -> _Surroundings:
        text = request.query_texts[query]
        if fitted.truncated:
            text = self._tokenizer.decode(fitted.tokens.tolist())
        frames = self._template.frames(text, request.instruction)
        position = next(i for i, frame in enumerate(frames) if frame.after is not None)
        left, right = frames[position].before, frames[position].after or ""
        # What cannot merge with a document is tokenised once, not once for each document.
        others = [heads.of(i, frame.before) for i, frame in enumerate(frames[:position])]
        head, head_ids = heads.of(position, left)
        apart = len(head) + max(self._tokenizer.breaks(left[len(head) :]), default=0)
        beside = min(self._tokenizer.breaks(right), default=len(right))
        rests = [frame.before[len(begun) :] for frame, (begun, _) in zip(frames, others, strict=False)]
        *encoded, middle, last = self._tokenizer.encode(
            [*rests, left[len(head) : apart], left[apart:]], "queries"
        )
        ids = [part for (_, begun), rest in zip(others, encoded, strict=True) for part in (begun, rest)]
        ids += [head_ids, middle]
        texts = [right[beside:], *(frame.before for frame in frames[position + 1 :])]
        after = [*self._tokenizer.encode(texts, "queries"), self._trailing]
        # The last token may merge with a document's first characters: it is no part of the prefix.
        return _Surroundings(
            np.concatenate(ids),
            left[apart:],
            right[:beside],
            np.concatenate(after),
            np.concatenate([*ids, last[:-1]]),
            self._types(ids, after),
        )

    def _types(
        self, before: list[TokenIds], after: list[TokenIds]
    ) -> tuple[TokenIds | int, int, TokenIds | int]:
        """The type ids around a document: the last two parts before it, and the first after it, are of its
        segment."""
        if not self._template.marks_document:
            return 0, 0, 0
        of_segment = [0] * (len(before) - 2) + [1, 1]
        lengths = [len(part) for part in before], [len(part) for part in after]
        return (
            np.repeat(np.array(of_segment, np.int32), lengths[0]),
            1,
            np.repeat(np.array([1] + [0] * (len(after) - 1), np.int32), lengths[1]),
        )

    def _fitted(self, pairs: list[_Pair], long_inputs: LongInputs) -> Iterator[tuple[list[TokenIds], bool]]:
        """The tokens of each pair's text, or of that text with each window of the document, and whether the
        document was cut."""
        limit = long_inputs.limit
        if long_inputs.max_document_tokens is not None:
            yield from (self._cut(pair, long_inputs) for pair in pairs)
            return
        texts, names = (pair.text for pair in pairs), (pair.name for pair in pairs)
        encoded = self._tokenizer.encode(texts, "documents", limit + 1, names=names)
        for pair, ids in zip(pairs, encoded, strict=True):
            fits = pair.around.num_tokens + len(ids) <= limit
            yield ([ids], False) if fits else self._cut(pair, long_inputs)

    def window_spans(
        self, request: ScoreRequest, index: int, query_tokens: int, long_inputs: LongInputs
    ) -> list[Span]:
        query = request.query_of(index)
        most = None if long_inputs.max_query_tokens is None else long_inputs.max_query_tokens + 1
        (encoded,) = self._tokenizer.encode([request.query_texts[query]], "queries", most, long_inputs.side)
        fitted = long_inputs.query(encoded, InputName("queries", query))
        around = self._surroundings(request, query, fitted, _Heads(self._tokenizer))
        pair = _Pair(InputName("documents", index), around, request.document_texts[index])
        tokens, room = self._read_apart(pair, long_inputs)
        limited = long_inputs.document(tokens.spans - len(around.left), pair.name)
        windows = long_inputs.windows(limited.tokens, room, pair.name)
        return [extent(np.clip(window.tokens, 0, len(pair.document))) or (0, 0) for window in windows]

    def _read_apart(self, pair: _Pair, long_inputs: LongInputs) -> tuple[Around, Room]:
        """The tokens of a pair's text that are the document's and those around them, and the room there is
        for the former."""
        most = long_inputs.most_of_document(long_inputs.limit)
        tokens = self._tokenizer.encode_around(
            pair.text, pair.span, "documents", most, long_inputs.side, pair.name
        )
        others = pair.around.num_tokens + len(tokens.before) + len(tokens.after)
        return tokens, Room(long_inputs.limit - others, others)

    def _cut(self, pair: _Pair, long_inputs: LongInputs) -> tuple[list[TokenIds], bool]:
        tokens, room = self._read_apart(pair, long_inputs)
        limited = long_inputs.document(tokens.inside, pair.name)
        windows = long_inputs.windows(limited.tokens, room, pair.name)
        parts = [np.concatenate([tokens.before, window.tokens, tokens.after]) for window in windows]
        return parts, limited.truncated or any(window.truncated for window in windows)
