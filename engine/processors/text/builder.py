"""Single texts to sequences: prompt, template, truncation, windows, query expansion, pooled tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from maxsimd.engine.checkpoint import RoleRules
from maxsimd.engine.errors import InvalidRequestError, RequestTooLargeError
from maxsimd.engine.processors.text.tokenization import (
    NO_SPAN,
    SHORTEST_TEXT,
    Origins,
    Side,
    Spans,
    TextTokenizer,
    truncate,
)
from maxsimd.engine.requests import Truncation
from maxsimd.engine.workers import yield_to_smaller
from maxsimd.scheduler import Tokens
from maxsimd.scheduler.sequence import TokenIds

# At least one in eight of a window's tokens is the document's, which so costs 16 times its tokens at most.
_SMALLEST_SHARE = 8


@dataclass(frozen=True, slots=True, eq=False)
class FittedText:
    """A text that fits, and whether the request or the model's maximum truncated it, not the length that the
    checkpoint sets for a query or document."""

    tokens: TokenIds
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class InputName:
    """The name of a text in errors: text `index` of the request's field `param`."""

    param: str
    index: int

    def __str__(self) -> str:
        return f"{self.param}[{self.index}]"

    def error(self, what: object) -> InvalidRequestError:
        return InvalidRequestError(f"{self} {what}", self.param)


@dataclass(frozen=True, slots=True)
class Room:
    """A sequence with room for `tokens` of a text, and `others`: special tokens, the prompt, the query."""

    tokens: int
    others: int


