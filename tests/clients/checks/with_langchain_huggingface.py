"""LangChain's package for Hugging Face's endpoints."""

from langchain_huggingface import HuggingFaceEndpointEmbeddings
from plain import BI_ENCODER, DOCUMENTS, QUERY, check_vectors


def embeds() -> None:
    embeddings = HuggingFaceEndpointEmbeddings(model=BI_ENCODER, huggingfacehub_api_token="none")
    check_vectors(embeddings.embed_documents(list(DOCUMENTS)), DOCUMENTS)
    check_vectors([embeddings.embed_query(QUERY)], [QUERY])
