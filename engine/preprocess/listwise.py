"""Score requests to a listwise model: the query and many documents in one prompt, and what is made of it.

Source: jina-reranker-v3, "Last but Not Late Interaction for Document Reranking", arXiv 2509.25085; the
wording of the prompt and the rule by which documents are packed are its model card's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from maxsimd.engine.checkpoint import ListwiseRules
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.preprocess.long_inputs import Fitted, LongInputs
from maxsimd.engine.preprocess.prepared import Combine, Prepared
from maxsimd.engine.preprocess.tokenization import TextTokenizer
from maxsimd.engine.requests import ScoreRequest, Value
from maxsimd.scheduler import ResultSlot, Tokens
from maxsimd.scheduler import Sequence as TokenSequence
from maxsimd.scheduler.payload import TokenIds

_SYSTEM = (
    "<|im_start|>system\nYou are a search relevance expert who can determine a ranking of the passages based "
    "on how relevant they are to the query. If the query is a question, how relevant a passage is depends on "
    "how well it answers the question. If not, try to analyze the intent of the query and assess how well "
    "each passage satisfies the intent. If an instruction is provided, you should follow the instruction "
    "when determining the ranking.<|im_end|>\n<|im_start|>user\n"
)
_ASSISTANT = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def listwise(
    request: ScoreRequest,
    rules: ListwiseRules,
    instruction: str | None,
    tokenizer: TextTokenizer,
    long_inputs: LongInputs,
    owner: int,
    keys: Iterator[int],
) -> Prepared:
    """One sequence a block of documents. Its rows that count are those of the documents' markers, in order,
    and the query's."""
    rules = replace(rules, context=min(rules.context, long_inputs.limit))
    texts = _Texts(rules, tokenizer, long_inputs)
    passes: list[TokenIds] = []
    passes_of_lists = []
    truncated = 0
    for first, query, documents in _lists(request):
        asked = texts.query(query)
        listed = [texts.document(text, first + i) for i, text in enumerate(documents)]
        truncated += sum(text.truncated for text in (asked, *listed))
        before, start = len(passes), 0
        for size in in_blocks([document.tokens for document in listed], asked.tokens, rules):
            block = [document.text for document in listed[start : start + size]]
            passes += _passes(asked.text, block, instruction, rules, tokenizer)
            start += size
        passes_of_lists.append(len(passes) - before)
    markers = [tokenizer.token_id(rules.document_marker), tokenizer.token_id(rules.query_marker)]
    sequences = []
    for i, ids in enumerate(passes):
        tokens = Tokens(ids, np.zeros_like(ids), pooled_positions=np.flatnonzero(np.isin(ids, markers)))
        sequences.append(TokenSequence.text(next(keys), ResultSlot(owner, i), "rank", tokens))
    return Prepared(sequences, len(sequences), truncated, _merge(passes_of_lists))


def in_blocks(lengths: Sequence[int], query_tokens: int, rules: ListwiseRules) -> list[int]:
    """How many documents go into each pass, in order.

    A pass is closed once it is full, or once what is left of the context, with room for the query twice, may
    not take a longest document."""
    sizes, size = [], 0
    room = rules.context - 2 * query_tokens
    for length in lengths:
        size += 1
        room -= length
        if size >= rules.block_documents or room <= rules.max_document_tokens:
            sizes.append(size)
            size, room = 0, rules.context - 2 * query_tokens
    return [*sizes, size] if size else sizes


