"""Listwise models: many documents in one prompt, each scored beside the others.

Source: jina-reranker-v3 (arXiv 2509.25085). The prompt and the rule for blocks are its model card's.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.cache.store import RunFacts
from maxsimd.engine.checkpoint import ListwiseRules, LoadedModel
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.processors.processor import (
    CachedScorePlan,
    PlanValues,
    ProcessorContext,
    RequestIds,
    ScoreProcessor,
    Scores,
    find_scores,
)
from maxsimd.engine.processors.text.builder import InputName, LongInputs, Room
from maxsimd.engine.processors.text.tokenization import SHORTEST_TEXT, TextTokenizer
from maxsimd.engine.requests import ScoreOptions, ScoreRequest
from maxsimd.scheduler import Tokens, TokenSequence
from maxsimd.scheduler.sequence import TokenIds

_SYSTEM = (
    "<|im_start|>system\nYou are a search relevance expert who can determine a ranking of the passages based "
    "on how relevant they are to the query. If the query is a question, how relevant a passage is depends on "
    "how well it answers the question. If not, try to analyze the intent of the query and assess how well "
    "each passage satisfies the intent. If an instruction is provided, you should follow the instruction "
    "when determining the ranking.<|im_end|>\n<|im_start|>user\n"
)
_ASSISTANT = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ListwisePlan(CachedScorePlan):
    """One value for each block, float32 [documents + 1, dim], the query last. `num_blocks[i]` blocks in a row
    are list i, whose documents are ranked together for one query. `texts` are the documents as read."""

    num_blocks: tuple[int, ...] = ()
    texts: Sequence["_Text"] = ()

    def raw_scores(self, values: PlanValues) -> Scores:
        blocks = iter(values)
        of_lists = [
            merge_blocks([np.asarray(next(blocks)) for _ in range(count)]) for count in self.num_blocks
        ]
        return self.found.with_new(np.concatenate(of_lists) if of_lists else np.empty(0, dtype=np.float32))

    def documents_of(self, values: Collection[int]) -> Sequence[int]:
        return range(self.request.num_documents)

    def input_of(self, value: int) -> str:
        return "documents"

    def explanations(self, values: PlanValues, documents: Iterable[int]) -> dict[int, Explanation]:
        texts = ((document, self.texts[document]) for document in documents)
        return {document: Explanation(text.tokens, text.truncated, cached=False) for document, text in texts}


class ListwiseProcessor(ScoreProcessor):
    """Makes one sequence for each block. Pooled are the documents' markers, in order, and the query's."""

    scores_together = True

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        assert context.model.listwise is not None
        self._rules = context.model.listwise
        markers = self._rules.document_marker, self._rules.query_marker
        self._markers = [self._tokenizer.token_id(marker) for marker in markers]

    @classmethod
    def is_for(cls, model: LoadedModel) -> bool:
        return model.listwise is not None

    def check_options(self, options: ScoreOptions) -> None:
        if options["on_timeout"] == "partial" or options["on_error"] == "report":
            raise InvalidRequestError(
                "a listwise model scores documents by each other: leave out on_timeout and on_error",
                "on_timeout" if options["on_timeout"] == "partial" else "on_error",
            )

    def plan(self, request: ScoreRequest, ids: RequestIds) -> ListwisePlan:
        found = find_scores(self._context.score_cache, request, together=True)
        long_inputs = self._limits.applied_to(request.truncation, ids.most_tokens)
        rules = replace(self._rules, context=min(self._rules.context, long_inputs.limit))
        options = rules, self._tokenizer, long_inputs
        blocks: list[TokenIds] = []
        num_blocks = []
        texts: list[_Text] = []
        facts: list[RunFacts] = []
        instruction = _without_markers(request.instruction or "", rules)
        # All documents are ranked for the one query, or each of N pairs by itself. By their first index.
        lists = {0: request.document_texts}
        if len(request.queries) > 1:
            lists = {i: (text,) for i, text in enumerate(request.document_texts)}
        for first, ranked in lists.items() if found.new else ():
            query = _read(request.query_texts[first], InputName("queries", first), *options)
            names = [InputName("documents", first + i) for i in range(len(ranked))]
            documents = [_read(text, name, *options) for text, name in zip(ranked, names, strict=True)]
            texts += documents
            before, start = len(blocks), 0
            for size in in_blocks([document.tokens for document in documents], query.tokens, rules):
                block = [document.text for document in documents[start : start + size]]
                blocks += _prompt_blocks(query.text, block, instruction, rules, self._tokenizer)
                start += size
            num_blocks.append(len(blocks) - before)
            # The first document stands for all that are run together.
            truncated = sum(text.truncated for text in (query, *documents))
            facts.append(RunFacts(sum(map(len, blocks[before:])), truncated, query.truncated, 1))
            facts += [RunFacts(0, 0, False, 1)] * (len(documents) - 1)
        sequences = []
        for i, token_ids in enumerate(blocks):
            pooled = np.flatnonzero(np.isin(token_ids, self._markers))
            tokens = Tokens(token_ids, np.zeros_like(token_ids), pooled_positions=pooled)
            sequences.append(TokenSequence.text(ids.next_sequence_id(), ids.slot(i), "rank", tokens))
        return ListwisePlan(
            sequences=sequences,
            num_values=len(sequences),
            truncated=sum(one.truncated for one in facts) + found.truncated_documents,
            cached_documents=len(found.cached),
            cached_tokens=found.cached_tokens,
            request=request,
            truncated_queries=sum(one.query_truncated for one in facts) + found.truncated_queries(request),
            normalization=self._normalization(request),
            found=found,
            facts=facts,
            num_blocks=tuple(num_blocks),
            texts=texts,
        )

    def shortest_sequences(self) -> dict[str, int]:
        prompt = listwise_prompt(SHORTEST_TEXT, [SHORTEST_TEXT], self._model.instruction, self._rules)
        return {"a query with one document": len(self._tokenizer.encode([prompt], "text")[0])}


def merge_blocks(blocks: Sequence[NDArray[np.float32]]) -> Scores:
    """Returns the score of each document of one query: its cosine with the query.

    A block is float32 [documents + 1, dim], the query last. The query is the mean of its vectors, weighted
    by the best cosine of each block, mapped to 0 to 1."""
    documents = [_unit(block[:-1]) for block in blocks]
    weights = [
        float((1 + unit @ _unit(block[-1])).max() / 2) for unit, block in zip(documents, blocks, strict=True)
    ]
    query = np.average([block[-1] for block in blocks], axis=0, weights=weights)
    return np.concatenate(documents) @ _unit(query).astype(np.float32)


def _unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    norm = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.asarray(rows / np.maximum(norm, 1e-12))


def in_blocks(lengths: Sequence[int], query_tokens: int, rules: ListwiseRules) -> list[int]:
    """Returns how many documents go into each block, in order. A block ends once it is full, or once the rest
    of the context, with room for the query twice, may not take a longest document."""
    sizes, size = [], 0
    room = rules.context - 2 * query_tokens
    for length in lengths:
        size += 1
        room -= length
        if size >= rules.block_documents or room <= rules.max_document_tokens:
            sizes.append(size)
            size, room = 0, rules.context - 2 * query_tokens
    return [*sizes, size] if size else sizes


def listwise_prompt(query: str, documents: list[str], instruction: str | None, rules: ListwiseRules) -> str:
    instruct = f"<instruct>\n{instruction}\n</instruct>\n" if instruction else ""
    passages = "\n".join(
        f'<passage id="{i}">\n{text}{rules.document_marker}\n</passage>' for i, text in enumerate(documents)
    )
    return (
        f"{_SYSTEM}I will provide you with {len(documents)} passages, each indicated by a numerical "
        f"identifier. Rank the passages based on their relevance to query: {query}\n{instruct}{passages}\n"
        f"<query>\n{query}{rules.query_marker}\n</query>{_ASSISTANT}"
    )


def _prompt_blocks(
    query: str, documents: list[str], instruction: str, rules: ListwiseRules, tokenizer: TextTokenizer
) -> list[TokenIds]:
    """Returns the token ids of a block's prompt, or of its halves if it exceeds the context: `in_blocks`
    does not count the wording around documents."""
    prompt = listwise_prompt(query, documents, instruction, rules)
    ids = tokenizer.encode([prompt], "documents")[0]
    if len(ids) <= rules.context:
        return [ids]
    if len(documents) == 1:
        raise InvalidRequestError(
            f"a pass over one document has {len(ids)} tokens, but at most {rules.context} can be "
            "run; shorten the query or the documents",
            "documents",
        )
    half = len(documents) // 2
    return [
        block
        for part in (documents[:half], documents[half:])
        for block in _prompt_blocks(query, part, instruction, rules, tokenizer)
    ]


def _without_markers(text: str, rules: ListwiseRules) -> str:
    """Removes markers as the model's own code does. That may join the parts of another, which becomes a
    space: a marker inside a text would shift the scores of the others."""
    for found_becomes in ("", " "):
        for marker in (rules.query_marker, rules.document_marker):
            text = text.replace(marker, found_becomes)
    return text


@dataclass(frozen=True, slots=True)
class _Text:
    """A text without markers, truncated to the model's length, and its number of tokens."""

    text: str
    tokens: int
    truncated: bool


def _read(
    text: str, name: InputName, rules: ListwiseRules, tokenizer: TextTokenizer, long_inputs: LongInputs
) -> _Text:
    """Reads a text as the model's own code does, which truncates long ones."""
    is_query, side = name.param == "queries", long_inputs.side
    length = rules.max_query_tokens if is_query else rules.max_document_tokens
    # Reading no more than the model does is no truncation, except of documents to be read through windows.
    own_length = length if is_query or not long_inputs.uses_windows else None
    most = long_inputs.most_of_text(length, own_length, name.param)
    (ids,) = tokenizer.encode([text], name.param, most, side, [name])
    fitted = long_inputs.truncate_to_room(ids, Room(length, 0), name, own_length)
    if len(fitted.tokens) < len(ids):
        text = tokenizer.decode(fitted.tokens.tolist())
    return _Text(_without_markers(text, rules), len(fitted.tokens), fitted.truncated)
