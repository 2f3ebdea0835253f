"""Single texts to sequences: prompt, template, truncation, query expansion, tokens left out of pooling."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.checkpoint import RoleRules
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.processors.text.origins import Origins, around, behind_prompt
from maxsimd.engine.processors.text.tokenization import SHORTEST_TEXT, TextTokenizer
from maxsimd.engine.processors.text.truncation import Fitted, InputName, LongInputs, Room, no_room
from maxsimd.engine.workers import yield_to_smaller
from maxsimd.scheduler import Tokens
from maxsimd.scheduler.sequence import TokenIds

_NONE = np.empty(0, dtype=np.int32)
# How many of the caller's own token ids are checked at a time.
_IDS = 65_536


@dataclass(frozen=True, slots=True, eq=False)
class BuiltText:
    """The tokens of a text's sequence, and whether the text was `truncated`."""

    tokens: Tokens
    truncated: bool

    @property
    def num_rows(self) -> int:
        """How many of its tokens are pooled."""
        positions = self.tokens.pooled_positions
        return len(self.tokens) if positions is None else len(positions)


class TextBuilder:
    """Builds the single-text sequences of one field of one request.

    `param` names the field in errors and `max_tokens` is how many tokens of a text the request wants. A text
    is never refused for being longer than the role's own length: that much of it is read."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        rules: RoleRules,
        long_inputs: LongInputs,
        param: str,
        max_tokens: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = tokenizer.single
        self.rules = rules
        self._long_inputs = long_inputs
        self._param = param
        self._max_tokens = max_tokens
        # The most tokens of a sequence in this role, as the checkpoint sets it.
        self.own_length = rules.max_tokens
        self._leading, self._before = _leading(rules, tokenizer, param)
        self._trailing = _NONE if rules.trailing_ids is None else rules.trailing_ids
        special_tokens = self._template.special_tokens + len(self._leading) + len(self._trailing)
        self.prompt_length = len(tokenizer.encode([self._before], param)[0]) if self._before else 0
        self._room = Room(long_inputs.limit - special_tokens, special_tokens)
        if self._room.tokens < 1:
            raise no_room(long_inputs.limit, special_tokens)

    def encode(self, texts: Sequence[str], indices: Iterable[int] | None = None) -> list[TokenIds]:
        """Token ids of each text behind the role's prompt, as many as `build` needs. `indices` say which of
        the field's texts these are, if not all."""
        return self._encode(texts, self._most, indices)

    def build(self, text: TokenIds, index: int) -> BuiltText:
        """Returns one text's sequence, truncated if it must be and may be."""
        name = InputName(self._param, index)
        return self._filled(self._one(text, name), name)

    def encode_for_windows(
        self, texts: Sequence[str], indices: Iterable[int] | None = None
    ) -> list[TokenIds]:
        """Token ids of each text behind the role's prompt, as many as `windows` needs."""
        return self._encode(texts, self._most_for_windows, indices)

    def windows(self, text: TokenIds, index: int) -> list[BuiltText]:
        """One document's sequences: one, or its windows, each behind the role's prompt."""
        name = InputName(self._param, index)
        return [self._filled(part, name) for part in self._windows(text, name)]

    def origins(self, text: str, index: int) -> Origins:
        """Which characters the rows of one text's sequence stand for."""
        return next(self._origins(text, InputName(self._param, index), self._most, self._alone))

    def window_origins(self, text: str, index: int) -> list[Origins]:
        """Which characters the rows of one document's sequences stand for."""
        name = InputName(self._param, index)
        return [*self._origins(text, name, self._most_for_windows, self._windows)]

    def whole(self, text: str) -> tuple[BuiltText, Origins]:
        """Returns the sequence of the field's one text, not truncated, and the characters of its rows. Raises
        InvalidRequestError for a text that is too long."""
        prompt = self._before
        room = self._room.tokens if self._own_room is None else min(self._room.tokens, self._own_room)
        ids, spans = self._tokenizer.encode_with_spans(prompt + text, self._param, room + 1)
        if len(ids) > room:
            raise InvalidRequestError(
                f"the document has more than the {room} tokens that this model reads of one at once; send it "
                "in parts",
                self._param,
            )
        tokens = self._filled(Fitted(ids), InputName(self._param, 0)).tokens
        placed = around(behind_prompt(spans, len(prompt)), self._num_before, len(tokens))
        rows = slice(None) if tokens.pooled_positions is None else tokens.pooled_positions
        return BuiltText(tokens, truncated=False), Origins(tokens.ids[rows], placed[rows])

    def build_from_ids(self, token_ids: tuple[int, ...], index: int) -> BuiltText:
        """The sequence of token ids that the caller made, special tokens included."""
        name = InputName(self._param, index)
        size = self._tokenizer.vocabulary_size
        parts = []
        for start in range(0, max(1, len(token_ids)), _IDS):
            yield_to_smaller()
            part = token_ids[start : start + _IDS]
            if not part or min(part) < 0 or max(part) >= size:
                raise InvalidRequestError(f"{name} must hold token ids from 0 to {size - 1}", self._param)
            parts.append(self._tokenizer.known(np.array(part, dtype=np.int32), self._param, name))
        ids = np.concatenate(parts)
        room = Room(self._long_inputs.limit, 0)
        fitted = self._long_inputs.fit(ids, room, name, self.own_length, self._max_tokens)
        types = np.zeros(len(fitted.tokens), dtype=np.int32)
        return self._completed(fitted.tokens, types, fitted.truncated, prompt_end=0)

    @property
    def _own_room(self) -> int | None:
        """How much of a text the checkpoint reads."""
        return None if self.own_length is None else max(0, self.own_length - self._room.others)

    @property
    def _most(self) -> int | None:
        """How many tokens of a text must be read that is one sequence."""
        return self._long_inputs.most_of_text(self._room.tokens, self._own_room, self._max_tokens)

    @property
    def _most_for_windows(self) -> int | None:
        """How many tokens of a document must be read."""
        if not self._long_inputs.uses_windows:
            return self._most
        return None if self._max_tokens is None else self._max_tokens + 1

    def _one(self, text: NDArray[np.int32], name: InputName) -> Fitted[np.int32]:
        """Returns the part of a text that one sequence has: its tokens or their spans."""
        return self._long_inputs.fit(text, self._room, name, self._own_room, self._max_tokens)

    def _alone(self, text: NDArray[np.int32], name: InputName) -> list[Fitted[np.int32]]:
        return [self._one(text, name)]

    def _windows(self, text: NDArray[np.int32], name: InputName) -> list[Fitted[np.int32]]:
        """Returns the part of a document that each of its sequences has: its tokens or their spans."""
        if not self._long_inputs.uses_windows:
            return self._alone(text, name)
        limited = self._long_inputs.within(text, self._max_tokens, name)
        room, special_tokens = self._room.tokens, self._room.others
        if self.own_length is not None:
            room = min(room, self.own_length - special_tokens)
        if len(limited.tokens) <= room:
            return [limited]
        prompt, body = np.split(limited.tokens, [self.prompt_length])
        beside_prompt = Room(room - len(prompt), special_tokens + len(prompt))
        return [
            Fitted(np.concatenate([prompt, window.tokens]), limited.truncated)
            for window in self._long_inputs.windows(body, beside_prompt, name)
        ]

    def _origins(
        self,
        text: str,
        name: InputName,
        most: int | None,
        parts: Callable[[NDArray[np.int32], InputName], list[Fitted[np.int32]]],
    ) -> Iterator[Origins]:
        """The rows of each sequence that `parts` makes of a text."""
        prompt, side = self._before, self._long_inputs.side
        ids, spans = self._tokenizer.encode_with_spans(prompt + text, self._param, most, side, name)
        spans = behind_prompt(spans, len(prompt))
        for part, part_spans in zip(parts(ids, name), parts(spans, name), strict=True):
            tokens = self._filled(part, name).tokens
            placed = around(part_spans.tokens, self._num_before, len(tokens))
            rows = slice(None) if tokens.pooled_positions is None else tokens.pooled_positions
            yield Origins(tokens.ids[rows], placed[rows])

    def _encode(
        self, texts: Sequence[str], most: int | None, indices: Iterable[int] | None
    ) -> list[TokenIds]:
        prompt = self._before
        # One by one, because a prompt may be long and the texts many.
        prompted = (prompt + text for text in texts) if prompt else texts
        names = (InputName(self._param, i) for i in (count() if indices is None else indices))
        return self._tokenizer.encode(prompted, self._param, most, self._long_inputs.side, names)

    def _filled(self, fitted: Fitted[np.int32], name: InputName) -> BuiltText:
        """The sequence of a text that fits: special tokens around it."""
        if self._room.others + len(fitted.tokens) == 0:
            raise InvalidRequestError(f"{name} has no tokens; leave it out", self._param)
        # An empty text may stand between the role's tokens alone.
        is_empty = self._template.special_tokens + len(fitted.tokens) == 0
        ids, types = (_NONE, _NONE) if is_empty else self._template.fill(fitted.tokens)
        if len(self._leading) or len(self._trailing):
            ids, types = self._with_fixed_ids(ids, types)
        prompt_end = 0
        if not self.rules.pool_prompt and self.prompt_length:
            prompt_end = self._num_before + self.prompt_length
        return self._completed(ids, types, fitted.truncated, prompt_end)

    @property
    def _num_before(self) -> int:
        """How many tokens stand before a text and its prompt."""
        return len(self._template.ids[0]) + len(self._leading)

    def _with_fixed_ids(self, ids: TokenIds, types: TokenIds) -> tuple[TokenIds, TokenIds]:
        """A text's tokens between those that the role always has."""
        return (
            np.concatenate([self._leading, ids, self._trailing]),
            np.concatenate([np.zeros_like(self._leading), types, np.zeros_like(self._trailing)]),
        )

    def _completed(self, ids: TokenIds, types: TokenIds, truncated: bool, prompt_end: int) -> BuiltText:
        """Does what the checkpoint's rules for the role ask for: expansion, and tokens left out of pooling,
        which are those before `prompt_end`, those of the skip list and perhaps the first, or the special
        ones around the text."""
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
            skipped |= self._specials_around(ids)
        if self.rules.skipped_ids is not None:
            skipped |= np.isin(ids, self.rules.skipped_ids)
        pooled = np.flatnonzero(~skipped) if skipped.any() else None
        return BuiltText(Tokens(ids, types, attended_len, pooled), truncated)

    def _specials_around(self, ids: TokenIds) -> NDArray[np.bool_]:
        """Which of a sequence's tokens are the template's before and behind a text."""
        before, behind = self._template.ids[0], self._template.ids[-1]
        found = np.zeros(len(ids), dtype=bool)
        if len(before) and np.array_equal(ids[: len(before)], before):
            found[: len(before)] = True
        if len(behind) and np.array_equal(ids[-len(behind) :], behind):
            found[-len(behind) :] = True
        return found


def _leading(rules: RoleRules, tokenizer: TextTokenizer, param: str) -> tuple[TokenIds, str]:
    """The tokens that stand before every text, however long it is, and what is tokenized with it."""
    if rules.chat is None:
        return _NONE if rules.leading_ids is None else rules.leading_ids, rules.before
    fixed, joined = rules.chat.parts_before(rules.prompt)
    return tokenizer.encode([fixed], param)[0], joined


def shortest_text(rules: RoleRules, tokenizer: TextTokenizer) -> int:
    """How many tokens the shortest sequence of a role has."""
    text = tokenizer.encode([rules.before + SHORTEST_TEXT], "text")[0]
    tokens = tokenizer.single.special_tokens + rules.num_fixed_ids + len(text)
    if rules.max_tokens is not None:
        tokens = min(tokens, rules.max_tokens)
    return tokens if rules.expansion is None else max(tokens, rules.expansion.length)
