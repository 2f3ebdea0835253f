"""Cross-encoders: query and document are read together, and a classifier's logit is the score.

Pair builders put both into one sequence as a model reads them. A plan makes scores of the logits.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from os.path import commonprefix
from typing import ClassVar, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.cache.store import RunFacts
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.checkpoint.templates import Frame, ScoreTemplate
from maxsimd.engine.checkpoint.visual import ImageInputs
from maxsimd.engine.errors import InvalidRequestError, ModelLoadError
from maxsimd.engine.explanations import Explanation, Span, WindowScore
from maxsimd.engine.media import Content
from maxsimd.engine.processors.classification import activate, keeps_order
from maxsimd.engine.processors.pages import PageBuilder, page_builder
from maxsimd.engine.processors.processor import (
    CachedScorePlan,
    FoundScores,
    PlanValues,
    PrefixSharing,
    ProcessorContext,
    RequestIds,
    ScoreProcessor,
    Scores,
    check_explained_lines,
    find_scores,
)
from maxsimd.engine.processors.text.builder import FittedText, InputName, LongInputs, Room
from maxsimd.engine.processors.text.tokenization import (
    PART_TEXTS,
    SHORTEST_TEXT,
    Around,
    TextTokenizer,
    extent,
    longest_first,
    truncate,
)
from maxsimd.engine.requests import Item, ScoreOptions, ScoreRequest
from maxsimd.engine.workers import yield_to_smaller
from maxsimd.pooling.methods import Head
from maxsimd.scheduler import JoinedTokens, Tokens, TokenSequence
from maxsimd.scheduler.sequence import TokenIds

TruncationStrategy = Literal["longest_first", "only_first", "only_second"]

_NO_TOKENS = np.empty(0, dtype=np.int32)
# Fewer tokens are run again rather than shared.
SHORTEST_PREFIX = 8
# The most labels that an error names.
_NAMED_LABELS = 4


@dataclass(frozen=True, slots=True, eq=False)
class BuiltPair:
    """A query and a document in one sequence, or one for each window of the document. Pairs of the query
    begin with `prefix`, unless it merges with the document. The pictures of a pair have no ids yet."""

    windows: Sequence[JoinedTokens | Tokens]
    prefix: TokenIds
    truncated: bool


class TokenizerPairBuilder:
    """Joins pairs by the tokenizer's template, as BERT's [CLS] query [SEP] document [SEP]. Thread-safe."""

    def __init__(self, tokenizer: TextTokenizer, truncation: TruncationStrategy) -> None:
        self._tokenizer = tokenizer
        self._template = tokenizer.pair
        self._truncation = truncation

    def build(
        self, request: ScoreRequest, queries: list[FittedText], long_inputs: LongInputs
    ) -> Iterator[BuiltPair]:
        """Yields the pairs of a request in the order of its documents; `queries` are its queries' tokens."""
        before, between, _ = self._template.ids
        prefixes = [np.concatenate([before, query.tokens, between]) for query in queries]
        # If both are truncated to half, the longer one matters.
        longest_query = max(len(query.tokens) for query in queries)
        most = long_inputs.most_of_document(max(long_inputs.limit, longest_query))
        names = [InputName("documents", i) for i in range(len(request.documents))]
        documents = self._tokenizer.encode(request.document_texts, "documents", most, long_inputs.side, names)
        for i, (text, name) in enumerate(zip(documents, names, strict=True)):
            query = request.query_of(i)
            document = long_inputs.within(text, name)
            if self._template.special_tokens + len(queries[query].tokens) + len(document.tokens) == 0:
                raise name.error("and its query have no tokens; leave them out")
            tokens = queries[query].tokens
            length, parts = self._parts(len(tokens), document.tokens, name, long_inputs)
            tokens = truncate(tokens, length, long_inputs.side)
            windows = [self._template.join(tokens, part.tokens) for part in parts]
            truncated = document.truncated or any(part.truncated for part in parts)
            yield BuiltPair(windows, prefixes[query], truncated)

    def window_spans(
        self, request: ScoreRequest, index: int, query: FittedText, long_inputs: LongInputs
    ) -> list[Span]:
        """Returns the characters of each window of a document beside its query; none if they are unknown."""
        most, name = long_inputs.max_document_tokens, InputName("documents", index)
        text = request.document_texts[index]
        _, spans = self._tokenizer.encode_with_spans(text, "documents", most, long_inputs.side, name)
        _, parts = self._parts(len(query.tokens), spans, name, long_inputs)
        return [extent(part.tokens) or (0, 0) for part in parts]

    def shortest_pair(self) -> int:
        """Returns the tokens of the shortest pair."""
        return self._template.special_tokens + 2

    def _parts(
        self, query: int, document: TokenIds, name: InputName, long_inputs: LongInputs
    ) -> tuple[int, list[FittedText]]:
        """Returns how many of a query's tokens are read, and what each sequence has of a document."""
        others = self._template.special_tokens + query
        if others + len(document) <= long_inputs.limit:
            return query, [FittedText(document)]
        if long_inputs.uses_windows:
            return query, long_inputs.windows(document, Room(long_inputs.limit - others, others), name)
        if not long_inputs.may_truncate:
            raise long_inputs.too_long(name, others + len(document), long_inputs.limit)
        room = long_inputs.limit - self._template.special_tokens
        if room < 1:
            raise long_inputs.no_room(self._template.special_tokens)
        first, second = longest_first(query, len(document), room)
        if self._truncation == "only_first":
            first, second = room - len(document), len(document)
            if first < 0:
                raise name.error(f"has {second} tokens and leaves no room for the query; shorten it")
        elif self._truncation == "only_second":
            first, second = query, room - query
            if second < 0:
                reason = f"the query has {query} tokens and leaves no room for {name}; shorten it"
                raise InvalidRequestError(reason, "queries")
        return first, [FittedText(truncate(document, second, long_inputs.side), truncated=True)]


