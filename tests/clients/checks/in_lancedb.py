"""LanceDB with the reranker that runs in its process."""

import tempfile

import lancedb
from lancedb.index import FTS
from plain import BEST, DOCUMENTS, LATE_INTERACTION, QUERY, check_ranking

from maxsimd import SyncEngine
from maxsimd.integrations.lancedb import MaxsimdReranker


def reranks_vector_full_text_and_hybrid_searches() -> None:
    with SyncEngine(score_type="bi-encoder", dtype="float32") as engine:
        *vectors, query = engine.embed([*DOCUMENTS, QUERY]).embeddings
    rows = [{"id": i, "text": text, "vector": vectors[i]} for i, text in enumerate(DOCUMENTS)]
    with tempfile.TemporaryDirectory() as folder, SyncEngine(dtype="float32") as ranking:
        reranker = MaxsimdReranker(engine=ranking)
        table = lancedb.connect(folder).create_table("documents", rows)
        table.create_index("text", config=FTS())
        by_vector = table.search(query).rerank(reranker, QUERY).to_list()
        check_ranking(LATE_INTERACTION, [(row["id"], row["_relevance_score"]) for row in by_vector])
        by_words = table.search("file", query_type="fts").rerank(reranker).to_list()
        assert [row["id"] for row in by_words] == [BEST]
        hybrid = table.search(query_type="hybrid").vector(query).text(QUERY)
        found = hybrid.rerank(reranker).to_list()
        assert found[0]["id"] == BEST
        assert not {"_score", "_distance"} & found[0].keys()
        hybrid = table.search(query_type="hybrid").vector(query).text(QUERY)
        [row] = hybrid.rerank(MaxsimdReranker(engine=ranking, top_n=1, return_score="all")).to_list()
        assert row["_score"] > 0
        assert table.search("zebra", query_type="fts").rerank(reranker).to_list() == []
