"""LangChain's package for Cohere, a reranker and embeddings."""

from langchain_cohere import CohereEmbeddings, CohereRerank
from langchain_core.documents import Document
from plain import ALL, BI_ENCODER, DOCUMENTS, QUERY, RANKING, check_ranking, check_vectors


def ranks() -> None:
    for url in ALL:
        reranker = CohereRerank(model="rerank-v3.5", cohere_api_key="none", base_url=url, top_n=3)
        answer = reranker.rerank(list(DOCUMENTS), QUERY)
        check_ranking(url, [(each["index"], each["relevance_score"]) for each in answer], top=3)


def compresses_documents() -> None:
    documents = [Document(text, metadata={"place": i}) for i, text in enumerate(DOCUMENTS)]
    for url in RANKING:
        reranker = CohereRerank(model="rerank-v3.5", cohere_api_key="none", base_url=url, top_n=2)
        best = reranker.compress_documents(documents, QUERY)
        found = [each.metadata for each in best]
        check_ranking(url, [(each["place"], each["relevance_score"]) for each in found], top=2)


def embeds() -> None:
    embeddings = CohereEmbeddings(
        model="embed-english-v3.0", cohere_api_key="none", base_url=BI_ENCODER, user_agent="langchain"
    )
    check_vectors(embeddings.embed_documents(list(DOCUMENTS)), DOCUMENTS, "document")
    check_vectors([embeddings.embed_query(QUERY)], [QUERY], "query")
