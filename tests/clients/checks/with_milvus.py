"""The requests of a Milvus server that reranks, by its providers vllm and tei."""

from plain import DOCUMENTS, QUERY, RANKING, check_ranking, post


def is_asked_as_its_rankers_ask() -> None:
    texts = list(DOCUMENTS)
    for url in RANKING:
        vllm = post(url, "/rerank", {"query": QUERY, "documents": texts, "truncate_prompt_tokens": 100})
        check_ranking(url, [(each["index"], each["relevance_score"]) for each in vllm["results"]])
        tei = post(url, "/rerank", {"query": QUERY, "texts": texts, "truncate": True, "raw_scores": True})
        check_ranking(url, [(each["index"], each["score"]) for each in tei])
