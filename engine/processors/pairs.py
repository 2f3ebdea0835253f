"""Score requests whose queries and documents are run together: cross-encoders of all kinds."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.explanations import Span
from maxsimd.engine.processors.combine import best_windows
from maxsimd.engine.processors.explain_limits import check_lines
from maxsimd.engine.processors.explain_pairs import explain_pairs
from maxsimd.engine.processors.pages import image_jobs
from maxsimd.engine.processors.pair_joiner import JoinedPair, PairJoiner
from maxsimd.engine.processors.prepared import PairFacts, Prepared
from maxsimd.engine.processors.request_ids import RequestIds
from maxsimd.engine.processors.text.long_inputs import InputName, LengthLimits
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.requests import ScoreRequest
from maxsimd.engine.workers import yield_to_smaller
from maxsimd.scheduler import JoinedTokens, Sequence, Tokens
from maxsimd.scheduler.payload import TokenIds

# Fewer tokens are run again rather than shared.
SHORTEST_PREFIX = 8


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    """Decides which prefixes are run once for all pairs that begin with them.

    A step with a shared prefix cannot be replayed as a CUDA graph, so the host launches it kernel by kernel.
    `launch_tokens` is how many tokens the device computes in the time that this takes; None where steps are
    not replayed, and every prefix is shared."""

    launch_tokens: int | None = None

    def is_worth(self, prefix: int, consumers: int, own: int) -> bool:
        """Whether to share a prefix of `prefix` tokens among `consumers` sequences, which have `own` more
        tokens in all.

        Sharing saves the prefix for all consumers but one. But the step is then launched kernel by kernel,
        which takes as long as `launch_tokens` tokens do: a smaller step loses the difference. On a device
        that replays steps, a prefix with one consumer is not shared."""
        if self.launch_tokens is None:
            return True
        saved = prefix * (consumers - 1)
        lost = max(0, self.launch_tokens - (prefix + own))
        return saved > lost


class PairStrategy:
    """One sequence a pair, or one a window of its document; the best of a document's windows counts.

    With `sharing` what stands before the document is a sequence by itself, which is run once for all pairs
    of a query, where that is worth it. Without CUDA graphs a pair is split there whether or not others come
    along: alone it takes the same path. The `model` says what stands before queries, which token its
    classifier reads, and how it reads pictures."""

    def __init__(
        self,
        joiner: PairJoiner,
        tokenizer: TextTokenizer,
        limits: LengthLimits,
        sharing: PrefixSharing | None,
        model: LoadedModel,
    ) -> None:
        self._model = model
        self._joiner = joiner
        self._tokenizer = tokenizer
        self._limits = limits
        self._sharing = sharing

    def prepare(self, request: ScoreRequest, ids: RequestIds) -> Prepared:
        request = self._prompted(request)
        long_inputs = self._limits.applied_to(request.truncation, ids)
        most = None if long_inputs.max_query_tokens is None else long_inputs.max_query_tokens + 1
        names = [InputName("queries", i) for i in range(len(request.queries))]
        texts = [query if isinstance(query, str) else "" for query in request.queries]
        encoded = self._tokenizer.encode(texts, "queries", most, long_inputs.side, names)
        queries = [long_inputs.query(*each) for each in zip(encoded, names, strict=True)]
        pairs, num_tokens = [], 0
        for pair in self._joiner.join(request, queries, long_inputs):
            yield_to_smaller()
            if self._model.ending_pad_id is not None:
                pair = replace(pair, windows=[self._model.for_classifier(each) for each in pair.windows])
            num_tokens += sum(map(len, pair.windows))
            ids.check_tokens(num_tokens)
            pairs.append(pair)
        shared = [] if self._sharing is None else _shared_prefixes(pairs, ids, self._sharing)
        prefix_of = {i: prefix for prefix, positions in shared for i in positions}
        sequences = _sequences([window for pair in pairs for window in pair.windows], prefix_of, ids)
        truncated_queries = sum(query.truncated for query in queries)
        truncated = truncated_queries + sum(pair.truncated for pair in pairs)
        combine = best_windows([len(pair.windows) for pair in pairs])
        facts = PairFacts(
            [sum(map(len, pair.windows)) for pair in pairs],
            [int(pair.truncated) for pair in pairs],
            [queries[request.query_of(i)].truncated for i in range(len(pairs))],
            [len(pair.windows) for pair in pairs],
        )

        def windows_of(index: int) -> list[Span]:
            query_tokens = len(queries[request.query_of(index)].tokens)
            return self._joiner.window_spans(request, index, query_tokens, long_inputs)

        explain = None
        if request.explain:
            check_lines(request.explain, facts.windows)
            explain = explain_pairs(facts, windows_of)
        images = image_jobs(self._model.vision, sequences)
        return Prepared(
            sequences,
            sum(facts.windows),
            truncated,
            combine,
            images=images,
            facts=facts,
            explain=explain,
            truncated_queries=truncated_queries,
        )

    def shortest_sequences(self) -> dict[str, int]:
        prompt = self._model.query.prompt
        return {"a pair": self._joiner.shortest_pair() + len(self._tokenizer.encode([prompt], "queries")[0])}

    def _prompted(self, request: ScoreRequest) -> ScoreRequest:
        """The request with the checkpoint's prompt before its queries."""
        rules = self._model.query
        if request.instruction is not None and rules.takes_instruction:
            rules = rules.instructed(request.instruction)
        if not rules.prompt:
            return request
        queries = (rules.prompt + each if isinstance(each, str) else each for each in request.queries)
        return replace(request, queries=tuple(queries))


