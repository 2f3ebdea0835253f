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
    gte,
    jina,
    language_models,
    late_interaction,
    nomic,
    retrained,
    sparse_encoders,
    t5,
)
from tests.parity import plain_scorers, references, retrained_references

Reference = Callable[[str, Sequence[str], Sequence[str]], references.Scores]
Embeddings = Callable[[str, Sequence[str], str], list[references.Scores]]

LATE, CROSS, BI, SPARSE = "late-interaction", "cross-encoder", "bi-encoder", "sparse"
HYBRID = "hybrid"


@dataclass(frozen=True, eq=False)
class Family:
    """`settings` are what a user would give on the command line beside the model; `packed` is how the engine
    is expected to run it; `weights` tells where the reference finds the same weights in its own terms, for
    checkpoints with code of their own; `embeddings` makes them of texts in a role, for checkpoints that
    sentence-transformers does not read."""

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
    embeddings: Embeddings | None = None


def _plain(
    name: str, published: str, build: Callable[[Path], str], plain: plain_scorers.PlainBiEncoder
) -> Family:
    """A bi-encoder with code of its own, beside a plain reading of that code."""
    return Family(name, BI, published, f"{_SAVE}, code of its own", build, plain, embeddings=plain.embeddings)


def _embedded(folder: Path) -> str:
    return embedded_model_path()


_E5 = {"query_prompt": "query: ", "document_prompt": "passage: "}
_FOR_CLASSIFICATION = "*ForSequenceClassification"
_OF_ITS_OWN = f"{_FOR_CLASSIFICATION}, code of its own"
_SAVE = "sentence-transformers"
_OWN_CODE = "code of its own"
_WITH_ADAPTERS = f"{_OWN_CODE}, an adapter for each task"


def _embedded_by(embedder: Callable[[str], Any]) -> Embeddings:
    """Embeddings by what stands in for a model of sentence-transformers."""
    return lambda path, texts, role: references.embeddings(embedder(path), texts, role)


