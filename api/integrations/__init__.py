"""Rerankers for frameworks, each in a module that needs its framework: `maxsimd.integrations.haystack`..."""

import threading
from collections.abc import Sequence
from typing import Any

from maxsimd.engine import RankedDocument, SyncEngine


class Ranker:
    """Ranks texts by a given engine, or by one of its own, started on first use and ended by `close`."""

    def __init__(self, engine: SyncEngine | None, model: str | None, options: dict[str, Any]) -> None:
        if engine is not None and (model is not None or options):
            raise TypeError("give an engine, or a model and its options, not both")
        self._is_own = engine is None
        self._engine = SyncEngine(model, progress=False, **options) if engine is None else engine
        self._is_started = not self._is_own
        # Frameworks rank in several threads.
        self._change = threading.Lock()

    def start(self) -> None:
        with self._change:
            if not self._is_started:
                self._engine.start()
                self._is_started = True

    def close(self) -> None:
        """Ends an engine of its own."""
        with self._change:
            if self._is_own and self._is_started:
                self._engine.close()
                self._is_started = False

    def rank(
        self, query: str, texts: Sequence[str], top_n: int | None, least: float | None, normalize: bool
    ) -> Sequence[RankedDocument]:
        """The best `top_n` texts (None: all) that reach the `least` score, best first."""
        if not texts:
            return []
        self.start()
        return self._engine.rerank(
            query, texts, top_n=top_n, score_threshold=least, normalize=normalize
        ).results
