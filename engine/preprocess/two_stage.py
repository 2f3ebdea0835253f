"""Score requests whose queries and documents are run apart: late interaction and bi-encoders."""

from collections.abc import Iterator, Sequence

from maxsimd.engine.preprocess.documents import Document, DocumentReader
from maxsimd.engine.preprocess.prepared import Prepared, best_of
from maxsimd.engine.preprocess.texts import TextBuilder
from maxsimd.engine.requests import ScoreRequest
from maxsimd.engine.scoring.documents import CachedDocument
from maxsimd.scheduler import CachedBatch, DocumentPayload, ResultSlot, Window
from maxsimd.scheduler import Sequence as TokenSequence

# A batch of cached documents has at most this many rows, so that scoring it takes no new memory.
CACHED_ROWS = 16_384
# Scoring this many cached rows takes about as long as running a token through a small model; a large one
# takes longer for its tokens, so that its cached documents cost too much rather than too little.
ROWS_PER_TOKEN = 128


def two_stages(
    request: ScoreRequest,
    queries: TextBuilder,
    documents: DocumentReader,
    task: str,
    owner: int,
    keys: Iterator[int],
) -> Prepared:
    """Queries first, then the documents to be run, and apart from them those whose embeddings are cached.

    With token embeddings a document's windows are scored as one, which is exact: MaxSim is a maximum over the
    union of their tokens. Else each window is a result, and the best counts."""
    as_one = task == "token_embed"
    read = documents.read(request)
    consumers = [0] * len(request.queries)
    for document in read.different:
        consumers[document.query] += max(1, len(document.windows))
    asked = [queries.build(text, i) for i, text in enumerate(queries.encode(request.queries))]
    sequences = [
        TokenSequence.query(next(keys), owner, task, built.tokens, consumers[i])
        for i, built in enumerate(asked)
    ]
    query_ids = [sequence.sequence_id for sequence in sequences]
    cached: dict[int, list[CachedDocument]] = {}
    counts, results = [], 0
    for document in read.different:
        query_id = query_ids[document.query]
        slots = [ResultSlot(owner, results + i) for i in range(max(1, len(document.windows)))]
        if document.cached is not None:
            cached.setdefault(query_id, []).append(CachedDocument(slots[0], document.cached))
        elif as_one:
            slots = slots[:1]
            sequences += _as_one(document, slots[0], query_id, task, keys)
        else:
            sequences += _apart(document, slots, query_id, task, keys)
        counts.append(len(slots))
        results += len(slots)
    truncated = sum(built.truncated for built in asked) + read.truncated
    batches = [batch for query_id, entries in cached.items() for batch in in_batches(entries, query_id)]
    return Prepared(sequences, results, truncated, best_of(counts, read.position_of), batches)


def in_batches(documents: Sequence[CachedDocument], query_id: int) -> Iterator[CachedBatch]:
    """Cached documents of one query in batches of at most `CACHED_ROWS` rows, or of one document."""
    batch: list[CachedDocument] = []
    rows = 0
    for document in documents:
        length = len(document.embedding.rows)
        if batch and rows + length > CACHED_ROWS:
            yield _priced(batch, rows, query_id)
            batch, rows = [], 0
        batch.append(document)
        rows += length
    if batch:
        yield _priced(batch, rows, query_id)


def _priced(documents: list[CachedDocument], rows: int, query_id: int) -> CachedBatch:
    price = -(-rows // ROWS_PER_TOKEN)
    return CachedBatch(documents[0].slot.request_id, query_id, max(1, price), tuple(documents))


def _as_one(
    document: Document, slot: ResultSlot, query_id: int, task: str, keys: Iterator[int]
) -> list[TokenSequence]:
    """The sequences of a document of which all windows together have one score."""
    ids = [next(keys) for _ in document.windows]
    window = Window(ids[0], len(ids)) if len(ids) > 1 else None
    payload = DocumentPayload(query_id, document.cache_key, document.truncated, window)
    return [
        TokenSequence.document(sequence_id, slot, task, built.tokens, payload)
        for sequence_id, built in zip(ids, document.windows, strict=True)
    ]


def _apart(
    document: Document, slots: list[ResultSlot], query_id: int, task: str, keys: Iterator[int]
) -> list[TokenSequence]:
    """The sequences of a document of which each window has a score; only a whole document is cached."""
    cache_key = document.cache_key if len(slots) == 1 else None
    payload = DocumentPayload(query_id, cache_key, document.truncated)
    return [
        TokenSequence.document(next(keys), slot, task, built.tokens, payload)
        for slot, built in zip(slots, document.windows, strict=True)
    ]
