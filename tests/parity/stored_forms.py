"""Checkpoints whose weights are stored in a form of their own, and that are proven: a second table in
docs/models.md is generated from this list. What they are compared with is run from the folder `plain` beside
them, which has the same weights dequantised."""

from functools import partial
from pathlib import Path

from tests.checkpoints import gguf_models, quantized
from tests.parity import references
from tests.parity.families import BI, CROSS, Family


def _plain(path: str) -> str:
    return str(Path(path).parent / "plain")


FORMS = [
    Family("Qwen3-Reranker, Q8_0", CROSS, "ggml-org/Qwen3-Reranker-0.6B-Q8_0-GGUF", "GGUF",
           partial(gguf_models.qwen3_reranker, kind="Q8_0"), references.qwen3_reranker, causal=True,
           weights=_plain),
    Family("Qwen3-Reranker, Q4_K", CROSS, "other conversions of Qwen/Qwen3-Reranker-0.6B", "GGUF",
           partial(gguf_models.qwen3, kind="Q4_K"), references.qwen3_reranker, causal=True, weights=_plain),
    Family("bge-reranker-v2-m3, F16", CROSS, "gpustack/bge-reranker-v2-m3-GGUF",
           "GGUF, tokenizer.json beside", partial(gguf_models.bge_reranker, kind="F16"),
           references.cross_encoder, weights=_plain),
    Family("Qwen3-Embedding, Q8_0", BI, "Qwen/Qwen3-Embedding-0.6B-GGUF", "GGUF",
           partial(gguf_models.qwen3_embedding, kind="Q8_0"), references.bi_encoder, causal=True,
           weights=_plain),
    Family("BERT, F16", BI, "CompendiumLabs/bge-small-en-v1.5-gguf", "GGUF",
           partial(gguf_models.bge, kind="F16"), references.bi_encoder, weights=_plain),
    Family("compressed-tensors, w8a8", CROSS, "int-quantized, activations as they are", "safetensors",
           partial(quantized.qwen3_reranker, scheme="w8a8"), references.qwen3_reranker, causal=True,
           weights=_plain),
    Family("compressed-tensors, w4a16", CROSS, "pack-quantized", "safetensors",
           partial(quantized.qwen3_reranker, scheme="w4a16, shifted"), references.qwen3_reranker, causal=True,
           weights=_plain),
    Family("compressed-tensors, FP8", CROSS, "float-quantized", "safetensors",
           partial(quantized.qwen3_reranker, scheme="float8, channels"), references.qwen3_reranker,
           causal=True, weights=_plain),
    Family("FP8 in blocks", CROSS, "Qwen's and DeepSeek's FP8 checkpoints", "safetensors",
           partial(quantized.qwen3_reranker, scheme="fp8"), references.qwen3_reranker, causal=True,
           weights=_plain),
]  # fmt: skip
