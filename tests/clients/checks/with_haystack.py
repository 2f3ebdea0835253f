"""Haystack's components for Cohere, Jina and Hugging Face."""

from collections.abc import Callable
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
from plain import ALL, BI_ENCODER, DOCUMENTS, QUERY, check_ranking, check_vectors, for_each

_KEY = Secret.from_token("none")


def _documents() -> list[Document]:
    return [Document(content=text, meta={"place": i}) for i, text in enumerate(DOCUMENTS)]


def _check_ranks(ranker_at: Callable[[str], Any]) -> None:
    for url in ALL:
        best = ranker_at(url).run(query=QUERY, documents=_documents(), top_k=3)["documents"]
        check_ranking(url, [(each.meta["place"], each.score) for each in best], top=3)


def ranks_as_each_vendor_does() -> None:
    jina = {"model": "jina-reranker-v2-base-multilingual", "api_key": _KEY}
    rankers: dict[str, Callable[[str], Any]] = {
        "Cohere": lambda url: CohereRanker(model="rerank-v3.5", api_key=_KEY, api_base_url=url),
        "Jina": lambda url: JinaRanker(base_url=url + "/v1/rerank", **jina),
        "text-embeddings-inference": lambda url: HuggingFaceTEIRanker(url=url),
    }
    for_each(rankers, _check_ranks)


def _check_embeds(embedders: tuple[Any, Any, dict[str, Any], bool]) -> None:
    text_embedder, document_embedder, options, has_types = embedders
    vector = text_embedder(**options).run(text=QUERY)["embedding"]
    check_vectors([vector], [QUERY], "query" if has_types else None)
    embedded = document_embedder(**options).run(documents=_documents())["documents"]
    check_vectors([each.embedding for each in embedded], DOCUMENTS, "document" if has_types else None)


def embeds_as_each_vendor_does() -> None:
    cohere = {"model": "embed-english-v3.0", "api_key": _KEY, "api_base_url": BI_ENCODER}
    jina = {"model": "jina-embeddings-v3", "api_key": _KEY, "base_url": BI_ENCODER + "/v1/embeddings"}
    tei = {"api_type": "text_embeddings_inference", "api_params": {"url": BI_ENCODER}}
    embedders = {
        "Cohere": (CohereTextEmbedder, CohereDocumentEmbedder, cohere, True),
        "Jina": (JinaTextEmbedder, JinaDocumentEmbedder, jina, False),
        "TEI": (HuggingFaceAPITextEmbedder, HuggingFaceAPIDocumentEmbedder, tei, False),
    }
    for_each(embedders, _check_embeds)
