"""A reranker for LanceDB."""

from typing import Any

import pyarrow as pa
from lancedb.rerankers import Reranker

from maxsimd.engine import SyncEngine
from maxsimd.integrations import Ranker


class MaxsimdReranker(Reranker):
    """Orders the rows of a search by the texts in `column`, best first: the best `top_n` rows, with a
    `score_threshold` only those that reach it. Rows without a text are scored as empty ones. The model's
    scores are in the new column `_relevance_score`, from 0 to 1 with `normalize`. `return_score="all"` keeps
    the scores of the search, too.

    It runs a model in this process: an `engine`, or one of `model` and the options of an `EngineConfig`."""

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: SyncEngine | None = None,
        column: str = "text",
        top_n: int | None = None,
        score_threshold: float | None = None,
        normalize: bool = False,
        return_score: str = "relevance",
        **options: Any,
    ) -> None:
        super().__init__(return_score)
        self.column, self.top_n, self.score_threshold = column, top_n, score_threshold
        self.normalize = normalize
        self._ranker = Ranker(engine, model, options)

    def close(self) -> None:
        """Ends the engine, if it was made here."""
        self._ranker.close()

    def rerank_vector(self, query: str, vector_results: pa.Table) -> pa.Table:
        return self._ranked(query, vector_results)

    def rerank_fts(self, query: str, fts_results: pa.Table) -> pa.Table:
        return self._ranked(query, fts_results)

    def rerank_hybrid(self, query: str, vector_results: pa.Table, fts_results: pa.Table) -> pa.Table:
        merge = self._merge_and_keep_scores if self.score == "all" else self.merge_results
        return self._ranked(query, merge(vector_results, fts_results))

    def _ranked(self, query: str, rows: pa.Table) -> pa.Table:
        if self.column not in rows.column_names:
            raise ValueError(f"there is no column {self.column!r}; name the one with the texts as `column`")
        texts = [text or "" for text in rows[self.column].to_pylist()]
        best = self._ranker.rank(query, texts, self.top_n, self.score_threshold, self.normalize)
        rows = rows.take(pa.array([one.index for one in best], pa.int64()))
        scores = pa.array([one.score for one in best], pa.float32())
        return self._keep_relevance_score(rows.append_column("_relevance_score", scores))
