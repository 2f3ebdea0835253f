"""The package rerankers, which asks whichever vendor's route it is pointed at."""

from plain import ALL, DOCUMENTS, QUERY, check_ranking, for_each
from rerankers.models.api_rankers import APIRanker

_PATHS = {
    "cohere": "/v1/rerank", "jina": "/v1/rerank", "voyage": "/v1/rerank", "mixedbread.ai": "/v1/reranking",
    "text-embeddings-inference": "/rerank",
}  # fmt: skip


def _check(provider: str) -> None:
    for url in ALL:
        ranker = APIRanker("all-MiniLM-L6-v2", "none", provider, url=url + _PATHS[provider])
        answer = ranker.rank(QUERY, list(DOCUMENTS), doc_ids=list(range(len(DOCUMENTS))))
        check_ranking(url, [(each.document.doc_id, each.score) for each in answer.results])


def ranks_as_each_vendor_does() -> None:
    for_each({name: name for name in _PATHS}, _check)
