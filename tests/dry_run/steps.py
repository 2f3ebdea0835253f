"""The steps that a model is driven through: whole sequences, cut ones, shared prefixes, documents that are
cached, read through windows or explained, and pictures.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import torch

from maxsimd.engine.cache import CachedEmbedding, Precision
from maxsimd.engine.cache.entry import rounded
from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.execution.selfcheck.pictures import random_pages
from maxsimd.engine.scoring.documents import CachedDocument, CachedDocuments, CacheHit, Duplicate
from maxsimd.scheduler import (
    CachedBatch,
    Chunk,
    DocumentPayload,
    Explained,
    ImageJob,
    ResultSlot,
    Sequence,
    Step,
    Tokens,
    Window,
)
from tests.dry_run.models import OnGPU, first_layers

Drive = Callable[[OnGPU], None]

LENGTHS = (7, 33, 100, 1, 64)


class Ids:
    """New numbers for what one drive makes, and tokens that are as random as they need be."""

    def __init__(self, model: LoadedModel) -> None:
        self.next = count()
        self.vocabulary = min(50, len(model.tokenizer))
        self.task = model.score_task

    def tokens(self, length: int, **others: Any) -> Tokens:
        ids = (np.arange(length) * 7 % self.vocabulary).astype(np.int32)
        return Tokens(ids, np.zeros_like(ids), **others)

    def text(self, length: int, task: str | None = None, **others: Any) -> Sequence:
        key = next(self.next)
        tokens = self.tokens(length, **others)
        return Sequence.text(key, ResultSlot(0, key), self.task if task is None else task, tokens)

    def query(self, length: int, num_consumers: int, **others: Any) -> Sequence:
        return Sequence.query(next(self.next), 0, self.task, self.tokens(length, **others), num_consumers)

    def document(self, length: int, payload: DocumentPayload, **others: Any) -> Sequence:
        key = next(self.next)
        return Sequence.document(key, ResultSlot(0, key), self.task, self.tokens(length, **others), payload)


def step_of(*parts: Sequence | Chunk, **others: Any) -> Step:
    """Sequences whole, or as the chunks say."""
    chunks = (x if isinstance(x, Chunk) else Chunk(x, x.shared_prefix_len, len(x)) for x in parts)
    return Step(0, tuple(chunks), **others)


def plain_step(model: LoadedModel) -> Step:
    """Whole sequences of the task that scores are computed from."""
    ids = Ids(model)
    return step_of(*(ids.text(length) for length in LENGTHS))


def whole(on: OnGPU) -> None:
    """All tasks in one step, and a step of one sequence; also with tokens that are not pooled or attended."""
    ids = Ids(on.model)
    texts = [ids.text(length, task) for task in on.model.tasks for length in LENGTHS]
    pooled = np.array([0, 1, 5, 20])
    on.run(step_of(*texts, ids.text(40, pooled_positions=pooled)))
    on.run(step_of(ids.text(12)))
    if not on.model.causal:
        on.run(step_of(ids.text(32, attended_len=9), ids.text(20)))


def cut(on: OnGPU) -> None:
    """A sequence of each task in three steps, beside others that are whole."""
    ids = Ids(on.model)
    texts = [ids.text(90, task) for task in on.model.tasks]
    for start in (0, 30, 60):
        chunks = (Chunk(text, start, start + 30) for text in texts)
        on.run(step_of(*chunks, ids.text(17), ids.text(3)))
    on.free(*(text.sequence_id for text in texts))
    assert on.runner.num_prefill_kv == on.pooler.num_states == 0


def prefixes(on: OnGPU) -> None:
    """Pairs behind a prefix of the same step and of an earlier one, whole and cut."""
    ids = Ids(on.model)
    prefix = Sequence.prefix(next(ids.next), 0, ids.tokens(20), 4)
    pairs = []
    for length in (31, 25, 30, 70):
        key = next(ids.next)
        pairs.append(Sequence.pair(key, ResultSlot(0, key), ids.tokens(length), prefix))
    on.run(step_of(prefix, *pairs[:2], ids.text(11)))
    on.run(step_of(pairs[2], Chunk(pairs[3], 20, 50)))
    on.run(step_of(Chunk(pairs[3], 50, 70)))
    on.free(prefix.sequence_id, pairs[3].sequence_id)
    assert on.runner.num_prefill_kv == on.pooler.num_states == 0


def documents(on: OnGPU) -> None:
    """Documents against queries of their own and of earlier steps: new, cached meanwhile, and twice in one
    step."""
    ids = Ids(on.model)
    query, other = ids.query(12, 5), ids.query(32, 1, **_unattended(on, 32))
    new = [ids.document(length, DocumentPayload(query.sequence_id, b"%d" % length)) for length in (40, 9)]
    again = replace(new[0], sequence_id=next(ids.next))
    hit = ids.document(30, DocumentPayload(other.sequence_id, b"hit"))
    plain = ids.document(25, DocumentPayload(query.sequence_id), pooled_positions=np.array([0, 3, 4]))
    skipped = [Duplicate(again), CacheHit(hit, _entry(on, 30))]
    on.run(step_of(query, other, *new, plain), skipped)
    on.run(step_of(ids.document(50, DocumentPayload(query.sequence_id, b"later"))))


def cached(on: OnGPU) -> None:
    """Documents that were cached when their request came, of a query that is run and of one that was given;
    some are explained."""
    ids = Ids(on.model)
    query = ids.query(12, 3)
    found = [CachedDocument(ResultSlot(0, i), _entry(on, 10 + i)) for i in range(3)]
    if on.is_late:
        explained = Explained((4, 7), with_map=True)
        found[1] = CachedDocument(ResultSlot(0, 1), _entry(on, 11), explained)
    on.run(step_of(query, cached=(CachedBatch(0, query.sequence_id, 1, CachedDocuments.of(found)),)))
    given = _entry(on, 5).rows.float()
    on.run(Step(0, (), (CachedBatch(0, next(ids.next), 1, CachedDocuments.of(found), given),)))
    payload = DocumentPayload(next(ids.next), b"given", given_query=given)
    on.run(step_of(ids.document(8, payload)))


def windows(on: OnGPU) -> None:
    """Documents of several windows in one step and in two, whose scores are explained or not: not where
    tokens are merged, to a number that is not told before."""
    ids = Ids(on.model)
    query = ids.query(6, 4)
    parts = []
    merged = on.model.token_pooling is not None
    for rows in (None, None if merged else Explained((20, 11), with_map=True)):
        of_document = Window(len(parts) + 100, 2)
        payload = DocumentPayload(query.sequence_id, b"%d" % len(parts), window=of_document, explained=rows)
        parts += [ids.document(length, payload) for length in (20, 11)]
    on.run(step_of(query, *parts[:3]))
    on.run(step_of(parts[3]))


def pictures(on: OnGPU) -> None:
    """Pictures and what is made of them, beside a text and, where the model can, cut."""
    ids = Ids(on.model)
    pages = [replace(page, sequence_id=next(ids.next)) for page in random_pages(on.model, ids.task)]
    jobs = [ImageJob(image.image_id, 0, 1, 0, image.inputs) for page in pages for image in page.tokens.images]
    on.run(Step(0, (), (), tuple(jobs)))
    on.run(step_of(*pages, ids.text(9)))
    if on.runner.chunked:
        half = len(pages[0]) // 2
        on.run(step_of(Chunk(pages[0], 0, half)))
        on.run(step_of(Chunk(pages[0], half, len(pages[0]))))
    on.free(*(job.image_id for job in jobs), pages[0].sequence_id)
    assert on.runner.num_features == on.runner.num_prefill_kv == 0


# Those that are about what follows the backbone, for which one of its layers is enough.
BEHIND_BACKBONE = (documents, cached, windows)


def run(drive: Drive, on: OnGPU) -> None:
    """With as few layers as will do."""
    with first_layers(on.model.backbone, 1 if drive in BEHIND_BACKBONE else 2):
        drive(on)


def drives(on: OnGPU) -> Iterator[Drive]:
    """What this model can be driven through."""
    yield whole
    if on.runner.chunked:
        yield cut
        if on.model.score_task == "classify":
            yield prefixes
    if on.model.score_task in ("embed", "token_embed"):
        yield documents
        yield cached
        if on.is_late:
            yield windows
    if on.model.vision is not None:
        yield pictures


def _unattended(on: OnGPU, length: int) -> dict[str, Any]:
    """Of a query that is filled up with tokens that nobody attends to, if the model has such."""
    expansion = on.model.query.expansion
    return {} if expansion is None or expansion.attended else {"attended_len": length - 20}


def _entry(on: OnGPU, tokens: int) -> CachedEmbedding:
    dim = on.model.tasks[on.model.score_task].dim
    rows = torch.zeros(tokens if on.is_late else 1, dim)
    precision: Precision = on.cache.precision
    values, scales = rounded(rows, precision)
    return CachedEmbedding(values, scales, tokens, False, b"entry of %d" % tokens)
