"""The families of models that are proven; the table in docs/models.md is generated from this list."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from maxsimd.engine.checkpoint.files import embedded_model_path
from tests.checkpoints import (
    bi_encoders,
    cross_encoders,
    gguf_models,
    gte,
    jina,
    language_models,
    late_interaction,
    nomic,
    quantized,
    retrained,
    sparse_encoders,
    t5,
)
from tests.parity import plain_models, references
from tests.parity.changes import Build

Reference = Callable[[str, Sequence[str], Sequence[str]], references.Scores]
Embeddings = Callable[[str, Sequence[str], str], list[references.Scores]]

LATE, CROSS, BI, SPARSE = "late-interaction", "cross-encoder", "bi-encoder", "sparse"
HYBRID = "hybrid"


@dataclass(frozen=True, eq=False)
class Family:
    """`settings` are options beside the model, `weights` finds the reference's weights for code of a
    checkpoint's own, and `embeddings` makes them of texts in a role where sentence-transformers cannot."""

    name: str
    kind: str
    published: str
    format: str
    build: Build
    reference: Reference
    settings: dict[str, Any] = field(default_factory=dict)
    packed: bool = True
    causal: bool = False
    weights: Callable[[str], str] = str
    embeddings: Embeddings | None = None


def _embedded(folder: Path) -> str:
    return embedded_model_path()


_E5 = {"query_prompt": "query: ", "document_prompt": "passage: "}
_FOR_CLASSIFICATION = "*ForSequenceClassification"
_OF_ITS_OWN = f"{_FOR_CLASSIFICATION}, code of its own"
_SAVE = "sentence-transformers"
_SAVE_OWN = f"{_SAVE}, code of its own"
_OWN_CODE = "code of its own"
_WITH_ADAPTERS = f"{_OWN_CODE}, an adapter for each task"


def _plain(
    name: str, published: str, format: str, build: Build, model: Any, kind: str = BI, causal: bool = False
) -> Family:
    """A family whose embeddings the tests make by a plain reading of its code, the `model` of a path."""
    compare = plain_models.maxsims if kind == LATE else plain_models.cosines

    def embeddings(path: str, texts: Sequence[str], role: str) -> list[references.Scores]:
        return references.embeddings(model(path), texts, role)

    reference = partial(compare, model=model)
    return Family(name, kind, published, format, build, reference, causal=causal, embeddings=embeddings)


def _usual(kind: str, format: str, reference: Reference) -> Callable[..., Family]:
    """Families of one format, by one reference."""

    def family(name: str, published: str, build: Build, **more: Any) -> Family:
        return Family(name, kind, published, format, build, reference, **more)

    return family


_classifier = _usual(CROSS, _FOR_CLASSIFICATION, references.cross_encoder)
_M3 = "FlagEmbedding's two layers beside it, --allow-pickle"
_PICKLED = {"allow_pickle": True}
_SPARSE_SAVE = f"{_SAVE}, SparseEncoder"
_embedder = _usual(BI, _SAVE, references.bi_encoder)
_sparse = _usual(SPARSE, _SPARSE_SAVE, references.sparse_encoder)

