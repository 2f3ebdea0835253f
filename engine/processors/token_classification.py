"""Token classification: texts to the logits of their tokens, and to entities.

Entities are those of transformers' `TokenClassificationPipeline`, whose rules on words and tags are repeated
here: B- and I- prefixes, subwords, and windows that overlap.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import cast

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.checkpoint.model import TOKEN_CLASSIFY
from maxsimd.engine.errors import InvalidRequestError, RequestTooLargeError
from maxsimd.engine.processors.processor import Plan, Processor, RequestIds, ScorePlan, ScoreProcessor
from maxsimd.engine.processors.text.builder import InputName, LongInputs, Room
from maxsimd.engine.processors.text.tokenization import NO_SPAN, Side, Spans, TextTokenizer, truncate
from maxsimd.engine.requests import (
    AggregationStrategy,
    EmbedRequest,
    ScoreOptions,
    ScoreRequest,
    TokenClassifyResult,
    TokenEntity,
    TokenLogits,
    Values,
)
from maxsimd.engine.workers import yield_to_smaller
from maxsimd.scheduler import Tokens, TokenSequence
from maxsimd.scheduler.sequence import TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class TokenWindow:
    """The part of text number `text` that one sequence has: the `rows` of its tokens, and their characters,
    int32 [rows, 2]."""

    text: int
    rows: slice
    spans: Spans


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenClassificationPlan(Plan):
    """One value, float32 [tokens, labels], for each window of each text, in the order of `windows`."""

    model: LoadedModel
    tokenizer: TextTokenizer
    texts: tuple[str, ...]
    windows: list[TokenWindow]

    def input_of(self, value: int) -> str:
        return f"input[{self.windows[value].text}]"

    def result(
        self, values: Values, strategy: AggregationStrategy, ignored: frozenset[str]
    ) -> TokenClassifyResult:
        """Makes the entities of each text, without those whose label is `ignored`. On a thread of the pool,
        smaller work goes first."""
        entities: list[list[TokenEntity]] = []
        for _, of_text in groupby(enumerate(self.windows), key=lambda each: each[1].text):
            found: list[TokenEntity] = []
            parts = list(of_text)
            for i, window in parts:
                yield_to_smaller()
                made = self._entities(i, window, np.asarray(values.values[i]), strategy)
                found += [entity for entity in made if entity.label not in ignored]
            entities.append(_without_overlaps(found) if len(parts) > 1 else found)
        return TokenClassifyResult(entities, self.model.labels, self.usage, self.truncated, values.timings)

    def logits(self, values: Values) -> TokenClassifyResult:
        """Returns the logits of all tokens of each text, in place of entities."""
        made = []
        for sequence, window, value in zip(self.sequences, self.windows, values.values, strict=True):
            rows = np.asarray(value)
            spans = np.full((len(rows), 2), NO_SPAN, dtype=np.int32)
            spans[window.rows] = window.spans
            made.append(TokenLogits(rows, sequence.tokens.ids, spans))
        return TokenClassifyResult([], self.model.labels, self.usage, self.truncated, values.timings, made)

    def _entities(
        self, value: int, window: TokenWindow, logits: NDArray[np.float32], strategy: AggregationStrategy
    ) -> list[TokenEntity]:
        ids = self.sequences[value].tokens.ids[window.rows].tolist()
        scores = probabilities(logits[window.rows])  # [tokens, labels]
        text, bounds = self.texts[window.text], window.spans.tolist()
        unknown = self.model.tokenizer.unk_token_id
        tokens = self.tokenizer.strings(ids)
        # The pipeline shows the text itself in place of an unknown token.
        words = [
            text[start:end] if token_id == unknown else token
            for token_id, token, (start, end) in zip(ids, tokens, bounds, strict=True)
        ]
        by_word = strategy not in ("none", "simple")
        goes_on = [False] * len(ids)
        if by_word:
            inside = self._subwords(text, tokens, bounds)
            goes_on = [is_sub and each != unknown for each, is_sub in zip(ids, inside, strict=True)]
        written: Callable[[list[str]], str] = self.model.tokenizer.convert_tokens_to_string
        pieces = []
        for first, stop in _words(goes_on):
            row = _word_scores(scores[first:stop], strategy)
            label = int(row.argmax())
            pieces.append(
                TokenEntity(
                    label=self.model.labels[label],
                    score=float(row[label]),
                    word=written(words[first:stop]) if by_word else words[first],
                    start=bounds[first][0],
                    end=bounds[stop - 1][1],
                    index=None if by_word else window.rows.start + first,
                )
            )
        return pieces if strategy == "none" else [_entity(group, written) for group in _by_tag(pieces)]

    def _subwords(self, text: str, tokens: Sequence[str], bounds: Sequence[Sequence[int]]) -> list[bool]:
        """Returns whether each token goes on with the word before it. Tokenizers that do not mark subwords
        have words between spaces."""
        if getattr(self.model.tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None):
            return [
                len(token) != len(text[start:end]) for token, (start, end) in zip(tokens, bounds, strict=True)
            ]
        return [start > 0 and " " not in text[start - 1 : start + 1] for start, _ in bounds]


def probabilities(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Applies softmax to each row."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    scores: NDArray[np.float32] = powers / powers.sum(axis=-1, keepdims=True)
    return scores


def _words(goes_on: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yields the first token of each word and the one after its last."""
    starts = [i for i, each in enumerate(goes_on) if i == 0 or not each]
    yield from pairwise([*starts, len(goes_on)])


