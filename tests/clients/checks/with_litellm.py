"""litellm, which asks as several vendors' clients do."""

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the web for a table of prices

import litellm
from plain import (
    BI_ENCODER,
    CROSS_ENCODER,
    DOCUMENTS,
    QUERY,
    RANKING,
    check_ranking,
    check_vectors,
)


def _check_ranks(model: str, path: str = "") -> None:
    for url in (*RANKING, CROSS_ENCODER):
        answer = litellm.rerank(
            model=model,
            query=QUERY,
            documents=list(DOCUMENTS),
            top_n=3,
            api_base=url + path,
            api_key="none",
        )
        check_ranking(url, [(each["index"], each["relevance_score"]) for each in answer.results], top=3)
        for each in answer.results:
            assert each["document"]["text"] == DOCUMENTS[each["index"]], each


def _check_embeds(model: str, path: str = "", meant: str | None = None, **options: Any) -> None:
    answer = litellm.embedding(
        model=model, input=list(DOCUMENTS), api_base=BI_ENCODER + path, api_key="none", **options
    )
    check_vectors([each["embedding"] for each in answer.data], DOCUMENTS, meant)


def ranks_as_cohere_does() -> None:
    _check_ranks("cohere/rerank-v3.5")


def ranks_as_jina_does() -> None:
    _check_ranks("jina_ai/jina-reranker-v2-base-multilingual")


def ranks_as_infinity_does() -> None:
    _check_ranks("infinity/all-MiniLM-L6-v2", "/infinity")


def ranks_as_hugging_face_does() -> None:
    _check_ranks("huggingface/all-MiniLM-L6-v2")


def ranks_as_voyage_does() -> None:
    _check_ranks("voyage/rerank-2.5", "/v1")


def embeds_as_cohere_does() -> None:
    _check_embeds("cohere/embed-english-v3.0", "/v2/embed", "document", input_type="search_document")


def embeds_as_jina_does() -> None:
    _check_embeds("jina_ai/jina-embeddings-v3", "/v1")


def embeds_as_infinity_does() -> None:
    _check_embeds("infinity/all-MiniLM-L6-v2", "/infinity")


def embeds_as_hugging_face_does() -> None:
    # Without a task it asks the hub for the model's.
    _check_embeds("huggingface/all-MiniLM-L6-v2", input_type="feature-extraction")


def embeds_as_voyage_does() -> None:
    _check_embeds("voyage/voyage-3.5", "/v1")


def embeds_as_openai_does() -> None:
    _check_embeds("openai/text-embedding-3-small", "/v1")