FAMILIES = [
    Family("ColBERT", LATE, "colbert-ir/colbertv2.0", "Stanford ColBERT", late_interaction.stanford,
           references.multi_vector),
    Family("ColBERT, attended expansion", LATE, "attend_to_mask_tokens", "Stanford ColBERT",
           partial(late_interaction.stanford, attend=True), references.multi_vector),
    Family("answerai-colbert-small", LATE, "answerdotai/answerai-colbert-small-v1", "Stanford ColBERT",
           partial(late_interaction.stanford, dim=96), references.multi_vector),
    Family("GTE-ModernColBERT", LATE, "lightonai/GTE-ModernColBERT-v1", "PyLate without model_type",
           late_interaction.pylate_modernbert, references.multi_vector),
    Family("LateOn", LATE, "lightonai/LateOn", "PyLate with model_type ColBERT",
           partial(late_interaction.pylate_modernbert, model_type="ColBERT"), references.multi_vector),
    Family("jina-colbert-v2", LATE, "jinaai/jina-colbert-v2", "Stanford ColBERT, code of its own",
           late_interaction.jina_colbert_v2, references.multi_vector,
           weights=lambda path: str(Path(path) / "saved")),
    _plain("jina-colbert-v1", "jinaai/jina-colbert-v1-en", "Stanford ColBERT, code of its own",
           jina.colbert_v1, plain_models.JinaColbert, LATE),
    Family("LFM2-ColBERT", LATE, "LiquidAI/LFM2-ColBERT-350M", "PyLate with model_type ColBERT",
           retrained.lfm2_colbert, references.multi_vector, causal=True),
    _plain("LFM2.5-ColBERT", "LiquidAI/LFM2.5-ColBERT-350M", "PyLate, code of its own",
           retrained.lfm2_5_colbert, plain_models.lfm2_5_colbert, LATE),
    Family("native multi-vector", LATE, "MultiVectorEncoder saves", _SAVE, late_interaction.native,
           references.multi_vector),
    Family("native multi-vector, token pooling", LATE, "MultiVectorEncoder saves", _SAVE,
           partial(late_interaction.native, token_pooling=True), references.multi_vector),
    Family("any encoder", LATE, "sentence-transformers/all-MiniLM-L6-v2", _SAVE, _embedded,
           references.plain_encoder, {"score_type": LATE}),

    _classifier("BERT", "cross-encoder/ms-marco-MiniLM-L6-v2", cross_encoders.ms_marco_minilm),
    _classifier("RoBERTa", "cross-encoder/stsb-roberta-base", cross_encoders.roberta),
    _classifier("XLM-RoBERTa", "BAAI/bge-reranker-v2-m3", cross_encoders.xlm_roberta),
    _classifier("ELECTRA", "cross-encoder/ms-marco-electra-base", cross_encoders.electra),
    _classifier("DistilBERT", "distilbert rerankers", cross_encoders.distilbert),
    _classifier("ModernBERT", "Alibaba-NLP/gte-reranker-modernbert-base", cross_encoders.modernbert),
    Family("gte-multilingual-reranker", CROSS, "Alibaba-NLP/gte-multilingual-reranker-base", _OF_ITS_OWN,
           gte.multilingual_reranker, plain_models.gte_reranker),
    Family("jina-reranker-v1", CROSS, "jinaai/jina-reranker-v1-turbo-en", _OF_ITS_OWN, jina.reranker_v1,
           plain_models.jina_reranker_v1),
    Family("jina-reranker-v2", CROSS, "jinaai/jina-reranker-v2-base-multilingual", _OF_ITS_OWN,
           jina.reranker_v2, plain_models.jina_reranker_v2),
    _classifier("DeBERTa-v2", "mixedbread-ai/mxbai-rerank-base-v1", cross_encoders.deberta_v2),
    _classifier("Qwen2", "Qwen2ForSequenceClassification", cross_encoders.qwen2, causal=True),
    _classifier("Qwen3", "tomaarsen/Qwen3-Reranker-0.6B-seq-cls", cross_encoders.qwen3, causal=True),
    _classifier("Llama", "LlamaForSequenceClassification", cross_encoders.llama, causal=True),
    _classifier("Gemma", "GemmaForSequenceClassification", cross_encoders.gemma, causal=True),
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
           retrained.nemotron_rerank, plain_models.nemotron_rerank),
    Family("bge-reranker-v2-minicpm-layerwise", CROSS, "BAAI/bge-reranker-v2-minicpm-layerwise", _OWN_CODE,
           retrained.bge_minicpm, plain_models.bge_minicpm, causal=True),
    Family("bge-reranker-v2.5-gemma2-lightweight", CROSS, "BAAI/bge-reranker-v2.5-gemma2-lightweight",
           _OWN_CODE, retrained.bge_gemma2, plain_models.bge_gemma2, causal=True),

    Family("MiniLM", BI, "sentence-transformers/all-MiniLM-L6-v2", _SAVE, _embedded, references.bi_encoder,
           {"score_type": BI}),
    _embedder("BGE", "BAAI/bge-base-en-v1.5", bi_encoders.bge),
    Family("E5", BI, "intfloat/e5-base-v2", _SAVE, bi_encoders.gte,
           partial(references.bi_encoder, query="query: ", document="passage: "), _E5),
    _embedder("GTE", "thenlper/gte-base", bi_encoders.gte),
    Family("nomic", BI, "nomic-ai/nomic-embed-text-v1.5", _SAVE_OWN, bi_encoders.nomic,
           references.bi_encoder, weights=lambda path: str(Path(path).parent / "own" / "saved")),
    _embedder("Qwen3-Embedding", "Qwen/Qwen3-Embedding-0.6B", bi_encoders.qwen3, causal=True),
    _embedder("EmbeddingGemma", "google/embeddinggemma-300m", bi_encoders.embeddinggemma),
    _plain("gte-Qwen2", "Alibaba-NLP/gte-Qwen2-1.5B-instruct", _SAVE_OWN,
           retrained.gte_qwen2, plain_models.gte_qwen2),
    _plain("voyage-4-nano", "voyageai/voyage-4-nano", _SAVE_OWN,
           retrained.voyage_4_nano, plain_models.voyage_4_nano),
    _plain("Llama Nemotron Embed", "nvidia/llama-nemotron-embed-1b-v2", _SAVE_OWN,
           retrained.nemotron_embed_with_modules, plain_models.nemotron_embed),
    _plain("NV-EmbedQA", "nvidia/llama-3.2-nv-embedqa-1b-v2", _OWN_CODE, retrained.nemotron_embed,
           plain_models.nemotron_embed),
    _plain("LFM2.5-Embedding", "LiquidAI/LFM2.5-Embedding-350M", _SAVE_OWN,
           retrained.lfm2_5_embedding, plain_models.lfm2_5_embedding),
    _plain("jina-embeddings-v5-text-small", "jinaai/jina-embeddings-v5-text-small", _WITH_ADAPTERS,
           retrained.jina_v5_small, plain_models.jina_v5, causal=True),
    _plain("jina-embeddings-v5-text-nano", "jinaai/jina-embeddings-v5-text-nano", _WITH_ADAPTERS,
           retrained.jina_v5_nano, plain_models.jina_v5),
    _embedder("Jina v3", "jinaai/jina-embeddings-v3-hf", bi_encoders.jina_v3),
    _embedder("MPNet", "sentence-transformers/all-mpnet-base-v2", bi_encoders.mpnet),
    _embedder("Sentence-T5", "sentence-transformers/sentence-t5-base, gtr-t5-base", t5.sentence_t5),
    _embedder("T5 1.1", "gated T5 encoders", partial(t5.sentence_t5, gated=True)),
    _embedder("SGPT", "Muennighoff/SGPT-125M-weightedmean-nli-bitfit", bi_encoders.sgpt, packed=False,
              causal=True),
    _plain("gte-multilingual", "Alibaba-NLP/gte-multilingual-base", _SAVE_OWN, gte.multilingual,
           plain_models.gte_multilingual),
    Family("gte-multilingual, sparse", SPARSE, "Alibaba-NLP/gte-multilingual-base", "code of its own",
           gte.multilingual, plain_models.gte_sparse, {"score_type": SPARSE}),
    _plain("gte-large-en-v1.5", "Alibaba-NLP/gte-large-en-v1.5", _SAVE_OWN, gte.english,
           plain_models.gte_english),
    _plain("gte-base-en-v1.5", "Alibaba-NLP/gte-base-en-v1.5", _SAVE_OWN, partial(gte.english, types=0),
           plain_models.gte_english),
    _plain("snowflake-arctic-embed-m-v2.0", "Snowflake/snowflake-arctic-embed-m-v2.0", _SAVE_OWN,
           gte.snowflake, plain_models.snowflake),
    _plain("jina-embeddings-v2", "jinaai/jina-embeddings-v2-base-en", _SAVE_OWN, jina.embeddings_v2,
           plain_models.jina_embeddings_v2),
    _plain("jina-embeddings-v2-base-code", "jinaai/jina-embeddings-v2-base-code", _SAVE_OWN,
           jina.embeddings_v2_code, plain_models.jina_embeddings_v2),
    _plain("JinaBERT with ReLU", "feed_forward_type: reglu", _SAVE_OWN,
           partial(jina.embeddings_v2, feed_forward="reglu"), plain_models.jina_embeddings_v2),
    _plain("nomic-embed-text-v2-moe", "nomic-ai/nomic-embed-text-v2-moe", _SAVE_OWN, nomic.v2_moe,
           plain_models.nomic_v2_moe),
    _embedder("prompt left out", "include_prompt: false", bi_encoders.without_prompt),

    _sparse("SPLADE", "naver/splade-v3", sparse_encoders.splade),
    Family("SPLADE, plain", SPARSE, "naver/splade-cocondenser-ensembledistil", "BertForMaskedLM",
           sparse_encoders.plain, references.sparse_encoder, {"score_type": SPARSE}),
    _sparse("SPLADE, heaviest words", "max_active_dims", sparse_encoders.splade_heaviest),
    _sparse("SPLADE over ModernBERT", "ModernBertForMaskedLM", sparse_encoders.modernbert),
    _sparse("SPLADE over XLM-RoBERTa", "XLMRobertaForMaskedLM", sparse_encoders.xlm_roberta),
    Family("OpenSearch, queries looked up", SPARSE,
           "opensearch-project/opensearch-neural-sparse-encoding-doc-v3-distill", f"{_SPARSE_SAVE}, Router",
           sparse_encoders.opensearch_v3, references.sparse_encoder),

    _embedder("bge-m3, dense", "BAAI/bge-m3", bi_encoders.bge_m3),
    Family("bge-m3, sparse", SPARSE, "BAAI/bge-m3", _M3, bi_encoders.bge_m3,
           partial(references.bge_m3, weights=(0, 1, 0)), _PICKLED | {"score_type": SPARSE}),
    Family("bge-m3, multi-vector", LATE, "BAAI/bge-m3", _M3, bi_encoders.bge_m3,
           partial(references.bge_m3, weights=(0, 0, 1)), _PICKLED | {"score_type": LATE}),
    Family("bge-m3, all three", HYBRID, "BAAI/bge-m3", _M3, bi_encoders.bge_m3,
           partial(references.bge_m3, weights=(0.4, 0.2, 0.4)), _PICKLED | {"score_type": HYBRID}),
]  # fmt: skip

