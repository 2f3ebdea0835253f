"""Voyage's client."""

from functools import partial

import voyageai
from plain import ALL, BI_ENCODER, DOCUMENTS, QUERY, check_ranking, check_vectors, error_of


def ranks() -> None:
    for url in ALL:
        client = voyageai.Client(api_key="none", base_url=url + "/v1")
        answer = client.rerank(QUERY, list(DOCUMENTS), model="rerank-2.5", top_k=3)
        check_ranking(url, [(each.index, each.relevance_score) for each in answer.results], top=3)
        assert [each.document for each in answer.results] == [
            DOCUMENTS[each.index] for each in answer.results
        ]
        assert answer.total_tokens > 0


def sees_what_is_wrong() -> None:
    for url in ALL:
        client = voyageai.Client(api_key="none", base_url=url + "/v1")
        asked = partial(client.rerank, QUERY, list(DOCUMENTS), model="rerank-2.5", top_k=-1)
        assert "top_k" in str(error_of(voyageai.error.InvalidRequestError, asked))


def embeds() -> None:
    client = voyageai.Client(api_key="none", base_url=BI_ENCODER + "/v1")
    answer = client.embed(list(DOCUMENTS), model="voyage-3.5", input_type="document")
    check_vectors(answer.embeddings, DOCUMENTS, "document")
    assert answer.total_tokens > 0
    short = client.embed([QUERY], model="voyage-3.5", input_type="query", output_dimension=64)
    check_vectors(short.embeddings, [QUERY], "query", dimensions=64)
