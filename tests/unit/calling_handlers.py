"""A request for each route, a real engine that records its calls, and a caller of `handle`."""

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from maxsimd.api.answer import Answer
from maxsimd.api.config import ServerConfig
from maxsimd.api.handlers import handle
from maxsimd.api.state import ServerState
from maxsimd.engine import Engine, EngineConfig
from maxsimd.engine.metrics import EngineMetrics

_SCORES = {"queries": "q", "documents": ["d"]}
_RERANKS = {"query": "q", "documents": ["d"]}
_PASSAGES = {"query": {"text": "q"}, "passages": [{"text": "d"}]}
_LABELS = {"query": "q", "items": ["d"], "label_token_ids": [1, 2]}
GOOD: dict[tuple[str, str], Any] = {
    **{("POST", path): _SCORES for path in ("/score", "/v1/score")},
    **{("POST", path): _RERANKS for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/invocations")},
    **{("POST", path): _RERANKS for path in ("/infinity/rerank", "/infinity/v1/rerank")},
    **{("POST", path): {"documents": ["d"]} for path in ("/documents", "/v1/documents")},
    ("POST", "/v1/reranking"): {"query": "q", "input": ["d"]},
    ("POST", "/reranking"): _RERANKS,
    ("POST", "/v1/ranking"): _PASSAGES,
    ("POST", "/v1/retrieval/all-MiniLM-L6-v2/reranking"): _PASSAGES,
    ("POST", "/v1/inference/all-MiniLM-L6-v2"): _SCORES,
    **{("POST", path): {"input": "d"} for path in ("/v1/embeddings", "/embeddings", "/v1/multi-vector")},
    **{("POST", path): {"input": "d"} for path in ("/pooling", "/classify", "/api/embed")},
    **{("POST", path): _LABELS for path in ("/label-scores", "/v1/label-scores", "/generative_scoring")},
    **{("POST", path): {"input": "d"} for path in ("/v1/token-classify", "/token-classify")},
    ("POST", "/predict_tokens"): {"inputs": "d"},
    **{("POST", url): {"inputs": "d"} for url in ("/", "/embed", "/embed_all", "/embed_sparse", "/predict")},
    ("POST", "/tokenize"): {"text": "d"},
    ("POST", "/detokenize"): {"tokens": [101]},
    ("POST", "/decode"): {"ids": [101]},
    ("POST", "/similarity"): {"inputs": {"source_sentence": "d", "sentences": ["e"]}},
    **{("POST", path): {"texts": ["d"]} for path in ("/v1/embed", "/v2/embed")},
    ("POST", "/v1/multimodalembeddings"): {"inputs": [{"content": [{"type": "text", "text": "d"}]}]},
    **{("GET", path): None for path in ("/", "/docs", "/health", "/ready", "/ping", "/info", "/version")},
    ("GET", "/api/version"): None,
    **{("GET", path): None for path in ("/models", "/v1/models", "/infinity/models", "/infinity/v1/models")},
    **{("GET", path): None for path in ("/metrics", "/openapi.json", "/usage", "/usage.csv")},
    ("DELETE", "/cache"): None,
}
POSTED = sorted(path for method, path in GOOD if method == "POST")
# The default model is no classifier, of texts or tokens, no language model, and gives no sparse vectors.
REFUSING = {"/classify", "/predict", "/embed_sparse"}
REFUSING |= {"/label-scores", "/v1/label-scores", "/generative_scoring"}
REFUSING |= {"/v1/token-classify", "/token-classify", "/predict_tokens"}
RERANK = GOOD["POST", "/rerank"]
HEAVY = {"query": "q", "documents": [f"{i} " + "word " * 240 for i in range(200)]}


def expected(path: str) -> int:
    return 400 if path in REFUSING else 200


def error_of(answer: Answer) -> Any:
    return json.loads(answer.body)["error"]


def _recorded(name: str) -> Any:
    async def method(engine: "RecordingEngine", *texts: Any, **options: Any) -> Any:
        engine.calls.append((name, texts, options))
        return await getattr(Engine, name)(engine, *texts, **options)

    return method


class RecordingEngine(Engine):
    """The real engine; it also remembers how its methods were called, and what ran in its thread pool."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        super().__init__(config)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.in_threads = 0
        self._own_metrics = self.metrics

    @property
    def queued_tokens(self) -> float:
        return self._own_metrics.registry.get_sample_value("maxsimd_queue_tokens") or 0.0

    @property
    def cancelled(self) -> float:
        return self._own_metrics.registry.get_sample_value("maxsimd_cancelled_requests_total") or 0.0

    score, rerank, classify = _recorded("score"), _recorded("rerank"), _recorded("classify")
    embed, embed_tokens = _recorded("embed"), _recorded("embed_tokens")
    add_documents, label_scores = _recorded("add_documents"), _recorded("label_scores")
    token_classify = _recorded("token_classify")

    async def in_thread(self, function: Any, size: int) -> Any:
        self.in_threads += 1
        return await super().in_thread(function, size)


class Caller:
    """Asks the handlers as an adapter would. Each has a server state, metrics and call record of its own."""

    def __init__(self, engine: RecordingEngine, **options: Any) -> None:
        engine.metrics = EngineMetrics()
        engine.calls.clear()
        engine.in_threads = 0
        self.engine = engine
        self.state = ServerState(engine, ServerConfig(**options))

    async def ask(self, method: str, path: str, body: Any = b"", headers: Any = None) -> Answer:
        """`body` as it is where it is bytes or a list of pieces, else as JSON."""
        if not isinstance(body, bytes | Pieces):
            body = json.dumps(body).encode()
        pieces = body if isinstance(body, Pieces) else Pieces([body])
        return await handle(self.state, method, path, headers or {}, pieces)

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        return await self.ask("POST", path, body, headers)

    async def json(self, path: str, body: Any) -> Any:
        answer = await self.post(path, body)
        assert answer.status == 200, answer.body
        return json.loads(answer.body)

    async def error(self, path: str, body: Any) -> tuple[int, Any]:
        answer = await self.post(path, body)
        assert answer.status >= 400, answer.body
        return answer.status, json.loads(answer.body)["error"]

    async def refused(self, path: str, body: Any, code: int, param: str | None = None, says: str = "") -> Any:
        """The error of a request that must get this status, be about this field, and say that."""
        found, error = await self.error(path, body)
        assert (found, says in error["message"]) == (code, True), (path, body, error)
        assert param in (None, error["param"]), (path, body, error)
        return error

    def metric(self, name: str, **labels: str) -> float | None:
        return self.engine.metrics.registry.get_sample_value(name, labels)


class Pieces:
    """A body that arrives in pieces; `read` counts those that were taken."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = list(pieces)
        self.read = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            self.read += 1
            yield piece
