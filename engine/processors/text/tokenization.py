"""Texts to token ids, exactly as the checkpoint's tokenizer makes them, and the characters of each token.

Each text is tokenized once, pairs as two texts. Special tokens around texts are learned from the tokenizer.
"""

import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import repeat
from typing import Any, Literal, cast

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from maxsimd.engine.checkpoint.recipe import PlainTokenizer
from maxsimd.engine.errors import InvalidRequestError, ModelLoadError
from maxsimd.engine.explanations import Span
from maxsimd.engine.processors.text.breaks import LONGEST_PIECE, Breaks, remembered_breaks
from maxsimd.engine.workers import yield_to_smaller
from maxsimd.scheduler import JoinedTokens
from maxsimd.scheduler.sequence import TokenIds

# First character and one after the last of each token, int32 [tokens, 2].
Spans = NDArray[np.int32]
# The span of a token without characters.
NO_SPAN = -1
# One visible character hardly has more code points than this.
_LONGEST_CLUSTER = 16
_JOINER = "\u200d"
_SKIN_TONES = "\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"


@dataclass(frozen=True, slots=True, eq=False)
class Origins:
    """The ids [rows] of a sequence's pooled tokens, and their spans [rows, 2] in the text; -1 for tokens
    that are not the text's: special tokens, prompt, expansion."""

    ids: TokenIds
    spans: Spans

    @property
    def extent(self) -> Span | None:
        """The characters from the first to the last of all tokens."""
        return extent(self.spans)

    @classmethod
    def join(cls, parts: Iterable["Origins"]) -> "Origins":
        ids, spans = zip(*((part.ids, part.spans) for part in parts), strict=True)
        return cls(np.concatenate(ids), np.concatenate(spans))

    def span(self, row: int, text: str) -> Span | None:
        """Returns a token's characters as people count them: without the spaces around them, and with the
        accents and joiners of the first and last, which may be tokens of their own."""
        start, stop = map(int, self.spans[row])
        if start < 0:
            return None
        found = text[start:stop]
        inside = found.strip()
        if inside:
            start += len(found) - len(found.lstrip())
            stop = start + len(inside)
        for _ in range(_LONGEST_CLUSTER):
            if 0 < start < len(text) and _belong_together(text[start - 1], text[start]):
                start -= 1
            if 0 < stop < len(text) and _belong_together(text[stop - 1], text[stop]):
                stop += 1
        return start, stop


def _belong_together(first: str, second: str) -> bool:
    """Whether readers see one character: accents, vowel signs, Korean syllables, parts of an emoji."""
    is_mark = unicodedata.category(second).startswith("M") and not first.isspace()
    # Korean letters: any, and those that do not begin a syllable.
    is_syllable = "\u1100" <= first <= "\u11ff" and "\u1160" <= second <= "\u11ff"
    return is_mark or is_syllable or _JOINER in (first, second) or second in _SKIN_TONES


def extent(spans: Spans) -> Span | None:
    """Returns the characters from the first of the spans to the last; None if no span has any."""
    there = spans[spans[:, 0] != NO_SPAN]
    return (int(there[:, 0].min()), int(there[:, 1].max())) if len(there) else None


Side = Literal["left", "right"]

# About the characters of a piece: tokenized within some milliseconds and a few megabytes.
PIECE = 16_384
# Texts are tokenized in parts of this size, which take some milliseconds.
PART_TEXTS, PART_CHARACTERS = 256, 65_536
# A text to truncate is tokenized in steps of this many characters for each wanted token.
_CHARACTERS_A_TOKEN, _FEWEST_CHARACTERS = 8, 1024
# Token ids and spans are read this many at a time: a million would hold Python's lock for 0.3 seconds.
_TOKENS_AT_ONCE = 16_384
# A text of about one token.
SHORTEST_TEXT = "a"
# The most tokens decoded at once, within about two seconds.
MOST_DECODED = 1_048_576
# The breaks of recent tokenizers by the digest of their description: finding them takes half a second.
_BREAKS: dict[bytes, Breaks | None] = {}
_MOST_BREAKS = 32


