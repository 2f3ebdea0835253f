"""The package rerankers, which asks whichever vendor's route it is pointed at."""

from plain import CROSS_ENCODER, DOCUMENTS, QUERY, RANKING, check_ranking
from rerankers.models.api_rankers import APIRanker

_PATHS = {
    "cohere": "/v1/rerank",
    "jina": "/v1/rerank",
    "voyage": "/v1/rerank",
    "mixedbread.ai": "/v1/reranking",
    "text-embeddings-inference": "/rerank",
}


def _check(provider: str) -> None:
    for url in (*RANKING, CROSS_ENCODER):
        ranker = APIRanker("all-MiniLM-L6-v2", "none", provider, url=url + _PATHS[provider])
        answer = ranker.rank(QUERY, list(DOCUMENTS), doc_ids=list(range(len(DOCUMENTS))))
        check_ranking(url, [(each.document.doc_id, each.score) for each in answer.results])


def ranks_as_cohere_does() -> None:
    _check("cohere")


def ranks_as_jina_does() -> None:
    _check("jina")


def ranks_as_voyage_does() -> None:
    _check("voyage")


def ranks_as_mixedbread_does() -> None:
    _check("mixedbread.ai")


def ranks_as_text_embeddings_inference_does() -> None:
    _check("text-embeddings-inference")
