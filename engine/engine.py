"""The engine: the public face, from texts to scores. Each request passes through here once on its way in and
once on its way out."""

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, Unpack, cast

from maxsimd.engine import media
from maxsimd.engine.errors import EngineDeadError, EngineNotReadyError, InvalidRequestError
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.life import EngineLife
from maxsimd.engine.media import Content, OpenImage, PictureFile
from maxsimd.engine.processors import Prepared
from maxsimd.engine.processors.late_chunking import as_document
from maxsimd.engine.requests import (
    CacheMode,
    ClassifyResult,
    EmbedRequest,
    EmbedResult,
    InputType,
    LongInputPolicy,
    OnError,
    OnTimeout,
    Priority,
    Progress,
    RerankResult,
    RunOptions,
    ScoreOptions,
    ScoreRequest,
    ScoreResult,
    SparseEmbedResult,
    TokenEmbedResult,
    Value,
    Values,
)
from maxsimd.engine.results.encodings import as_muvera, check_encoding, encoded_result
from maxsimd.engine.results.postprocess import (
    aside,
    classify_result,
    embed_result,
    query_rows,
    rank,
    sparse_embed_result,
    token_embed_result,
    work_in,
)
from maxsimd.engine.results.scores import ScoredPairs, score_call
from maxsimd.engine.results.stream import Arrived, ScoreStream
from maxsimd.engine.validation import (
    Scorable,
    Scored,
    as_inputs,
    as_query,
    as_scored,
    as_texts,
    as_truncation,
    check_options,
    check_paired,
    check_task,
)
from maxsimd.pooling.muvera import Muvera
from maxsimd.pooling.query_rows import QueryRows

# A picture to embed.
Picture = Content | media.Picture | PictureFile | OpenImage
Inputs = Picture | str | Sequence[Picture | str | Sequence[int]]


