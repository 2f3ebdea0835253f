"""Makes a loaded model ready to run on its device: precision, proof of packing, weight layout."""

import logging
from dataclasses import dataclass

import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.packed import linear, varlen
from maxsimd.engine.packed.attention import Attention, attend_grouped
from maxsimd.engine.packed.proof import gate_if_exact, why_not_packed
from maxsimd.engine.packed.runner import ModelRunner, PackedRunner, PaddedRunner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedModel:
    """How a model is run, and why so; `not_packed` is None for a packed one."""

    runner: ModelRunner
    dtype: torch.dtype
    not_packed: str | None


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it natively, else float32."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    capable = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if capable else torch.float32


def prepare(model: LoadedModel, config: EngineConfig, device: torch.device) -> PreparedModel:
    """Settles precision and execution. The model is proven in float32, whatever it then runs in."""
    dtype = choose_dtype(config.dtype, device)
    attention, grouped = _choose_attention(device, dtype)
    backbone = model.backbone
    gate = None
    if config.packing == "off":
        not_packed: str | None = "packing is off"
    else:
        backbone.float()
        # The flash kernels know no float32: what is proven on a GPU is layout, positions and masks.
        not_packed = why_not_packed(model, device, attend_grouped, grouped)
        if not_packed is not None:
            log.warning("runs padded, which is slower: %s", not_packed)
        else:
            gate = gate_if_exact(model, device, attend_grouped, grouped)
    backbone.to(dtype)
    if linear.is_supported(device, dtype):
        linear.prepack(backbone)
    runner: ModelRunner
    if not_packed is None:
        runner = PackedRunner(model, device, attention, grouped, gate)
    else:
        runner = PaddedRunner(model, device)
    return PreparedModel(runner, dtype, not_packed)


def _choose_attention(device: torch.device, dtype: torch.dtype) -> tuple[Attention, bool]:
    """The attention for a device, and whether it wants sequences grouped by length."""
    if varlen.is_available(device, dtype):
        return varlen.attend_varlen, False
    return attend_grouped, True
