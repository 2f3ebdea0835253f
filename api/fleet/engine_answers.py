"""What an engine answers to the questions of fronts."""

import hashlib
import logging
import pickle
from collections.abc import Awaitable, Callable
from dataclasses import fields, replace
from typing import Any

from prometheus_client import generate_latest

from maxsimd import __version__
from maxsimd.api.fleet import messages
from maxsimd.api.fleet.messages import (
    Answer,
    Arrived,
    Question,
    received_inputs,
    received_item,
    received_items,
    sent_query,
)
from maxsimd.engine import Engine
from maxsimd.engine.errors import InvalidRequestError
from maxsimd.engine.requests import ScoreOptions, ScoreResult, Timings, Usage

log = logging.getLogger("maxsimd.fleet")

_NOTHING = Usage(0)
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


class EngineAnswers:
    """Answers what fronts ask of an engine that runs. For one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._introduction = messages.Introduction(
            facts=engine.facts,
            config=engine.config,
            tokenizer=pickle.dumps(engine.tokenizer),
            fingerprint=fingerprint_of(engine),
        )

    async def __call__(self, question: Question, send: Send) -> Answer:
        """The answer to a question, after what is sent before it. Raises the errors of `Engine`."""
        engine = self._engine
        match question:
            case messages.Score():
                return await self._score(question, send)
            case messages.EncodeQuery():
                return await self._encode_query(question)
            case messages.Rank():
                return await self._rank(question)
            case messages.Embed():
                return await self._embed(question)
            case messages.Classify():
                run = question.run
                classified = await engine.classify(
                    received_inputs(question.texts),
                    text_pairs=question.text_pairs,
                    truncation=run.truncation,
                    use_activation=question.use_activation,
                    priority=run.priority,
                    tenant=run.tenant,
                    timeout=run.timeout,
                )
                return messages.Classified(classified)
            case messages.Converse():
                text, is_complete = await engine.conversation(
                    question.messages,
                    add_generation_prompt=question.add_generation_prompt,
                    continue_final_message=question.continue_final_message,
                )
                return messages.Conversation(text, is_complete)
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
        options = _options(question)
        if not question.streams:
            return messages.Scored(await self._engine.score(queries, documents, **options))
        async with self._engine.stream(queries, documents, **options) as stream:
            async for new in stream:
                explanations = {one.index: one.explanation for one in new if one.explanation is not None}
                scores = [one.score for one in new]
                result = ScoreResult(scores, _NOTHING, 0, timings=Timings(), explanations=explanations)
                await send(Arrived(result, [one.index for one in new]))
        return messages.Scored(stream.result)

    async def _encode_query(self, question: messages.EncodeQuery) -> Answer:
        run = question.run
        query: Any = received_item(question.query)
        encoded = await self._engine.encode_query(
            query,
            instruction=question.instruction,
            truncation=run.truncation,
            priority=run.priority,
            tenant=run.tenant,
            timeout=run.timeout,
        )
        return messages.EncodedQuery(sent_query(encoded))

    async def _rank(self, question: messages.Rank) -> Answer:
        score = question.score
        queries, documents = received_items(score.queries), received_items(score.documents)
        if len(queries) != 1:
            raise InvalidRequestError("a ranking has one query", "query")
        ranked = await self._engine.rerank(
            queries[0],
            documents,
            top_n=question.top_n,
            score_threshold=question.score_threshold,
            **_options(score),
        )
        explanations = {one.index: one.explanation for one in ranked.results if one.explanation is not None}
        result = ScoreResult(
            [one.score for one in ranked.results],
            ranked.usage,
            ranked.truncated,
            ranked.unscored,
            ranked.errors,
            ranked.timings,
            explanations,
        )
        return messages.Ranked(result, [one.index for one in ranked.results])

    async def _embed(self, question: messages.Embed) -> Answer:
        run, texts = question.run, received_inputs(question.texts)
        options: dict[str, Any] = {
            "input_type": question.input_type,
            "prompt_name": question.prompt_name,
            "dimensions": question.dimensions,
            "truncation": run.truncation,
            "priority": run.priority,
            "tenant": run.tenant,
            "timeout": run.timeout,
        }
        if question.task == "sparse_embed":
            del options["dimensions"]
            return messages.EmbeddedSparse(await self._engine.embed_sparse(texts, **options))
        if question.task == "token_embed":
            options["max_tokens"] = question.max_tokens
            return messages.EmbeddedTokens(await self._engine.embed_tokens(texts, **options))
        options |= {"late_chunking": question.late_chunking, "chunks": question.chunks}
        options["encoding"] = question.encoding
        return messages.Embedded(await self._engine.embed(texts, **options))


def _options(question: messages.Score) -> ScoreOptions:
    run = question.run
    return {
        "truncation": run.truncation,
        "use_activation": question.use_activation,
        "normalize": question.normalize,
        "instruction": question.instruction,
        "cache": question.cache,
        "priority": run.priority,
        "tenant": run.tenant,
        "timeout": run.timeout,
        "on_timeout": question.on_timeout,
        "on_error": question.on_error,
        "explain": question.explain,  # type: ignore[typeddict-item]
    }


def fingerprint_of(engine: Engine) -> str:
    """A digest of what decides an engine's scores: the version, the model and how it is run."""
    # Where it runs, and the last digits of what was measured at load, decide nothing.
    facts = replace(engine.facts, device="", kernels="", findings=())
    config = engine.config
    names = (field.name for field in fields(config) if field.name not in _DECIDE_NOTHING)
    settings = [(name, getattr(config, name)) for name in names]
    decides = (__version__, facts, settings)
    return hashlib.blake2b(repr(decides).encode(), digest_size=8).hexdigest()
