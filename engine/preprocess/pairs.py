"""Score requests whose queries and documents are run together: cross-encoders of all kinds."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from maxsimd.engine.checkpoint import PairRules
from maxsimd.engine.checkpoint.score_template import Frame, ScoreTemplate
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.preprocess.long_inputs import LongInputs, too_long
from maxsimd.engine.preprocess.prepared import Prepared, best_of
from maxsimd.engine.requests import ScoreRequest
from maxsimd.engine.tokenization import TextTokenizer, cut, longest_first
from maxsimd.scheduler import Role, Sequence
from maxsimd.scheduler.sequence import TokenIds

# Fewer tokens are run again rather than shared.
SHORTEST_PREFIX = 8

# Token ids and type ids.
_Pair = tuple[TokenIds, TokenIds]


def pairs(
    request: ScoreRequest,
    rules: PairRules,
    instruction: str | None,
    tokenizer: TextTokenizer,
    long_inputs: LongInputs,
    owner: int,
    keys: Iterator[int],
    share_prefixes: bool,
) -> Prepared:
    """One sequence a pair, or one a window of its document; the best of a document's windows counts.

    With `share_prefixes` what all pairs of a query begin with is a sequence by itself, run once."""
    if rules.template is None:
        built = _joined_by_tokenizer(request, rules, tokenizer, long_inputs)
    else:
        built = _joined_by_template(request, rules.template, instruction, tokenizer, long_inputs)
    counts: list[int] = []
    of_query: dict[int, list[_Pair]] = {}
    for i, windows in enumerate(built):
        counts.append(len(windows))
        of_query.setdefault(request.query_of(i), []).extend(windows)
    sequences: list[Sequence] = []
    results = 0
    for together in of_query.values():
        prefix = common_prefix([ids for ids, _ in together]) if share_prefixes else 0
        key = next(keys) if prefix else None
        if key is not None:
            ids, types = together[0]
            sequences.append(
                Sequence(key, owner, -1, Role.PREFIX, "", ids[:prefix], types[:prefix], uses=len(together))
            )
        for ids, types in together:
            sequences.append(
                Sequence(
                    next(keys), owner, results, Role.PAIR, "classify", ids, types, prefix=key, shared=prefix
                )
            )
            results += 1
    return Prepared(sequences, results, long_inputs.truncated, best_of(counts))


def common_prefix(sequences: list[TokenIds]) -> int:
    """How many tokens all sequences begin with, leaving each one of its own; 0 where it is not worth it."""
    if len(sequences) < 2:
        return 0
    longest = min(len(ids) for ids in sequences) - 1
    first = sequences[0]
    for ids in sequences[1:]:
        differing = np.flatnonzero(ids[:longest] != first[:longest])
        if len(differing):
            longest = int(differing[0])
    return longest if longest >= SHORTEST_PREFIX else 0


def _joined_by_tokenizer(
    request: ScoreRequest, rules: PairRules, tokenizer: TextTokenizer, long_inputs: LongInputs
) -> Iterator[list[_Pair]]:
    template = tokenizer.pair
    special = template.special_tokens
    room = long_inputs.limit - special
    queries = [long_inputs.query(text) for text in tokenizer.encode(request.queries, "queries")]
    for i, text in enumerate(tokenizer.encode(request.documents, "documents")):
        query, document = queries[request.query_of(i)], long_inputs.document(text)
        if len(query) + len(document) <= room:
            yield [template.fill(query, document)]
        elif long_inputs.uses_windows:
            windows = long_inputs.windows(document, room - len(query), special + len(query), "documents", i)
            yield [template.fill(query, window) for window in windows]
        elif not long_inputs.cuts:
            raise too_long("documents", i, len(query) + len(document) + special, long_inputs.limit)
        else:
            yield [template.fill(*_cut_pair(query, document, room, rules, long_inputs, i))]


def _cut_pair(
    query: TokenIds, document: TokenIds, room: int, rules: PairRules, long_inputs: LongInputs, index: int
) -> tuple[TokenIds, TokenIds]:
    """Both texts within `room` tokens together, as the tokenizers library's strategy of that name has it."""
    first, second = len(query), max(0, room - len(query))
    if rules.truncation == "longest_first":
        first, second = longest_first(len(query), len(document), room)
    elif first > room:
        raise InvalidRequestError(
            f"the query has {first} tokens and leaves no room for documents[{index}]; shorten it", "queries"
        )
    side = long_inputs.side
    long_inputs.truncated += 1
    return cut(query, first, side), cut(document, second, side)


@dataclass(frozen=True, slots=True, eq=False)
class _Around:
    """The token ids around the segment that holds the document, and that segment."""

    before: TokenIds
    segment: Frame
    after: TokenIds


def _joined_by_template(
    request: ScoreRequest,
    template: ScoreTemplate,
    instruction: str | None,
    tokenizer: TextTokenizer,
    long_inputs: LongInputs,
) -> Iterator[list[_Pair]]:
    arounds = [
        _around(template.frames(query, instruction), tokenizer)
        for query in _shortened(request.queries, tokenizer, long_inputs)
    ]
    texts = []
    for i, document in enumerate(request.documents):
        segment = arounds[request.query_of(i)].segment
        texts.append(f"{segment.before}{document}{segment.after}")
    for i, (text, ids) in enumerate(zip(texts, tokenizer.encode(texts, "documents"), strict=True)):
        around = arounds[request.query_of(i)]
        others = len(around.before) + len(around.after)
        if others + len(ids) <= long_inputs.limit and not long_inputs.limits_documents:
            built = [ids]
        else:
            start = len(around.segment.before)
            first, last = tokenizer.span(text, start, start + len(request.documents[i]), "documents")
            head, document_ids, tail = ids[:first], long_inputs.document(ids[first:last]), ids[last:]
            others += len(head) + len(tail)
            room = long_inputs.limit - others
            windows = long_inputs.windows(document_ids, room, others, "documents", i)
            built = [np.concatenate([head, window, tail]) for window in windows]
        yield [_untyped(np.concatenate([around.before, part, around.after])) for part in built]


def _shortened(queries: tuple[str, ...], tokenizer: TextTokenizer, long_inputs: LongInputs) -> Iterator[str]:
    """Queries within the request's limit for them, as texts."""
    for query, ids in zip(queries, tokenizer.encode(queries, "queries"), strict=True):
        kept = long_inputs.query(ids)
        yield query if len(kept) == len(ids) else tokenizer.decode(kept.tolist())


def _around(frames: list[Frame], tokenizer: TextTokenizer) -> _Around:
    place = next(i for i, frame in enumerate(frames) if frame.after is not None)
    ids = tokenizer.encode([frame.before for frame in frames], "queries")
    nothing = np.empty(0, dtype=np.int32)
    return _Around(
        np.concatenate([nothing, *ids[:place]]),
        frames[place],
        np.concatenate([nothing, *ids[place + 1 :]]),
    )


def _untyped(ids: TokenIds) -> _Pair:
    return ids, np.zeros(len(ids), dtype=np.int32)
