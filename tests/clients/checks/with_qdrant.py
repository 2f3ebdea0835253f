"""Qdrant in the process of its client: token vectors, sparse vectors."""

from plain import DOCUMENTS, LATE_INTERACTION, QUERY, check_ranking, post
from qdrant_client import QdrantClient, models


def scores_multivectors_as_rerank_does() -> None:
    def token_vectors(role: str, texts: list[str]) -> list[list[list[float]]]:
        body = {"model": f"all-MiniLM-L6-v2:{role}", "input": texts}
        return [each["embeddings"] for each in post(LATE_INTERACTION, "/v1/multi-vector", body)["data"]]

    matrices, [query] = token_vectors("document", list(DOCUMENTS)), token_vectors("query", [QUERY])
    max_sim = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
    params = models.VectorParams(size=384, distance=models.Distance.DOT, multivector_config=max_sim)
    client = QdrantClient(":memory:")
    client.create_collection("documents", params)
    points = [models.PointStruct(id=i, vector=matrix) for i, matrix in enumerate(matrices)]
    client.upsert("documents", points)
    found = client.query_points("documents", query, limit=len(DOCUMENTS)).points
    check_ranking(LATE_INTERACTION, [(point.id, point.score) for point in found])
