"""Score requests whose queries and documents are run apart: late interaction and bi-encoders."""

from collections.abc import Iterator
from typing import Any

from maxsimd.engine.preprocess.documents import Document, DocumentReader
from maxsimd.engine.preprocess.prepared import Prepared, best_of
from maxsimd.engine.preprocess.texts import Parts, TextBuilder
from maxsimd.engine.requests import ScoreRequest
from maxsimd.engine.scoring.documents import KeptDocument
from maxsimd.scheduler import Role, Sequence


def two_stages(
    request: ScoreRequest,
    queries: TextBuilder,
    documents: DocumentReader,
    task: str,
    owner: int,
    keys: Iterator[int],
) -> Prepared:
    """Queries first, then documents; those that are kept go straight to scoring.

    With token embeddings a document's windows are scored as one, which is exact: MaxSim is a maximum over the
    union of their tokens. Else each window is a result, and the best counts."""
    as_one = task == "token_embed"
    read = documents.read(request)
    uses = [0] * len(request.queries)
    for document in read.different:
        uses[document.query] += max(1, len(document.windows))
    asked = [queries.build(text, i) for i, text in enumerate(queries.encode(request.queries))]
    sequences = [
        _sequence(parts, next(keys), owner, i, Role.QUERY, task, uses=uses[i])
        for i, parts in enumerate(asked)
    ]
    query_keys = [sequence.key for sequence in sequences]
    kept, counts, results = [], [], 0
    for document in read.different:
        query = query_keys[document.query]
        if document.kept is not None:
            kept.append(KeptDocument(owner, results, query, document.kept))
        else:
            sequences += _run(document, owner, results, query, task, as_one, keys)
        counts.append(1 if as_one else max(1, len(document.windows)))
        results += counts[-1]
    truncated = sum(parts.truncated for parts in asked) + read.truncated
    return Prepared(sequences, results, truncated, best_of(counts, read.place_of), kept)


def _run(
    document: Document, owner: int, index: int, query: int, task: str, as_one: bool, keys: Iterator[int]
) -> list[Sequence]:
    """The sequences of a document that has to be run, the first of them with `index`."""
    windows = document.windows
    first = next(keys)
    return [
        _sequence(
            parts,
            next(keys) if place else first,
            owner,
            index if as_one else index + place,
            Role.DOCUMENT,
            task,
            query=query,
            document=first if as_one and len(windows) > 1 else None,
            windows=len(windows) if as_one else 1,
            cache_key=document.cache_key if as_one or len(windows) == 1 else None,
            truncated=document.truncated,
        )
        for place, parts in enumerate(windows)
    ]


def _sequence(
    parts: Parts, key: int, owner: int, index: int, role: Role, task: str, **links: Any
) -> Sequence:
    return Sequence(
        key, owner, index, role, task, parts.token_ids, parts.type_ids, parts.attended, parts.kept, **links
    )
