"""The kernels of fused layers as the layers of well-known models launch them, to be compiled ahead of time:
each with its name, its source, and the bytes that a row makes it read and write."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from maxsimd.bench.gpu.ahead_of_time import POINTERS, VARYING, Source

ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel for one shape; `bytes_a_row` is what it reads and writes of a row of its input, weights left
    out, which stay in the caches."""

    name: str
    source: Source
    bytes_a_row: int


def variants(dtype: str = "bf16") -> Iterator[Variant]:
    """All variants in a precision."""
    for width in (384, 768, 1024, 4096, 8192):
        yield from (_layer_norm(width, dtype, kind, biased=True) for kind in _LAYER_NORMS)
        yield from (_rms_norm(width, dtype, added=added) for added in (False, True))
    yield _rms_norm(2048, dtype, added=True, weight="fp32")  # Gemma
    # ModernBERT has no biases.
    yield from (_layer_norm(768, dtype, kind, biased=False) for kind in _LAYER_NORMS)
    # Qwen3-0.6B and 8B, Llama-3.2-1B, a head of 256, jina-colbert-v2, ModernBERT and gte-multilingual-base.
    for heads, head_dim, normed in (
        (24, 128, True),
        (40, 128, True),
        (40, 64, False),
        (24, 256, True),
        (32, 64, False),
        (24, 64, False),
    ):
        yield _norm_rotary(heads, head_dim, dtype, normed=normed)
    yield _gated(3072, "silu", dtype)  # Qwen3, nomic-bert
    yield _gated(3072, "gelu", dtype)  # gte-multilingual-base
    yield _gated(1152, "gelu", dtype)  # ModernBERT
    yield _gated(16384, "gelu_tanh", dtype)  # Gemma
    yield _gated(512, "relu", dtype)


# Names of the norm alone, of a sum, and with the sum; how often each reads or writes a row.
_LAYER_NORMS = {"layer norm": 2, "add and layer norm": 3, "sum and layer norm": 4}


def _layer_norm(width: int, dtype: str, kind: str, *, biased: bool) -> Variant:
    from maxsimd.engine.ops.triton.elementwise import layer_norm_kernel

    arguments = ("x", "residual", "weight", "bias", "total", "out")
    constants = {"ADDED": kind != "layer norm", "SUMMED": kind == "sum and layer norm", "BIASED": biased}
    source = _of_rows(layer_norm_kernel, arguments, width, dtype, constants)
    name = f"{kind} {width}{'' if biased else ', no bias'}"
    return Variant(name, source, _LAYER_NORMS[kind] * width * ITEMSIZE[dtype])


def _rms_norm(width: int, dtype: str, *, added: bool, weight: str | None = None) -> Variant:
    from maxsimd.engine.ops.triton.elementwise import rms_norm_kernel

    arguments = ("x", "residual", "weight", "total", "out")
    types = {"weight": POINTERS[weight or dtype]}
    source = _of_rows(rms_norm_kernel, arguments, width, dtype, {"ADDED": added}, types)
    passes = 4 if added else 2
    return Variant(f"{'add and ' * added}RMS norm {width}", source, passes * width * ITEMSIZE[dtype])


def _of_rows(
    kernel: Any,
    arguments: tuple[str, ...],
    width: int,
    dtype: str,
    constants: dict[str, Any],
    others: dict[str, str] | None = None,
) -> Source:
    """`others` are the types of the arguments that are not of `dtype`."""
    from maxsimd.engine.ops.triton.elementwise import row_tile

    tile = row_tile(width)
    types = dict.fromkeys(arguments, POINTERS[dtype]) | {"epsilon": "fp32"} | (others or {})
    return Source(kernel, types, constants | {"BLOCK": tile.numbers}, {"num_warps": tile.warps})


def _norm_rotary(heads: int, head_dim: int, dtype: str, *, normed: bool) -> Variant:
    from maxsimd.engine.ops.triton import elementwise

    block = elementwise.blocks_for(heads, head_dim)
    types = dict.fromkeys(("qkv", "cos", "sin", "query_weight", "key_weight"), POINTERS[dtype])
    constants = {"NORMED": normed, "BLOCK_HEADS": block.heads, "BLOCK_HALF": block.half}
    source = Source(
        elementwise.norm_rotary_kernel,
        types | {"epsilon": "fp32"},
        constants,
        {"num_warps": elementwise.WARPS},
        VARYING | {"queries", "heads"},
    )
    name = f"{'norm and ' * normed}rotary {heads} heads of {head_dim}"
    return Variant(name, source, 2 * heads * head_dim * ITEMSIZE[dtype] + 2 * head_dim * ITEMSIZE[dtype])


def _gated(width: int, activation: str, dtype: str) -> Variant:
    from maxsimd.engine.ops.triton import elementwise

    types = dict.fromkeys(("gate_up", "out"), POINTERS[dtype])
    block = elementwise.block_for(width)
    options = {"num_warps": block // elementwise.NUMBERS_OF_A_WARP}
    source = Source(elementwise.gated_kernel, types, {"ACTIVATION": activation, "BLOCK": block}, options)
    return Variant(f"gated {activation} {width}", source, 3 * width * ITEMSIZE[dtype])
