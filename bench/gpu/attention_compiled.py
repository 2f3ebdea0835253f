"""Attention as it is compiled for a GPU."""

from dataclasses import dataclass
from typing import Any

from maxsimd.bench.gpu.ahead_of_time import POINTERS, Source
from maxsimd.bench.gpu.maxsim_compiled import ITEMSIZE, LIMITS
from maxsimd.engine.ops.triton.launch import next_power_of_two


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """The kernel for heads of `head_dim` numbers, and for what sequences can be: causal, with a window, after
    a prefix that they share."""

    capability: int
    head_dim: int
    dtype: str = "bf16"
    causal: bool = False
    windowed: bool = False
    prefixed: bool = False

    @property
    def name(self) -> str:
        parts = ("causal", "windowed", "prefixed")
        return ", ".join([f"{self.dtype}, heads of {self.head_dim}", *(x for x in parts if getattr(self, x))])

    @property
    def source(self) -> Source:
        from maxsimd.engine.ops.triton import attention
        from maxsimd.engine.ops.triton.attention import attention_kernel

        limits = LIMITS[self.capability]
        tiles = attention.tiles_for(limits, self.head_dim, ITEMSIZE[self.dtype], self.windowed)
        types = dict.fromkeys(("q", "k", "v", "prefix_k", "prefix_v", "out"), POINTERS[self.dtype])
        types |= {"blocks": "*i32", "scale": "fp32"}
        constants: dict[str, Any] = {
            "CAUSAL": self.causal,
            "WINDOWED": self.windowed,
            "PREFIXED": self.prefixed,
        }
        constants |= {"HEAD_DIM": self.head_dim, "BLOCK_DIM": next_power_of_two(self.head_dim)}
        constants |= {"BLOCK_Q": tiles.queries, "BLOCK_K": tiles.keys}
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        options |= {} if tiles.registers is None else {"maxnreg": tiles.registers}
        return Source(attention_kernel, types, constants, options)


def attention_launches(capability: int) -> list[AttentionLaunch]:
    """What encoders and rerankers launch in 16 bits."""
    return [
        AttentionLaunch(capability, head_dim, causal=causal)
        for head_dim in (64, 128, 256)
        for causal in (False, True)
    ]
