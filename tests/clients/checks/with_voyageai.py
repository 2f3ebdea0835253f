"""Voyage's client."""

import os
from functools import partial

import voyageai
from plain import ALL, BI_ENCODER, DOCUMENTS, QUERY, check_ranking, check_vectors, error_of


def ranks() -> None:
    for url in ALL:
        client = voyageai.Client(api_key="none", base_url=url + "/v1")
        answer = client.rerank(QUERY, list(DOCUMENTS), model="rerank-2.5", top_k=3)
        check_ranking(url, [(each.index, each.relevance_score) for each in answer.results], top=3)
        assert all(each.document == DOCUMENTS[each.index] for each in answer.results)
        assert answer.total_tokens > 0


def sees_what_is_wrong() -> None:
    for url in ALL:
        client = voyageai.Client(api_key="none", base_url=url + "/v1")
        asked = partial(client.rerank, QUERY, list(DOCUMENTS), model="rerank-2.5", top_k=-1)
        assert "top_k" in str(error_of(voyageai.error.InvalidRequestError, asked))


def tries_again_after_a_429() -> None:
    def client(retries: int) -> voyageai.Client:
        url = os.environ["LIMITED_URL"] + "/v1"
        return voyageai.Client(api_key="limited", base_url=url, max_retries=retries)

    def asked(retries: int) -> object:
        return client(retries).rerank(QUERY, list(DOCUMENTS), model="rerank-2.5")

    for _ in range(20):
        asked(0)
    assert "20 requests" in str(error_of(voyageai.error.RateLimitError, partial(asked, 0)))
    # The next request may come after three seconds.
    assert asked(5)


def embeds() -> None:
    client = voyageai.Client(api_key="none", base_url=BI_ENCODER + "/v1")
    answer = client.embed(list(DOCUMENTS), model="voyage-3.5", input_type="document")
    check_vectors(answer.embeddings, DOCUMENTS, "document")
    parts = client.multimodal_embed([[text] for text in DOCUMENTS], "voyage-3.5", "document")
    check_vectors(parts.embeddings, DOCUMENTS, "document")
    assert parts.total_tokens == parts.text_tokens == answer.total_tokens > 0
    short = client.embed([QUERY], model="voyage-3.5", input_type="query", output_dimension=64)
    check_vectors(short.embeddings, [QUERY], "query", dimensions=64)
