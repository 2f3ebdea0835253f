"""Pairs: a query and a document in one sequence, as a cross-encoder reads them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from maxsimd.engine.checkpoint.templates import Frame, ScoreTemplate
from maxsimd.engine.checkpoint.visual import ImageInputs
from maxsimd.engine.errors import InvalidRequestError, ModelLoadError
from maxsimd.engine.explanations import Span
from maxsimd.engine.media import Content
from maxsimd.engine.processors.pages import PageBuilder
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
from maxsimd.engine.requests import Item, ScoreRequest
from maxsimd.engine.workers import yield_to_smaller
from maxsimd.scheduler import JoinedTokens, Tokens
from maxsimd.scheduler.sequence import TokenIds

TruncationStrategy = Literal["longest_first", "only_first", "only_second"]

_NO_TOKENS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class BuiltPair:
    """A query and a document in one sequence, or one for each window of the document.

    `prefix` stands before the document in all pairs of the query; a pair whose document merges with it
    begins otherwise. The pictures of a pair have no ids yet."""

    windows: Sequence[JoinedTokens | Tokens]
    prefix: TokenIds
    truncated: bool


class PairBuilder(ABC):
    """Puts queries and documents together as one model reads them. Thread-safe."""

    @abstractmethod
    def build(
        self, request: ScoreRequest, queries: list[FittedText], long_inputs: LongInputs
    ) -> Iterator[BuiltPair]:
        """Yields the pairs of a request in the order of its documents; `queries` are its queries' tokens."""

    @abstractmethod
    def window_spans(
        self, request: ScoreRequest, index: int, query_tokens: int, long_inputs: LongInputs
    ) -> list[Span]:
        """Returns the characters of each window of document `index`, beside a query of that many tokens;
        none if a truncated pair does not tell."""

    @abstractmethod
    def shortest_pair(self) -> int:
        """Returns the tokens of the shortest pair."""


class TokenizerPairBuilder(PairBuilder):
    """Joins pairs by the tokenizer's template, such as BERT's [CLS] query [SEP] document [SEP].

    `truncation` is the tokenizers library's name for how a long pair is truncated."""

    def __init__(self, tokenizer: TextTokenizer, truncation: TruncationStrategy) -> None:
        self._tokenizer = tokenizer
        self._template = tokenizer.pair
        self._truncation = truncation

    def build(
        self, request: ScoreRequest, queries: list[FittedText], long_inputs: LongInputs
    ) -> Iterator[BuiltPair]:
        before, between, _ = self._template.ids
        prefixes = [np.concatenate([before, query.tokens, between]) for query in queries]
        # If both are truncated to half, the longer one matters.
        longest_query = max(len(query.tokens) for query in queries)
        most = long_inputs.most_of_document(max(long_inputs.limit, longest_query))
        names = [InputName("documents", i) for i in range(len(request.documents))]
        documents = self._tokenizer.encode(request.document_texts, "documents", most, long_inputs.side, names)
        for i, (text, name) in enumerate(zip(documents, names, strict=True)):
            query = request.query_of(i)
            document = long_inputs.document(text, name)
            if self._template.special_tokens + len(queries[query].tokens) + len(document.tokens) == 0:
                raise name.error("and its query have no tokens; leave them out")
            windows, is_truncated = self._windows(queries[query].tokens, document.tokens, name, long_inputs)
            yield BuiltPair(windows, prefixes[query], document.truncated or is_truncated)

    def window_spans(
        self, request: ScoreRequest, index: int, query_tokens: int, long_inputs: LongInputs
    ) -> list[Span]:
        most, side = long_inputs.max_document_tokens, long_inputs.side
        name = InputName("documents", index)
        text = request.document_texts[index]
        _, spans = self._tokenizer.encode_with_spans(text, "documents", most, side, name)
        room = long_inputs.limit - self._template.special_tokens
        if long_inputs.uses_windows:
            windows = long_inputs.windows(spans, self._beside(query_tokens, long_inputs), name)
            return [extent(window.tokens) or (0, 0) for window in windows]
        if query_tokens + len(spans) > room:
            _, length = self._truncated_lengths(query_tokens, len(spans), room, name)
            spans = truncate(spans, length, side)
        return [extent(spans) or (0, 0)]

    def shortest_pair(self) -> int:
        return self._template.special_tokens + 2

    def _windows(
        self, query: TokenIds, document: TokenIds, name: InputName, long_inputs: LongInputs
    ) -> tuple[list[JoinedTokens], bool]:
        """Returns a pair as one sequence or as windows, and whether it was truncated."""
        special_tokens = self._template.special_tokens
        room = long_inputs.limit - special_tokens
        if len(query) + len(document) <= room:
            return [self._template.join(query, document)], False
        if long_inputs.uses_windows:
            windows = long_inputs.windows(document, self._beside(len(query), long_inputs), name)
            return [self._template.join(query, window.tokens) for window in windows], False
        if not long_inputs.may_truncate:
            raise long_inputs.too_long(name, len(query) + len(document) + special_tokens, long_inputs.limit)
        first, second = self._truncated_lengths(len(query), len(document), room, name)
        side = long_inputs.side
        return [self._template.join(truncate(query, first, side), truncate(document, second, side))], True

    def _beside(self, query: int, long_inputs: LongInputs) -> Room:
        """Returns the room for a document beside a query."""
        others = self._template.special_tokens + query
        return Room(long_inputs.limit - others, others)

    def _truncated_lengths(self, query: int, document: int, room: int, name: InputName) -> tuple[int, int]:
        """Returns how much of both texts is read within `room` tokens together."""
        if self._truncation == "longest_first":
            return longest_first(query, document, room)
        if self._truncation == "only_first":
            if document > room:
                raise name.error(f"has {document} tokens and leaves no room for the query; shorten it")
            return room - document, document
        if query > room:
            raise InvalidRequestError(
                f"the query has {query} tokens and leaves no room for {name}; shorten it", "queries"
            )
        return query, room - query


