"""Texts to embed over a fleet: split by tokens, and the rows of all parts put together."""

from collections.abc import Mapping
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from maxsimd.api.fleet.items import sent_inputs
from maxsimd.api.fleet.messages import Answer, Classify, Converse, Embed, Embedded, Run
from maxsimd.api.fleet.scoring import MOST_AROUND, digest_of_content, size_of, slowest
from maxsimd.api.fleet.spread import Job, estimated_tokens
from maxsimd.engine.media import Content
from maxsimd.engine.requests import EmbedResult, Usage, as_truncation
from maxsimd.scheduler.fleet import Split, digest_of

_OF_THE_RUN = frozenset({"truncation", "priority", "tenant", "timeout"})
# About how many characters a token stands for.
_CHARACTERS_A_TOKEN = 4


class EmbedJob:
    """The texts of one request, and the rows that there are of them so far."""

    def __init__(
        self, texts: tuple[str | tuple[int, ...] | Content, ...], options: Mapping[str, Any]
    ) -> None:
        self.texts = texts
        self._run = run_of(options)
        self._options = {name: value for name, value in options.items() if name not in _OF_THE_RUN}
        self._parts: list[tuple[NDArray[np.int64], EmbedResult]] = []

    def job(self) -> Job:
        """What is to be spread."""
        # Token vectors of documents may be cached where these were scored.
        is_cached = (
            self._options.get("encoding") is not None and self._options.get("input_type") == "document"
        )
        return Job(
            np.array([_digest(text) for text in self.texts], dtype=np.uint64),
            estimated_tokens([_size(text) for text in self.texts]),
            Split.BY_OWNER if is_cached else Split.BY_TOKENS,
            self._run.timeout,
            is_cached,
            self._question,
            self._commit,
        )

    @property
    def most_tokens(self) -> int:
        """The request has no more: a token is at least a character."""
        return sum(_size(text) + MOST_AROUND for text in self.texts)

    def question_of_all(self, task: Literal["embed", "token_embed", "sparse_embed"]) -> Embed:
        """What an engine is asked about all texts."""
        return Embed(texts=sent_inputs(self.texts), run=self._run, task=task, **self._options)

    def result(self) -> EmbedResult:
        """One row a text."""
        results = [result for _, result in self._parts]
        if len(results) == 1:
            return results[0]
        rows = np.empty((len(self.texts), results[0].embeddings.shape[1]), dtype=np.float32)
        for indices, result in self._parts:
            rows[indices] = result.embeddings
        usage = Usage(
            sum(each.usage.prompt_tokens for each in results),
            sum(each.usage.cached_tokens for each in results),
            sum(each.usage.cached_documents for each in results),
        )
        truncated = sum(each.truncated for each in results)
        timings = slowest([each.timings for each in results])
        return EmbedResult(rows, usage, truncated, timings, results[0].encoding)

    def _question(self, indices: NDArray[np.int64], left: float | None) -> Embed:
        texts = sent_inputs([self.texts[i] for i in indices.tolist()])
        run = Run(self._run.truncation, self._run.priority, self._run.tenant, left)
        return Embed(texts=texts, run=run, **self._options)

    def _commit(self, indices: NDArray[np.int64], answer: Answer) -> None:
        self._parts.append((indices, cast("Embedded", answer).result))


def run_of(options: Mapping[str, Any]) -> Run:
    """How a request is run, by the options of the engine's method."""
    return Run(
        truncation=as_truncation(options.get("truncation", "cut")),
        priority=options.get("priority", 0),
        tenant=options.get("tenant", ""),
        timeout=options.get("timeout"),
    )


def num_characters(question: Converse | Classify | Embed) -> int:
    """About how much there is to read for an answer."""
    if isinstance(question, Converse):
        return sum(len(message["content"]) for message in question.messages)
    return sum(len(text) if isinstance(text, str) else 0 for text in question.texts)


def _digest(text: str | tuple[int, ...] | Content) -> int:
    if isinstance(text, Content):
        return digest_of_content(text)
    return digest_of(text if isinstance(text, str) else repr(text))


def _size(text: str | tuple[int, ...] | Content) -> int:
    return _CHARACTERS_A_TOKEN * len(text) if isinstance(text, tuple) else size_of(text)