@dataclass(frozen=True, slots=True, eq=False)
class _Surroundings:
    """The tokens around the documents of a query: `before` and `after` a text, which is the document between
    `left` and `right`, with which its tokens may merge. All pairs of the query begin with `prefix`. `types`
    are the type ids before the text, of it, and after it."""

    before: TokenIds
    left: str
    right: str
    after: TokenIds
    prefix: TokenIds
    types: tuple[TokenIds | int, int, TokenIds | int]

    @property
    def num_tokens(self) -> int:
        return len(self.before) + len(self.after)


@dataclass(frozen=True, slots=True, eq=False)
class _TemplateQuery:
    """A query for the template. `around` is None if documents are not written once, unchanged."""

    text: str
    instruction: str | None
    around: _Surroundings | None
    frames: list[Frame] | None


@dataclass(frozen=True, slots=True)
class _TemplatePair:
    name: InputName
    query: _TemplateQuery
    around: _Surroundings
    document: str

    @property
    def text(self) -> str:
        return f"{self.around.left}{self.document}{self.around.right}"


class _SegmentHeads:
    """Tokenizes once what segments begin with for all queries: it ends with the instruction."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        # For each segment: the beginning that texts must share, the part split off from it, and its tokens.
        self._heads: dict[int, tuple[str, str, TokenIds]] = {}
        self._last: dict[int, str] = {}

    def of(self, segment: int, text: str) -> tuple[str, TokenIds]:
        """Returns how a segment begins for earlier queries too, and its tokens; empty for the first."""
        common, head, ids = self._heads.get(segment, ("", "", _NO_TOKENS))
        # The head can be split off where the rest of `common` follows, and perhaps not elsewhere.
        if not head or not text.startswith(common):
            common = commonprefix([self._last.get(segment, ""), text])  # noqa: RUF071 (no paths)
            head = common[: max(self._tokenizer.breaks(common), default=0)]
            ids = self._tokenizer.encode([head], "queries")[0]
            self._heads[segment] = common, head, ids
        self._last[segment] = text
        return head, ids


def _refused_instruction(error: ModelLoadError) -> InvalidRequestError:
    return InvalidRequestError(f"the instruction: {error}; change it, or leave it out", "instruction")


class TemplatePairBuilder:
    """Joins pairs by a score template. The tokens around a query's documents are made once. Unless the
    template is plain, each pair is also written whole, and tokenized so if the two differ. Thread-safe."""

    def __init__(self, tokenizer: TextTokenizer, template: ScoreTemplate, instruction: str | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._instruction = instruction
        self._trailing = np.array(template.trailing_ids, dtype=np.int32)

    def build(
        self, request: ScoreRequest, queries: list[FittedText], long_inputs: LongInputs
    ) -> Iterator[BuiltPair]:
        heads = _SegmentHeads(self._tokenizer)
        query = self._query(request, 0, queries[0], heads)
        # In parts, because the text around each document may be long.
        for start in range(0, len(request.documents), PART_TEXTS):
            pairs: list[_TemplatePair] = []
            whole: dict[int, BuiltPair] = {}
            for i, document in enumerate(request.document_texts[start : start + PART_TEXTS], start):
                if i and request.query_of(i) == i:
                    query = self._query(request, i, queries[i], heads)
                name = InputName("documents", i)
                if query.around is not None and self._is_framed(query, document, name):
                    pairs.append(_TemplatePair(name, query, query.around, document))
                else:
                    whole[i] = self._build_written(query, document, name, long_inputs)
            fitted = self._build_framed(pairs, long_inputs)
            for i in range(start, start + len(pairs) + len(whole)):
                yield whole[i] if i in whole else next(fitted)

    def shortest_pair(self) -> int:
        segments = self._template.written(SHORTEST_TEXT, SHORTEST_TEXT, self._instruction)
        return sum(len(ids) for ids in self._tokenizer.encode(segments, "text")) + len(self._trailing)

    def _joined(self, pair: _TemplatePair, parts: list[TokenIds], truncated: bool) -> BuiltPair:
        before, after = pair.around.before, pair.around.after
        windows = [JoinedTokens.of((before, part, after), pair.around.types) for part in parts]
        return BuiltPair(windows, pair.around.prefix, truncated)

    def _query(
        self, request: ScoreRequest, index: int, fitted: FittedText, heads: _SegmentHeads
    ) -> _TemplateQuery:
        text = request.query_texts[index]
        if fitted.truncated:
            text = self._tokenizer.decode(fitted.tokens.tolist())
        try:
            frames = self._template.frames(text, request.instruction)
        except ModelLoadError as error:
            raise _refused_instruction(error) from error
        around = None if frames is None else self._surroundings(frames, heads)
        return _TemplateQuery(text, request.instruction, around, frames)

    def _is_framed(self, query: _TemplateQuery, document: str, name: InputName) -> bool:
        """Whether the template writes a pair as the frames of its query say."""
        if self._template.is_plain:
            return True
        assert query.frames is not None
        framed = [
            frame.before if frame.after is None else f"{frame.before}{document}{frame.after}"
            for frame in query.frames
        ]
        return framed == self._written(query, document, name)

    def _written(self, query: _TemplateQuery, document: str, name: InputName) -> list[str]:
        """Returns a pair's segments. Raises InvalidRequestError if the template refuses its texts."""
        try:
            return self._template.written(query.text, document, query.instruction)
        except ModelLoadError as error:
            raise name.error(f"and its query: {error}") from error

    def _build_written(
        self, query: _TemplateQuery, document: str, name: InputName, long_inputs: LongInputs
    ) -> BuiltPair:
        """Builds a pair that is tokenized as the template writes it. A long one is truncated at an end, as by
        sentence-transformers; its last tokens then become those at the end of all pairs."""
        yield_to_smaller()
        most = long_inputs.max_document_tokens
        is_truncated = False
        if most is not None:
            (ids,) = self._tokenizer.encode([document], "documents", most + 1, long_inputs.side, [name])
            within = long_inputs.within(ids, name)
            if is_truncated := within.truncated:
                document = self._tokenizer.decode(within.tokens.tolist())
        segments = self._written(query, document, name)
        prefix = _NO_TOKENS if query.around is None else query.around.prefix
        limit = long_inputs.limit - len(self._trailing)
        if limit < 1:
            raise long_inputs.no_room(len(self._trailing))
        names = [name] * len(segments)
        ids = np.concatenate(
            self._tokenizer.encode(segments, "documents", limit + 1, long_inputs.side, names)
        )
        if len(ids) > limit:
            if long_inputs.uses_windows:
                raise name.error(
                    "is too long and cannot be read through windows: this model's template may "
                    f"change documents; shorten it, or let it be truncated ({long_inputs.names.allow})",
                )
            if not long_inputs.may_truncate:
                raise long_inputs.too_long(name, len(ids), long_inputs.limit)
            ids, is_truncated = truncate(ids, limit, long_inputs.side).copy(), True
            end = self._end(query.instruction)[-limit:] if self._template.restores_end else _NO_TOKENS
            ids[limit - len(end) :] = end
        tokens = JoinedTokens.of((ids, self._trailing), (0, 0))
        return BuiltPair([tokens], prefix, is_truncated)

    def _end(self, instruction: str | None) -> TokenIds:
        """Returns the tokens at the end of all pairs, as sentence-transformers finds them. Raises
        InvalidRequestError for an instruction that the template refuses."""
        try:
            written = [self._template.written(text, text, instruction) for text in ("0", "1 2 3 4")]
        except ModelLoadError as error:
            raise _refused_instruction(error) from error
        first, second = (np.concatenate(self._tokenizer.encode(each, "text")) for each in written)
        backwards = zip(first[::-1].tolist(), second[::-1].tolist(), strict=False)
        count = next((i for i, (one, other) in enumerate(backwards) if one != other), 0)
        return first[len(first) - count :]

    def _surroundings(self, frames: list[Frame], heads: _SegmentHeads) -> _Surroundings:
        position = next(i for i, frame in enumerate(frames) if frame.after is not None)
        left, right = frames[position].before, frames[position].after or ""
        # Text that cannot merge with a document is tokenized once, not once for each document.
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
        types: tuple[TokenIds | int, int, TokenIds | int] = 0, 0, 0
        if self._template.marks_document:
            # The last two parts before a document, and the first after it, share its type.
            before, behind = [0] * (len(ids) - 2) + [1, 1], [1] + [0] * (len(after) - 1)
            types = (
                np.repeat(np.array(before, np.int32), [len(part) for part in ids]),
                1,
                np.repeat(np.array(behind, np.int32), [len(part) for part in after]),
            )
        # The last token may merge with a document's first characters: it is no part of the prefix.
        return _Surroundings(
            np.concatenate(ids),
            left[apart:],
            right[:beside],
            np.concatenate(after),
            np.concatenate([*ids, last[:-1]]),
            types,
        )

    def _build_framed(self, pairs: list[_TemplatePair], long_inputs: LongInputs) -> Iterator[BuiltPair]:
        """Builds each pair, as one sequence or with each window of the document in one."""
        limit, at_one_end = long_inputs.limit, self._truncates_at_one_end(long_inputs)
        if long_inputs.max_document_tokens is not None:
            yield from (self._build_from_parts(pair, long_inputs) for pair in pairs)
            return
        texts, names = (pair.text for pair in pairs), (pair.name for pair in pairs)
        encoded = self._tokenizer.encode(texts, "documents", limit + 1, names=names)
        for pair, ids in zip(pairs, encoded, strict=True):
            if pair.around.num_tokens + len(ids) <= limit:
                yield self._joined(pair, [ids], False)
            elif at_one_end:
                yield self._build_written(pair.query, pair.document, pair.name, long_inputs)
            else:
                yield self._build_from_parts(pair, long_inputs)

    def _truncates_at_one_end(self, long_inputs: LongInputs) -> bool:
        """Whether a long pair is truncated as written, and so loses more than tokens of its document."""
        at_one_end = not self._template.restores_end or long_inputs.side == "left"
        is_limited = long_inputs.max_document_tokens is not None
        return at_one_end and not is_limited and long_inputs.truncates_as_usual and long_inputs.may_truncate

    def window_spans(
        self, request: ScoreRequest, index: int, query: FittedText, long_inputs: LongInputs
    ) -> list[Span]:
        framed = self._query(request, request.query_of(index), query, _SegmentHeads(self._tokenizer))
        document = request.document_texts[index]
        name = InputName("documents", index)
        is_framed = framed.around is not None and self._is_framed(framed, document, name)
        if framed.around is None or not is_framed or self._truncates_at_one_end(long_inputs):
            return []
        pair = _TemplatePair(name, framed, framed.around, document)
        tokens, room = self._read_apart(pair, long_inputs)
        limited = long_inputs.within(tokens.spans - len(framed.around.left), pair.name)
        windows = long_inputs.windows(limited.tokens, room, pair.name)
        return [extent(np.clip(window.tokens, 0, len(pair.document))) or (0, 0) for window in windows]

    def _read_apart(self, pair: _TemplatePair, long_inputs: LongInputs) -> tuple[Around, Room]:
        """Returns the document's tokens and those around them, and the room for the former."""
        most = long_inputs.most_of_document(long_inputs.limit)
        start = len(pair.around.left)
        span = range(start, start + len(pair.document))
        tokens = self._tokenizer.encode_around(
            pair.text, span, "documents", most, long_inputs.side, pair.name
        )
        others = pair.around.num_tokens + len(tokens.before) + len(tokens.after)
        return tokens, Room(long_inputs.limit - others, others)

    def _build_from_parts(self, pair: _TemplatePair, long_inputs: LongInputs) -> BuiltPair:
        tokens, room = self._read_apart(pair, long_inputs)
        limited = long_inputs.within(tokens.inside, pair.name)
        windows = long_inputs.windows(limited.tokens, room, pair.name)
        parts = [np.concatenate([tokens.before, window.tokens, tokens.after]) for window in windows]
        return self._joined(pair, parts, limited.truncated or any(window.truncated for window in windows))


