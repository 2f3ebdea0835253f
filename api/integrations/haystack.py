"""A ranker for Haystack."""

from dataclasses import replace
from typing import Any

from haystack import Document, component, default_from_dict, default_to_dict

from maxsimd.engine import SyncEngine
from maxsimd.integrations import Ranker


@component
class MaxsimdRanker:
    """Leaves the best `top_k` documents, best first, with the model's scores; with a `score_threshold` only
    those that reach it. `normalize` gives scores from 0 to 1. The values of `meta_fields_to_embed` stand
    before a document's text, a line each.

    It runs a model in this process: an `engine`, or one of `model` and the options of an `EngineConfig`. A
    pipeline that is saved has the model and the options, and so no engine; Haystack loads it again where
    `allowed_modules` of `Pipeline.loads` names this module."""

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: SyncEngine | None = None,
        top_k: int | None = 10,
        score_threshold: float | None = None,
        normalize: bool = False,
        meta_fields_to_embed: list[str] | None = None,
        **options: Any,
    ) -> None:
        self._ranker = Ranker(engine, model, options)
        self._saved = None if engine is not None else {"model": model, **options}
        self.top_k = top_k
        self.score_threshold = score_threshold
        self.normalize = normalize
        self.meta_fields_to_embed = meta_fields_to_embed or []

    def warm_up(self) -> None:
        """Loads the model, unless that is done."""
        self._ranker.start()

    def close(self) -> None:
        """Ends the engine, if it was made here."""
        self._ranker.close()

    def to_dict(self) -> dict[str, Any]:
        if self._saved is None:
            raise ValueError("a ranker with an engine cannot be saved; give it a model and options instead")
        saved: dict[str, Any] = default_to_dict(
            self,
            **self._saved,
            top_k=self.top_k,
            score_threshold=self.score_threshold,
            normalize=self.normalize,
            meta_fields_to_embed=self.meta_fields_to_embed,
        )
        return saved

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "MaxsimdRanker":
        ranker: MaxsimdRanker = default_from_dict(cls, data)
        return ranker

    @component.output_types(documents=list[Document])
    def run(
        self,
        query: str,
        documents: list[Document],
        top_k: int | None = None,
        score_threshold: float | None = None,
    ) -> dict[str, list[Document]]:
        texts = [self._text(document) for document in documents]
        ranked = self._ranker.rank(
            query,
            texts,
            self.top_k if top_k is None else top_k,
            self.score_threshold if score_threshold is None else score_threshold,
            self.normalize,
        )
        return {"documents": [replace(documents[one.index], score=one.score) for one in ranked]}

    def _text(self, document: Document) -> str:
        fields = [document.meta.get(name) for name in self.meta_fields_to_embed]
        return "\n".join([str(field) for field in (*fields, document.content) if field])