@dataclass(frozen=True, slots=True, eq=False)
class _Surroundings:
    """The tokens around the documents of a query.

    `before` and `after` are token ids around a text: the document between `left` and `right`, with which
    its tokens may merge. All pairs of the query begin with `prefix`. `types` are the type ids before the
    text, of it, and after it."""

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

    @property
    def span(self) -> range:
        """The document's place in the text."""
        start = len(self.around.left)
        return range(start, start + len(self.document))


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
            common = _common_start(self._last.get(segment, ""), text)
            head = common[: max(self._tokenizer.breaks(common), default=0)]
            ids = self._tokenizer.encode([head], "queries")[0]
            self._heads[segment] = common, head, ids
        self._last[segment] = text
        return head, ids


def _common_start(first: str, second: str) -> str:
    different = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return first[: next(different, min(len(first), len(second)))]


def _refused_instruction(error: ModelLoadError) -> InvalidRequestError:
    return InvalidRequestError(f"the instruction: {error}; change it, or leave it out", "instruction")


class TemplatePairBuilder(PairBuilder):
    """Joins pairs by a score template; `instruction` is the checkpoint's own.

    The tokens around a query's documents are made once. Unless the template is plain, each pair is also
    written as a whole, and tokenized as a whole if the two differ."""

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
        """Builds a pair that is tokenized as the template writes it.

        A long one is truncated at one end, as sentence-transformers does; its last tokens then become
        those at the end of all pairs."""
        yield_to_smaller()
        most = long_inputs.max_document_tokens
        is_truncated = False
        if most is not None:
            (ids,) = self._tokenizer.encode([document], "documents", most + 1, long_inputs.side, [name])
            within = long_inputs.document(ids, name)
            if is_truncated := within.truncated:
                document = self._tokenizer.decode(within.tokens.tolist())
        segments = self._written(query, document, name)
        around = None if query.around is None else query.around.prefix
        prefix = _NO_TOKENS if around is None else around
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
                    f"change documents; shorten it, or let it be truncated ({long_inputs.words.allow})",
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
        shorter = min(len(first), len(second))
        alike = first[len(first) - shorter :] == second[len(second) - shorter :]
        count = shorter - int(np.flatnonzero(~alike)[-1]) - 1 if not alike.all() else 0
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
        """Returns type ids: the last two parts before a document, and the first after it, share its type."""
        if not self._template.marks_document:
            return 0, 0, 0
        of_segment = [0] * (len(before) - 2) + [1, 1]
        lengths = [len(part) for part in before], [len(part) for part in after]
        return (
            np.repeat(np.array(of_segment, np.int32), lengths[0]),
            1,
            np.repeat(np.array([1] + [0] * (len(after) - 1), np.int32), lengths[1]),
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
        self, request: ScoreRequest, index: int, query_tokens: int, long_inputs: LongInputs
    ) -> list[Span]:
        query = request.query_of(index)
        most = None if long_inputs.max_query_tokens is None else long_inputs.max_query_tokens + 1
        (encoded,) = self._tokenizer.encode([request.query_texts[query]], "queries", most, long_inputs.side)
        fitted = long_inputs.query(encoded, InputName("queries", query))
        framed = self._query(request, query, fitted, _SegmentHeads(self._tokenizer))
        document = request.document_texts[index]
        name = InputName("documents", index)
        is_framed = framed.around is not None and self._is_framed(framed, document, name)
        if framed.around is None or not is_framed or self._truncates_at_one_end(long_inputs):
            return []
        pair = _TemplatePair(name, framed, framed.around, document)
        tokens, room = self._read_apart(pair, long_inputs)
        limited = long_inputs.document(tokens.spans - len(framed.around.left), pair.name)
        windows = long_inputs.windows(limited.tokens, room, pair.name)
        return [extent(np.clip(window.tokens, 0, len(pair.document))) or (0, 0) for window in windows]

    def _read_apart(self, pair: _TemplatePair, long_inputs: LongInputs) -> tuple[Around, Room]:
        """Returns the document's tokens and those around them, and the room for the former."""
        most = long_inputs.most_of_document(long_inputs.limit)
        tokens = self._tokenizer.encode_around(
            pair.text, pair.span, "documents", most, long_inputs.side, pair.name
        )
        others = pair.around.num_tokens + len(tokens.before) + len(tokens.after)
        return tokens, Room(long_inputs.limit - others, others)

    def _build_from_parts(self, pair: _TemplatePair, long_inputs: LongInputs) -> BuiltPair:
        tokens, room = self._read_apart(pair, long_inputs)
        limited = long_inputs.document(tokens.inside, pair.name)
        windows = long_inputs.windows(limited.tokens, room, pair.name)
        parts = [np.concatenate([tokens.before, window.tokens, tokens.after]) for window in windows]
        return self._joined(pair, parts, limited.truncated or any(window.truncated for window in windows))


