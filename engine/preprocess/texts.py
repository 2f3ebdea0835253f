"""Single texts to sequences: prompt, template, truncation, query expansion, tokens left out of pooling."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from maxsimd.engine.checkpoint import RoleRules
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.preprocess.long_inputs import Fitted, LongInputs, no_room
from maxsimd.engine.preprocess.tokenization import TextTokenizer
from maxsimd.scheduler import Tokens
from maxsimd.scheduler.payload import TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class BuiltText:
    """The tokens of a text's sequence, and whether the text was `truncated`."""

    tokens: Tokens
    truncated: bool


Given: TypeAlias = str | tuple[int, ...]


class TextBuilder:
    """Builds the single-text sequences of one field of one request.

    `param` names the field in errors and `most` is how many tokens of a text the request wants. A text is
    never refused for being longer than the role's own length: that much of it is read."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        rules: RoleRules,
        long_inputs: LongInputs,
        param: str,
        most: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = tokenizer.single
        self._rules = rules
        self._long = long_inputs
        self._param = param
        self._most = most
        self._limit = long_inputs.limit
        # The most tokens of a sequence in this role, as the checkpoint sets it.
        self.own_length = rules.max_tokens
        self._prompt_tokens = 0
        if not rules.pool_prompt and rules.prompt:
            self._prompt_tokens = len(tokenizer.encode([rules.prompt], param)[0])
        if self._room < 1:
            raise no_room(self._limit, self._template.special_tokens)

    def encode(self, texts: tuple[str, ...]) -> list[TokenIds]:
        """Token ids of each text behind the role's prompt, without special tokens."""
        prompt = self._rules.prompt
        return self._tokenizer.encode([prompt + text for text in texts] if prompt else texts, self._param)

    def build(self, text: TokenIds, index: int) -> BuiltText:
        """One text's sequence, cut if it must be and may be."""
        around = self._template.special_tokens
        own = None if self.own_length is None else max(0, self.own_length - around)
        fitted = self._long.fit(text, self._room, around, self._param, index, own, self._most)
        return self._filled(fitted, index)

    def windows(self, text: TokenIds, index: int) -> list[BuiltText]:
        """One document's sequences: one, or its windows, each behind the role's prompt."""
        if not self._long.uses_windows:
            return [self.build(text, index)]
        wanted = self._long.within(text, self._most)
        around = self._template.special_tokens
        room = self._room if self.own_length is None else min(self._room, self.own_length - around)
        if len(wanted.tokens) <= room:
            return [self._filled(wanted, index)]
        prompt, body = wanted.tokens[: self._prompt_length], wanted.tokens[self._prompt_length :]
        around += len(prompt)
        windows = self._long.windows(body, room - len(prompt), around, self._param, index)
        return [
            self._filled(Fitted(np.concatenate([prompt, window.tokens]), wanted.truncated), index)
            for window in windows
        ]

    def given(self, tokens: tuple[int, ...], index: int) -> BuiltText:
        """The sequence of token ids that the caller made, special tokens included."""
        ids = np.array(tokens, dtype=np.int64)
        size = self._tokenizer.vocabulary_size
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= size:
            raise InvalidRequestError(
                f"{self._param}[{index}] must hold token ids from 0 to {size - 1}", self._param
            )
        fitted = self._long.fit(ids, self._limit, 0, self._param, index, self.own_length, self._most)
        types = np.zeros(len(fitted.tokens), dtype=np.int32)
        return self._completed(fitted.tokens.astype(np.int32), types, fitted.truncated, prompt_rows=0)

    @property
    def _room(self) -> int:
        """What the request leaves for a text."""
        return self._limit - self._template.special_tokens

    @property
    def _prompt_length(self) -> int:
        """How many tokens the prompt has in front of a text that is cut into windows."""
        prompt = self._rules.prompt
        return len(self._tokenizer.encode([prompt], self._param)[0]) if prompt else 0

    def _filled(self, fitted: Fitted[np.int32], index: int) -> BuiltText:
        ids, types = self._template.fill(fitted.tokens)
        if len(ids) == 0:
            raise InvalidRequestError(f"{self._param}[{index}] has no tokens; leave it out", self._param)
        prompt_rows = len(self._template.ids[0]) + self._prompt_tokens
        return self._completed(ids, types, fitted.truncated, prompt_rows)

    def _completed(self, ids: TokenIds, types: TokenIds, truncated: bool, prompt_rows: int) -> BuiltText:
        """Adds what the checkpoint's rules for the role ask for: expansion, and tokens left out."""
        attended = len(ids)
        expansion = self._rules.expansion
        if expansion is not None and len(ids) < expansion.length:
            missing = expansion.length - len(ids)
            ids = np.concatenate([ids, np.full(missing, expansion.token_id, dtype=np.int32)])
            types = np.concatenate([types, np.zeros(missing, dtype=np.int32)])
            attended = len(ids) if expansion.attended else attended
        skipped = np.zeros(len(ids), dtype=bool)
        if self._prompt_tokens and prompt_rows < len(ids):
            skipped[:prompt_rows] = True
        if self._rules.skipped_ids is not None:
            skipped |= np.isin(ids, self._rules.skipped_ids)
        pooled = np.flatnonzero(~skipped) if skipped.any() else None
        return BuiltText(Tokens(ids, types, attended, pooled), truncated)