def _word_scores(scores: NDArray[np.float32], strategy: AggregationStrategy) -> NDArray[np.float32]:
    """Returns the scores [labels] of a word, from those of its tokens."""
    if strategy == "average":
        mean: NDArray[np.float32] = scores.mean(axis=0)
        return mean
    token = int(scores.max(axis=-1).argmax()) if strategy == "max" else 0
    row: NDArray[np.float32] = scores[token]
    return row


def _by_tag(pieces: Sequence[TokenEntity]) -> Iterator[list[TokenEntity]]:
    """Yields neighbors of the same tag together. A label that begins with B- begins another group."""
    group: list[TokenEntity] = []
    for piece in pieces:
        if group and (piece.label.startswith("B-") or _tag(piece.label) != _tag(group[-1].label)):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _tag(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label


def _entity(group: Sequence[TokenEntity], written: Callable[[list[str]], str]) -> TokenEntity:
    score = float(np.array([piece.score for piece in group], dtype=np.float32).mean())
    word = written([piece.word for piece in group])
    return TokenEntity(group[0].label.split("-", 1)[-1], score, word, group[0].start, group[-1].end)


def _without_overlaps(entities: Sequence[TokenEntity]) -> list[TokenEntity]:
    """Returns the entities of overlapping windows: of those that overlap the longest, then the likeliest."""
    kept: list[TokenEntity] = []
    for entity in sorted(entities, key=lambda entity: entity.start):
        if not kept or not kept[-1].start <= entity.start < kept[-1].end:
            kept.append(entity)
            continue
        lengths = entity.end - entity.start, kept[-1].end - kept[-1].start
        if lengths[0] > lengths[1] or (lengths[0] == lengths[1] and entity.score > kept[-1].score):
            kept[-1] = entity
    return kept


class TokenClassificationProcessor(Processor[EmbedRequest, TokenClassificationPlan]):
    """Makes one sequence of each text, or with a `stride` one of each of its windows."""

    def prepare(self, request: EmbedRequest, ids: RequestIds) -> TokenClassificationPlan:
        long_inputs = self._limits.applied_to(request.truncation, ids.most_tokens)
        template = self._tokenizer.single
        room = Room(long_inputs.limit - template.special_tokens, template.special_tokens)
        if room.tokens < 1:
            raise long_inputs.no_room(room.others)
        if request.stride is not None and not 0 <= request.stride <= room.tokens // 2:
            raise InvalidRequestError(
                f"stride is {request.stride}, but windows of {room.tokens} tokens may share from 0 to "
                f"{room.tokens // 2}; change it, or leave it out to truncate long texts",
                "stride",
            )
        texts = cast("tuple[str, ...]", request.texts)
        sequences: list[TokenSequence] = []
        windows: list[TokenWindow] = []
        truncated = num_tokens = 0
        for i, text in enumerate(texts):
            yield_to_smaller()
            name = InputName("input", i)
            parts, is_truncated = self._read(text, name, request.stride, long_inputs, room, ids)
            truncated += is_truncated
            for token_ids, spans in parts:
                if room.others + len(token_ids) == 0:
                    raise name.error("has no tokens; leave it out")
                joined = template.join(token_ids)
                num_tokens += len(joined)
                ids.check_tokens(num_tokens)
                tokens, slot = Tokens(joined.ids, joined.type_ids), ids.slot(len(sequences))
                sequences.append(TokenSequence.text(ids.next_sequence_id(), slot, TOKEN_CLASSIFY, tokens))
                first = len(template.ids[0])
                windows.append(TokenWindow(i, slice(first, first + len(token_ids)), spans))
        if request.max_tokens is not None and num_tokens > request.max_tokens:
            raise RequestTooLargeError(
                f"these texts have {num_tokens} tokens, each with labels, and an answer has room for "
                f"{request.max_tokens} of them; send fewer texts at a time"
            )
        return TokenClassificationPlan(
            sequences=sequences,
            num_values=len(sequences),
            truncated=truncated,
            model=self._model,
            tokenizer=self._tokenizer,
            texts=texts,
            windows=windows,
        )

    def _read(
        self,
        text: str,
        name: InputName,
        stride: int | None,
        long_inputs: LongInputs,
        room: Room,
        ids: RequestIds,
    ) -> tuple[list[tuple[TokenIds, Spans]], bool]:
        """Returns the token ids of each window of a text, with their characters, and whether the text was
        truncated."""
        side = long_inputs.side
        most = ids.most_tokens + 1
        if stride is None:
            wanted = long_inputs.most_of_text(room.tokens, None, name.param)
            most = most if wanted is None else wanted
        token_ids, spans = self._tokenizer.encode_with_spans(text, name.param, most, side, name)
        if stride is None:
            fitted = long_inputs.truncate_to_room(token_ids, room, name)
            return [(fitted.tokens, truncate(spans, len(fitted.tokens), side))], fitted.truncated
        bounds = _window_bounds(len(token_ids), room.tokens, stride, side)
        # All windows but the last are full.
        ids.check_tokens((len(bounds) - 1) * (room.tokens + room.others))
        return [(token_ids[start:stop], spans[start:stop]) for start, stop in bounds], False


def _window_bounds(length: int, room: int, stride: int, side: Side) -> list[tuple[int, int]]:
    """Returns the first token of each window and the one after its last, from the side that is kept when
    texts are truncated, as the tokenizers library divides texts."""
    starts = range(0, max(1, length - stride), room - stride)
    bounds = [(start, min(start + room, length)) for start in starts]
    return bounds if side == "right" else [(length - stop, length - start) for start, stop in bounds]


def no_score(param: str) -> InvalidRequestError:
    """The error of a request for scores to a token classifier."""
    return InvalidRequestError(
        "this model labels tokens and scores no documents; use token_classify (POST /v1/token-classify), or "
        "another model",
        param,
    )


class UnscoredProcessor(ScoreProcessor):
    """Refuses all score requests, for token classifiers."""

    @classmethod
    def is_for(cls, model: LoadedModel) -> bool:
        return model.score_task == TOKEN_CLASSIFY

    def check_options(self, options: ScoreOptions) -> None:
        raise no_score("model")

    def plan(self, request: ScoreRequest, ids: RequestIds) -> ScorePlan:
        raise no_score("model")

    def shortest_sequences(self) -> dict[str, int]:
        return {}