@dataclass(frozen=True, slots=True, eq=False)
class _PictureSide:
    """A query or a document: its texts, None in place of each picture, and the pictures."""

    texts: list[str | None]
    images: list[ImageInputs]


class PicturePairBuilder(PairBuilder):
    """Joins pairs with pictures, which are not truncated, by a score template; `texts` joins all others."""

    def __init__(
        self,
        texts: PairBuilder,
        template: ScoreTemplate,
        instruction: str | None,
        tokenizer: TextTokenizer,
        pages: PageBuilder,
        longest: int,
    ) -> None:
        self._texts = texts
        self._template = template
        self._instruction = instruction
        self._tokenizer = tokenizer
        self._pages = pages
        self._longest = longest

    def build(
        self, request: ScoreRequest, queries: list[FittedText], long_inputs: LongInputs
    ) -> Iterator[BuiltPair]:
        read: dict[int, _PictureSide] = {}
        others = self._texts.build(_without_pictures(request), queries, long_inputs)
        for i, joined in enumerate(others):
            query = request.query_of(i)
            if not isinstance(request.queries[query], Content) and isinstance(request.documents[i], str):
                yield joined
                continue
            if query not in read:
                read[query] = self._query(request, query, queries[query])
            document = self._side(request.documents[i], InputName("documents", i))
            names = InputName("queries", query), InputName("documents", i)
            yield self._joined(read[query], document, request.instruction, *names)

    def window_spans(
        self, request: ScoreRequest, index: int, query_tokens: int, long_inputs: LongInputs
    ) -> list[Span]:
        return self._texts.window_spans(_without_pictures(request), index, query_tokens, long_inputs)

    def shortest_pair(self) -> int:
        return self._texts.shortest_pair()

    def _query(self, request: ScoreRequest, index: int, fitted: FittedText) -> _PictureSide:
        query = request.queries[index]
        if isinstance(query, str) and fitted.truncated:
            query = self._tokenizer.decode(fitted.tokens.tolist())
        return self._side(query, InputName("queries", index))

    def _side(self, item: Item, name: InputName) -> _PictureSide:
        if isinstance(item, Content):
            side = _PictureSide(*self._pages.split(self._pages.opened(item, name), name))
        else:
            assert isinstance(item, str)
            side = _PictureSide([item], [])
        self._pages.check_texts(side.texts, name)
        return side

    def _joined(
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
            pair = self._template.pair(query.texts, document.texts, used, self._pages.image_token)
        except ModelLoadError as error:
            raise name.error(f"and its query: {error}") from error
        sides = (query.images, document.images) if pair.query_first else (document.images, query.images)
        prefix = _NO_TOKENS
        if pair.before and pair.query_first:
            # Without the last token, which may merge with the document.
            prefix = self._pages.written(pair.before, query.images, query_name).ids[:-1]
        tokens = self._pages.written(pair.text, [*sides[0], *sides[1]], name, self._template.trailing_ids)
        self._pages.check_length(tokens, self._longest, name)
        return BuiltPair([tokens], prefix, truncated=False)


def _without_pictures(request: ScoreRequest) -> ScoreRequest:
    """Replaces contents with pictures by empty texts."""
    return replace(
        request,
        queries=tuple("" if isinstance(query, Content) else query for query in request.queries),
        documents=tuple("" if isinstance(document, Content) else document for document in request.documents),
    )
