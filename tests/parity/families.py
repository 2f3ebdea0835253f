"""The families of models that are proven: how each is published, how a small one is built, and by what its
scores are checked. The table in docs/models.md is generated from this list."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from maxsimd.engine.checkpoint.embedded import embedded_model_path
from tests.checkpoints import (
    bi_encoders,
    cross_encoders,
    language_models,
    late_interaction,
    sparse_encoders,
)
from tests.parity import references

Reference = Callable[[str, Sequence[str], Sequence[str]], references.Scores]

LATE, CROSS, BI, SPARSE = "late-interaction", "cross-encoder", "bi-encoder", "sparse"
HYBRID = "hybrid"


@dataclass(frozen=True, eq=False)
class Family:
    """`settings` are what a user would give on the command line beside the model; `packed` is how the engine
    is expected to run it; `weights` tells where the reference finds the same weights in its own terms, for
    checkpoints with code of their own."""

    name: str
    kind: str
    published: str
    format: str
    build: Callable[[Path], str]
    reference: Reference
    settings: dict[str, Any] = field(default_factory=dict)
    packed: bool = True
    causal: bool = False
    weights: Callable[[str], str] = str


def _embedded(folder: Path) -> str:
    return embedded_model_path()


_E5 = {"query_prompt": "query: ", "document_prompt": "passage: "}
_FOR_CLASSIFICATION = "*ForSequenceClassification"
_SAVE = "sentence-transformers"
_M3 = "FlagEmbedding's two layers beside it, --allow-pickle"
_PICKLED = {"allow_pickle": True}
_SPARSE_SAVE = f"{_SAVE}, SparseEncoder"

FAMILIES = [
    Family("ColBERT", LATE, "colbert-ir/colbertv2.0", "Stanford ColBERT", late_interaction.stanford,
           references.multi_vector),
    Family("ColBERT, attended expansion", LATE, "attend_to_mask_tokens", "Stanford ColBERT",
           partial(late_interaction.stanford, attend=True), references.multi_vector),
    Family("answerai-colbert-small", LATE, "answerdotai/answerai-colbert-small-v1", "Stanford ColBERT",
           late_interaction.answerai, references.multi_vector),
    Family("GTE-ModernColBERT", LATE, "lightonai/GTE-ModernColBERT-v1", "PyLate without model_type",
           late_interaction.pylate_modernbert, references.multi_vector),
    Family("LateOn", LATE, "lightonai/LateOn", "PyLate with model_type ColBERT",
           late_interaction.pylate_v3_modernbert, references.multi_vector),
    Family("jina-colbert-v2", LATE, "jinaai/jina-colbert-v2", "Stanford ColBERT, code of its own",
           late_interaction.jina_colbert_v2, references.multi_vector,
           weights=lambda path: str(Path(path) / "saved")),
    Family("native multi-vector", LATE, "MultiVectorEncoder saves", _SAVE, late_interaction.native,
           references.multi_vector),
    Family("native multi-vector, token pooling", LATE, "MultiVectorEncoder saves", _SAVE,
           late_interaction.pooled, references.multi_vector),
    Family("any encoder", LATE, "sentence-transformers/all-MiniLM-L6-v2", _SAVE, _embedded,
           references.plain_encoder, {"score_type": LATE}),

    Family("BERT", CROSS, "cross-encoder/ms-marco-MiniLM-L6-v2", _FOR_CLASSIFICATION,
           cross_encoders.ms_marco_minilm, references.cross_encoder),
    Family("RoBERTa", CROSS, "cross-encoder/stsb-roberta-base", _FOR_CLASSIFICATION, cross_encoders.roberta,
           references.cross_encoder),
    Family("XLM-RoBERTa", CROSS, "BAAI/bge-reranker-v2-m3", _FOR_CLASSIFICATION, cross_encoders.xlm_roberta,
           references.cross_encoder),
    Family("ELECTRA", CROSS, "cross-encoder/ms-marco-electra-base", _FOR_CLASSIFICATION,
           cross_encoders.electra, references.cross_encoder),
    Family("DistilBERT", CROSS, "distilbert rerankers", _FOR_CLASSIFICATION, cross_encoders.distilbert,
           references.cross_encoder),
    Family("ModernBERT", CROSS, "Alibaba-NLP/gte-reranker-modernbert-base", _FOR_CLASSIFICATION,
           cross_encoders.modernbert, references.cross_encoder),
    Family("DeBERTa-v2", CROSS, "mixedbread-ai/mxbai-rerank-base-v1", _FOR_CLASSIFICATION,
           cross_encoders.deberta_v2, references.cross_encoder, packed=False),
    Family("Qwen2", CROSS, "Qwen2ForSequenceClassification", _FOR_CLASSIFICATION, cross_encoders.qwen2,
           references.cross_encoder, causal=True),
    Family("Qwen3", CROSS, "tomaarsen/Qwen3-Reranker-0.6B-seq-cls", _FOR_CLASSIFICATION, cross_encoders.qwen3,
           references.cross_encoder, causal=True),
    Family("Llama", CROSS, "LlamaForSequenceClassification", _FOR_CLASSIFICATION, cross_encoders.llama,
           references.cross_encoder, causal=True),
    Family("Gemma", CROSS, "GemmaForSequenceClassification", _FOR_CLASSIFICATION, cross_encoders.gemma,
           references.cross_encoder, causal=True),
    Family("Qwen3-Reranker", CROSS, "Qwen/Qwen3-Reranker-0.6B", "Qwen3ForCausalLM",
           language_models.qwen3_reranker, references.qwen3_reranker, causal=True),
    Family("mxbai-rerank-v2", CROSS, "mixedbread-ai/mxbai-rerank-base-v2", "Qwen2ForCausalLM",
           language_models.mxbai_rerank_v2, references.mxbai_rerank_v2, causal=True),
    Family("bge-reranker-v2-gemma", CROSS, "BAAI/bge-reranker-v2-gemma", "GemmaForCausalLM",
           language_models.bge_reranker_v2_gemma, references.bge_reranker_v2_gemma, causal=True),
    Family("LogitScore", CROSS, "zeroentropy/zerank-2", f"{_SAVE}, LogitScore", language_models.zerank_2,
           references.cross_encoder, causal=True),

    Family("MiniLM", BI, "sentence-transformers/all-MiniLM-L6-v2", _SAVE, _embedded, references.bi_encoder,
           {"score_type": BI}),
    Family("BGE", BI, "BAAI/bge-base-en-v1.5", _SAVE, bi_encoders.bge, references.bi_encoder),
    Family("E5", BI, "intfloat/e5-base-v2", _SAVE, bi_encoders.e5,
           partial(references.bi_encoder, query="query: ", document="passage: "), _E5),
    Family("GTE", BI, "thenlper/gte-base", _SAVE, bi_encoders.gte, references.bi_encoder),
    Family("nomic", BI, "nomic-ai/nomic-embed-text-v1.5", f"{_SAVE}, code of its own", bi_encoders.nomic,
           references.bi_encoder, weights=lambda path: str(Path(path).parent / "own" / "saved")),
    Family("Qwen3-Embedding", BI, "Qwen/Qwen3-Embedding-0.6B", _SAVE, bi_encoders.qwen3,
           references.bi_encoder, causal=True),
    Family("EmbeddingGemma", BI, "google/embeddinggemma-300m", _SAVE, bi_encoders.embeddinggemma,
           references.bi_encoder),
    Family("Jina v3", BI, "jinaai/jina-embeddings-v3-hf", _SAVE, bi_encoders.jina_v3, references.bi_encoder),
    Family("MPNet", BI, "sentence-transformers/all-mpnet-base-v2", _SAVE, bi_encoders.mpnet,
           references.bi_encoder, packed=False),
    Family("SGPT", BI, "Muennighoff/SGPT-125M-weightedmean-nli-bitfit", _SAVE, bi_encoders.sgpt,
           references.bi_encoder, packed=False, causal=True),
    Family("prompt left out", BI, "include_prompt: false", _SAVE, bi_encoders.without_prompt,
           references.bi_encoder),

    Family("SPLADE", SPARSE, "naver/splade-v3", _SPARSE_SAVE, sparse_encoders.splade,
           references.sparse_encoder),
    Family("SPLADE, plain", SPARSE, "naver/splade-cocondenser-ensembledistil", "BertForMaskedLM",
           sparse_encoders.plain, references.sparse_encoder, {"score_type": SPARSE}),
    Family("SPLADE, heaviest words", SPARSE, "max_active_dims", _SPARSE_SAVE,
           sparse_encoders.splade_heaviest, references.sparse_encoder),
    Family("SPLADE over ModernBERT", SPARSE, "ModernBertForMaskedLM", _SPARSE_SAVE,
           sparse_encoders.modernbert, references.sparse_encoder),
    Family("SPLADE over XLM-RoBERTa", SPARSE, "XLMRobertaForMaskedLM", _SPARSE_SAVE,
           sparse_encoders.xlm_roberta, references.sparse_encoder),
    Family("OpenSearch, queries looked up", SPARSE,
           "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill", f"{_SPARSE_SAVE}, Router",
           sparse_encoders.opensearch_v3, references.sparse_encoder),

    Family("bge-m3, dense", BI, "BAAI/bge-m3", _SAVE, bi_encoders.bge_m3, references.bi_encoder),
    Family("bge-m3, sparse", SPARSE, "BAAI/bge-m3", _M3, bi_encoders.bge_m3,
           partial(references.bge_m3, weights=(0, 1, 0)), _PICKLED | {"score_type": SPARSE}),
    Family("bge-m3, multi-vector", LATE, "BAAI/bge-m3", _M3, bi_encoders.bge_m3,
           partial(references.bge_m3, weights=(0, 0, 1)), _PICKLED | {"score_type": LATE}),
    Family("bge-m3, all three", HYBRID, "BAAI/bge-m3", _M3, bi_encoders.bge_m3,
           partial(references.bge_m3, weights=(0.4, 0.2, 0.4)), _PICKLED | {"score_type": HYBRID}),
]  # fmt: skip


LISTWISE = Family(
    "jina-reranker-v3",
    "listwise",
    "jinaai/jina-reranker-v3",
    "JinaForRanking, code of its own",
    language_models.jina_reranker_v3,
    lambda path, queries, documents: references.jina_reranker_v3(path, queries[0], documents),
    causal=True,
)