def _sequences(
    windows: list[JoinedTokens | Tokens], prefix_of: Mapping[int, Sequence], ids: RequestIds
) -> list[Sequence]:
    """The sequences of windows, each prefix before the first that begins with it."""
    sequences: list[Sequence] = []
    added: set[int] = set()
    for i, tokens in enumerate(windows):
        prefix = prefix_of.get(i)
        if prefix is not None and prefix.sequence_id not in added:
            sequences.append(prefix)
            added.add(prefix.sequence_id)
        if isinstance(tokens, Tokens):
            tokens = tokens.behind(0 if prefix is None else len(prefix), ids.sequence_ids)
        sequences.append(Sequence.pair(ids.next_sequence_id(), ids.slot(i), tokens, prefix))
    return sequences


def _shared_prefixes(
    pairs: list[JoinedPair], ids: RequestIds, sharing: PrefixSharing
) -> list[tuple[Sequence, list[int]]]:
    """The prefixes that are run by themselves, and the positions of the windows that begin with each."""
    windows = [(window, pair.prefix) for pair in pairs for window in pair.windows]
    positions_of: dict[tuple[bytes, ...], list[int]] = {}
    for i, (tokens, prefix) in enumerate(windows):
        yield_to_smaller()
        token_ids = tokens.ids
        length = shared_tokens(token_ids, prefix)
        if length:
            pictures = [image.digest for image in tokens.images if image.positions[0] < length]
            positions_of.setdefault((token_ids[:length].tobytes(), *pictures), []).append(i)
    shared = []
    for positions in positions_of.values():
        tokens, prefix = windows[positions[0]]
        own = sum(len(windows[i][0]) for i in positions) - len(positions) * len(prefix)
        # Steps with pictures are never replayed, so sharing costs them nothing.
        has_pictures = any(windows[i][0].images for i in positions)
        if not has_pictures and not sharing.is_worth(len(prefix), len(positions), own):
            continue
        if isinstance(tokens, Tokens):
            shared_part = tokens.first(len(prefix)).behind(0, ids.sequence_ids)
        else:
            shared_part = Tokens(tokens.ids[: len(prefix)], tokens.type_ids[: len(prefix)])
        sequence = Sequence.prefix(
            ids.next_sequence_id(), ids.request_id, shared_part, num_consumers=len(positions)
        )
        shared.append((sequence, positions))
    return shared


def shared_tokens(ids: TokenIds, prefix: TokenIds) -> int:
    """How many tokens a pair shares with all others that begin with `prefix`; 0 where it begins otherwise,
    has none of its own, or its prefix is too short to be shared. Depends on nothing but the pair."""
    length = len(prefix)
    if length < SHORTEST_PREFIX or len(ids) <= length or not np.array_equal(ids[:length], prefix):
        return 0
    return length