LISTWISE = Family(
    "jina-reranker-v3", "listwise", "jinaai/jina-reranker-v3", "JinaForRanking, code of its own",
    language_models.jina_reranker_v3,
    lambda path, queries, documents: references.jina_reranker_v3(path, queries[0], documents), causal=True,
)  # fmt: skip


# Checkpoints whose weights are stored in a form of their own: a second table in docs/models.md.


def dequantised(path: str) -> str:
    """The folder beside them, which has the same weights as transformers has them."""
    return str(Path(path).parent / "plain")


_GGUF = [
    ("Qwen3-Reranker, Q8_0", CROSS, "ggml-org/Qwen3-Reranker-0.6B-Q8_0-GGUF", "GGUF",
     partial(gguf_models.qwen3_reranker, kind="Q8_0"), references.qwen3_reranker),
    ("Qwen3-Reranker, Q4_K", CROSS, "other conversions of Qwen/Qwen3-Reranker-0.6B", "GGUF",
     partial(gguf_models.qwen3, kind="Q4_K"), references.qwen3_reranker),
    ("bge-reranker-v2-m3, F16", CROSS, "gpustack/bge-reranker-v2-m3-GGUF", "GGUF, tokenizer.json beside",
     partial(gguf_models.bge_reranker, kind="F16"), references.cross_encoder),
    ("Qwen3-Embedding, Q8_0", BI, "Qwen/Qwen3-Embedding-0.6B-GGUF", "GGUF",
     partial(gguf_models.qwen3_embedding, kind="Q8_0"), references.bi_encoder),
    ("BERT, F16", BI, "CompendiumLabs/bge-small-en-v1.5-gguf", "GGUF", partial(gguf_models.bge, kind="F16"),
     references.bi_encoder),
]  # fmt: skip
_SAFETENSORS = [
    ("compressed-tensors, w8a8", "int-quantized, activations as they are", "w8a8"),
    ("compressed-tensors, w4a16", "pack-quantized", "w4a16, shifted"),
    ("compressed-tensors, FP8", "float-quantized", "float8, channels"),
    ("FP8 in blocks", "Qwen's and DeepSeek's FP8 checkpoints", "fp8"),
]
FORMS = [Family(*row, causal="Qwen3" in row[0], weights=dequantised) for row in _GGUF] + [
    Family(name, CROSS, published, "safetensors", partial(quantized.qwen3_reranker, scheme=scheme),
           references.qwen3_reranker, causal=True, weights=dequantised)
    for name, published, scheme in _SAFETENSORS
]  # fmt: skip
