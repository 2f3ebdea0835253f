"""Haystack's components for Cohere, Jina and Hugging Face."""

from typing import Any

from haystack import Document
from haystack.utils import Secret
from haystack_integrations.components.embedders.cohere import CohereDocumentEmbedder, CohereTextEmbedder
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceAPIDocumentEmbedder,
    HuggingFaceAPITextEmbedder,
)
from haystack_integrations.components.embedders.jina import JinaDocumentEmbedder, JinaTextEmbedder
from haystack_integrations.components.rankers.cohere import CohereRanker
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker
from haystack_integrations.components.rankers.jina import JinaRanker
from plain import BI_ENCODER, CROSS_ENCODER, DOCUMENTS, QUERY, RANKING, check_ranking, check_vectors

_KEY = Secret.from_token("none")
_URLS = (*RANKING, CROSS_ENCODER)


def _documents() -> list[Document]:
    return [Document(content=text, meta={"place": i}) for i, text in enumerate(DOCUMENTS)]


def _check_ranks(url: str, ranker: Any) -> None:
    best = ranker.run(query=QUERY, documents=_documents(), top_k=3)["documents"]
    check_ranking(url, [(each.meta["place"], each.score) for each in best], top=3)


def _check_embeds(text_embedder: Any, document_embedder: Any, meant: tuple[str | None, str | None]) -> None:
    check_vectors([text_embedder.run(text=QUERY)["embedding"]], [QUERY], meant[0])
    embedded = document_embedder.run(documents=_documents())["documents"]
    check_vectors([each.embedding for each in embedded], DOCUMENTS, meant[1])


def ranks_as_cohere_does() -> None:
    for url in _URLS:
        _check_ranks(url, CohereRanker(model="rerank-v3.5", api_key=_KEY, api_base_url=url))


def ranks_as_jina_does() -> None:
    model = "jina-reranker-v2-base-multilingual"
    for url in _URLS:
        _check_ranks(url, JinaRanker(model=model, api_key=_KEY, base_url=url + "/v1/rerank"))


def ranks_as_text_embeddings_inference_does() -> None:
    for url in _URLS:
        _check_ranks(url, HuggingFaceTEIRanker(url=url))


def embeds_as_cohere_does() -> None:
    options = {"model": "embed-english-v3.0", "api_key": _KEY, "api_base_url": BI_ENCODER}
    _check_embeds(CohereTextEmbedder(**options), CohereDocumentEmbedder(**options), ("query", "document"))


def embeds_as_jina_does() -> None:
    options = {"model": "jina-embeddings-v3", "api_key": _KEY, "base_url": BI_ENCODER + "/v1/embeddings"}
    _check_embeds(JinaTextEmbedder(**options), JinaDocumentEmbedder(**options), (None, None))


def embeds_as_text_embeddings_inference_does() -> None:
    options = {"api_type": "text_embeddings_inference", "api_params": {"url": BI_ENCODER}}
    _check_embeds(
        HuggingFaceAPITextEmbedder(**options), HuggingFaceAPIDocumentEmbedder(**options), (None, None)
    )
