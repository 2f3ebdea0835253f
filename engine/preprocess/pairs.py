"""Score requests whose queries and documents are run together: cross-encoders of all kinds."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from maxsimd.engine.checkpoint import PairRules
from maxsimd.engine.checkpoint.score_template import Frame, ScoreTemplate
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.preprocess.long_inputs import Fitted, LongInputs, too_long
from maxsimd.engine.preprocess.prepared import Prepared, best_of
from maxsimd.engine.preprocess.tokenization import TextTokenizer, cut, longest_first
from maxsimd.engine.requests import ScoreRequest
from maxsimd.scheduler import ResultSlot, Sequence, Tokens
from maxsimd.scheduler.payload import TokenIds

# Fewer tokens are run again rather than shared.
SHORTEST_PREFIX = 8

# Token ids and type ids.
_Pair = tuple[TokenIds, TokenIds]


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """One pair as it is read: one sequence, or one a window of its document."""

    windows: list[_Pair]
    # The tokens before the document, which all pairs of a query that can share them begin with.
    prefix: TokenIds
    truncated: bool


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

    With `share_prefixes` what stands before the document is a sequence by itself, which is run once for all
    pairs of a query. A pair is split there whether or not others come along: alone it takes the same path."""
    queries = [long_inputs.query(ids) for ids in tokenizer.encode(request.queries, "queries")]
    if rules.template is None:
        built = _joined_by_tokenizer(request, queries, rules, tokenizer, long_inputs)
    else:
        built = _joined_by_template(request, queries, rules.template, instruction, tokenizer, long_inputs)
    read = list(built)
    sequences = _sequences(read, owner, keys, share_prefixes)
    counts = [len(pair.windows) for pair in read]
    truncated = sum(query.truncated for query in queries) + sum(pair.truncated for pair in read)
    return Prepared(sequences, sum(counts), truncated, best_of(counts))


def _sequences(read: list[_Read], owner: int, keys: Iterator[int], share_prefixes: bool) -> list[Sequence]:
    """The prefixes that are run once, and then the pairs, in order."""
    windows = [window for pair in read for window in pair.windows]
    shared = [shared_tokens(ids, pair.prefix) for pair in read for ids, _ in pair.windows]
    users: dict[bytes, list[int]] = {}
    for i, (ids, _) in enumerate(windows):
        if shared[i] and share_prefixes:
            users.setdefault(ids[: shared[i]].tobytes(), []).append(i)
    sequences = []
    prefix_of: dict[int, Sequence] = {}
    for members in users.values():
        ids, types = (part[: shared[members[0]]] for part in windows[members[0]])
        prefix = Sequence.prefix(next(keys), owner, Tokens(ids, types), num_consumers=len(members))
        sequences.append(prefix)
        prefix_of |= dict.fromkeys(members, prefix)
    for i, (ids, types) in enumerate(windows):
        slot = ResultSlot(owner, i)
        sequences.append(Sequence.pair(next(keys), slot, Tokens(ids, types), prefix_of.get(i)))
    return sequences


def shared_tokens(ids: TokenIds, prefix: TokenIds) -> int:
    """How many tokens a pair shares with all others that begin with `prefix`; 0 where it begins otherwise,
    has none of its own, or sharing is not worth it. Depends on nothing but the pair."""
    length = len(prefix)
    if length < SHORTEST_PREFIX or len(ids) <= length or not np.array_equal(ids[:length], prefix):
        return 0
    return length


def _joined_by_tokenizer(
    request: ScoreRequest,
    queries: list[Fitted[np.int32]],
    rules: PairRules,
    tokenizer: TextTokenizer,
    long_inputs: LongInputs,
) -> Iterator[_Read]:
    template = tokenizer.pair
    special = template.special_tokens
    room = long_inputs.limit - special
    prefixes = [np.concatenate([template.ids[0], query.tokens, template.ids[1]]) for query in queries]
    for i, text in enumerate(tokenizer.encode(request.documents, "documents")):
        query, wanted = queries[request.query_of(i)].tokens, long_inputs.document(text)
        document, truncated = wanted.tokens, wanted.truncated
        if len(query) + len(document) <= room:
            built = [template.fill(query, document)]
        elif long_inputs.uses_windows:
            windows = long_inputs.windows(document, room - len(query), special + len(query), "documents", i)
            built = [template.fill(query, window.tokens) for window in windows]
        elif not long_inputs.cuts:
            raise too_long("documents", i, len(query) + len(document) + special, long_inputs.limit)
        else:
            built = [template.fill(*_cut_pair(query, document, room, rules, long_inputs, i))]
            truncated = True
        if len(built[0][0]) == 0:
            raise InvalidRequestError(
                f"documents[{i}] and its query have no tokens; leave them out", "documents"
            )
        yield _Read(built, prefixes[request.query_of(i)], truncated)


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
    return cut(query, first, side), cut(document, second, side)


@dataclass(frozen=True, slots=True, eq=False)
class _Around:
    """The token ids around the segment that holds the document, and that segment. `prefix` is what pairs of
    the query begin with, whatever the document."""

    before: TokenIds
    segment: Frame
    after: TokenIds
    prefix: TokenIds


def _joined_by_template(
    request: ScoreRequest,
    queries: list[Fitted[np.int32]],
    template: ScoreTemplate,
    instruction: str | None,
    tokenizer: TextTokenizer,
    long_inputs: LongInputs,
) -> Iterator[_Read]:
    arounds = []
    for query, fitted in zip(request.queries, queries, strict=True):
        asked = tokenizer.decode(fitted.tokens.tolist()) if fitted.truncated else query
        arounds.append(_around(template.frames(asked, instruction), tokenizer))
    texts = []
    for i, document in enumerate(request.documents):
        segment = arounds[request.query_of(i)].segment
        texts.append(f"{segment.before}{document}{segment.after}")
    for i, (text, ids) in enumerate(zip(texts, tokenizer.encode(texts, "documents"), strict=True)):
        around = arounds[request.query_of(i)]
        others = len(around.before) + len(around.after)
        truncated = False
        if others + len(ids) <= long_inputs.limit and not long_inputs.limits_documents:
            built = [ids]
        else:
            start = len(around.segment.before)
            first, last = tokenizer.span(text, start, start + len(request.documents[i]), "documents")
            head, wanted, tail = ids[:first], long_inputs.document(ids[first:last]), ids[last:]
            others += len(head) + len(tail)
            room = long_inputs.limit - others
            windows = long_inputs.windows(wanted.tokens, room, others, "documents", i)
            built = [np.concatenate([head, window.tokens, tail]) for window in windows]
            truncated = wanted.truncated or any(window.truncated for window in windows)
        whole = [_untyped(np.concatenate([around.before, part, around.after])) for part in built]
        yield _Read(whole, around.prefix, truncated)


def _around(frames: list[Frame], tokenizer: TextTokenizer) -> _Around:
    position = next(i for i, frame in enumerate(frames) if frame.after is not None)
    segment = frames[position]
    ids = tokenizer.encode([frame.before for frame in frames], "queries")
    nothing = np.empty(0, dtype=np.int32)
    before = np.concatenate([nothing, *ids[:position]])
    after = np.concatenate([nothing, *ids[position + 1 :]])
    # The segment's last token may merge with a document's first characters, so it is no part of the prefix.
    prefix = np.concatenate([before, ids[position][:-1]])
    return _Around(before, segment, after, prefix)


def _untyped(ids: TokenIds) -> _Pair:
    return ids, np.zeros(len(ids), dtype=np.int32)
