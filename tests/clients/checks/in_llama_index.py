"""Our reranker in LlamaIndex, in the framework's own process."""

import asyncio

from llama_index.core import Settings
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from plain import DOCUMENTS, LATE_INTERACTION, QUERY, check_ranking

from maxsimd import SyncEngine
from maxsimd.integrations.llama_index import MaxsimdRerank

_OPTIONS = {"dtype": "float32", "threads": 1}


class _All(BaseRetriever):
    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=text, id_=str(i))) for i, text in enumerate(DOCUMENTS)]


def _check(nodes: list[NodeWithScore], top: int) -> None:
    check_ranking(LATE_INTERACTION, [(int(each.node.node_id), each.score) for each in nodes], top)


def postprocesses_nodes() -> None:
    reranker = MaxsimdRerank(top_n=3, **_OPTIONS)
    nodes = _All().retrieve(QUERY)
    try:
        _check(reranker.postprocess_nodes(nodes, query_str=QUERY), 3)
        _check(reranker.postprocess_nodes(nodes, query_bundle=QueryBundle(QUERY)), 3)
        _check(asyncio.run(reranker.apostprocess_nodes(nodes, query_str=QUERY)), 3)
        assert reranker.postprocess_nodes([], query_str=QUERY) == []
    finally:
        reranker.close()


def ranks_what_a_query_engine_reads() -> None:
    Settings.llm = MockLLM()
    with SyncEngine(**_OPTIONS, progress=False) as engine:
        reranker = MaxsimdRerank(engine=engine, top_n=2)
        queried = RetrieverQueryEngine.from_args(_All(), node_postprocessors=[reranker]).query(QUERY)
        _check(queried.source_nodes, 2)


def is_told_by_its_name_and_fields() -> None:
    saved = MaxsimdRerank(top_n=2, **_OPTIONS).to_dict()
    assert (saved["class_name"], saved["top_n"]) == ("MaxsimdRerank", 2), saved