def _read_in_tests(
    name: str,
    published: str,
    format: str,
    build: Callable[[Path], str],
    embedder: Callable[[str], Any],
    causal: bool = False,
) -> Family:
    """A bi-encoder whose embeddings the tests make themselves."""
    reference = partial(retrained_references.cosines, model=embedder)
    embeddings = _embedded_by(embedder)
    return Family(name, BI, published, format, build, reference, causal=causal, embeddings=embeddings)


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
    Family("jina-colbert-v1", LATE, "jinaai/jina-colbert-v1-en", "Stanford ColBERT, code of its own",
           jina.colbert_v1, plain_scorers.JINA_COLBERT_V1,
           embeddings=plain_scorers.JINA_COLBERT_V1.embeddings),
    Family("LFM2-ColBERT", LATE, "LiquidAI/LFM2-ColBERT-350M", "PyLate with model_type ColBERT",
           retrained.lfm2_colbert, references.multi_vector, causal=True),
    Family("LFM2.5-ColBERT", LATE, "LiquidAI/LFM2.5-ColBERT-350M", "PyLate, code of its own",
           retrained.lfm2_5_colbert, retrained_references.maxsims,
           embeddings=_embedded_by(retrained_references.lfm2_5_colbert)),
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
    Family("gte-multilingual-reranker", CROSS, "Alibaba-NLP/gte-multilingual-reranker-base", _OF_ITS_OWN,
           gte.multilingual_reranker, plain_scorers.GTE_RERANKER),
    Family("jina-reranker-v1", CROSS, "jinaai/jina-reranker-v1-turbo-en", _OF_ITS_OWN, jina.reranker_v1,
           plain_scorers.JINA_RERANKER_V1),
    Family("jina-reranker-v2", CROSS, "jinaai/jina-reranker-v2-base-multilingual", _OF_ITS_OWN,
           jina.reranker_v2, plain_scorers.JINA_RERANKER_V2),
    Family("DeBERTa-v2", CROSS, "mixedbread-ai/mxbai-rerank-base-v1", _FOR_CLASSIFICATION,
           cross_encoders.deberta_v2, references.cross_encoder),
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

    Family("monoT5", CROSS, "castorini/monot5-base-msmarco", "T5ForConditionalGeneration", t5.monot5,
           references.monot5),
    Family("mT5", CROSS, "unicamp-dl/mt5-base-mmarco-v2", "MT5ForConditionalGeneration", t5.mt5,
           partial(references.monot5, words=("\u2581yes", "\u2581no"))),
    Family("Llama Nemotron Rerank", CROSS, "nvidia/llama-nemotron-rerank-1b-v2", _OWN_CODE,
           retrained.nemotron_rerank, retrained_references.nemotron_rerank),
    Family("bge-reranker-v2-minicpm-layerwise", CROSS, "BAAI/bge-reranker-v2-minicpm-layerwise", _OWN_CODE,
           retrained.bge_minicpm, retrained_references.bge_minicpm, causal=True),
    Family("bge-reranker-v2.5-gemma2-lightweight", CROSS, "BAAI/bge-reranker-v2.5-gemma2-lightweight",
           _OWN_CODE, retrained.bge_gemma2, retrained_references.bge_gemma2, causal=True),

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
    _read_in_tests("gte-Qwen2", "Alibaba-NLP/gte-Qwen2-1.5B-instruct", f"{_SAVE}, code of its own",
           retrained.gte_qwen2, retrained_references.gte_qwen2),
    _read_in_tests("voyage-4-nano", "voyageai/voyage-4-nano", f"{_SAVE}, code of its own",
           retrained.voyage_4_nano, retrained_references.voyage_4_nano),
    _read_in_tests("Llama Nemotron Embed", "nvidia/llama-nemotron-embed-1b-v2", f"{_SAVE}, code of its own",
           retrained.nemotron_embed_with_modules, retrained_references.nemotron_embed),
    _read_in_tests("NV-EmbedQA", "nvidia/llama-3.2-nv-embedqa-1b-v2", _OWN_CODE, retrained.nemotron_embed,
           retrained_references.nemotron_embed),
    _read_in_tests("LFM2.5-Embedding", "LiquidAI/LFM2.5-Embedding-350M", f"{_SAVE}, code of its own",
           retrained.lfm2_5_embedding, retrained_references.lfm2_5_embedding),
    _read_in_tests("jina-embeddings-v5-text-small", "jinaai/jina-embeddings-v5-text-small", _WITH_ADAPTERS,
           retrained.jina_v5_small, retrained_references.jina_v5, causal=True),
    _read_in_tests("jina-embeddings-v5-text-nano", "jinaai/jina-embeddings-v5-text-nano", _WITH_ADAPTERS,
           retrained.jina_v5_nano, retrained_references.jina_v5),
    Family("Jina v3", BI, "jinaai/jina-embeddings-v3-hf", _SAVE, bi_encoders.jina_v3, references.bi_encoder),
    Family("MPNet", BI, "sentence-transformers/all-mpnet-base-v2", _SAVE, bi_encoders.mpnet,
           references.bi_encoder),
    Family("Sentence-T5", BI, "sentence-transformers/sentence-t5-base, gtr-t5-base", _SAVE, t5.sentence_t5,
           references.bi_encoder),
    Family("T5 1.1", BI, "gated T5 encoders", _SAVE, partial(t5.sentence_t5, gated=True),
           references.bi_encoder),
    Family("SGPT", BI, "Muennighoff/SGPT-125M-weightedmean-nli-bitfit", _SAVE, bi_encoders.sgpt,
           references.bi_encoder, packed=False, causal=True),
    _plain("gte-multilingual", "Alibaba-NLP/gte-multilingual-base", gte.multilingual,
           plain_scorers.GTE_MULTILINGUAL),
    Family("gte-multilingual, sparse", SPARSE, "Alibaba-NLP/gte-multilingual-base", "code of its own",
           gte.multilingual, plain_scorers.gte_sparse, {"score_type": SPARSE}),
    _plain("gte-large-en-v1.5", "Alibaba-NLP/gte-large-en-v1.5", gte.english, plain_scorers.GTE_ENGLISH),
    _plain("gte-base-en-v1.5", "Alibaba-NLP/gte-base-en-v1.5", gte.english_without_types,
           plain_scorers.GTE_ENGLISH),
    _plain("snowflake-arctic-embed-m-v2.0", "Snowflake/snowflake-arctic-embed-m-v2.0", gte.snowflake,
           plain_scorers.SNOWFLAKE),
    _plain("jina-embeddings-v2", "jinaai/jina-embeddings-v2-base-en", jina.embeddings_v2,
           plain_scorers.JINA_EMBEDDINGS_V2),
    _plain("jina-embeddings-v2-base-code", "jinaai/jina-embeddings-v2-base-code", jina.embeddings_v2_code,
           plain_scorers.JINA_EMBEDDINGS_V2),
    _plain("JinaBERT with ReLU", "feed_forward_type: reglu", jina.embeddings_v2_relu,
           plain_scorers.JINA_EMBEDDINGS_V2),
    _plain("nomic-embed-text-v2-moe", "nomic-ai/nomic-embed-text-v2-moe", nomic.v2_moe,
           plain_scorers.NOMIC_V2_MOE),
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
