"""Cross-encoders: query and document are read together, and a classifier's logit is the score."""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.explanations import Explanation, Span, WindowScore
from maxsimd.engine.processors.classification import activate, keeps_order
from maxsimd.engine.processors.pages import page_builder
from maxsimd.engine.processors.pairs import (
    BuiltPair,
    PairBuilder,
    PicturePairBuilder,
    TemplatePairBuilder,
    TokenizerPairBuilder,
)
from maxsimd.engine.processors.processor import (
    PrefixSharing,
    ProcessorContext,
    RequestIds,
    ScoreProcessor,
    Scores,
    check_explained_lines,
    with_window_scores,
)
from maxsimd.engine.processors.score_lookup import CachedScorePlan, FoundScores, RunFacts, ScoreLookup
from maxsimd.engine.processors.text.builder import FittedText, InputName, LongInputs
from maxsimd.engine.requests import ScoreOptions, ScoreRequest, Value
from maxsimd.engine.workers import yield_to_smaller
from maxsimd.pooling.methods import Head
from maxsimd.scheduler import JoinedTokens, Tokens, TokenSequence
from maxsimd.scheduler.sequence import TokenIds

# Fewer tokens are run again rather than shared.
SHORTEST_PREFIX = 8
# The most labels that an error names.
_NAMED_LABELS = 4