class LongInputs:
    """Truncates the texts of one request, or divides them into windows. Immutable.

    `longest` is the most tokens of any sequence, and `limit` the most for this request. Windows share
    `overlap` tokens by default, but at most half of each. Texts are truncated at `own_side` by default.
    `most_tokens` is the limit of all windows together."""

    def __init__(
        self,
        truncation: Truncation,
        longest: int,
        overlap: int,
        most_tokens: int | None = None,
        own_side: Side = "right",
    ) -> None:
        self._truncation = truncation
        self.uses_windows = truncation.windows
        self.max_query_tokens = truncation.max_query_tokens
        self.max_document_tokens = truncation.max_document_tokens
        self._most_tokens = most_tokens
        self._overlap = overlap if truncation.window_overlap is None else truncation.window_overlap
        self.names = truncation.option_names
        wanted = truncation.max_tokens
        self.limit = longest if wanted is None or wanted == -1 else wanted
        if self.limit > longest:
            raise InvalidRequestError(
                f"{self.names.max_tokens} is {self.limit}, more than the {longest} tokens that this model "
                "takes; ask for less, or for -1",
                self.names.max_tokens,
            )
        # The end at which texts are truncated.
        self.side: Side = own_side if truncation.side is None else truncation.side
        self.truncates_as_usual = self.side == own_side and not truncation.windows

    @property
    def signature(self) -> str:
        """All that decides how a document is read, beside the document and the checkpoint."""
        given = self._truncation
        truncates = (given.max_tokens is not None, self.side, given.max_document_tokens)
        # Part of the keys of caches on disk.
        read = ("as asked", self.limit, truncates, given.windows and ("at most half", self._overlap))
        return repr((*read, "refuse") if given.refuse else read)

    @property
    def may_truncate(self) -> bool:
        """Whether long texts are truncated rather than refused."""
        return self._truncation.max_tokens is not None and not self._truncation.refuse

    def limit_of(self, param: str) -> int | None:
        """Returns the request's own limit of the texts of a field."""
        return {"queries": self.max_query_tokens, "documents": self.max_document_tokens}.get(param)

    def most_of_text(self, room: int, own_length: int | None, param: str) -> int | None:
        """Returns how many tokens `truncate_to_room` needs of a field's text; None for all. That is one more
        than are kept, unless the text is refused by its length."""
        limits = [limit for limit in (own_length, self.limit_of(param)) if limit is not None]
        if self.may_truncate:
            limits.append(room)
        elif limits and min(limits) > room:
            return None
        return max(0, min(limits)) + 1 if limits else None

    def most_of_document(self, room: int) -> int | None:
        """Returns how many tokens of a document must be read to know what is kept of it; None for all."""
        limits = [] if self.max_document_tokens is None else [self.max_document_tokens]
        if self.may_truncate and not self.uses_windows:
            limits.append(room)
        return max(0, min(limits)) + 1 if limits else None

    def within(self, text: TokenIds, name: InputName) -> FittedText:
        """Truncates a text to the request's own limit, unless the request refuses longer ones."""
        max_tokens = self.limit_of(name.param)
        if max_tokens is None or len(text) <= max_tokens:
            return FittedText(text)
        self._check_own_limit(len(text), max_tokens, name)
        return FittedText(truncate(text, max_tokens, self.side), truncated=True)

    def _check_own_limit(self, length: int, max_tokens: int, name: InputName) -> None:
        if self._truncation.refuse and length > max_tokens:
            is_query = name.param == "queries"
            limit = self.names.max_query_tokens if is_query else self.names.max_document_tokens
            raise name.error(
                f"has more than {max_tokens} tokens, and the request refuses longer texts; shorten "
                f"it, raise {limit}, or let it be truncated ({self.names.allow})"
            )

    def too_long(self, name: InputName, length: int, limit: int) -> InvalidRequestError:
        return name.error(
            f"has {length} tokens, but at most {limit} can be run; shorten it, or let it be truncated "
            f"({self.names.allow})"
        )

    def no_room(self, special_tokens: int) -> InvalidRequestError:
        return InvalidRequestError(
            f"{self.limit} tokens leave no room beside {special_tokens} special tokens",
            self.names.max_tokens,
        )

    def truncate_to_room(
        self, text: TokenIds, room: Room, name: InputName, own_length: int | None = None
    ) -> FittedText:
        """Truncates a text to its room and to the request's own limit, or refuses it if that is not allowed.
        `own_length` is how much of a text the checkpoint reads in this role, which refuses no text."""
        meant = len(text) if own_length is None else min(len(text), own_length)
        length = meant
        if (max_tokens := self.limit_of(name.param)) is not None:
            self._check_own_limit(meant, max_tokens, name)
            length = min(meant, max_tokens)
        if length > room.tokens:
            if not self.may_truncate:
                raise self.too_long(name, len(text) + room.others, room.tokens + room.others)
            if room.tokens < 1:
                raise InvalidRequestError(
                    f"{room.others} tokens stand around {name} and leave no room for it; shorten the query",
                    "queries",
                )
            length = room.tokens
        return FittedText(truncate(text, length, self.side), truncated=length < meant)

    def windows(self, text: TokenIds, room: Room, name: InputName) -> list[FittedText]:
        """Divides a document into overlapping windows of at most `room.tokens` tokens; without windows,
        truncates it. Raises RequestTooLargeError before too many are made."""
        if len(text) <= room.tokens or not self.uses_windows:
            return [self.truncate_to_room(text, room, name)]
        overlap = self._shared(room, name)
        starts = range(0, len(text) - overlap, room.tokens - overlap)
        # All windows but the last are full.
        check_tokens((len(starts) - 1) * (room.tokens + room.others), self._most_tokens)
        return [FittedText(text[start : start + room.tokens]) for start in starts]

    def _shared(self, room: Room, name: InputName) -> int:
        """Returns how many tokens windows share. Raises InvalidRequestError if they would repeat too much."""
        if room.tokens * _SMALLEST_SHARE < room.tokens + room.others:
            raise name.error(
                f"is to be read through windows of {max(0, room.tokens)} tokens beside {room.others} "
                f"others; shorten the query, so that at least one in {_SMALLEST_SHARE} is the document's"
            )
        wanted, most = self._truncation.window_overlap, room.tokens // 2
        if wanted is not None and wanted > most:
            raise InvalidRequestError(
                f"window_overlap is {wanted}, but windows of {name} have {room.tokens} tokens and may share "
                f"at most {most}; ask for no more, or shorten the query",
                "window_overlap",
            )
        return min(self._overlap, most)


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """The lengths that the engine can run. Windows share `window_overlap` tokens and texts are truncated at
    `side` by default. A query or document sent as vectors has at most `most_vectors`, and a pair at most the
    square of that in comparisons; None for no limit."""

    longest_sequence: int
    window_overlap: int
    side: Side = "right"
    most_vectors: int | None = None

    def applied_to(self, truncation: Truncation, most_tokens: int | None = None) -> LongInputs:
        return LongInputs(truncation, self.longest_sequence, self.window_overlap, most_tokens, self.side)


