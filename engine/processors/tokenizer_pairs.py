"""Pairs that the tokeniser's own template puts together: BERT's [CLS] query [SEP] document [SEP] and its
like."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.explanations import Span
from maxsimd.engine.processors.pair_joiner import JoinedPair
from maxsimd.engine.processors.text.long_inputs import Fitted, InputName, LongInputs, Room, too_long
from maxsimd.engine.processors.text.origins import extent
from maxsimd.engine.processors.text.tokenization import TextTokenizer, cut, longest_first
from maxsimd.engine.requests import ScoreRequest
from maxsimd.scheduler import JoinedTokens
from maxsimd.scheduler.payload import TokenIds

TruncationStrategy = Literal["longest_first", "only_first", "only_second"]


class TokenizerJoiner:
    """Joins pairs by the tokeniser's template; `truncation` is the tokenizers library's name for how a pair
    that is too long is cut."""

    def __init__(self, tokenizer: TextTokenizer, truncation: TruncationStrategy) -> None:
        self._tokenizer = tokenizer
        self._template = tokenizer.pair
        self._truncation = truncation

    def join(
        self, request: ScoreRequest, queries: list[Fitted[np.int32]], long_inputs: LongInputs
    ) -> Iterator[JoinedPair]:
        before, between, _ = self._template.ids
        prefixes = [np.concatenate([before, query.tokens, between]) for query in queries]
        # Where both are cut to halves, it counts which of them is longer.
        longest_query = max(len(query.tokens) for query in queries)
        most = long_inputs.most_of_document(max(long_inputs.limit, longest_query))
        names = [InputName("documents", i) for i in range(len(request.documents))]
        documents = self._tokenizer.encode(request.document_texts, "documents", most, long_inputs.side, names)
        for i, (text, name) in enumerate(zip(documents, names, strict=True)):
            query = request.query_of(i)
            document = long_inputs.document(text, name)
            if self._template.special_tokens + len(queries[query].tokens) + len(document.tokens) == 0:
                raise InvalidRequestError(f"{name} and its query have no tokens; leave them out", name.param)
            windows, cut_to_fit = self._windows(queries[query].tokens, document.tokens, name, long_inputs)
            yield JoinedPair(windows, prefixes[query], document.truncated or cut_to_fit)

    def window_spans(
        self, request: ScoreRequest, index: int, query_tokens: int, long_inputs: LongInputs
    ) -> list[Span]:
        most = long_inputs.max_document_tokens
        name = InputName("documents", index)
        _, spans = self._tokenizer.encode_with_spans(
            request.document_texts[index], "documents", most, long_inputs.side, name
        )
        windows = long_inputs.windows(spans, self._beside(query_tokens, long_inputs), name)
        return [extent(window.tokens) or (0, 0) for window in windows]

    def shortest_pair(self) -> int:
        return self._template.special_tokens + 2

    def _windows(
        self, query: TokenIds, document: TokenIds, name: InputName, long_inputs: LongInputs
    ) -> tuple[list[JoinedTokens], bool]:
        """A pair as one sequence or as windows, and whether it was cut."""
        special_tokens = self._template.special_tokens
        room = long_inputs.limit - special_tokens
        if len(query) + len(document) <= room:
            return [self._template.join(query, document)], False
        if long_inputs.uses_windows:
            windows = long_inputs.windows(document, self._beside(len(query), long_inputs), name)
            return [self._template.join(query, window.tokens) for window in windows], False
        if not long_inputs.may_cut:
            raise too_long(name, len(query) + len(document) + special_tokens, long_inputs.limit)
        first, second = self._cut_lengths(len(query), len(document), room, name)
        side = long_inputs.side
        return [self._template.join(cut(query, first, side), cut(document, second, side))], True

    def _beside(self, query: int, long_inputs: LongInputs) -> Room:
        """The room for a document beside a query of this many tokens."""
        others = self._template.special_tokens + query
        return Room(long_inputs.limit - others, others)

    def _cut_lengths(self, query: int, document: int, room: int, name: InputName) -> tuple[int, int]:
        """How much of both texts is read within `room` tokens together."""
        if self._truncation == "longest_first":
            return longest_first(query, document, room)
        if self._truncation == "only_first":
            if document > room:
                raise InvalidRequestError(
                    f"{name} has {document} tokens and leaves no room for the query; shorten it", name.param
                )
            return room - document, document
        if query > room:
            raise InvalidRequestError(
                f"the query has {query} tokens and leaves no room for {name}; shorten it", "queries"
            )
        return query, room - query