@dataclass(frozen=True, slots=True)
class ScoreLabel:
    """The label whose probability is the score. `exclusive` labels share 1 between them."""

    index: int
    exclusive: bool

    def logits_of(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """Returns the numbers [n] whose sigmoids are the probabilities, from logits [n, labels]."""
        numbers = rows.astype(np.float64)
        if not self.exclusive:
            return numbers[:, self.index]
        others = np.delete(numbers, self.index, axis=1)
        greatest = others.max(axis=1, keepdims=True)
        rest = np.log(np.exp(others - greatest).sum(axis=1))
        logits: NDArray[np.float64] = numbers[:, self.index] - greatest[:, 0] - rest
        return logits


@dataclass(frozen=True, slots=True, eq=False)
class ReadPairs:
    """The reading of a plan's pairs, kept to find the characters of windows again."""

    builder: PairBuilder
    request: ScoreRequest
    queries: Sequence[FittedText]
    long_inputs: LongInputs

    def window_spans(self, pair: int) -> list[Span]:
        query_tokens = len(self.queries[self.request.query_of(pair)].tokens)
        return self.builder.window_spans(self.request, pair, query_tokens, self.long_inputs)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CrossEncoderPlan(CachedScorePlan):
    """One value for each window of each document to run; the best window counts.

    `label` is set if the model has several labels, and `pairs` for requests with `explain`."""

    activation: Head | None = None
    label: ScoreLabel | None = None
    pairs: ReadPairs | None = None

    @property
    def keeps_order(self) -> bool:
        return self.activation is None or keeps_order(self.activation)

    def raw_scores(self, values: Sequence[Value | None]) -> Scores:
        scores = np.array(self.logits(values), dtype=np.float32)
        if self.num_values > len(self.facts):
            scores = np.maximum.reduceat(scores, self._first_values[:-1])
        return self.found.with_new(scores)

    def final_scores(self, raw: Scores) -> Scores:
        scores = raw
        if self.activation is not None:
            scores = activate(scores[:, None], self.activation)[:, 0]
        return scores if self.normalization is None else self.normalization.apply(scores)

    def logits(self, values: Sequence[Value | None]) -> Sequence[Value | None]:
        """Returns one number for each value: of several labels' logits, that of the label that counts."""
        rows = [value for value in values if value is not None] if self.label is not None else []
        if self.label is None or not rows:
            return values
        logits = iter(self.label.logits_of(np.array(rows).reshape(len(rows), -1)).tolist())
        return [None if value is None else next(logits) for value in values]

    def documents_of(self, values: Collection[int]) -> Sequence[int]:
        first_values = self._first_values
        return [self.found.new[bisect_right(first_values, value) - 1] for value in values]

    def explanations(
        self, values: Sequence[Value | None], documents: Iterable[int]
    ) -> dict[int, Explanation]:
        logits = self.logits(values)
        first_values = self._first_values
        pair_of = {document: pair for pair, document in enumerate(self.found.new)}
        explained: dict[int, Explanation] = {}
        for document in documents:
            yield_to_smaller()
            explanation = self.found.explanation(document)
            if explanation is None:
                pair = pair_of[document]
                explanation = self._explain(pair, logits[first_values[pair] : first_values[pair + 1]])
            if explanation is not None:
                explained[document] = explanation
        return explained

    @property
    def _first_values(self) -> list[int]:
        """The first value of each document that is run, and the one after the last value."""
        return list(accumulate((one.windows for one in self.facts), initial=0))

    def _explain(self, pair: int, logits: Sequence[Value | None]) -> Explanation | None:
        """Explains a pair that was run, by the logits of its windows."""
        scores = [logit for logit in logits if isinstance(logit, float)]
        if len(scores) < len(logits):
            return None
        facts = self.facts[pair]
        windows: tuple[WindowScore, ...] = ()
        if len(scores) > 1:
            assert self.pairs is not None
            spans = self.pairs.window_spans(pair)
            windows = tuple(WindowScore(span, score) for span, score in zip(spans, scores, strict=False))
        read = self._read_span(pair) if facts.truncated else None
        explanation = Explanation(facts.tokens, bool(facts.truncated), False, (), windows, (), read)
        if not windows:
            return explanation
        raw = np.array([window.score for window in windows], dtype=np.float32)
        return with_window_scores(explanation, self.final_scores(raw))

    def _read_span(self, pair: int) -> Span | None:
        """The part of a truncated document that was read; None if it cannot be told."""
        if self.pairs is None or not isinstance(self.pairs.request.documents[pair], str):
            return None
        spans = self.pairs.window_spans(pair)
        return (spans[0][0], spans[-1][1]) if spans else None


class CrossEncoderProcessor(ScoreProcessor):
    """Makes one sequence for each pair, or one for each window of its document.

    With prefix sharing, the tokens before the document are a sequence that is run once for all pairs of a
    query. Without CUDA graphs even a lone pair is split there, so that its score does not depend on other
    pairs."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self._pairs = _pair_builder(context)
        self._lookup = ScoreLookup(context.score_cache, together=False)
        model = context.model
        self._label: ScoreLabel | None = None
        if model.score_label is not None:
            self._label = ScoreLabel(model.score_label, exclusive=model.probabilities is not torch.sigmoid)

    @classmethod
    def is_for(cls, model: LoadedModel) -> bool:
        return model.score_task == "classify" and model.listwise is None

    def check_options(self, options: ScoreOptions) -> None:
        labels = self._model.labels
        if not self._model.has_score:
            named = ", ".join(labels[:_NAMED_LABELS]) + (", ..." if len(labels) > _NAMED_LABELS else "")
            raise InvalidRequestError(
                f"this model has {len(labels)} labels ({named}) but no single score; name the one that "
                "means relevance by the option score_label, or classify (POST /classify)",
                "model",
            )

    def plan(self, request: ScoreRequest, ids: RequestIds) -> CrossEncoderPlan:
        found = self._lookup.find(request)
        if not found.cached:
            return self._plan(request, request, found, ids)
        try:
            return self._plan(request, request.only(found.new) if found.new else request, found, ids)
        except InvalidRequestError:
            # Errors name a document by its index in the whole request.
            self._plan(request, request, FoundScores.none(request), ids)
            raise

    def shortest_sequences(self) -> dict[str, int]:
        prompt = self._model.query.prompt
        return {"a pair": self._pairs.shortest_pair() + len(self._tokenizer.encode([prompt], "queries")[0])}

    def _plan(
        self, request: ScoreRequest, new: ScoreRequest, found: FoundScores, ids: RequestIds
    ) -> CrossEncoderPlan:
        """Makes the plan of a request whose `new` documents are run, if any."""
        new = self._with_prompt(new)
        long_inputs = self._limits.applied_to(new.truncation, ids.most_tokens)
        queries = self._read_queries(new, long_inputs) if found.new else []
        pairs = self._build(new, queries, long_inputs, ids) if found.new else []
        facts = [
            RunFacts(
                sum(map(len, pair.windows)),
                int(pair.truncated),
                queries[new.query_of(i)].truncated,
                len(pair.windows),
            )
            for i, pair in enumerate(pairs)
        ]
        if request.explain:
            check_explained_lines(request.explain, [one.windows for one in facts])
        sequences = self._sequences(pairs, ids)
        truncated_queries = sum(query.truncated for query in queries) + found.truncated_queries(request)
        return CrossEncoderPlan(
            sequences=sequences,
            num_values=sum(one.windows for one in facts),
            truncated=truncated_queries + sum(pair.truncated for pair in pairs) + found.truncated_documents,
            images=self._image_jobs(sequences),
            cached_documents=len(found.cached),
            cached_tokens=found.cached_tokens,
            request=request,
            truncated_queries=truncated_queries,
            normalization=self._normalization(request),
            found=found,
            facts=facts,
            activation=self._activation(request),
            label=self._label,
            pairs=ReadPairs(self._pairs, new, queries, long_inputs) if request.explain else None,
        )

    def _activation(self, request: ScoreRequest) -> Head | None:
        if not (request.use_activation or request.normalize):
            return None
        if self._label is not None:
            return torch.sigmoid
        return self._model.probabilities if request.normalize else self._model.activation

    def _with_prompt(self, request: ScoreRequest) -> ScoreRequest:
        """Puts the checkpoint's prompt before the queries."""
        rules = self._model.query
        if request.instruction is not None and rules.takes_instruction:
            rules = rules.instructed(request.instruction)
        if not rules.prompt:
            return request
        queries = (rules.prompt + each if isinstance(each, str) else each for each in request.queries)
        return replace(request, queries=tuple(queries))

    def _read_queries(self, request: ScoreRequest, long_inputs: LongInputs) -> list[FittedText]:
        most = None if long_inputs.max_query_tokens is None else long_inputs.max_query_tokens + 1
        names = [InputName("queries", i) for i in range(len(request.queries))]
        texts = [query if isinstance(query, str) else "" for query in request.queries]
        encoded = self._tokenizer.encode(texts, "queries", most, long_inputs.side, names)
        return [long_inputs.query(*each) for each in zip(encoded, names, strict=True)]

    def _build(
        self, request: ScoreRequest, queries: list[FittedText], long_inputs: LongInputs, ids: RequestIds
    ) -> list[BuiltPair]:
        """Builds all pairs. Raises RequestTooLargeError as soon as they have too many tokens."""
        pairs, num_tokens = [], 0
        for pair in self._pairs.build(request, queries, long_inputs):
            yield_to_smaller()
            if self._model.ending_pad_id is not None:
                pair = replace(pair, windows=[self._model.for_classifier(each) for each in pair.windows])
            num_tokens += sum(map(len, pair.windows))
            ids.check_tokens(num_tokens)
            pairs.append(pair)
        return pairs

    def _sequences(self, pairs: Sequence[BuiltPair], ids: RequestIds) -> list[TokenSequence]:
        """Returns the sequences of all windows, each prefix before the first window that begins with it."""
        sharing = self._context.sharing
        shared = [] if sharing is None else _shared_prefixes(sharing, pairs, ids)
        prefix_of: Mapping[int, TokenSequence] = {i: prefix for prefix, windows in shared for i in windows}
        windows: list[JoinedTokens | Tokens] = [window for pair in pairs for window in pair.windows]
        sequences: list[TokenSequence] = []
        added: set[int] = set()
        for i, tokens in enumerate(windows):
            prefix = prefix_of.get(i)
            if prefix is not None and prefix.sequence_id not in added:
                sequences.append(prefix)
                added.add(prefix.sequence_id)
            if isinstance(tokens, Tokens):
                tokens = tokens.behind(0 if prefix is None else len(prefix), ids.sequence_ids)
            sequences.append(TokenSequence.pair(ids.next_sequence_id(), ids.slot(i), tokens, prefix))
        return sequences


def _pair_builder(context: ProcessorContext) -> PairBuilder:
    model, tokenizer, longest = context.model, context.tokenizer, context.limits.longest_sequence
    template = model.pairs.template
    if template is None:
        return TokenizerPairBuilder(tokenizer, model.pairs.truncation)
    of_texts = TemplatePairBuilder(tokenizer, template, model.instruction)
    pages = page_builder(model, tokenizer, longest)
    if pages is None:
        return of_texts
    return PicturePairBuilder(of_texts, template, model.instruction, tokenizer, pages, longest)


def _shared_prefixes(
    sharing: PrefixSharing, pairs: Sequence[BuiltPair], ids: RequestIds
) -> list[tuple[TokenSequence, list[int]]]:
    """Returns the prefixes to run by themselves, each with the positions of the windows that share it."""
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
        # Steps with pictures are never replayed, so sharing is free.
        has_pictures = any(windows[i][0].images for i in positions)
        if not has_pictures and not sharing.is_worth(len(prefix), len(positions), own):
            continue
        if isinstance(tokens, Tokens):
            shared_part = tokens.first(len(prefix)).behind(0, ids.sequence_ids)
        else:
            shared_part = Tokens(tokens.ids[: len(prefix)], tokens.type_ids[: len(prefix)])
        sequence = TokenSequence.prefix(
            ids.next_sequence_id(), ids.request_id, shared_part, num_consumers=len(positions)
        )
        shared.append((sequence, positions))
    return shared


def shared_tokens(ids: TokenIds, prefix: TokenIds) -> int:
    """Returns how many tokens a pair shares with all others that begin with `prefix`: 0 if it begins
    otherwise, has no tokens of its own, or the prefix is too short. Depends on nothing but the pair."""
    length = len(prefix)
    if length < SHORTEST_PREFIX or len(ids) <= length or not np.array_equal(ids[:length], prefix):
        return 0
    return length
