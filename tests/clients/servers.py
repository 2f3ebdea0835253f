"""The servers that clients ask: real ones on free ports of this machine, always stopped."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maxsimd.bench.checkpoints import save_cross_encoder
from tests.checkpoints import token_classifiers
from tests.clients.page import RAG
from tests.server.conftest import starter

# The models that clients ask for, since some take no other names.
MODELS = (
    "all-MiniLM-L6-v2",
    *("text-embedding-ada-002", "text-embedding-3-small", "rerank-v3.5", "embed-english-v3.0"),
    *("jina-reranker-v2-base-multilingual", "jina-embeddings-v3", "rerank-2.5", "voyage-3.5"),
)
_PLAIN = ("--dtype", "float32", "--threads", "1", "--log-level", "warning")


@contextmanager
def running() -> Iterator[dict[str, str]]:
    """Six servers by the environment variables of their base URLs: three kinds of score, a token classifier,
    the two models of docs/rag.md, and one that lets the key `limited` send 20 requests a minute."""
    names = [part for name in MODELS for part in ("--served-model-name", name)]
    with tempfile.TemporaryDirectory() as temporary, contextmanager(starter)(Path(temporary)) as start:
        cross_encoder = save_cross_encoder(Path(temporary) / "cross-encoder")
        token_classifier = token_classifiers.labeled(Path(temporary) / "token-classifier")
        two = Path(temporary) / "models.yaml"
        two.write_text(RAG.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0])
        keys = Path(temporary) / "keys.txt"
        keys.write_text("limited requests_per_minute=20\n")
        kinds = {
            "LATE_INTERACTION_URL": names,
            "BI_ENCODER_URL": ["--score-type", "bi-encoder", "--batch-dir", f"{temporary}/batches", *names],
            "CROSS_ENCODER_URL": [cross_encoder, *names],
            "TOKEN_CLASSIFIER_URL": [token_classifier, *names], "TWO_MODELS_URL": ["--config", str(two)],
            "LIMITED_URL": ["--api-key-file", str(keys), *names],
        }  # fmt: skip
        yield {kind: start(*options, *_PLAIN, installed=True).url for kind, options in kinds.items()}