# A query or a document: its texts, None in place of each picture, and the pictures.
_PictureSide: TypeAlias = tuple[list[str | None], list[ImageInputs]]


class PicturePairBuilder(TemplatePairBuilder):
    """Joins pairs with pictures, which are not truncated, by a score template; its base joins others."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: ScoreTemplate,
        instruction: str | None,
        pages: PageBuilder,
        longest: int,
    ) -> None:
        super().__init__(tokenizer, template, instruction)
        self._pages = pages
        self._longest = longest

    def build(
        self, request: ScoreRequest, queries: list[FittedText], long_inputs: LongInputs
    ) -> Iterator[BuiltPair]:
        read: dict[int, _PictureSide] = {}
        for i, joined in enumerate(super().build(_without_pictures(request), queries, long_inputs)):
            query = request.query_of(i)
            if not isinstance(request.queries[query], Content) and isinstance(request.documents[i], str):
                yield joined
                continue
            names = InputName("queries", query), InputName("documents", i)
            if query not in read:
                item = request.queries[query]
                if isinstance(item, str) and queries[query].truncated:
                    item = self._tokenizer.decode(queries[query].tokens.tolist())
                read[query] = self._side(item, names[0])
            document = self._side(request.documents[i], names[1])
            yield self._joined_pictures(read[query], document, request.instruction, *names)

    def window_spans(
        self, request: ScoreRequest, index: int, query: FittedText, long_inputs: LongInputs
    ) -> list[Span]:
        return super().window_spans(_without_pictures(request), index, query, long_inputs)

    def _side(self, item: Item, name: InputName) -> _PictureSide:
        if isinstance(item, Content):
            side = self._pages.split(self._pages.opened(item, name), name)
        else:
            assert isinstance(item, str)
            side = [item], []
        self._pages.check_texts(side[0], name)
        return side

    def _joined_pictures(
        self,
        query: _PictureSide,
        document: _PictureSide,
        instruction: str | None,
        query_name: InputName,
        name: InputName,
    ) -> BuiltPair:
        used = instruction or self._instruction
        if used and self._pages.image_token in used:
            raise InvalidRequestError(
                f"instruction holds {self._pages.image_token!r}, in whose place this model reads pictures; "
                "leave it out",
                "instruction",
            )
        try:
            pair = self._template.pair(query[0], document[0], used, self._pages.image_token)
        except ModelLoadError as error:
            raise name.error(f"and its query: {error}") from error
        sides = (query[1], document[1]) if pair.query_first else (document[1], query[1])
        prefix = _NO_TOKENS
        if pair.before and pair.query_first:
            # Without the last token, which may merge with the document.
            prefix = self._pages.written(pair.before, query[1], query_name).ids[:-1]
        tokens = self._pages.written(pair.text, [*sides[0], *sides[1]], name, self._template.trailing_ids)
        self._pages.check_length(tokens, self._longest, name)
        return BuiltPair([tokens], prefix, truncated=False)


PairBuilder: TypeAlias = TokenizerPairBuilder | TemplatePairBuilder


def _without_pictures(request: ScoreRequest) -> ScoreRequest:
    """Replaces contents with pictures by empty texts."""
    return replace(
        request,
        queries=tuple("" if isinstance(query, Content) else query for query in request.queries),
        documents=tuple("" if isinstance(document, Content) else document for document in request.documents),
    )


@dataclass(frozen=True, slots=True)
class ScoreLabel:
    """The label whose probability is the score. `exclusive` labels share 1 between them."""

    index: int
    exclusive: bool

    def logits_of(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """Returns the numbers [n] whose sigmoids are the probabilities, from logits [n, labels]."""
        numbers = rows.astype(np.float64)
        if not self.exclusive:
            return numbers[:, self.index]
        others = np.delete(numbers, self.index, axis=1)
        greatest = others.max(axis=1, keepdims=True)
        rest = np.log(np.exp(others - greatest).sum(axis=1))
        logits: NDArray[np.float64] = numbers[:, self.index] - greatest[:, 0] - rest
        return logits


@dataclass(frozen=True, slots=True, eq=False)
class ReadPairs:
    """The reading of a plan's pairs, kept to find the characters of windows again."""

    builder: PairBuilder
    request: ScoreRequest
    queries: Sequence[FittedText]
    long_inputs: LongInputs

    def window_spans(self, pair: int) -> list[Span]:
        query = self.queries[self.request.query_of(pair)]
        return self.builder.window_spans(self.request, pair, query, self.long_inputs)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CrossEncoderPlan(CachedScorePlan):
    """One value for each window of each document to run; the best window counts. `label` is set if the model
    has several labels, and `pairs` for requests with `explain`."""

    activation: Head | None = None
    label: ScoreLabel | None = None
    pairs: ReadPairs | None = None

    @property
    def keeps_order(self) -> bool:
        return self.activation is None or keeps_order(self.activation)

    def raw_scores(self, values: PlanValues) -> Scores:
        scores = np.array(self.logits(values), dtype=np.float32)
        if self.num_values > len(self.facts):
            scores = np.maximum.reduceat(scores, self._first_values[:-1])
        return self.found.with_new(scores)

    def final_scores(self, raw: Scores) -> Scores:
        scores = raw
        if self.activation is not None:
            scores = activate(scores[:, None], self.activation)[:, 0]
        return scores if self.normalization is None else self.normalization.apply(scores)

    def logits(self, values: PlanValues) -> PlanValues:
        """Returns one number for each value: of several labels' logits, that of the label that counts."""
        rows = [value for value in values if value is not None] if self.label is not None else []
        if self.label is None or not rows:
            return values
        logits = iter(self.label.logits_of(np.array(rows).reshape(len(rows), -1)).tolist())
        return [None if value is None else next(logits) for value in values]

    def documents_of(self, values: Collection[int]) -> Sequence[int]:
        first_values = self._first_values
        return [self.found.new[bisect_right(first_values, value) - 1] for value in values]

    def explanations(self, values: PlanValues, documents: Iterable[int]) -> dict[int, Explanation]:
        logits = self.logits(values)
        first_values = self._first_values
        pair_of = {document: pair for pair, document in enumerate(self.found.new)}
        explained: dict[int, Explanation] = {}
        for document in documents:
            yield_to_smaller()
            explanation = self.found.explanation(document)
            if explanation is None:
                pair = pair_of[document]
                explanation = self._explain(pair, logits[first_values[pair] : first_values[pair + 1]])
            if explanation is not None:
                explained[document] = explanation
        return explained

    @property
    def _first_values(self) -> list[int]:
        """The first value of each document that is run, and the one after the last value."""
        return list(accumulate((one.windows for one in self.facts), initial=0))

    def _explain(self, pair: int, logits: PlanValues) -> Explanation | None:
        """Explains a pair that was run, by the logits of its windows; None if one is missing."""
        if None in logits:
            return None
        facts, spans = self.facts[pair], []
        is_text = self.pairs is not None and isinstance(self.pairs.request.documents[pair], str)
        if self.pairs is not None and is_text and (facts.truncated or len(logits) > 1):
            spans = self.pairs.window_spans(pair)
        windows: tuple[WindowScore, ...] = ()
        if len(logits) > 1:
            scores = self.final_scores(np.array(logits, dtype=np.float32)).tolist()
            windows = tuple(WindowScore(*each) for each in zip(spans, scores, strict=False))
        read_span = (spans[0][0], spans[-1][1]) if spans and facts.truncated else None
        return Explanation(facts.tokens, bool(facts.truncated), False, (), windows, (), read_span)


