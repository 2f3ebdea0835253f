"""Our reranker in LangChain, in the framework's own process."""

import asyncio

from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from plain import BEST, DOCUMENTS, LATE_INTERACTION, QUERY, check_ranking

from maxsimd import SyncEngine
from maxsimd.integrations.langchain import MaxsimdRerank

_OPTIONS = {"dtype": "float32", "threads": 1}


class _All(BaseRetriever):
    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        return [Document(text, metadata={"place": i}) for i, text in enumerate(DOCUMENTS)]


def _check(found: list[Document], top: int) -> None:
    ranking = [(each.metadata["place"], each.metadata["relevance_score"]) for each in found]
    check_ranking(LATE_INTERACTION, ranking, top)


def compresses_what_a_retriever_finds() -> None:
    reranker = MaxsimdRerank(top_n=3, **_OPTIONS)
    retriever = ContextualCompressionRetriever(base_compressor=reranker, base_retriever=_All())
    try:
        _check(retriever.invoke(QUERY), 3)
        _check(asyncio.run(retriever.ainvoke(QUERY)), 3)
    finally:
        reranker.close()


def takes_an_engine_that_runs() -> None:
    with SyncEngine(**_OPTIONS, progress=False) as engine:
        reranker = MaxsimdRerank(engine=engine, top_n=None)
        documents = _All().invoke(QUERY)
        _check(list(reranker.compress_documents(documents, QUERY)), len(DOCUMENTS))
        assert "relevance_score" not in documents[0].metadata
        reranker.close()
        assert engine.rerank(QUERY, DOCUMENTS).results[0].index == BEST


def leaves_out_what_is_below_a_threshold() -> None:
    reranker = MaxsimdRerank(top_n=None, score_threshold=0.5, normalize=True, **_OPTIONS)
    try:
        best = reranker.compress_documents(_All().invoke(QUERY), QUERY)
        assert [each.metadata["place"] for each in best][:1] == [BEST], best
        assert all(0.5 <= each.metadata["relevance_score"] <= 1 for each in best), best
        assert len(best) < len(DOCUMENTS)
        assert list(reranker.compress_documents([], QUERY)) == []
    finally:
        reranker.close()
