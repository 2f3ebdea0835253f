"""Cohere's client, in both versions of its interface."""

import base64
import struct
from functools import partial
from typing import Any

import cohere
from plain import ALL, BI_ENCODER, DOCUMENTS, QUERY, check_ranking, check_vectors, error_of

_RERANKER, _EMBEDDER = "rerank-v3.5", "embed-english-v3.0"


def _client_1(url: str) -> Any:
    return cohere.Client(api_key="none", base_url=url)


def _client_2(url: str) -> Any:
    return cohere.ClientV2(api_key="none", base_url=url)


def ranks_in_the_first_version() -> None:
    for url in ALL:
        answer = _client_1(url).rerank(
            model=_RERANKER, query=QUERY, documents=DOCUMENTS, top_n=3, return_documents=True
        )
        check_ranking(url, [(each.index, each.relevance_score) for each in answer.results], top=3)
        assert all(each.document.text == DOCUMENTS[each.index] for each in answer.results)


def ranks_in_the_second_version() -> None:
    for url in ALL:
        answer = _client_2(url).rerank(model=_RERANKER, query=QUERY, documents=list(DOCUMENTS), top_n=3)
        check_ranking(url, [(each.index, each.relevance_score) for each in answer.results], top=3)
        assert answer.meta.billed_units.search_units == 1


def embeds_in_the_first_version() -> None:
    answer = _client_1(BI_ENCODER).embed(texts=DOCUMENTS, model=_EMBEDDER, input_type="search_document")
    check_vectors(answer.embeddings, DOCUMENTS, "document")
    typed = _client_1(BI_ENCODER).embed(
        texts=[QUERY], model=_EMBEDDER, input_type="search_query", embedding_types=["float"]
    )
    check_vectors(typed.embeddings.float_, [QUERY], "query")


def embeds_in_the_second_version() -> None:
    asked = {"texts": list(DOCUMENTS), "model": _EMBEDDER, "input_type": "search_document"}
    answer = _client_2(BI_ENCODER).embed(**asked, embedding_types=["float", "base64", "ubinary"])
    check_vectors(answer.embeddings.float_, DOCUMENTS, "document")
    check_vectors([_numbers(each) for each in answer.embeddings.base64], DOCUMENTS, "document")
    vector = answer.embeddings.float_[0]
    bits = [byte >> (7 - i) & 1 for byte in answer.embeddings.ubinary[0] for i in range(8)]
    assert bits == [int(number > 0) for number in vector]
    assert answer.texts == list(DOCUMENTS)


def is_told_of_a_model_that_is_not_there() -> None:
    for client in (_client_1(BI_ENCODER), _client_2(BI_ENCODER)):
        asked = partial(client.rerank, model="no-such-model", query=QUERY, documents=list(DOCUMENTS))
        error = error_of(cohere.NotFoundError, asked)
        assert "no-such-model" in str(error), error


def _numbers(encoded: str) -> list[float]:
    data = base64.b64decode(encoded)
    return list(struct.unpack(f"<{len(data) // 4}f", data))
