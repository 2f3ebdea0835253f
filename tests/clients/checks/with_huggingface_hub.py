"""Hugging Face's InferenceClient, which asks `/` of the base URL that it is given, or a route behind it."""

from huggingface_hub import InferenceClient
from plain import (
    BI_ENCODER,
    CROSS_ENCODER,
    DOCUMENTS,
    LATE_INTERACTION,
    QUERY,
    TOKEN_CLASSIFIER,
    check_vectors,
    cosine,
    post,
)

_URLS = (BI_ENCODER, LATE_INTERACTION)


def extracts_features() -> None:
    for url in (*_URLS, BI_ENCODER + "/embed"):
        client = InferenceClient(base_url=url)
        check_vectors(client.feature_extraction(QUERY, normalize=True, truncate=True).tolist(), [QUERY])
        check_vectors(client.feature_extraction(list(DOCUMENTS)).tolist(), DOCUMENTS)


def extracts_features_with_fewer_dimensions() -> None:
    vectors = InferenceClient(model=BI_ENCODER).feature_extraction(QUERY, dimensions=64)
    check_vectors(vectors.tolist(), [QUERY], dimensions=64)


def tells_how_similar_sentences_are() -> None:
    answer = post(BI_ENCODER, "/v1/embeddings", {"input": [QUERY, *DOCUMENTS]})
    query, *documents = [each["embedding"] for each in answer["data"]]
    for url in (*_URLS, BI_ENCODER + "/similarity"):
        given = InferenceClient(model=url).sentence_similarity(QUERY, list(DOCUMENTS))
        assert len(given) == len(DOCUMENTS), given
        for similarity, document in zip(given, documents, strict=True):
            assert abs(similarity - cosine(query, document)) < 1e-3, given


def classifies_text() -> None:
    client = InferenceClient(model=CROSS_ENCODER + "/predict")
    (plain,) = post(CROSS_ENCODER, "/predict", {"inputs": QUERY})
    (given,) = client.text_classification(QUERY)
    assert given.label == plain["label"]
    assert abs(given.score - plain["score"]) < 1e-6


def finds_entities() -> None:
    for strategy in ("none", "simple", "max"):
        body = {"input": QUERY, "aggregation_strategy": strategy, "ignore_labels": []}
        plain = post(TOKEN_CLASSIFIER, "/v1/token-classify", body)["data"][0]["entities"]
        assert plain, strategy
        for url in (TOKEN_CLASSIFIER, TOKEN_CLASSIFIER + "/predict_tokens"):
            client = InferenceClient(model=url)
            given = client.token_classification(QUERY, aggregation_strategy=strategy, ignore_labels=[])
            assert [
                (each.entity or each.entity_group, each.word, each.start, each.end) for each in given
            ] == [(each["label"], each["word"], each["start"], each["end"]) for each in plain]
    assert InferenceClient(model=TOKEN_CLASSIFIER).token_classification(QUERY)[0].entity_group