class Engine(EngineLife):
    """Scores and embeds texts with one model. Use it as an async context manager, from one event loop.

    All methods raise InvalidRequestError for requests that make no sense, RequestTooLargeError for those that
    are too much by themselves, QueueFullError when too much waits already, RequestTimeoutError when `timeout`
    (seconds) passes, RequestFailedError when the model fails on this very request, EngineNotReadyError
    outside of the context and EngineDeadError when the engine has died. Cancelling a call cancels its work.
    Tenants share the device by weight (`set_tenants`), however many requests each has, and a lower
    `priority` gets a larger share: "interactive" is 0, "batch" 4. `progress` is called on the event loop with
    how many of a call's values have come and how many there will be (one or more a document, text or pass);
    it must not block, and if it raises, the call fails.
    """

    async def score(
        self,
        queries: Scored,
        documents: Scored,
        *,
        truncation: LongInputPolicy = "cut",
        use_activation: bool = True,
        normalize: bool = False,
        instruction: str | None = None,
        cache: CacheMode = "use",
        priority: Priority = 0,
        tenant: str = "",
        timeout: float | None = None,
        on_timeout: OnTimeout = "error",
        on_error: OnError = "fail",
        progress: Progress | None = None,
        explain: bool | Literal["maps"] = False,
    ) -> ScoreResult:
        """Scores documents against queries: one query against one or many documents, or N against N.

        Scores are in the documents' order and higher is better: MaxSim sums for late interaction, cosines
        for bi-encoders and listwise models, the classifier's activation (logits without `use_activation`)
        for cross-encoders. For late interaction and bi-encoders each text may come as its embedding, an
        array or `Vectors`. Inputs that are too long for the model are cut, and counted in `truncated`, unless
        `truncation` says "error", "window" or something else. `instruction` is for models that take one.
        `cache` says whether embeddings of documents are taken from the cache, and new ones cached. With
        `normalize` scores are from 0 to 1: classifiers' probabilities, cosines without their negative part,
        and of MaxSim the mean over the query's tokens, without its negative part.

        With `on_timeout` "partial" a request whose time is up has the scores that there are by then, and the
        rest `unscored`; its documents are run in their order. With `on_error` "report" a document that cannot
        be read, or on which the model fails, has an error in `errors` and the others their scores. A listwise
        model scores documents by each other and takes neither.

        With `explain` the result has `explanations`: matching tokens for late interaction, the scores of
        windows, and what was read and what was cached; with "maps" also, of documents with pictures, the
        similarity of each token of the query to each patch.
        """
        options: ScoreOptions = {
            "truncation": truncation,
            "use_activation": use_activation,
            "normalize": normalize,
            "instruction": instruction,
            "cache": cache,
            "priority": priority,
            "tenant": tenant,
            "timeout": timeout,
            "on_timeout": on_timeout,
            "on_error": on_error,
            "progress": progress,
            "explain": explain,
        }
        scored = await self._scored(queries, documents, options)
        result = await aside(scored.result, scored.call.num_documents)
        explanations = await self._why(scored, range(scored.call.num_documents))
        return replace(result, explanations=explanations) if explanations else result

    async def rerank(
        self,
        query: Scorable,
        documents: Sequence[Scorable],
        *,
        top_n: int | None = None,
        score_threshold: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> RerankResult:
        """Ranks documents for a query, best first, ties in input order; at most `top_n` of them, and none
        with a score below the `score_threshold`. Documents with equal scores are ranked by what the scores
        were before the activation. Other options are those of `score`."""
        if top_n is not None and top_n < 0:
            raise InvalidRequestError(f"top_n must not be negative, not {top_n}", "top_n")
        check_options("rerank", options)
        given = as_scored(documents, "documents", takes_vectors=True, takes_pictures=True)
        scored = await self._scored(query, given, {**SCORE_DEFAULTS, **options}, top_n)
        result = await aside(scored.result, len(given))
        ranked = await aside(
            lambda: rank(result.scores, given, top_n, score_threshold, result.ranking_scores), len(given)
        )
        explanations = await self._why(scored, [one.index for one in ranked])
        if explanations:
            ranked = [replace(one, explanation=explanations.get(one.index)) for one in ranked]
        return RerankResult(
            ranked, result.usage, result.truncated, result.unscored, result.errors, result.timings
        )

    def stream(self, queries: Scored, documents: Scored, **options: Unpack[ScoreOptions]) -> ScoreStream:
        """Scores documents as `score` does, and gives them as they are ready::

            async with engine.stream(query, documents) as stream:
                async for new in stream:  # RankedDocuments, by their index
                    ...
            stream.result  # what `score` would have returned

        Leaving it early cancels what is left."""
        check_options("stream", options)
        complete: ScoreOptions = {**SCORE_DEFAULTS, **options}
        return ScoreStream(
            lambda arrived: self._scored(queries, documents, complete, arrived=arrived), self._why
        )

    async def encode_query(
        self,
        query: Scorable,
        *,
        instruction: str | None = None,
        truncation: LongInputPolicy = "cut",
        priority: Priority = 0,
        tenant: str = "",
        timeout: float | None = None,
    ) -> QueryRows:
        """The embedding of a text or picture as a query, to be given to `score`, `rerank` or `stream` in its
        place: now or later, here or in another process with the same model, as often as there are documents.

        Scores, tokens and cut inputs are then those that the query itself would have; `instruction` and the
        query's `truncation` are settled with this. For late interaction and bi-encoders; raises
        InvalidRequestError for models that read query and document together."""
        running = self._require()
        loaded = self.device_model
        model = loaded.model
        queries = as_query(query, model.vision is not None)
        request = ScoreRequest(
            queries=queries, documents=(), truncation=as_truncation(truncation), instruction=instruction
        )
        options = RunOptions(priority, tenant, timeout)
        prepared, values = await running.run(
            lambda ids: running.preprocessor.encode_query(request, ids), request, options
        )
        return query_rows(prepared, values, model, loaded.prepared.dtype)

    async def embed(
        self,
        texts: Inputs,
        *,
        input_type: InputType | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        late_chunking: bool = False,
        chunks: Sequence[tuple[int, int]] | None = None,
        encoding: Muvera | Literal["muvera"] | None = None,
        truncation: LongInputPolicy = "cut",
        priority: Priority = 0,
        tenant: str = "",
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> EmbedResult:
        """One vector a text: float32 [texts, dim]. `input_type` chooses the checkpoint's prompt for queries
        or documents, `prompt_name` any by its name; `dimensions` is how many columns are
        returned, the first ones (matryoshka).

        With `late_chunking` the texts are the chunks of one document, end to end, or the document is one text
        and `chunks` are its first characters and those after its last: it is read as a whole, and each chunk
        has the mean of its tokens. No such document is cut.

        With an `encoding` a model of late interaction gives one vector of a text's token vectors, of which
        the inner product with another is about MaxSim; `input_type` must then be given, and token vectors of
        documents are taken from the cache."""
        given = as_inputs(texts, self.model.vision is not None)
        document = as_document(given, chunks, late_chunking)
        request = EmbedRequest(
            texts=given if document is None else document[:1],
            chunks=None if document is None else document[1],
            task="embed",
            input_type=input_type,
            prompt_name=prompt_name,
            truncation=as_truncation(truncation),
        )
        options = RunOptions(priority, tenant, timeout, progress)
        model = self.model
        if encoding is not None:
            others = {"dimensions": dimensions is not None, "late_chunking": late_chunking}
            muvera = as_muvera(encoding)
            check_encoding(muvera, model, input_type, others)
            return await self._encoded(request, muvera, options)
        prepared, values = await self._texts(request, dimensions, options)
        normalised = model.tasks["embed"].normalised
        return await aside(lambda: embed_result(prepared, values, dimensions, normalised), work_in(values))

    async def _encoded(self, request: EmbedRequest, muvera: Muvera, options: RunOptions) -> EmbedResult:
        """One vector of each text's token vectors."""
        of_tokens = replace(request, task="token_embed", takes_cached=True)
        is_query, cache = request.input_type == "query", self.device_model.cache
        prepared, values = await self._texts(of_tokens, None, options)
        return await asyncio.to_thread(encoded_result, prepared, values, muvera, is_query, cache)

    async def embed_tokens(
        self,
        texts: Inputs,
        *,
        input_type: InputType | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        max_tokens: int | None = None,
        truncation: LongInputPolicy = "cut",
        priority: Priority = 0,
        tenant: str = "",
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> TokenEmbedResult:
        """One vector a token: a list of float32 [tokens, dim], as late interaction scores them. Texts with
        more than `max_tokens` together are refused before they are run."""
        request = EmbedRequest(
            texts=as_inputs(texts, self.model.vision is not None),
            task="token_embed",
            input_type=input_type,
            prompt_name=prompt_name,
            truncation=as_truncation(truncation),
            max_tokens=max_tokens,
        )
        model, options = self.model, RunOptions(priority, tenant, timeout, progress)
        prepared, values = await self._texts(request, dimensions, options)
        normalised = model.tasks["token_embed"].normalised
        return await aside(
            lambda: token_embed_result(prepared, values, dimensions, normalised), work_in(values)
        )

    async def embed_sparse(
        self,
        texts: Inputs,
        *,
        input_type: InputType | None = None,
        prompt_name: str | None = None,
        truncation: LongInputPolicy = "cut",
        priority: Priority = 0,
        tenant: str = "",
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> SparseEmbedResult:
        """One sparse vector a text: weights of words, by the ids of their tokens. For models that give them
        (SPLADE); raises InvalidRequestError for others."""
        request = EmbedRequest(
            texts=as_inputs(texts, self.model.vision is not None),
            task="sparse_embed",
            input_type=input_type,
            prompt_name=prompt_name,
            truncation=as_truncation(truncation),
        )
        options = RunOptions(priority, tenant, timeout, progress)
        prepared, values = await self._texts(request, None, options)
        return await aside(lambda: sparse_embed_result(prepared, values), work_in(values))

    async def classify(
        self,
        texts: Inputs,
        *,
        text_pairs: Sequence[str] | None = None,
        truncation: LongInputPolicy = "cut",
        use_activation: bool = True,
        priority: Priority = 0,
        tenant: str = "",
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> ClassifyResult:
        """A classifier's probabilities, or its logits without `use_activation`, one a text and label.

        Of single texts, or of pairs with the `text_pairs` as their second texts."""
        model = self.model
        check_task("classify", model.tasks)
        options = RunOptions(priority, tenant, timeout, progress)
        long_inputs = as_truncation(truncation)
        if text_pairs is None:
            inputs = as_inputs(texts, takes_pictures=False)
            texts_alone = EmbedRequest(texts=inputs, task="classify", truncation=long_inputs)
            prepared, values = await self._texts(texts_alone, None, options)
        else:
            pairs = ScoreRequest(
                queries=as_texts(cast("Sequence[str]", texts), "queries"),
                documents=as_texts(text_pairs, "documents"),
                truncation=long_inputs,
                cache="bypass",
            )
            check_paired(pairs.queries, pairs.documents)
            prepared, values = await self._pairs(pairs, options)
        activation = model.probabilities if use_activation else None
        return await aside(
            lambda: classify_result(prepared, values, activation, model.labels), work_in(values)
        )

    async def _scored(
        self,
        queries: Scored,
        documents: Scored,
        options: ScoreOptions,
        top_n: int | None = None,
        arrived: Arrived | None = None,
    ) -> ScoredPairs:
        """Runs a score request, of which at most `top_n` documents are to be explained, if any are; `arrived`
        is told of what there is so far."""
        call = score_call(self.device_model, queries, documents, options, top_n)

        def tell(prepared: Prepared, values: list[Value | None]) -> None:
            if arrived is not None:
                arrived(ScoredPairs(call, prepared, Values(values, {})))

        # A listwise model scores documents by each other: before all are there, none is.
        tells = arrived is not None and self.model.listwise is None
        prepared, values = await self._pairs(call.request, call.run_options, tell if tells else None)
        return ScoredPairs(call, prepared, values)

    async def _why(self, scored: ScoredPairs, documents: Sequence[int]) -> Mapping[int, Explanation]:
        """How documents came to their scores, for a request that asks for that."""
        if not scored.call.request.explain:
            return {}
        texts = scored.call.request.documents
        size = sum(len(text) for i in documents if isinstance(text := texts[i], str))
        try:
            return await self.in_thread(lambda: scored.explanations(documents), size)
        except (EngineNotReadyError, EngineDeadError):
            # It has stopped meanwhile, and is not needed any more.
            return await asyncio.to_thread(scored.explanations, documents)


# What `rerank` has where its caller leaves out an option of `score`.
SCORE_DEFAULTS = cast(
    "ScoreOptions",
    {
        name: parameter.default
        for name, parameter in inspect.signature(Engine.score).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    },
)
