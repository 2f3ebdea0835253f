"""Makes a loaded model ready to run on its device: precision, proof of packing, weight layout."""

import logging
import time
from dataclasses import dataclass, replace

import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.packed import linear
from maxsimd.engine.packed.attention import PackedAttention
from maxsimd.engine.packed.choice import choose_attention
from maxsimd.engine.packed.compiled import is_compiled_supported
from maxsimd.engine.packed.graphs import with_graphs
from maxsimd.engine.packed.grouped import GROUPED
from maxsimd.engine.packed.padded import PaddedRunner
from maxsimd.engine.packed.proof import Proof, prove, random_steps
from maxsimd.engine.packed.runner import ModelRunner, PackedRunner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedModel:
    """How a model is run, and why so: by which `attention`, or `not_packed` and why. `proof_seconds` is how
    long it took to find out, `quantized` how many of its weights are int8."""

    runner: ModelRunner
    dtype: torch.dtype
    attention: str | None
    not_packed: str | None
    proof_seconds: float
    quantized: int


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


def cast(backbone: torch.nn.Module, dtype: torch.dtype) -> None:
    """Puts the weights into a precision. Buffers that are not in the checkpoint stay as the model made them:
    rotary frequencies, which must be float32 or far positions are lost."""
    for module in backbone.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                module.register_buffer(name, buffer.to(dtype))


def prepare(model: LoadedModel, config: EngineConfig, device: torch.device) -> PreparedModel:
    """Settles precision and execution. The model is proven in float32, whatever it then runs in.

    Raises ModelLoadError where int8 weights are asked for and cannot be multiplied here."""
    dtype = choose_dtype(config.dtype, device)
    compiled = config.kernels == "auto" and is_compiled_supported(device, dtype)
    if config.quantization == "int8" and not compiled:
        raise ModelLoadError(
            "int8 weights need a CPU with AVX-512 (VNNI and BF16), the compiled kernels and the precision"
            " bfloat16: leave out --quantization, or the --device, --dtype or --kernels that rules these out"
        )
    attention = choose_attention(config.attention, model, device, dtype, compiled)
    backbone = model.backbone
    started = time.perf_counter()
    if config.packing == "off":
        proof = Proof("packing is off", None)
    else:
        proof = prove(model, device, _in_float32(attention))
        if proof.not_packed is not None:
            log.warning("runs padded, which is slower: %s", proof.not_packed)
    proof_seconds = time.perf_counter() - started
    cast(backbone, dtype)
    quantized = 0
    if config.quantization == "int8":
        quantized = linear.compile_int8(backbone)
    elif compiled and not linear.prefers_prepacked():
        linear.compile_bfloat16(backbone)
    elif linear.is_prepacked_supported(device, dtype):
        linear.prepack(backbone)
    if proof.not_packed is not None:
        return PreparedModel(
            PaddedRunner(model, device), dtype, None, proof.not_packed, proof_seconds, quantized
        )
    packed = PackedRunner(model, device, attention, proof.gate)
    runner: ModelRunner = packed
    if config.cuda_graphs == "auto":
        runner = with_graphs(packed, attention, model.causal, device, random_steps(model))
    return PreparedModel(runner, dtype, attention.name, None, proof_seconds, quantized)


def _in_float32(attention: PackedAttention) -> PackedAttention:
    """What stands in for an attention that knows no float32: with it layout, positions and masks are
    proven."""
    if attention.knows_float32:
        return attention
    first_rows = None if attention.first_rows is None else GROUPED.first_rows
    return replace(GROUPED, first_rows=first_rows, arrangement=attention.arrangement)