def check_tokens(tokens: int, most: int | None) -> None:
    """Raises RequestTooLargeError if a request has more than `most` tokens so far. Called while sequences are
    built, because a few bytes can ask for many tokens."""
    if most is not None and tokens > most:
        raise RequestTooLargeError(
            f"this request has more than the {most} tokens that one may have; send it in parts, let texts be "
            "truncated, or raise max_request_tokens"
        )


_NONE = np.empty(0, dtype=np.int32)
# The caller's token ids are checked this many at a time.
_IDS = 65_536


@dataclass(frozen=True, slots=True, eq=False)
class BuiltText:
    tokens: Tokens
    truncated: bool

    @property
    def num_rows(self) -> int:
        """The number of its tokens that are pooled."""
        positions = self.tokens.pooled_positions
        return len(self.tokens) if positions is None else len(positions)


class TextBuilder:
    """Builds the single-text sequences of the field `param` of one request. Only documents are read through
    windows. No text is refused for exceeding the role's own length: that much of it is read."""

    def __init__(
        self, tokenizer: TextTokenizer, rules: RoleRules, long_inputs: LongInputs, param: str
    ) -> None:
        self._tokenizer = tokenizer
        self._template = tokenizer.single
        self.rules = rules
        self.long_inputs = long_inputs
        self._param = param
        self._uses_windows = param == "documents" and long_inputs.uses_windows
        # The checkpoint's limit of a sequence in this role.
        self.own_length = rules.max_tokens
        # The tokens before every text, and the text that is tokenized with it.
        leading, self._before = rules.leading_ids, rules.before
        if rules.chat is not None:
            fixed, self._before = rules.chat.parts_before(rules.prompt)
            leading = tokenizer.encode([fixed], param)[0]
        self._leading = _NONE if leading is None else leading
        self._trailing = _NONE if rules.trailing_ids is None else rules.trailing_ids
        # The number of tokens before a text and its prompt.
        self._num_before = len(self._template.ids[0]) + len(self._leading)
        special_tokens = self._template.special_tokens + len(self._leading) + len(self._trailing)
        self._prompt_length = len(tokenizer.encode([self._before], param)[0]) if self._before else 0
        self._room = Room(long_inputs.limit - special_tokens, special_tokens)
        if self._room.tokens < 1:
            raise long_inputs.no_room(special_tokens)

    def encode(self, texts: Sequence[str], indices: Iterable[int] | None = None) -> list[TokenIds]:
        """Returns token ids of each text behind the role's prompt, as many as `build` and `windows` need.
        `indices` are the texts' positions in the field, if not all are given."""
        prompt = self._before
        # Lazily, because a prompt may be long and the texts many.
        prompted = (prompt + text for text in texts) if prompt else texts
        names = (InputName(self._param, i) for i in (count() if indices is None else indices))
        return self._tokenizer.encode(prompted, self._param, self._most, self.long_inputs.side, names)

    def build(self, text: TokenIds, index: int) -> BuiltText:
        """Returns the sequence of a text that is not read through windows."""
        return self.windows(text, index)[0]

    def windows(self, text: TokenIds, index: int) -> list[BuiltText]:
        """Returns one text's sequences: one, or its windows, each behind the role's prompt."""
        name = InputName(self._param, index)
        return [self._filled(part, name) for part in self._parts(text, name)]

    def origins(self, text: str, index: int) -> list[Origins]:
        """Returns the characters of the rows of one text's sequences."""
        name = InputName(self._param, index)
        ids, spans = self._encode_with_spans(text, self._most, name)
        parts = zip(self._parts(ids, name), self._parts(spans, name), strict=True)
        return [self._origins_of(self._filled(part, name).tokens, of_part.tokens) for part, of_part in parts]

    def whole(self, text: str) -> tuple[BuiltText, Origins]:
        """Returns the sequence of a whole text and the characters of its rows. Refuses longer texts."""
        name = InputName(self._param, 0)
        room = self._room.tokens if self._own_room is None else min(self._room.tokens, self._own_room)
        ids, spans = self._encode_with_spans(text, room + 1, self._param)
        if len(ids) > room:
            raise InvalidRequestError(
                f"the document has more than the {room} tokens that this model reads of one at once; send it "
                "in parts",
                self._param,
            )
        built = self._filled(FittedText(ids), name)
        return built, self._origins_of(built.tokens, spans)

    def build_from_ids(self, token_ids: tuple[int, ...], index: int) -> BuiltText:
        """Builds a sequence of the caller's token ids, special tokens included."""
        name = InputName(self._param, index)
        ids = checked_ids(token_ids, self._tokenizer, name)
        room = Room(self.long_inputs.limit, 0)
        fitted = self.long_inputs.truncate_to_room(ids, room, name, self.own_length)
        types = np.zeros(len(fitted.tokens), dtype=np.int32)
        return self._completed(fitted.tokens, types, fitted.truncated, prompt_end=0)

    @property
    def _own_room(self) -> int | None:
        return None if self.own_length is None else max(0, self.own_length - self._room.others)

    @property
    def _most(self) -> int | None:
        """The most tokens to read of a text."""
        if not self._uses_windows:
            return self.long_inputs.most_of_text(self._room.tokens, self._own_room, self._param)
        limit = self.long_inputs.limit_of(self._param)
        return None if limit is None else limit + 1

    def _parts(self, text: TokenIds, name: InputName) -> list[FittedText]:
        """Returns what each sequence has of a text: its tokens or their spans."""
        if not self._uses_windows:
            return [self.long_inputs.truncate_to_room(text, self._room, name, self._own_room)]
        limited = self.long_inputs.within(text, name)
        room, special_tokens = self._room.tokens, self._room.others
        if self.own_length is not None:
            room = min(room, self.own_length - special_tokens)
        if len(limited.tokens) <= room:
            return [limited]
        prompt, body = np.split(limited.tokens, [self._prompt_length])
        beside_prompt = Room(room - len(prompt), special_tokens + len(prompt))
        return [
            FittedText(np.concatenate([prompt, window.tokens]), limited.truncated)
            for window in self.long_inputs.windows(body, beside_prompt, name)
        ]

    def _encode_with_spans(self, text: str, most: int | None, name: object) -> tuple[TokenIds, Spans]:
        """Returns the token ids behind the role's prompt, and their characters in the text."""
        prompt, side = self._before, self.long_inputs.side
        ids, spans = self._tokenizer.encode_with_spans(prompt + text, self._param, most, side, name)
        in_text = np.maximum(spans - len(prompt), 0)
        in_text[spans[:, 1] <= len(prompt)] = NO_SPAN
        return ids, in_text

    def _origins_of(self, tokens: Tokens, spans: Spans) -> Origins:
        """Returns the characters of a sequence's rows. The `spans` are those of its text and prompt."""
        placed = np.full((len(tokens), 2), NO_SPAN, dtype=np.int32)
        placed[self._num_before : self._num_before + len(spans)] = spans
        rows = slice(None) if tokens.pooled_positions is None else tokens.pooled_positions
        return Origins(tokens.ids[rows], placed[rows])

    def _filled(self, fitted: FittedText, name: InputName) -> BuiltText:
        """Puts special tokens around a text that fits."""
        if self._room.others + len(fitted.tokens) == 0:
            raise InvalidRequestError(f"{name} has no tokens; leave it out", self._param)
        if self._template.special_tokens + len(fitted.tokens) == 0:
            # An empty text may stand between the role's tokens alone.
            ids = types = _NONE
        else:
            joined = self._template.join(fitted.tokens)
            ids, types = joined.ids, joined.type_ids
        if len(self._leading) or len(self._trailing):
            ids = np.concatenate([self._leading, ids, self._trailing])
            types = np.concatenate([np.zeros_like(self._leading), types, np.zeros_like(self._trailing)])
        prompt_end = 0
        if not self.rules.pool_prompt and self._prompt_length:
            prompt_end = self._num_before + self._prompt_length
        return self._completed(ids, types, fitted.truncated, prompt_end)

    def _completed(self, ids: TokenIds, types: TokenIds, truncated: bool, prompt_end: int) -> BuiltText:
        """Applies the role's rules: expansion, and tokens left out of pooling: those before `prompt_end`,
        those of the skip list, and perhaps the first or the special ones around the text."""
        yield_to_smaller()
        if self.rules.last_id is not None:
            behind = int(np.argmax(ids == self.rules.last_id)) + 1
            if ids[behind - 1] == self.rules.last_id:
                ids, types = ids[:behind], types[:behind]
        attended_len = len(ids)
        expansion = self.rules.expansion
        if expansion is not None and len(ids) < expansion.length:
            missing = expansion.length - len(ids)
            ids = np.concatenate([ids, np.full(missing, expansion.token_id, dtype=np.int32)])
            types = np.concatenate([types, np.zeros(missing, dtype=np.int32)])
            attended_len = len(ids) if expansion.attended else attended_len
        skipped = np.zeros(len(ids), dtype=bool)
        # A text that was truncated within its prompt has nothing else to pool.
        if prompt_end < len(ids):
            skipped[:prompt_end] = True
        if not self.rules.pool_first:
            skipped[:1] = True
        if not self.rules.pool_specials:
            first, last = self._template.ids[0], self._template.ids[-1]
            for part, at in ((first, slice(len(first))), (last, slice(len(ids) - len(last), None))):
                skipped[at] |= np.array_equal(ids[at], part)
        if self.rules.skipped_ids is not None:
            skipped |= np.isin(ids, self.rules.skipped_ids)
        pooled = np.flatnonzero(~skipped) if skipped.any() else None
        return BuiltText(Tokens(ids, types, attended_len, pooled), truncated)


def checked_ids(token_ids: tuple[int, ...], tokenizer: TextTokenizer, name: InputName) -> TokenIds:
    """Returns a caller's token ids. Raises InvalidRequestError for none, and for those that no token has."""
    size, parts = tokenizer.vocabulary_size, []
    for start in range(0, max(1, len(token_ids)), _IDS):
        yield_to_smaller()
        part = token_ids[start : start + _IDS]
        if not part or min(part) < 0 or max(part) >= size:
            raise name.error(f"must hold token ids from 0 to {size - 1}")
        parts.append(tokenizer.known(np.array(part, dtype=np.int32), name.param, name))
    return np.concatenate(parts)


def shortest_text(rules: RoleRules, tokenizer: TextTokenizer) -> int:
    """Returns the tokens of the shortest sequence of a role."""
    text = tokenizer.encode([rules.before + SHORTEST_TEXT], "text")[0]
    tokens = tokenizer.single.special_tokens + rules.num_fixed_ids + len(text)
    if rules.max_tokens is not None:
        tokens = min(tokens, rules.max_tokens)
    return tokens if rules.expansion is None else max(tokens, rules.expansion.length)
