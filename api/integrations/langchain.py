"""A document compressor for LangChain."""

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, PrivateAttr

from maxsimd.engine import SyncEngine
from maxsimd.integrations import Ranker


class MaxsimdRerank(BaseDocumentCompressor):
    """Leaves the best `top_n` documents, best first, with their scores in the metadata `relevance_score`;
    with a `score_threshold` only those that reach it. `normalize` gives scores from 0 to 1.

    It runs a model in this process: an `engine`, or one of `model` and the options of an `EngineConfig`."""

    model_config = ConfigDict(extra="forbid")

    top_n: int | None = 3
    score_threshold: float | None = None
    normalize: bool = False
    _ranker: Ranker = PrivateAttr()

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: SyncEngine | None = None,
        top_n: int | None = 3,
        score_threshold: float | None = None,
        normalize: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(top_n=top_n, score_threshold=score_threshold, normalize=normalize)
        self._ranker = Ranker(engine, model, options)

    def close(self) -> None:
        """Ends the engine, if it was made here."""
        self._ranker.close()

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        texts = [document.page_content for document in documents]
        ranked = self._ranker.rank(query, texts, self.top_n, self.score_threshold, self.normalize)
        best = []
        for one in ranked:
            # Copies, so that those that were given stay as they are.
            document = documents[one.index].model_copy()
            document.metadata = {**document.metadata, "relevance_score": one.score}
            best.append(document)
        return best