def merge_blocks(blocks: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Scores of all documents of one query: the cosine of each with the query.

    A block is float32 [documents + 1, dim], the query last. The query is the mean of what it is in each,
    weighted by the block's best cosine, mapped to 0 to 1."""
    documents = [_unit(block[:-1]) for block in blocks]
    weights = [
        float((1 + unit @ _unit(block[-1])).max() / 2) for unit, block in zip(documents, blocks, strict=True)
    ]
    query = np.average([block[-1] for block in blocks], axis=0, weights=weights)
    return np.concatenate(documents) @ _unit(query).astype(np.float32)


def _merge(passes: list[int]) -> Combine:
    """`passes` says of each list that is ranked by itself in how many passes it was."""

    def combine(values: list[Value]) -> NDArray[np.float32]:
        scores, place = [], 0
        for count in passes:
            scores.append(merge_blocks([np.asarray(value) for value in values[place : place + count]]))
            place += count
        return np.concatenate(scores)

    return combine


def _passes(
    query: str, block: list[str], instruction: str | None, rules: ListwiseRules, tokenizer: TextTokenizer
) -> list[TokenIds]:
    """The token ids of a block's pass; of its halves' where the prompt around short documents, which the
    packing rule does not count, is more than the context takes."""
    ids = tokenizer.encode([listwise_prompt(query, block, instruction, rules)], "documents")[0]
    if len(ids) <= rules.context:
        return [ids]
    if len(block) == 1:
        raise InvalidRequestError(
            f"a pass over one document has {len(ids)} tokens, but at most {rules.context} can be run; "
            "shorten the query or the documents",
            "documents",
        )
    half = len(block) // 2
    return [
        *_passes(query, block[:half], instruction, rules, tokenizer),
        *_passes(query, block[half:], instruction, rules, tokenizer),
    ]


def _unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    norm = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.asarray(rows / np.maximum(norm, 1e-12))


def _lists(request: ScoreRequest) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """What is ranked together: all documents of the one query, or each of N pairs by itself. With the index
    in the request of the first document."""
    if len(request.queries) == 1:
        yield 0, request.queries[0], request.documents
    else:
        for i, (query, document) in enumerate(zip(request.queries, request.documents, strict=True)):
            yield i, query, (document,)


def listwise_prompt(query: str, documents: list[str], instruction: str | None, rules: ListwiseRules) -> str:
    """What the model is asked about a query and a block of documents."""
    asked = f"<instruct>\n{instruction}\n</instruct>\n" if instruction else ""
    passages = "\n".join(
        f'<passage id="{i}">\n{text}{rules.document_marker}\n</passage>' for i, text in enumerate(documents)
    )
    return (
        f"{_SYSTEM}I will provide you with {len(documents)} passages, each indicated by a numerical "
        f"identifier. Rank the passages based on their relevance to query: {query}\n{asked}{passages}\n"
        f"<query>\n{query}{rules.query_marker}\n</query>{_ASSISTANT}"
    )


@dataclass(frozen=True, slots=True)
class _Text:
    """A text free of markers, within the model's length, with its number of tokens."""

    text: str
    tokens: int
    truncated: bool


class _Texts:
    """Reads texts as the model's own code does, which cuts those that are longer than it takes."""

    def __init__(self, rules: ListwiseRules, tokenizer: TextTokenizer, long_inputs: LongInputs) -> None:
        self._rules = rules
        self._tokenizer = tokenizer
        self._long = long_inputs

    def query(self, text: str) -> _Text:
        ids = self._tokenizer.encode([text], "queries")[0]
        own = self._rules.max_query_tokens
        return self._clean(
            text, ids, self._long.fit(ids, own, 0, "queries", 0, own, self._long.max_query_tokens)
        )

    def document(self, text: str, index: int) -> _Text:
        ids = self._tokenizer.encode([text], "documents")[0]
        room = self._rules.max_document_tokens
        # There are no windows here: a request that wants them is told that the document was cut.
        own = None if self._long.uses_windows else room
        return self._clean(
            text, ids, self._long.fit(ids, room, 0, "documents", index, own, self._long.max_document_tokens)
        )

    def _clean(self, text: str, ids: TokenIds, fitted: Fitted[np.int32]) -> _Text:
        if len(fitted.tokens) < len(ids):
            text = self._tokenizer.decode(fitted.tokens.tolist())
        for marker in (self._rules.query_marker, self._rules.document_marker):
            text = text.replace(marker, "")
        return _Text(text, len(fitted.tokens), fitted.truncated)
