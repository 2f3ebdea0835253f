"""A document compressor for LangChain."""

import asyncio
from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, PrivateAttr

from maxsimd.engine import SyncEngine
from maxsimd.integrations import Place, Ranker


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
        return _best(documents, self._ranker.rank(query, texts, *self._options))

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        texts = [document.page_content for document in documents]
        return _best(documents, await asyncio.to_thread(self._ranker.rank, query, texts, *self._options))

    @property
    def _options(self) -> tuple[int | None, float | None, bool]:
        return self.top_n, self.score_threshold, self.normalize


def _best(documents: Sequence[Document], places: list[Place]) -> list[Document]:
    """Copies, so that those that were given stay as they are."""
    best = []
    for place in places:
        document = documents[place.index].model_copy()
        document.metadata = {**document.metadata, "relevance_score": place.score}
        best.append(document)
    return best