class CrossEncoderProcessor(ScoreProcessor):
    """Makes one sequence for each pair, or one for each window of its document.

    With prefix sharing, the tokens before the document run once for all pairs of a query. Without CUDA
    graphs even a lone pair is split there, so that its score does not depend on other pairs."""

    # The task of a pair.
    _task: ClassVar[str] = "classify"

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        model, tokenizer, longest = context.model, context.tokenizer, context.limits.longest_sequence
        template, pages = model.pairs.template, page_builder(model, tokenizer, longest)
        self._pairs: PairBuilder
        if template is None:
            self._pairs = TokenizerPairBuilder(tokenizer, model.pairs.truncation)
        elif pages is None:
            self._pairs = TemplatePairBuilder(tokenizer, template, model.instruction)
        else:
            self._pairs = PicturePairBuilder(tokenizer, template, model.instruction, pages, longest)
        self._label: ScoreLabel | None = None
        if model.score_label is not None:
            self._label = ScoreLabel(model.score_label, exclusive=model.probabilities is not torch.sigmoid)

    @classmethod
    def is_for(cls, model: LoadedModel) -> bool:
        return model.score_task == "classify" and model.listwise is None

    def check_options(self, options: ScoreOptions) -> None:
        labels = self._model.labels
        if not self._model.has_score:
            named = ", ".join(labels[:_NAMED_LABELS]) + (", ..." if len(labels) > _NAMED_LABELS else "")
            raise InvalidRequestError(
                f"this model has {len(labels)} labels ({named}) but no single score; name the one that "
                "means relevance by the option score_label, or classify (POST /classify)",
                "model",
            )

    def plan(self, request: ScoreRequest, ids: RequestIds) -> CrossEncoderPlan:
        found = find_scores(self._context.score_cache, request, together=False)
        if not found.cached:
            return self._plan(request, request, found, ids)
        try:
            return self._plan(request, request.only(found.new) if found.new else request, found, ids)
        except InvalidRequestError:
            # Errors name a document by its index in the whole request.
            self._plan(request, request, FoundScores.none(request), ids)
            raise

    def shortest_sequences(self) -> dict[str, int]:
        prompt = self._model.query.prompt
        return {"a pair": self._pairs.shortest_pair() + len(self._tokenizer.encode([prompt], "queries")[0])}

    def _plan(
        self, request: ScoreRequest, new: ScoreRequest, found: FoundScores, ids: RequestIds
    ) -> CrossEncoderPlan:
        """Makes the plan of a request whose `new` documents are run, if any."""
        new = self._with_prompt(new)
        long_inputs = self._limits.applied_to(new.truncation, ids.most_tokens)
        queries = self._read_queries(new, long_inputs) if found.new else []
        pairs = self._build(new, queries, long_inputs, ids) if found.new else []
        facts = [
            RunFacts(
                sum(map(len, pair.windows)),
                int(pair.truncated),
                queries[new.query_of(i)].truncated,
                len(pair.windows),
            )
            for i, pair in enumerate(pairs)
        ]
        if request.explain:
            check_explained_lines(request.explain, [one.windows for one in facts])
        sequences = pair_sequences(pairs, self._context.sharing, ids, self._task)
        truncated_queries = sum(query.truncated for query in queries) + found.truncated_queries(request)
        return CrossEncoderPlan(
            sequences=sequences,
            num_values=sum(one.windows for one in facts),
            truncated=truncated_queries + sum(pair.truncated for pair in pairs) + found.truncated_documents,
            images=self._image_jobs(sequences),
            cached_documents=len(found.cached),
            cached_tokens=found.cached_tokens,
            request=request,
            truncated_queries=truncated_queries,
            normalization=self._normalization(request),
            found=found,
            facts=facts,
            activation=self._activation(request),
            label=self._label,
            pairs=ReadPairs(self._pairs, new, queries, long_inputs) if request.explain else None,
        )

    def _activation(self, request: ScoreRequest) -> Head | None:
        if not (request.use_activation or request.normalize):
            return None
        if self._label is not None:
            return torch.sigmoid
        return self._model.probabilities if request.normalize else self._model.activation

    def _with_prompt(self, request: ScoreRequest) -> ScoreRequest:
        rules = self._model.query
        if request.instruction is not None and rules.takes_instruction:
            rules = rules.instructed(request.instruction)
        if not rules.prompt:
            return request
        queries = (rules.prompt + each if isinstance(each, str) else each for each in request.queries)
        return replace(request, queries=tuple(queries))

    def _read_queries(self, request: ScoreRequest, long_inputs: LongInputs) -> list[FittedText]:
        most = None if long_inputs.max_query_tokens is None else long_inputs.max_query_tokens + 1
        names = [InputName("queries", i) for i in range(len(request.queries))]
        texts = [query if isinstance(query, str) else "" for query in request.queries]
        encoded = self._tokenizer.encode(texts, "queries", most, long_inputs.side, names)
        return [long_inputs.within(*each) for each in zip(encoded, names, strict=True)]

    def _build(
        self, request: ScoreRequest, queries: list[FittedText], long_inputs: LongInputs, ids: RequestIds
    ) -> list[BuiltPair]:
        """Builds all pairs. Raises RequestTooLargeError as soon as they have too many tokens."""
        pairs, num_tokens = [], 0
        for pair in self._pairs.build(request, queries, long_inputs):
            yield_to_smaller()
            if self._model.ending_pad_id is not None:
                pair = replace(pair, windows=[self._model.for_classifier(each) for each in pair.windows])
            num_tokens += sum(map(len, pair.windows))
            ids.check_tokens(num_tokens)
            pairs.append(pair)
        return pairs


