"""Pairs of which the query or the document has pictures, as a score template writes them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from maxsimd.engine.checkpoint.score_template import ScoreTemplate
from maxsimd.engine.checkpoint.visual.vision import ImageInputs
from maxsimd.engine.errors import InvalidRequestError, ModelLoadError
from maxsimd.engine.explanations import Span
from maxsimd.engine.media import Content
from maxsimd.engine.processors.pages import PageBuilder
from maxsimd.engine.processors.pair_joiner import JoinedPair, PairJoiner
from maxsimd.engine.processors.text.long_inputs import Fitted, InputName, LongInputs
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.requests import Item, ScoreRequest

_NONE = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """A query or a document: its texts, None in place of each picture, and the pictures."""

    texts: list[str | None]
    images: list[ImageInputs]


class PicturePairJoiner:
    """Joins pairs with pictures, which are not cut, by a score template; `texts` joins all others."""

    def __init__(
        self,
        texts: PairJoiner,
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

    def join(
        self, request: ScoreRequest, queries: list[Fitted[np.int32]], long_inputs: LongInputs
    ) -> Iterator[JoinedPair]:
        read: dict[int, _Side] = {}
        others = self._texts.join(_without_pictures(request), queries, long_inputs)
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
        """A pair with pictures is read through one window."""
        return self._texts.window_spans(_without_pictures(request), index, query_tokens, long_inputs)

    def shortest_pair(self) -> int:
        return self._texts.shortest_pair()

    def _query(self, request: ScoreRequest, index: int, fitted: Fitted[np.int32]) -> _Side:
        query = request.queries[index]
        if isinstance(query, str) and fitted.truncated:
            query = self._tokenizer.decode(fitted.tokens.tolist())
        return self._side(query, InputName("queries", index))

    def _side(self, item: Item, name: InputName) -> _Side:
        if isinstance(item, Content):
            side = _Side(*self._pages.split(self._pages.opened(item, name), name))
        else:
            assert isinstance(item, str)
            side = _Side([item], [])
        self._pages.check_texts(side.texts, name)
        return side

    def _joined(
        self,
        query: _Side,
        document: _Side,
        instruction: str | None,
        query_name: InputName,
        name: InputName,
    ) -> JoinedPair:
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
            raise InvalidRequestError(f"{name} and its query: {error}", name.param) from error
        sides = (query.images, document.images) if pair.query_first else (document.images, query.images)
        prefix = _NONE
        if pair.before and pair.query_first:
            # But for the last token, which may merge with the document.
            prefix = self._pages.written(pair.before, query.images, query_name).ids[:-1]
        tokens = self._pages.written(pair.text, [*sides[0], *sides[1]], name, self._template.trailing_ids)
        self._pages.check_length(tokens, self._longest, name)
        return JoinedPair([tokens], prefix, truncated=False)


def _without_pictures(request: ScoreRequest) -> ScoreRequest:
    """The request with an empty text in place of what has pictures."""
    return replace(
        request,
        queries=tuple("" if isinstance(query, Content) else query for query in request.queries),
        documents=tuple("" if isinstance(document, Content) else document for document in request.documents),
    )
