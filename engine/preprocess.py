"""Requests to sequences: roles, prompts, templates, truncation, query expansion.

Functions of their input, run in the thread pool; nothing here knows of queues or devices.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.checkpoint import LoadedModel, RoleRules
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.requests import EmbedRequest, ScoreRequest, Truncation
from maxsimd.engine.tokenization import TextTokenizer, cut, longest_first
from maxsimd.scheduler import Role, Sequence
from maxsimd.scheduler.sequence import TokenIds

# Token ids, type ids, attended length and kept rows of a sequence.
_Parts = tuple[TokenIds, TokenIds, int, NDArray[np.int64] | None]


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """The sequences of a request, queries first; `results` of them end in a result."""

    sequences: list[Sequence]
    results: int
    truncated: int

    @property
    def tokens(self) -> int:
        return sum(len(sequence) for sequence in self.sequences)


class Preprocessor:
    """Turns requests into sequences for one model. Thread-safe.

    `longest_sequence` is the most tokens that the engine can run in one sequence.
    """

    def __init__(self, model: LoadedModel, tokenizer: TextTokenizer, longest_sequence: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._longest = min(model.max_tokens, longest_sequence)

    def score(self, request: ScoreRequest, owner: int, keys: Iterator[int]) -> Prepared:
        """The sequences of a score request; the document or pair i has index i."""
        if self._model.score_task == "classify":
            return self._pairs(request, owner, keys)
        return self._two_stages(request, owner, keys)

    def embed(self, request: EmbedRequest, owner: int, keys: Iterator[int]) -> Prepared:
        """The sequences of texts to embed or classify, in their order."""
        assembly = self._assembly(self._model.rules(request.input_type), request.truncation, "input")
        texts = iter(assembly.encode(tuple(text for text in request.texts if isinstance(text, str))))
        role = {"query": Role.QUERY, "document": Role.DOCUMENT}.get(request.input_type or "", Role.TEXT)
        sequences = []
        for i, text in enumerate(request.texts):
            parts = assembly.build(next(texts), i) if isinstance(text, str) else assembly.given(text, i)
            sequences.append(Sequence(next(keys), owner, i, role, request.task, *parts))
        return Prepared(sequences, len(sequences), assembly.truncated)

    def _pairs(self, request: ScoreRequest, owner: int, keys: Iterator[int]) -> Prepared:
        truncation = request.truncation
        queries = self._tokenizer.encode(request.queries, "queries")
        documents = self._tokenizer.encode(request.documents, "documents")
        queries = [_cut_text(text, truncation.max_query_tokens, truncation) for text in queries]
        documents = [_cut_text(text, truncation.max_document_tokens, truncation) for text in documents]
        template = self._tokenizer.pair
        limit = self._limit(truncation)
        room = limit - template.special_tokens
        sequences = []
        truncated = 0
        for i, document in enumerate(documents):
            query = queries[request.query_of(i)]
            if len(query) + len(document) > room:
                if truncation.max_tokens is None:
                    total = len(query) + len(document) + template.special_tokens
                    raise _too_long("documents", i, total, limit)
                truncated += 1
                first, second = longest_first(len(query), len(document), room)
                query, document = cut(query, first, truncation.side), cut(document, second, truncation.side)
            ids, types = template.fill(query, document)
            sequences.append(Sequence(next(keys), owner, i, Role.PAIR, "classify", ids, types))
        return Prepared(sequences, len(sequences), truncated)

    def _two_stages(self, request: ScoreRequest, owner: int, keys: Iterator[int]) -> Prepared:
        task = self._model.score_task
        for_queries = self._assembly(self._model.query, request.truncation, "queries")
        for_documents = self._assembly(self._model.document, request.truncation, "documents")
        uses = len(request.documents) if len(request.queries) == 1 else 1
        queries = []
        for i, text in enumerate(for_queries.encode(request.queries)):
            parts = for_queries.build(text, i)
            queries.append(Sequence(next(keys), owner, i, Role.QUERY, task, *parts, uses=uses))
        documents = []
        for i, text in enumerate(for_documents.encode(request.documents)):
            parts = for_documents.build(text, i)
            query = queries[request.query_of(i)].key
            documents.append(Sequence(next(keys), owner, i, Role.DOCUMENT, task, *parts, query=query))
        truncated = for_queries.truncated + for_documents.truncated
        return Prepared(queries + documents, len(documents), truncated)

    def _limit(self, truncation: Truncation) -> int:
        """The longest sequence a request allows. Raises for a limit that makes no sense."""
        asked = truncation.max_tokens
        if asked is None or asked == -1:
            return self._longest
        if asked > self._longest:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {asked}, more than the {self._longest} tokens that this model "
                "takes; ask for less, or for -1",
                "truncate_prompt_tokens",
            )
        return asked

    def _assembly(self, rules: RoleRules, truncation: Truncation, param: str) -> "_Assembly":
        limit = self._limit(truncation)
        is_query = rules is self._model.query
        most = truncation.max_query_tokens if is_query else truncation.max_document_tokens
        # A checkpoint's own length for queries is how they are meant to be read, never an error;
        # documents beyond theirs are one, unless the request allows to cut them.
        always_cut = is_query and rules.max_tokens is not None
        return _Assembly(self._tokenizer, rules, truncation, limit, most, always_cut, param)


class _Assembly:
    """Builds the single-text sequences of one field of one request, counting those that it cuts."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        rules: RoleRules,
        truncation: Truncation,
        limit: int,
        most: int | None,
        always_cut: bool,
        param: str,
    ) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._side = truncation.side
        self._may_cut = always_cut or truncation.max_tokens is not None
        self._limit = limit if rules.max_tokens is None else min(limit, rules.max_tokens)
        self._most = most
        self._param = param
        self.truncated = 0
        if self._limit <= tokenizer.single.special_tokens:
            raise InvalidRequestError(
                f"{self._limit} tokens leave no room beside {tokenizer.single.special_tokens} special tokens",
                "truncate_prompt_tokens",
            )

    def encode(self, texts: tuple[str, ...]) -> list[TokenIds]:
        prompt = self._rules.prompt
        encoded = self._tokenizer.encode([prompt + text for text in texts] if prompt else texts, self._param)
        return encoded if self._most is None else [cut(text, self._most, self._side) for text in encoded]

    def build(self, text: TokenIds, index: int) -> _Parts:
        """The parts of one text's sequence: template, truncation and the role's rules applied."""
        template = self._tokenizer.single
        room = self._limit - template.special_tokens
        if len(text) > room:
            if not self._may_cut:
                raise _too_long(self._param, index, len(text) + template.special_tokens, self._limit)
            self.truncated += 1
            text = cut(text, room, self._side)
        ids, types = template.fill(text)
        if len(ids) == 0:
            raise InvalidRequestError(f"{self._param}[{index}] has no tokens; leave it out", self._param)
        return self._complete(ids, types)

    def given(self, tokens: tuple[int, ...], index: int) -> _Parts:
        """The same of token ids that the caller made."""
        ids = np.array(tokens, dtype=np.int64)
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= self._tokenizer.vocabulary_size:
            raise InvalidRequestError(
                f"{self._param}[{index}] must hold token ids from 0 to {self._tokenizer.vocabulary_size - 1}",
                self._param,
            )
        if len(ids) > self._limit:
            if not self._may_cut:
                raise _too_long(self._param, index, len(ids), self._limit)
            self.truncated += 1
            ids = cut(ids, self._limit, self._side)
        return self._complete(ids.astype(np.int32), np.zeros(len(ids), dtype=np.int32))

    def _complete(self, ids: TokenIds, types: TokenIds) -> _Parts:
        """Adds what the checkpoint's rules for the role ask for: expansion, and tokens left out."""
        attended = len(ids)
        expansion = self._rules.expansion
        if expansion is not None and len(ids) < expansion.length:
            missing = expansion.length - len(ids)
            ids = np.concatenate([ids, np.full(missing, expansion.token_id, dtype=np.int32)])
            types = np.concatenate([types, np.zeros(missing, dtype=np.int32)])
            attended = len(ids) if expansion.attended else attended
        kept = None
        if self._rules.skipped_ids is not None:
            kept = np.flatnonzero(~np.isin(ids, self._rules.skipped_ids))
            kept = None if len(kept) == len(ids) else kept
        return ids, types, attended, kept


def _cut_text(text: TokenIds, most: int | None, truncation: Truncation) -> TokenIds:
    return text if most is None else cut(text, most, truncation.side)


def _too_long(param: str, index: int, length: int, limit: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param}[{index}] has {length} tokens, but at most {limit} can be run; shorten it, or let it be cut "
        "with truncate_prompt_tokens (-1 cuts to the maximum)",
        param,
    )
