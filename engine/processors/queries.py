"""The queries of requests whose queries and documents are run apart: to be run, or as their embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from maxsimd.engine.checkpoint import LoadedModel, RoleRules
from maxsimd.engine.media import Content
from maxsimd.engine.processors.given_vectors import GivenVectors
from maxsimd.engine.processors.pages import PageBuilder, image_jobs
from maxsimd.engine.processors.prepared import EncodedBefore, Prepared
from maxsimd.engine.processors.request_ids import RequestIds
from maxsimd.engine.processors.text.long_inputs import InputName, LengthLimits, LongInputs
from maxsimd.engine.processors.text.texts import BuiltText, TextBuilder
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.requests import ScoreRequest
from maxsimd.pooling.query_rows import QueryRows
from maxsimd.pooling.vectors import Vectors
from maxsimd.scheduler import Role
from maxsimd.scheduler import Sequence as TokenSequence


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """A query under its sequence id: built from a text or a picture, to be run, or given as rows
    [tokens, dim], which an engine may have `encoded_before`."""

    id: int
    built: BuiltText | torch.Tensor
    encoded_before: EncodedBefore = field(default_factory=EncodedBefore)

    @property
    def given(self) -> torch.Tensor | None:
        return None if isinstance(self.built, BuiltText) else self.built

    @property
    def truncated(self) -> bool:
        was_cut = self.encoded_before.truncated > 0
        return self.built.truncated if isinstance(self.built, BuiltText) else was_cut

    @property
    def num_rows(self) -> int:
        """How many of its tokens are scored."""
        return self.built.num_rows if isinstance(self.built, BuiltText) else len(self.built)


class QueryReader:
    """Builds the sequences of queries, and checks those that came as their embeddings. Thread-safe."""

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: TextTokenizer,
        limits: LengthLimits,
        given: GivenVectors,
        pages: PageBuilder | None,
    ) -> None:
        self._rules = model.query
        self._task = model.score_task
        self._vision = model.vision
        self._tokenizer = tokenizer
        self._limits = limits
        self._given = given
        self._pages = pages

    def builder(self, request: ScoreRequest, long_inputs: LongInputs) -> TextBuilder:
        """What builds the texts among the queries of a request."""
        rules = _instructed(self._rules, request.instruction)
        return TextBuilder(self._tokenizer, rules, long_inputs, "queries", long_inputs.max_query_tokens)

    def read(self, request: ScoreRequest, builder: TextBuilder, ids: RequestIds) -> list[Query]:
        """The queries of a request, in its order."""
        texts = {i: text for i, text in enumerate(request.queries) if isinstance(text, str)}
        encoded = builder.encode([*texts.values()], texts)
        built = {i: builder.build(text, i) for i, text in zip(texts, encoded, strict=True)}
        built |= self._read_pages(request, builder.rules, ids)
        return [
            self._given_query(query, i, ids)
            if isinstance(query, Vectors)
            else Query(ids.next_sequence_id(), built[i])
            for i, query in enumerate(request.queries)
        ]

    def prepare(self, request: ScoreRequest, ids: RequestIds) -> Prepared:
        """The queries of a request by themselves, whose embeddings are its results."""
        builder = self.builder(request, self._limits.applied_to(request.truncation, ids))
        built = [each.built for each in self.read(request, builder, ids) if isinstance(each.built, BuiltText)]
        sequences = [
            TokenSequence.text(ids.next_sequence_id(), ids.slot(i), self._task, each.tokens, Role.QUERY)
            for i, each in enumerate(built)
        ]
        truncated = sum(each.truncated for each in built)
        images = image_jobs(self._vision, sequences)
        return Prepared(sequences, len(built), truncated, images=images, truncated_queries=truncated)

    def _given_query(self, vectors: Vectors, index: int, ids: RequestIds) -> Query:
        rows = self._given.query(vectors, index)
        before = EncodedBefore()
        if isinstance(vectors, QueryRows):
            before = EncodedBefore(vectors.tokens, int(vectors.truncated))
        return Query(ids.next_sequence_id(), rows, before)

    def _read_pages(self, request: ScoreRequest, rules: RoleRules, ids: RequestIds) -> dict[int, BuiltText]:
        """The queries that have pictures, by their index."""
        pages: dict[int, BuiltText] = {}
        for i, query in enumerate(request.queries):
            if isinstance(query, Content):
                assert self._pages is not None
                name = InputName("queries", i)
                opened = self._pages.opened(query, name)
                pages[i] = self._pages.built(opened, rules, name, ids)
                ids.check_tokens(sum(len(page.tokens) for page in pages.values()))
        return pages


def all_before(queries: Sequence[Query]) -> EncodedBefore:
    """What was done for all of the queries together before they came."""
    return EncodedBefore(
        sum(query.encoded_before.tokens for query in queries),
        sum(query.encoded_before.truncated for query in queries),
    )


def _instructed(rules: RoleRules, instruction: str | None) -> RoleRules:
    """The rules for queries with the instruction in their prompt, if there is one."""
    return rules if instruction is None else rules.instructed(instruction)
