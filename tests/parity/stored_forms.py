"""Checkpoints whose weights are stored in a form of their own, and that are proven: a second table in
docs/models.md is generated from this list."""

from functools import partial
from pathlib import Path

from tests.checkpoints import gguf_models, quantized
from tests.parity import references
from tests.parity.families import BI, CROSS, Family


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
