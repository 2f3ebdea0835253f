"""litellm, which asks as several vendors' clients do."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the web for a table of prices

import litellm
from plain import ALL, BI_ENCODER, DOCUMENTS, QUERY, RANKING, check_ranking, check_vectors, for_each

_RANKERS = {
    "Cohere": ("cohere/rerank-v3.5", ""),
    "Jina": ("jina_ai/jina-reranker-v2-base-multilingual", ""),
    "Infinity": ("infinity/all-MiniLM-L6-v2", "/infinity"),
    "Hugging Face": ("huggingface/all-MiniLM-L6-v2", ""),
    "Voyage": ("voyage/rerank-2.5", "/v1"),
    "NVIDIA": ("nvidia_nim/all-MiniLM-L6-v2", ""),
    "NVIDIA, by its own route": ("nvidia_nim/ranking/all-MiniLM-L6-v2", ""),
}
# Hugging Face's without a task asks the hub for the model's.
_EMBEDDERS: dict[str, tuple[str, str, dict[str, str]]] = {
    "Cohere": ("cohere/embed-english-v3.0", "/v2/embed", {"input_type": "search_document"}),
    "Jina": ("jina_ai/jina-embeddings-v3", "/v1", {}),
    "Infinity": ("infinity/all-MiniLM-L6-v2", "/infinity", {}),
    "Hugging Face": ("huggingface/all-MiniLM-L6-v2", "", {"input_type": "feature-extraction"}),
    "Voyage": ("voyage/voyage-3.5", "/v1", {}),
    "OpenAI": ("openai/text-embedding-3-small", "/v1", {}),
    "Ollama": ("ollama/all-MiniLM-L6-v2", "", {}),
}


def _check_ranks(ranker: tuple[str, str]) -> None:
    model, path = ranker
    # NVIDIA's answers have logits. For a classifier, /rerank gives their sigmoid.
    for url in RANKING if model.startswith("nvidia_nim/") else ALL:
        asked = {"model": model, "query": QUERY, "documents": list(DOCUMENTS), "top_n": 3}
        answer = litellm.rerank(**asked, api_base=url + path, api_key="none")
        check_ranking(url, [(each["index"], each["relevance_score"]) for each in answer.results], top=3)
        for each in answer.results:
            assert each["document"]["text"] == DOCUMENTS[each["index"]], each


def _check_embeds(embedder: tuple[str, str, dict[str, str]]) -> None:
    model, path, options = embedder
    url = BI_ENCODER + path
    answer = litellm.embedding(model=model, input=list(DOCUMENTS), api_base=url, api_key="none", **options)
    meant = "document" if "search_document" in options.values() else None
    check_vectors([each["embedding"] for each in answer.data], DOCUMENTS, meant)


def ranks_as_each_vendor_does() -> None:
    for_each(_RANKERS, _check_ranks)


def ranks_as_deepinfra_does() -> None:
    """DeepInfra's answers have the scores alone, in the order of the documents."""
    for url in ALL:
        asked = {"model": "deepinfra/all-MiniLM-L6-v2", "query": QUERY, "documents": list(DOCUMENTS)}
        answer = litellm.rerank(**asked, api_base=url + "/v1", api_key="none")
        scores = [(each["index"], each["relevance_score"]) for each in answer.results]
        check_ranking(url, sorted(scores, key=lambda each: -each[1]))


def embeds_as_each_vendor_does() -> None:
    for_each(_EMBEDDERS, _check_embeds)
