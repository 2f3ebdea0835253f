"""Which instructions of an x86 processor are used: those that it has, up to what MAXSIMD_MAX_CPU_ISA names.

The cap is there to run on one machine what others run. torch and oneDNN have caps of their own, which are to
be set with it: ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA.
"""

import functools
import os

import torch

VARIABLE = "MAXSIMD_MAX_CPU_ISA"
# Each with all before it; `avx512_bf16` means VNNI too, and `all` whatever the processor has, AMX among it.
LEVELS = ("default", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "all")


@functools.cache
def cap() -> str:
    """The highest level that may be used. Raises ValueError where the environment names no level."""
    named = os.environ.get(VARIABLE, "").strip().lower() or "all"
    if named not in LEVELS:
        raise ValueError(f"{VARIABLE} is {named!r}, but must be one of {', '.join(LEVELS)}")
    return named


def may_use(level: str) -> bool:
    """Whether the cap leaves a level."""
    return LEVELS.index(level) <= LEVELS.index(cap())


def multiplies_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 natively and may be used so."""
    return (may_use("avx512_bf16") and torch.cpu._is_avx512_bf16_supported()) or (
        may_use("all") and torch.cpu._is_amx_tile_supported()
    )


def in_words() -> str:
    """The processor's instruction sets that count here, for logs and reports."""
    has = {
        "avx2": torch.cpu._is_avx2_supported(),
        "avx512": torch.cpu._is_avx512_supported(),
        "avx512_vnni": torch.cpu._is_vnni_supported(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
    }
    found = [level for level, present in has.items() if present and may_use(level)]
    if may_use("all") and torch.cpu._is_amx_tile_supported():
        found.append("amx")
    return ", ".join(found) or "neither AVX2 nor AVX-512"
