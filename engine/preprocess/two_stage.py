"""Score requests whose queries and documents are run apart: late interaction and bi-encoders."""

from collections.abc import Iterator
from typing import Any

from maxsimd.engine.preprocess.long_inputs import LongInputs
from maxsimd.engine.preprocess.prepared import Prepared, best_of
from maxsimd.engine.preprocess.texts import Parts, TextBuilder
from maxsimd.engine.requests import ScoreRequest
from maxsimd.scheduler import Role, Sequence


def two_stages(
    request: ScoreRequest,
    queries: TextBuilder,
    documents: TextBuilder,
    long_inputs: LongInputs,
    task: str,
    owner: int,
    keys: Iterator[int],
) -> Prepared:
    """Queries first, then documents. With token embeddings a document's windows are scored as one, which is
    exact: MaxSim is a maximum over the union of their tokens. Else each is a result, and the best counts."""
    as_one = task == "token_embed"
    built = [
        documents.windows(long_inputs.document(text), i)
        for i, text in enumerate(documents.encode(request.documents))
    ]
    shared = len(request.queries) == 1
    query_sequences = []
    for i, text in enumerate(queries.encode(request.queries)):
        parts = queries.build(long_inputs.query(text), i)
        uses = sum(map(len, built)) if shared else len(built[i])
        query_sequences.append(_sequence(parts, next(keys), owner, i, Role.QUERY, task, uses=uses))
    document_sequences: list[Sequence] = []
    for i, windows in enumerate(built):
        query = query_sequences[request.query_of(i)].key
        first = next(keys)
        for place, parts in enumerate(windows):
            document_sequences.append(
                _sequence(
                    parts,
                    next(keys) if place else first,
                    owner,
                    i if as_one else len(document_sequences),
                    Role.DOCUMENT,
                    task,
                    query=query,
                    document=first if as_one and len(windows) > 1 else None,
                    windows=len(windows) if as_one else 1,
                )
            )
    results = len(built) if as_one else len(document_sequences)
    counts = [1] * len(built) if as_one else [len(windows) for windows in built]
    return Prepared(query_sequences + document_sequences, results, long_inputs.truncated, best_of(counts))


def _sequence(
    parts: Parts, key: int, owner: int, index: int, role: Role, task: str, **links: Any
) -> Sequence:
    return Sequence(
        key, owner, index, role, task, parts.token_ids, parts.type_ids, parts.attended, parts.kept, **links
    )
