"""Hugging Face's InferenceClient, which asks `/` of the base URL that it is given, or a route behind it."""

from huggingface_hub import InferenceClient
from plain import BI_ENCODER, CROSS_ENCODER, DOCUMENTS, LATE_INTERACTION, QUERY, check_vectors, cosine, post

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
