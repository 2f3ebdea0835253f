"""A node postprocessor for LlamaIndex."""

from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle

from maxsimd.engine import SyncEngine
from maxsimd.integrations import Ranker


class MaxsimdRerank(BaseNodePostprocessor):
    """Leaves the best `top_n` nodes, best first, with the model's scores; with a `score_threshold` only those
    that reach it. `normalize` gives scores from 0 to 1. Nodes are read as they are embedded.

    It runs a model in this process: an `engine`, or one of `model` and the options of an `EngineConfig`."""

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

    @classmethod
    def class_name(cls) -> str:
        return "MaxsimdRerank"

    def close(self) -> None:
        """Ends the engine, if it was made here."""
        self._ranker.close()

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise ValueError("there is no query; give query_str or query_bundle")
        texts = [node.node.get_content(metadata_mode=MetadataMode.EMBED) for node in nodes]
        ranked = self._ranker.rank(
            query_bundle.query_str, texts, self.top_n, self.score_threshold, self.normalize
        )
        return [NodeWithScore(node=nodes[one.index].node, score=one.score) for one in ranked]
