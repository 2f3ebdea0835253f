"""Infinity's client, with the base URL that is for it."""

from infinity_client import Client
from infinity_client.api.default import classify, embeddings, health, models, rerank
from infinity_client.models import ClassifyInput, OpenAIEmbeddingInputText, OpenAIEmbeddingResult, RerankInput
from plain import ALL, BI_ENCODER, CROSS_ENCODER, DOCUMENTS, QUERY, check_ranking, check_vectors, post

_MODEL = "all-MiniLM-L6-v2"


def _client(url: str) -> Client:
    return Client(base_url=f"{url}/infinity", raise_on_unexpected_status=True)


def ranks() -> None:
    for url in ALL:
        texts = {"query": QUERY, "documents": list(DOCUMENTS)}
        body = RerankInput(**texts, model=_MODEL, top_n=3, return_documents=True)
        answer = rerank.sync(client=_client(url), body=body)
        check_ranking(url, [(each.index, each.relevance_score) for each in answer.results], top=3)
        assert all(each.document == DOCUMENTS[each.index] for each in answer.results)


def embeds() -> None:
    body = OpenAIEmbeddingInputText(input_=list(DOCUMENTS), model=_MODEL)
    answer = embeddings.sync(client=_client(BI_ENCODER), body=body)
    assert isinstance(answer, OpenAIEmbeddingResult), answer
    check_vectors([each.embedding for each in answer.data], DOCUMENTS)
    unnamed = embeddings.sync(client=_client(BI_ENCODER), body=OpenAIEmbeddingInputText(input_=QUERY))
    check_vectors([each.embedding for each in unnamed.data], [QUERY])


def classifies() -> None:
    body = ClassifyInput(input_=[QUERY], model=_MODEL)
    answer = classify.sync(client=_client(CROSS_ENCODER), body=body)
    (plain,) = post(CROSS_ENCODER, "/predict", {"inputs": QUERY})
    ((given,),) = answer.data
    assert given.label == plain["label"]
    assert abs(given.score - plain["score"]) < 1e-6


def asks_for_health_and_models() -> None:
    assert health.sync_detailed(client=_client(BI_ENCODER)).status_code == 200
    listed = models.sync(client=_client(BI_ENCODER)).data
    assert _MODEL in [model.id for model in listed], listed
    for model in listed:
        assert model.owned_by == "infinity", model
        assert "results_pending" in model.stats, model
