"""The door to preprocessing: one strategy for score requests, chosen at construction, and one for texts."""

from dataclasses import replace

from maxsimd.engine.cache import EmbeddingCache, ScoreCache
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.processors.choice import score_strategy
from maxsimd.engine.processors.pairs import PrefixSharing
from maxsimd.engine.processors.prepared import Prepared
from maxsimd.engine.processors.readable import prepare_readable
from maxsimd.engine.processors.request_ids import RequestIds
from maxsimd.engine.processors.single_texts import TextStrategy
from maxsimd.engine.processors.text.long_inputs import LengthLimits
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.processors.two_stage import TwoStageStrategy
from maxsimd.engine.requests import EmbedRequest, OnError, ScoreRequest
from maxsimd.pooling.query_rows import QueryRows


class Preprocessor:
    """Turns requests into sequences for one model. Thread-safe.

    `longest_sequence` is the most tokens that the engine can run in one sequence, and `window_overlap` how
    many the windows of a long document share. What is in the `cache` is not run again, and with
    `sharing`, which says where that is worth it, neither is what all pairs of a query begin with. At most
    `most_vectors` may come in place of a text, None for any number.
    """

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: TextTokenizer,
        longest_sequence: int,
        window_overlap: int,
        cache: EmbeddingCache | ScoreCache | None,
        sharing: PrefixSharing | None,
        most_vectors: int | None = None,
    ) -> None:
        self._longest = min(model.max_tokens, longest_sequence)
        limits = LengthLimits(self._longest, window_overlap, model.truncation_side, most_vectors)
        self._model = model
        self._tokenizer = tokenizer
        self._scores = score_strategy(model, tokenizer, limits, cache, sharing)
        embeddings = cache if isinstance(cache, EmbeddingCache) else None
        self._texts = TextStrategy(model, tokenizer, limits, embeddings)

    def score(self, request: ScoreRequest, ids: RequestIds, on_error: OnError = "fail") -> Prepared:
        """The sequences of a score request; with `report`, of those of its documents that can be read."""
        if request.instruction is not None and any(isinstance(each, QueryRows) for each in request.queries):
            raise InvalidRequestError(
                "the query is encoded, and the instruction is part of that: give it to encode_query",
                "instruction",
            )
        request = self._instructed(request)
        if on_error == "report":
            return prepare_readable(self._scores.prepare, request, ids)
        return self._scores.prepare(request, ids)

    def encode_query(self, request: ScoreRequest, ids: RequestIds) -> Prepared:
        """The sequence of a request's query by itself, which has no documents. Raises InvalidRequestError for
        a model that reads query and document together."""
        if not isinstance(self._scores, TwoStageStrategy):
            raise InvalidRequestError(
                "this model reads query and document together, so that a query has no embedding by itself; "
                "score its text",
                "queries",
            )
        return self._scores.encode_query(self._instructed(request), ids)

    def embed(self, request: EmbedRequest, ids: RequestIds) -> Prepared:
        """The sequences of texts to embed or classify, in their order."""
        return self._texts.prepare(request, ids)

    def _instructed(self, request: ScoreRequest) -> ScoreRequest:
        """The request with the instruction that is to be used. Raises InvalidRequestError for one of its own
        that cannot be."""
        if request.instruction is not None and not self._model.takes_instruction:
            raise InvalidRequestError("this model takes no instruction; leave it out", "instruction")
        if request.instruction:
            # An instruction becomes part of other texts, maybe many: what is wrong with it is said before.
            (tokens,) = self._tokenizer.encode([request.instruction], "instruction", self._longest)
            if len(tokens) == self._longest:
                raise InvalidRequestError(
                    f"instruction has {self._longest} tokens or more, and no more can be run in a sequence; "
                    "shorten it",
                    "instruction",
                )
            return request
        return replace(request, instruction=self._model.instruction)
