"""Texts to token ids, exactly as the checkpoint's tokeniser does it, but each text only once.

A pair is put together from two texts tokenised apart, so that a query is not tokenised again for every
document, and truncation is arithmetic on lengths. The special tokens around texts are learned from the
tokeniser itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.preprocess.workers import yield_to_smaller
from maxsimd.scheduler.payload import TokenIds

Side = Literal["left", "right"]
IdType = TypeVar("IdType", np.int32, np.int64)

# Texts are tokenised in parts of this size, which take some milliseconds.
PART_TEXTS, PART_CHARACTERS = 256, 65_536


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """The special tokens around one text or two: `ids[i]` and `types[i]` come before text i, the last
    ones after the last text. `text_types[i]` is the type of text i's own tokens."""

    ids: tuple[TokenIds, ...]
    types: tuple[TokenIds, ...]
    text_types: tuple[int, ...]

    @property
    def special_tokens(self) -> int:
        return sum(len(part) for part in self.ids)

    def fill(self, *texts: TokenIds) -> tuple[TokenIds, TokenIds]:
        """The token ids and type ids of one sequence."""
        ids, types = [self.ids[0]], [self.types[0]]
        for i, text in enumerate(texts):
            ids += [text, self.ids[i + 1]]
            types += [np.full(len(text), self.text_types[i], dtype=np.int32), self.types[i + 1]]
        return np.concatenate(ids), np.concatenate(types)


class TextTokenizer:
    """A private copy of a checkpoint's tokeniser. Thread-safe: nothing in it changes after construction."""

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InvalidRequestError(f"{type(tokenizer).__name__} has no fast tokeniser, which is required")
        self._tokenizer: Tokenizer = Tokenizer.from_str(backend.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.single = _learn_template(self._tokenizer.encode("a"), texts=1)
        self.pair = _learn_template(self._tokenizer.encode("a", "b"), texts=2)

    @property
    def vocabulary_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, texts: Sequence[str], param: str) -> list[TokenIds]:
        """The token ids of each text, without special tokens. `param` names the field in errors."""
        token_ids: list[TokenIds] = []
        for part in in_parts(texts):
            yield_to_smaller()
            try:
                encodings = self._tokenizer.encode_batch_fast(part, add_special_tokens=False)
            except (TypeError, UnicodeEncodeError) as error:
                raise _not_unicode(param) from error
            token_ids += [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
        return token_ids

    def span(self, text: str, start: int, stop: int, param: str) -> tuple[int, int]:
        """The first token that holds one of the characters `start` to `stop` of a text, and the one after the
        last; `stop` is excluded."""
        try:
            offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        except (TypeError, UnicodeEncodeError) as error:
            raise _not_unicode(param) from error
        inside = [i for i, (begin, end) in enumerate(offsets) if end > start and begin < stop]
        return (inside[0], inside[-1] + 1) if inside else (len(offsets), len(offsets))

    def token_id(self, token: str) -> int:
        """The id of a token of the vocabulary."""
        token_id = self._tokenizer.token_to_id(token)
        assert token_id is not None, token
        return int(token_id)

    def encode_whole(self, text: str) -> tuple[list[int], list[str]]:
        """Ids and token strings of one text as it would be run alone, special tokens included."""
        encoding = self._tokenizer.encode(text)
        return encoding.ids, encoding.tokens

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def in_parts(texts: Sequence[str]) -> Iterator[list[str]]:
    """Texts in parts of at most `PART_TEXTS` texts and `PART_CHARACTERS` characters, or of one text."""
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


def _not_unicode(param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} holds a text that is not valid Unicode; replace lone surrogates", param
    )


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
        else:
            texts_before = text + 1
            text_types[text] = type_id
    return Template(
        tuple(np.array(part, dtype=np.int32) for part in ids),
        tuple(np.array(part, dtype=np.int32) for part in types),
        tuple(text_types),
    )


def cut(text: NDArray[IdType], length: int, side: Side) -> NDArray[IdType]:
    """At most `length` tokens of a text, cut at the given side."""
    if len(text) <= length:
        return text
    return text[:length] if side == "right" else text[len(text) - length :]


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """The lengths of two texts cut to `room` tokens together, as the tokenizers library's longest_first
    strategy has it: the longer one is cut to what the shorter leaves, and where that is less than half
    both are cut to halves."""
    if first + second <= room:
        return first, second
    short, long = min(first, second), max(first, second)
    long = max(short, room - short)
    if short + long > room:
        short = room // 2
        long = short + room % 2
    return (short, long) if first <= second else (long, short)