def pair_sequences(
    pairs: Sequence[BuiltPair], sharing: PrefixSharing | None, ids: RequestIds, task: str
) -> list[TokenSequence]:
    """Returns the sequences of all windows, each prefix before the first window that begins with it."""
    shared = [] if sharing is None else _shared_prefixes(sharing, pairs, ids)
    prefix_of: Mapping[int, TokenSequence] = {i: prefix for prefix, windows in shared for i in windows}
    windows: list[JoinedTokens | Tokens] = [window for pair in pairs for window in pair.windows]
    sequences: list[TokenSequence] = []
    added: set[int] = set()
    for i, tokens in enumerate(windows):
        prefix = prefix_of.get(i)
        if prefix is not None and prefix.sequence_id not in added:
            sequences.append(prefix)
            added.add(prefix.sequence_id)
        if isinstance(tokens, Tokens):
            tokens = tokens.behind(0 if prefix is None else len(prefix), ids.sequence_ids)
        sequences.append(TokenSequence.pair(ids.next_sequence_id(), ids.slot(i), tokens, prefix, task))
    return sequences


def _shared_prefixes(
    sharing: PrefixSharing, pairs: Sequence[BuiltPair], ids: RequestIds
) -> list[tuple[TokenSequence, list[int]]]:
    """Returns the prefixes to run by themselves, each with the positions of the windows that share it."""
    windows = [(window, pair.prefix) for pair in pairs for window in pair.windows]
    positions_of: dict[tuple[bytes, ...], list[int]] = {}
    for i, (tokens, prefix) in enumerate(windows):
        yield_to_smaller()
        token_ids = tokens.ids
        length = shared_tokens(token_ids, prefix)
        if length:
            pictures = [image.digest for image in tokens.images if image.positions[0] < length]
            positions_of.setdefault((token_ids[:length].tobytes(), *pictures), []).append(i)
    shared = []
    for positions in positions_of.values():
        tokens, prefix = windows[positions[0]]
        own = sum(len(windows[i][0]) for i in positions) - len(positions) * len(prefix)
        # Steps with pictures are never replayed, so sharing is free.
        has_pictures = any(windows[i][0].images for i in positions)
        if not has_pictures and not sharing.is_worth(len(prefix), len(positions), own):
            continue
        if isinstance(tokens, Tokens):
            shared_part = tokens.first(len(prefix)).behind(0, ids.sequence_ids)
        else:
            shared_part = Tokens(tokens.ids[: len(prefix)], tokens.type_ids[: len(prefix)])
        sequence = TokenSequence.prefix(
            ids.next_sequence_id(), ids.request_id, shared_part, num_consumers=len(positions)
        )
        shared.append((sequence, positions))
    return shared


def shared_tokens(ids: TokenIds, prefix: TokenIds) -> int:
    """Returns how many tokens a pair shares with all others that begin with `prefix`: 0 if it begins
    otherwise, has no tokens of its own, or the prefix is too short. Depends on nothing but the pair."""
    length = len(prefix)
    if length < SHORTEST_PREFIX or len(ids) <= length or not np.array_equal(ids[:length], prefix):
        return 0
    return length
