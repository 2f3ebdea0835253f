"""Loaded by schemathesis: fills in what no schema says, and raises short timeouts, which end in a 504."""

from typing import Any

import schemathesis
from plain import DOCUMENTS, QUERY

_SECONDS = 60
# The fields with texts that each route cannot do without, though its schema leaves them open.
_TEXTS = {
    "rerank": {"query": QUERY, "documents": list(DOCUMENTS)},
    "score": {"queries": QUERY, "documents": list(DOCUMENTS)}, "embed": {"texts": list(DOCUMENTS)},
    "embeddings": {"input": list(DOCUMENTS)}, "multi-vector": {"input": list(DOCUMENTS)},
    "pooling": {"input": QUERY}, "reranking": {"query": QUERY, "input": list(DOCUMENTS)},
    "ranking": {"query": QUERY, "passages": list(DOCUMENTS)}, "tokenize": {"text": QUERY},
}  # fmt: skip
_MODEL = "all-MiniLM-L6-v2"


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    body = case.body
    if not isinstance(body, dict):
        return
    timeout = body.get("timeout")
    if isinstance(timeout, int | float) and 0 < timeout < _SECONDS:
        body["timeout"] = _SECONDS
    # The others stay as they are, so that these forms are tested too.
    if len(str(body)) % 2 and case.meta.generation.mode.is_positive:
        texts = _TEXTS.get(case.path.rpartition("/")[2], {})
        if not {"texts", "messages"} & {name for name, value in body.items() if value is not None}:
            body.update(texts)
        if isinstance(body.get("model"), str):
            body["model"] = _MODEL
