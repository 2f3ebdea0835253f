"""LlamaIndex's packages for Cohere, Jina and text-embeddings-inference."""

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference
from plain import BI_ENCODER, CROSS_ENCODER, DOCUMENTS, QUERY, RANKING, check_ranking, check_vectors

_URLS = (*RANKING, CROSS_ENCODER)


def _check(url: str, reranker: BaseNodePostprocessor) -> None:
    nodes = [NodeWithScore(node=TextNode(text=text, id_=str(i))) for i, text in enumerate(DOCUMENTS)]
    best = reranker.postprocess_nodes(nodes, query_str=QUERY)
    check_ranking(url, [(int(each.node.node_id), each.score) for each in best], top=3)


def ranks_as_cohere_does() -> None:
    for url in _URLS:
        _check(url, CohereRerank(model="rerank-v3.5", api_key="none", base_url=url, top_n=3))


def ranks_as_jina_does() -> None:
    for url in _URLS:
        model = "jina-reranker-v2-base-multilingual"
        _check(url, JinaRerank(model=model, api_key="none", base_url=url + "/v1", top_n=3))


def ranks_as_text_embeddings_inference_does() -> None:
    for url in _URLS:
        _check(url, TextEmbeddingInference(base_url=url, top_n=3))


def embeds() -> None:
    model = TextEmbeddingsInference(model_name="all-MiniLM-L6-v2", base_url=BI_ENCODER)
    check_vectors(model.get_text_embedding_batch(list(DOCUMENTS)), DOCUMENTS)
    check_vectors([model.get_query_embedding(QUERY)], [QUERY])
