"""The answers of an engine to the questions of fronts."""

import hashlib
import inspect
import pickle
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import msgspec
from prometheus_client import generate_latest

from maxsimd import __version__
from maxsimd.api.fleet import messages
from maxsimd.api.fleet.messages import (
    Answer,
    Question,
    received_inputs,
    received_item,
    received_items,
    sent_query,
)
from maxsimd.engine import Engine
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.explanations import Explanation
from maxsimd.engine.requests import RankedDocument, ScoreResult, Timings, Usage

Send = Callable[[Answer], Awaitable[None]]


# Options of an engine that change when, where and how fast it scores, but no score.
_DECIDE_NOTHING = frozenset(
    {
        *("offline", "device", "kernels", "maxsim", "attention", "cuda_graphs", "packing", "prefix_sharing"),
        *("max_batch_tokens", "max_batch_sequences", "max_queued_tokens", "max_wait_seconds"),
        *("max_request_tokens", "steps_in_flight", "step_timeout_seconds", "threads", "tokenizer_threads"),
        *("cache_mb", "device_cache_mb", "cache_dir", "cache_disk_mb", "max_vectors"),
    }
)
# The engine's method for each task of `Embed`, and its answer.
_EMBED: dict[str, tuple[str, Callable[[Any], Answer]]] = {
    "embed": ("embed", messages.Embedded),
    "token_embed": ("embed_tokens", messages.EmbeddedTokens),
    "sparse_embed": ("embed_sparse", messages.EmbeddedSparse),
}


class EngineAnswers:
    """Answers the questions of fronts by a running engine. For one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._introduction = messages.Introduction(
            facts=engine.facts,
            config=engine.config,
            tokenizer=pickle.dumps(engine.tokenizer),
            fingerprint=fingerprint_of(engine),
        )

    async def __call__(self, question: Question, send: Send) -> Answer:
        """The answer to a question, after those that are sent before it. Raises the errors of `Engine`."""
        engine = self._engine
        match question:
            case messages.Score():
                return await self._score(question, send)
            case messages.EncodeQuery():
                query: Any = received_item(question.query)
                return messages.EncodedQuery(
                    sent_query(await engine.encode_query(query, **_options("encode_query", question)))
                )
            case messages.Rank():
                return await self._rank(question)
            case messages.Embed():
                method, answer = _EMBED[question.task]
                texts = received_inputs(question.texts)
                return answer(await getattr(engine, method)(texts, **_options(method, question)))
            case messages.Classify():
                texts = received_inputs(question.texts)
                return messages.Classified(await engine.classify(texts, **_options("classify", question)))
            case messages.Converse():
                flags = question.add_generation_prompt, question.continue_final_message
                return messages.Conversation(
                    *await engine.conversation(
                        question.messages, add_generation_prompt=flags[0], continue_final_message=flags[1]
                    )
                )
            case messages.ClearCache():
                await engine.clear_cache()
            case messages.SetTenants():
                engine.set_tenants(question.tenants)
            case messages.ShowMetrics():
                return messages.Metrics(generate_latest(engine.metrics.registry))
            case messages.Introduce():
                return self._introduction
        return messages.Done()

    async def _score(self, question: messages.Score, send: Send) -> Answer:
        queries, documents = received_items(question.queries), received_items(question.documents)
        options = _options("score", question)
        if not question.streams:
            return messages.Scored(await self._engine.score(queries, documents, **options))
        async with self._engine.stream(queries, documents, **options) as stream:
            async for new in stream:
                result = ScoreResult(
                    [one.score for one in new], Usage(0), 0, timings=Timings(), explanations=_explained(new)
                )
                await send(messages.Arrived(result, [one.index for one in new]))
        return messages.Scored(stream.result)

    async def _rank(self, question: messages.Rank) -> Answer:
        queries = received_items(question.score.queries)
        if len(queries) != 1:
            raise InvalidRequestError("a ranking has one query", "query")
        ranked = await self._engine.rerank(
            queries[0],
            received_items(question.score.documents),
            top_n=question.top_n,
            score_threshold=question.score_threshold,
            **_options("score", question.score),
        )
        result = ScoreResult(
            [one.score for one in ranked.results],
            ranked.usage,
            ranked.truncated,
            ranked.unscored,
            ranked.errors,
            ranked.timings,
            _explained(ranked.results),
        )
        return messages.Ranked(result, [one.index for one in ranked.results])


def _explained(documents: Sequence[RankedDocument]) -> dict[int, Explanation]:
    return {one.index: one.explanation for one in documents if one.explanation is not None}


@cache
def _names(method: str) -> tuple[str, ...]:
    """The options of a method of the engine."""
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