@dataclass(frozen=True, eq=False)
class Template:
    """The special tokens around one text or two: `ids[i]` and `types[i]` come before text i, the last ones
    after the last text. `text_types[i]` is the type of text i."""

    ids: tuple[TokenIds, ...]
    types: tuple[TokenIds, ...]
    text_types: tuple[int, ...]

    @cached_property
    def special_tokens(self) -> int:
        return sum(map(len, self.ids))

    def join(self, *texts: TokenIds) -> JoinedTokens:
        """Joins one sequence without copying the texts' tokens. Raises ValueError if it is empty."""
        parts: list[TokenIds] = [self.ids[0]]
        types: list[TokenIds | int] = [self.types[0]]
        for i, text in enumerate(texts):
            parts += [text, self.ids[i + 1]]
            types += [self.text_types[i], self.types[i + 1]]
        return JoinedTokens.of(parts, types)


@dataclass(frozen=True, slots=True, eq=False)
class Around:
    """The tokens before, inside and after a part of a text, and the characters of those `inside`."""

    before: TokenIds
    inside: TokenIds
    after: TokenIds
    spans: Spans


class TextTokenizer:
    """A checkpoint's tokenizer, without padding and truncation. Thread-safe and immutable.

    Long texts are tokenized in pieces, between which other work goes on. Texts that are not Unicode, or have
    no break for more than `LONGEST_PIECE` characters, are refused: errors name the field `param`, or the
    text's `name`. So are tokens whose id is `rows` or more, which have no embedding, except by `read`."""

    def __init__(self, tokenizer: Any, rows: int | None = None) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InvalidRequestError(f"{type(tokenizer).__name__} has no fast tokenizer, which is required")
        description = backend.to_str()
        # transformers sets padding and truncation of its tokenizers at each call.
        is_ours = isinstance(tokenizer, PlainTokenizer)
        self._tokenizer: Tokenizer = backend if is_ours else Tokenizer.from_str(description)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        digest = sha256(description.encode()).digest()
        if digest not in _BREAKS:
            while len(_BREAKS) >= _MOST_BREAKS:
                _BREAKS.pop(next(iter(_BREAKS)), None)
            _BREAKS[digest] = remembered_breaks(self._tokenizer, description)
        self._breaks = _BREAKS[digest]
        self.single = _learn_template(self._tokenizer.encode("a"), texts=1)
        self.pair = _learn_template(self._tokenizer.encode("a", "b"), texts=2)
        self._rows = rows

    @property
    def vocabulary_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(
        self,
        texts: Iterable[str],
        param: str,
        most: int | None = None,
        side: Side = "right",
        names: Iterable[object] | None = None,
    ) -> list[TokenIds]:
        """Returns the token ids of each text, without special tokens. A text is truncated to `most` tokens at
        the given side, and the rest is not read. There are as many `names` as texts, or more."""
        size = PIECE if most is None else min(PIECE, max(_FEWEST_CHARACTERS, _CHARACTERS_A_TOKEN * most))
        rests: deque[tuple[Iterator[str], object]] = deque()

        def firsts() -> Iterator[str]:
            for text, name in zip(texts, repeat(param) if names is None else names, strict=False):
                bounds = self._piece_bounds(text, size, side, param, name)
                pieces = (text[start:stop] for start, stop in bounds)
                rests.append((pieces, name))
                yield next(pieces)

        token_ids: list[TokenIds] = []
        for part in in_parts(firsts()):
            yield_to_smaller()
            for first in self._encode_batch(part, param, names=(name for _, name in rests)):
                rest, name = rests.popleft()
                read = [ids_of(first)]
                num_tokens = len(read[0])
                while (most is None or num_tokens < most) and (piece := next(rest, None)):
                    yield_to_smaller()
                    (encoding,) = self._encode_batch([piece], param, names=[name])
                    read.append(ids_of(encoding))
                    num_tokens += len(read[-1])
                token_ids.append(self.known(_joined(read, most, side), param, name))
        return token_ids

    def encode_around(
        self,
        text: str,
        span: range,
        param: str,
        most: int | None = None,
        side: Side = "right",
        name: object = None,
    ) -> Around:
        """Splits a text's tokens at `span`. `inside` are those from the first that holds one of its
        characters to the last, truncated to `most` tokens."""
        parts: list[tuple[TokenIds, TokenIds, TokenIds, Spans]] = []
        num_inside = 0
        for start, stop in self._piece_bounds(text, PIECE, side, param, name or param):
            if most is not None and num_inside >= most and span.start < start and stop < span.stop:
                continue
            yield_to_smaller()
            (encoding,) = self._encode_batch([text[start:stop]], param, complete=True, names=[name or param])
            ids, spans = ids_of(encoding), spans_of(encoding, start)
            first, last = _holding(spans, span)
            parts.append((ids[:first], ids[first:last], ids[last:], spans[first:last]))
            num_inside += last - first
        before, inside, after, held = (list(each) for each in zip(*parts, strict=True))
        return Around(
            self.known(_joined(before, None, side), param, name or param),
            self.known(_joined(inside, most, side), param, name or param),
            self.known(_joined(after, None, side), param, name or param),
            _joined(held, most, side),
        )

    def encode_with_spans(
        self, text: str, param: str, most: int | None = None, side: Side = "right", name: object = None
    ) -> tuple[TokenIds, Spans]:
        """Returns the token ids of a text like `encode`, and the characters of each."""
        ids: list[TokenIds] = []
        spans: list[Spans] = []
        num_tokens = 0
        for start, encoding in self.read(text, param, side, name):
            ids.append(ids_of(encoding))
            spans.append(spans_of(encoding, start))
            num_tokens += len(ids[-1])
            if most is not None and num_tokens >= most:
                break
        return self.known(_joined(ids, most, side), param, name or param), _joined(spans, most, side)

    def read(
        self, text: str, param: str, side: Side = "right", name: object = None
    ) -> Iterator[tuple[int, Encoding]]:
        """Yields where each piece of a text begins, and its encoding, without special tokens."""
        for start, stop in self._piece_bounds(text, PIECE, side, param, name or param):
            yield_to_smaller()
            (encoding,) = self._encode_batch([text[start:stop]], param, complete=True, names=[name or param])
            yield start, encoding

    def known(self, ids: TokenIds, param: str, name: object) -> TokenIds:
        """Returns the same ids. Refuses one without an embedding, which would crash a GPU."""
        if self._rows is not None and len(ids) and ids.max() >= self._rows:
            token = self.token(int(ids.max()))
            raise InvalidRequestError(
                f"{name} holds the token {token!r}, for which the model has no embedding; leave it out", param
            )
        return ids

    def breaks(self, text: str) -> list[int]:
        """Returns where a text can be split so that each part has the same tokens alone."""
        return [] if self._breaks is None else self._breaks.all(text)

    def token(self, token_id: int) -> str:
        return str(self._tokenizer.id_to_token(token_id))

    def strings(self, ids: Iterable[int]) -> list[str]:
        """Returns tokens as the vocabulary writes them."""
        return [*map(self.token, ids)]

    def token_id(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        assert token_id is not None, token
        return int(token_id)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of at most `MOST_DECODED` tokens."""
        return self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]

    def _piece_bounds(
        self, text: str, size: int, side: Side, param: str, name: object
    ) -> Iterator[tuple[int, int]]:
        """Yields where pieces of about `size` characters begin and end, from the side that is kept when the
        text is truncated."""
        breaks, start, stop = self._breaks, 0, len(text)
        while breaks is not None and stop - start > size:
            if side == "right":
                at = breaks.first(text, start + size, min(start + LONGEST_PIECE + 1, stop))
            else:
                at = breaks.late(text, max(0, stop - LONGEST_PIECE), stop - size)
            if at is None:
                break
            if side == "right":
                yield start, at
                start = at
            else:
                yield at, stop
                stop = at
        if stop - start > LONGEST_PIECE:
            if breaks is None:
                wrong, remedy = "text", "this model's tokenizer takes no more at once; split the text"
            else:
                wrong, remedy = "text without a break", "put spaces or line breaks into it"
            raise InvalidRequestError(
                f"{name} holds more than {LONGEST_PIECE} characters of {wrong}; {remedy}", param
            )
        yield start, stop

    def _encode_batch(
        self, texts: list[str], param: str, complete: bool = False, names: Iterable[object] = ()
    ) -> list[Encoding]:
        """Encodes texts, with strings and offsets only if `complete`."""
        # Unlike `encode`, both let other threads run meanwhile.
        encode = self._tokenizer.encode_batch if complete else self._tokenizer.encode_batch_fast
        try:
            return encode(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            name = next((name for text, name in zip(texts, names, strict=False) if is_broken(text)), param)
            raise InvalidRequestError(
                f"{name} has half of a character, like \\ud83d alone; send whole characters, or leave it out",
                param,
            ) from error


def is_broken(text: str) -> bool:
    """Whether a text has a lone surrogate and so is not Unicode."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def in_parts(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yields parts of at most `PART_TEXTS` texts and `PART_CHARACTERS` characters, or of one text."""
    part: list[str] = []
    characters = 0
    for text in texts:
        if part and (characters + len(text) > PART_CHARACTERS or len(part) == PART_TEXTS):
            yield part
            part, characters = [], 0
        part.append(text)
        characters += len(text)
    if part:
        yield part


def ids_of(encoding: Encoding) -> TokenIds:
    read = encoding.ids
    ids = np.empty(len(read), dtype=np.int32)
    for part in in_turn(len(read)):
        ids[part] = read[part]
    return ids


def spans_of(encoding: Encoding, start: int) -> Spans:
    """Returns the characters of each token of a piece that begins at `start`."""
    if len(encoding) <= _TOKENS_AT_ONCE:
        return np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2) + np.int32(start)
    # One by one, because `offsets` would hold the lock for all tokens.
    spans = np.empty((len(encoding), 2), dtype=np.int32)
    for part in in_turn(len(encoding)):
        found = [encoding.token_to_chars(i) for i in range(*part.indices(len(encoding)))]
        spans[part] = cast("list[tuple[int, int]]", found)  # each token has characters
    return spans + np.int32(start)


