"""The answers of an engine to the questions of fronts."""

import hashlib
import inspect
import pickle
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, cast

import msgspec

from maxsimd import __version__
from maxsimd.api.fleet import messages as wire
from maxsimd.api.fleet.link import Send
from maxsimd.api.fleet.messages import Answer, Question, received_inputs, received_item, sent_query
from maxsimd.engine import Engine
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.requests import RankedDocument, ScoreResult, Usage

# Options of an engine that change when, where and how fast it scores, but no score.
_DECIDE_NOTHING = frozenset(
    {
        *("offline", "device", "kernels", "maxsim", "attention", "cuda_graphs", "packing", "prefix_sharing"),
        *("max_batch_tokens", "max_batch_sequences", "max_queued_tokens", "max_wait_seconds"),
        *("max_request_tokens", "steps_in_flight", "step_timeout_seconds", "threads", "tokenizer_threads"),
        *("cache_mb", "device_cache_mb", "cache_dir", "cache_disk_mb", "document_store_mb", "max_vectors"),
    }
)
# The engine's method for each task of `Embed`, and its answer.
_EMBED: dict[str, tuple[str, Callable[[Any], Answer]]] = {
    "embed": ("embed", wire.Embedded),
    "token_embed": ("embed_tokens", wire.EmbeddedTokens),
    "sparse_embed": ("embed_sparse", wire.EmbeddedSparse),
}


class EngineAnswers:
    """Answers the questions of fronts by a running engine. For one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._introduction = wire.Introduction(
            facts=engine.facts,
            config=engine.config,
            tokenizer=pickle.dumps(engine.tokenizer),
            fingerprint=fingerprint_of(engine),
        )

    def is_idle(self) -> bool:
        return self._engine.is_healthy and self._engine.stats().requests == 0

    def queued_tokens(self) -> int:
        return self._engine.stats().waiting_tokens if self._engine.is_healthy else 0

    async def __call__(self, question: Question, send: Send) -> Answer:
        """The answer to a question, after those that are sent before it. Raises the errors of `Engine`."""
        engine = self._engine
        match question:
            case wire.Score():
                return await self._score(question, send)
            case wire.EncodeQuery():
                query: Any = received_item(question.query)
                return sent_query(await engine.encode_query(query, **_options("encode_query", question)))
            case wire.Rank():
                return await self._rank(question)
            case wire.AddDocuments():
                texts = cast("list[str]", [*map(received_item, question.documents)])
                added = await engine.add_documents(texts, **_options("add_documents", question))
                return wire.Added(added.usage, added.truncated, added.not_kept, added.timings)
            case wire.Embed():
                method, answer = _EMBED[question.task]
                inputs = received_inputs(question.texts)
                return answer(await getattr(engine, method)(inputs, **_options(method, question)))
            case wire.Classify():
                inputs = received_inputs(question.texts)
                return wire.Classified(await engine.classify(inputs, **_options("classify", question)))
            case wire.ScoreLabels():
                query, *items = cast("Any", received_inputs(question.prompts))
                found = await engine.label_scores(
                    query, items, question.labels, **_options("label_scores", question)
                )
                return wire.ScoredLabels(found)
            case wire.TokenClassify():
                texts = cast("list[str]", [*map(received_item, question.texts)])
                options = _options("token_classify", question)
                return wire.TokenClassified(await engine.token_classify(texts, **options))
            case wire.Converse():
                return wire.Conversation(*await engine.conversation(**msgspec.structs.asdict(question)))
            case wire.Command.CLEAR_CACHE:
                await engine.clear_cache()
            case wire.SetTenants():
                engine.set_tenants(question.tenants)
            case wire.Command.SHOW_METRICS:
                return wire.Metrics.of(engine.metrics.registry)
            case wire.Command.INTRODUCE:
                return self._introduction
        return wire.Done()

    async def _score(self, question: wire.Score, send: Send) -> Answer:
        queries: Any = [*map(received_item, question.queries)]
        documents: Any = [*map(received_item, question.documents)]
        options = _options("score", question)
        if not question.streams:
            return wire.Scored(await self._engine.score(queries, documents, **options))
        async with self._engine.stream(queries, documents, **options) as stream:
            async for new in stream:
                scores = [one.score for one in new]
                result = ScoreResult(scores, Usage(0), 0, explanations=_explained(new))
                await send(wire.Arrived(result, [one.index for one in new]))
        return wire.Scored(stream.result)

    async def _rank(self, question: wire.Rank) -> Answer:
        query, *others = map(received_item, question.score.queries)
        if others:
            raise InvalidRequestError("a ranking has one query", "query")
        documents: Any = [*map(received_item, question.score.documents)]
        options = _options("score", question.score)
        options |= {"top_n": question.top_n, "score_threshold": question.score_threshold}
        ranked = await self._engine.rerank(cast("Any", query), documents, **options)
        result = ScoreResult(
            [one.score for one in ranked.results],
            ranked.usage,
            ranked.truncated,
            ranked.unscored,
            ranked.errors,
            ranked.timings,
            _explained(ranked.results),
        )
        return wire.Scored(result, [one.index for one in ranked.results])


def _explained(documents: Sequence[RankedDocument]) -> dict[int, Explanation]:
    return {one.index: one.explanation for one in documents if one.explanation is not None}


@cache
def _names(method: str) -> tuple[str, ...]:
    parameters = inspect.signature(getattr(Engine, method)).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)


def _options(method: str, question: Any) -> Any:
    """The fields of a question that are options of the engine's method, and of how it is run."""
    fields = msgspec.structs.asdict(question) | msgspec.structs.asdict(question.run)
    return {name: fields[name] for name in _names(method) if name in fields}


def fingerprint_of(engine: Engine) -> str:
    """A digest of what decides an engine's scores: version, model, weights and settings."""
    # The device, its free memory and the self-check's last digits decide nothing.
    facts = replace(engine.facts, device="", kernels="", findings=(), step_tokens=0)
    config = engine.config
    names = (field.name for field in fields(config) if field.name not in _DECIDE_NOTHING)
    settings = [(name, getattr(config, name)) for name in names]
    decides = (__version__, facts, settings, engine.model.fingerprint)
    return hashlib.blake2b(repr(decides).encode(), digest_size=8).hexdigest()
