"""vLLM as a second reader: what it makes of each family's checkpoint. tests/oracles/test_vllm.py compares
what is equal, and docs/internals/models-proven.md prints it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

VERSION = "0.32.0"

# Compared results: one vector a text, one a token, the logits of pairs, the weights of all words (SPLADE), of
# a text's own words (bge-m3), and the cosines of a listwise model.
Compared = Literal["embeddings", "tokens", "logits", "words", "own words", "listwise"]


@dataclass(frozen=True, slots=True)
class Told:
    """Settings of vLLM beside a folder's path: `overrides` (hf_overrides), the class that is the `stand_in`
    for a configuration with code of its own, and settings of its `pooler`."""

    overrides: Mapping[str, Any] = field(default_factory=dict)
    stand_in: str | None = None
    pooler: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Equal:
    """Float32 results of vLLM are ours within a relative error of 1e-4."""

    compared: Compared
    told: Told = Told()
    note: str = ""


# Else what it does instead, in words.
Reader = Equal | str


def as_words(reader: Reader) -> str:
    """The cell of the page of models."""
    if isinstance(reader, str):
        return reader
    note = f"; {reader.note}" if reader.note else ""
    return f"equal {_NAMES[reader.compared]}{note}"


_NAMES: dict[Compared, str] = {
    "embeddings": "embeddings", "tokens": "token embeddings", "logits": "logits", "words": "weights of words",
    "own words": "weights of words", "listwise": "cosines",
}  # fmt: skip


def _architecture(name: str, stand_in: str | None = None, **more: Any) -> Told:
    return Told({"architectures": [name], **more}, stand_in)


_LLAMA = "LlamaBidirectionalConfig"
_MODERNBERT = _architecture("ColBERTModernBertModel")
_NEW = _architecture("GteNewModel", "NewConfig")
_SPLADE = _architecture("BertSpladeSparseEmbeddingModel")


def _answers(kind: str, *words: str, **how: Any) -> Equal:
    """The logits of a language model that answers with one of `words`."""
    name = f"{kind}ForSequenceClassification"
    return Equal("logits", _architecture(name, classifier_from_token=[*words], **how))


def _refuses(error: str) -> str:
    return f"refuses it: `{error}`"


def _differs(why: str) -> str:
    return f"differs: {why}"


_UNKNOWN = "Model architectures ['{}'] are not supported for now"
_NOT_DISPATCHED = "Layer 0 does not dispatch through the Transformers attention interface"
_T5 = "Argument position_ids not found in the forward method of <class 'transformers.models.{}'>"
_CODE = "but Transformers does not recognize this architecture"
_GGUF = "model.gguf' is not a valid JSON file"

READERS: dict[str, Reader] = {
    **dict.fromkeys(("ColBERT", "ColBERT, attended expansion", "answerai-colbert-small"), Equal("tokens")),
    **dict.fromkeys(("native multi-vector", "any encoder"), Equal("tokens")),
    **dict.fromkeys(("GTE-ModernColBERT", "LateOn"), Equal("tokens", _MODERNBERT)),
    **dict.fromkeys(("BERT", "RoBERTa", "XLM-RoBERTa", "ModernBERT"), Equal("logits")),
    **dict.fromkeys(("Qwen2", "Qwen3", "Llama", "Gemma"), Equal("logits")),
    **dict.fromkeys(("bge-reranker-v2-minicpm-layerwise", "bge-reranker-v2.5-gemma2-lightweight"),
                    _refuses(_CODE)),
    **dict.fromkeys(("MiniLM", "BGE", "E5", "GTE", "Qwen3-Embedding", "EmbeddingGemma"), Equal("embeddings")),
    **dict.fromkeys(("Llama Nemotron Embed", "NV-EmbedQA"), Equal("embeddings", Told(stand_in=_LLAMA))),
    **dict.fromkeys(("Sentence-T5", "T5 1.1"), _refuses(_T5.format("t5.modeling_t5.T5Stack"))),
    **dict.fromkeys(("gte-multilingual", "gte-large-en-v1.5", "gte-base-en-v1.5"), Equal("embeddings", _NEW)),
    **dict.fromkeys(("jina-embeddings-v2", "jina-embeddings-v2-base-code", "JinaBERT with ReLU"),
                    _refuses(_UNKNOWN.format("JinaBertForMaskedLM"))),
    **dict.fromkeys(("SPLADE", "SPLADE, plain", "SPLADE, heaviest words"), Equal("words", _SPLADE)),
    **dict.fromkeys(("Qwen3-Reranker, Q8_0", "Qwen3-Reranker, Q4_K", "bge-reranker-v2-m3, F16",
                     "Qwen3-Embedding, Q8_0", "BERT, F16"), _refuses(_GGUF)),
    "jina-colbert-v2": Equal("tokens", _architecture("ColBERTJinaRobertaModel", "XLMRobertaFlashConfig")),
    "jina-colbert-v1": _refuses("Only 'absolute' position_embedding_type is supported"),
    "LFM2-ColBERT": _differs(
        "its rotary kernel for CPUs takes heads for tokens, and turns the first of them alone; ours are those"
        " of transformers, which with this mistake gives vLLM's"),
    "LFM2.5-ColBERT": _refuses(_UNKNOWN.format("Lfm2BidirectionalModel")),
    "native multi-vector, token pooling": _differs(
        "it does not merge documents' tokens, as sentence-transformers and we do"),
    "ELECTRA": Equal(
        "logits", note="where embeddings are as wide as states; the layer between them it leaves out"),
    "DistilBERT": _refuses(_NOT_DISPATCHED),
    "gte-multilingual-reranker": Equal(
        "logits", _architecture("GteNewForSequenceClassification", "NewConfig")),
    "jina-reranker-v1": _refuses(_UNKNOWN.format("JinaBertForSequenceClassification")),
    "jina-reranker-v2": Equal("logits", Told(stand_in="XLMRobertaFlashConfig")),
    "DeBERTa-v2": _refuses(_UNKNOWN.format("DebertaV2ForSequenceClassification")),
    "Qwen3-Reranker": _answers("Qwen3", "no", "yes", is_original_qwen3_reranker=True),
    "mxbai-rerank-v2": _answers("Qwen2", "0", "1", method="from_2_way_softmax"),
    "bge-reranker-v2-gemma": _answers("Gemma", "Yes", method="no_post_processing"),
    "LogitScore": _answers("Qwen3", "Yes", method="no_post_processing"),
    "monoT5": _refuses(_T5.format("t5.modeling_t5.T5Stack")),
    "mT5": _refuses(_T5.format("mt5.modeling_mt5.MT5Stack")),
    "Llama Nemotron Rerank": Equal("logits", Told(stand_in=_LLAMA, pooler={"logit_sigma": 0.8})),
    "nomic": Equal("embeddings", Told(stand_in="NomicBertConfig")),
    "gte-Qwen2": Equal("embeddings", Told({"is_causal": False})),
    "voyage-4-nano": Equal("embeddings", _architecture("VoyageQwen3BidirectionalEmbedModel")),
    "LFM2.5-Embedding": _refuses(_UNKNOWN.format("Lfm2BidirectionalModel")),
    "jina-embeddings-v5-text-small": Equal("embeddings", Told(stand_in="JinaSmallConfig")),
    "jina-embeddings-v5-text-nano": Equal("embeddings", Told(stand_in="JinaNanoConfig")),
    "Jina v3": _refuses(_NOT_DISPATCHED),
    "MPNet": _refuses(_UNKNOWN.format("MPNetModel")),
    "SGPT": _refuses(_UNKNOWN.format("GPTNeoModel")),
    "snowflake-arctic-embed-m-v2.0": Equal("embeddings", Told(stand_in="GteConfig")),
    "nomic-embed-text-v2-moe": _refuses("fused_topk is not implemented as lack of triton"),
    "prompt left out": _differs(
        "it averages the prompt's tokens, too, which sentence-transformers and we leave out"),
    "SPLADE over ModernBERT": _refuses(
        "Cannot resolve attention scaling expression 'self.head_dim ** (-0.5)' in ModernBertAttention"),
    "SPLADE over XLM-RoBERTa": _differs(
        "it gives the last token's state, with positions counted from 0, where sentence-transformers and we"
        " give the weights of words"),
    "OpenSearch, queries looked up": _refuses("Invalid repository ID or local directory specified"),
    "gte-multilingual, sparse": _refuses("Unsupported task: 'token_classify'"),
    "bge-m3, dense": Equal("embeddings", Told({"position_embedding_type": "absolute"})),
    "bge-m3, sparse": Equal("own words", _architecture("BgeM3EmbeddingModel")),
    "bge-m3, multi-vector": Equal("tokens", _architecture("BgeM3EmbeddingModel")),
    "bge-m3, all three": "in parts: bge-m3, dense, bge-m3, sparse, bge-m3, multi-vector",
    "jina-reranker-v3": Equal("listwise"),
    "compressed-tensors, w8a8": _differs(
        "it rounds activations to int8 as the file asks; ours are those of transformers on the same weights"
        " with activations as they are, and rounding them there gives vLLM's within 0.04"),
    "compressed-tensors, w4a16": _refuses("\"cpu_gemm_wna16\" not implemented for 'Float'"),
    "compressed-tensors, FP8": _refuses(
        "Failed to find a kernel that can implement the ScaledMM linear layer"),
    "FP8 in blocks": _refuses("torch.float32 is not supported for quantization method fp8"),
}  # fmt: skip
