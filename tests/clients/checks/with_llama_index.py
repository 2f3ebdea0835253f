"""LlamaIndex's packages for Cohere, Jina and text-embeddings-inference."""

from collections.abc import Callable

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference
from plain import ALL, BI_ENCODER, DOCUMENTS, QUERY, check_ranking, check_vectors, for_each


def _check(reranker_at: Callable[[str], BaseNodePostprocessor]) -> None:
    nodes = [NodeWithScore(node=TextNode(text=text, id_=str(i))) for i, text in enumerate(DOCUMENTS)]
    for url in ALL:
        best = reranker_at(url).postprocess_nodes(nodes, query_str=QUERY)
        check_ranking(url, [(int(each.node.node_id), each.score) for each in best], top=3)


def ranks_as_each_vendor_does() -> None:
    key = {"api_key": "none", "top_n": 3}
    jina = "jina-reranker-v2-base-multilingual"
    rerankers: dict[str, Callable[[str], BaseNodePostprocessor]] = {
        "Cohere": lambda url: CohereRerank(model="rerank-v3.5", base_url=url, **key),
        "Jina": lambda url: JinaRerank(model=jina, base_url=url + "/v1", **key),
        "text-embeddings-inference": lambda url: TextEmbeddingInference(base_url=url, top_n=3),
    }
    for_each(rerankers, _check)


def embeds() -> None:
    model = TextEmbeddingsInference(model_name="all-MiniLM-L6-v2", base_url=BI_ENCODER)
    check_vectors(model.get_text_embedding_batch(list(DOCUMENTS)), DOCUMENTS)
    check_vectors([model.get_query_embedding(QUERY)], [QUERY])