def in_turn(num_tokens: int) -> Iterator[slice]:
    """Yields parts of a piece's tokens for work that holds Python's lock, with other work between them."""
    for start in range(0, num_tokens, _TOKENS_AT_ONCE):
        if start:
            yield_to_smaller()
        yield slice(start, start + _TOKENS_AT_ONCE)


def _joined(read: list[NDArray[np.int32]], most: int | None, side: Side) -> NDArray[np.int32]:
    """Joins pieces' tokens or spans, read from the kept side, and truncates them to `most`."""
    ids = read[0] if len(read) == 1 else np.concatenate(read if side == "right" else read[::-1])
    return ids if most is None or len(ids) <= most else truncate(ids, most, side).copy()


def _holding(spans: Spans, characters: range) -> tuple[int, int]:
    """Returns the first token that has any of the characters, and the one after the last."""
    inside = np.flatnonzero((spans[:, 1] > characters.start) & (spans[:, 0] < characters.stop))
    if len(inside):
        return int(inside[0]), int(inside[-1]) + 1
    before = int((spans[:, 1] <= characters.start).sum())
    return before, before


def _learn_template(encoding: Encoding, texts: int) -> Template:
    """Learns from an encoded sample which tokens stand around and between its texts."""
    ids: list[list[int]] = [[] for _ in range(texts + 1)]
    types: list[list[int]] = [[] for _ in range(texts + 1)]
    text_types = [0] * texts
    texts_before = 0
    for token, type_id, text in zip(encoding.ids, encoding.type_ids, encoding.sequence_ids, strict=True):
        if text is None:
            ids[texts_before].append(token)
            types[texts_before].append(type_id)
        elif text >= texts:
            raise ModelLoadError(
                "the post_processor in tokenizer.json has a step behind its TemplateProcessing, after which "
                "special tokens count as texts; put TemplateProcessing last"
            )
        else:
            texts_before = text + 1
            text_types[text] = type_id
    return Template(
        tuple(np.array(part, dtype=np.int32) for part in ids),
        tuple(np.array(part, dtype=np.int32) for part in types),
        tuple(text_types),
    )


def truncate(text: NDArray[np.int32], length: int, side: Side) -> NDArray[np.int32]:
    """Truncates a text to `length` tokens at the given side."""
    if len(text) <= length:
        return text
    return text[:length] if side == "right" else text[len(text) - length :]


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns the lengths of two texts truncated to `room` tokens together, like the tokenizers library's
    longest_first: the longer text gets what the shorter leaves, but at least half."""
    if first + second <= room:
        return first, second
    short, long = min(first, second), max(first, second)
    long = max(short, room - short)
    if short + long > room:
        short = room // 2
        long = short + room % 2
    return (short, long) if first <= second else (long, short)


def chat_text(
    tokenizer: Any,
    messages: Sequence[dict[str, str]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> str:
    """Writes messages of "role" and "content" by the checkpoint's chat template, special tokens included.
    Raises InvalidRequestError if there is no template, or it does not take such messages."""
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidRequestError("this model has no chat template; send the text as input", "messages")
    try:
        text: str = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise InvalidRequestError(
            f"the model's chat template does not take these messages: {error}", "messages"
        ) from None
    return text
