"""Precisions: which one a configuration means, and how weights are converted."""

import torch

from maxsimd.engine.ops.cpu.instruction_sets import multiplies_bfloat16


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it natively, else float32."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if device.type != "cpu":
        return torch.bfloat16 if _says_bfloat16_is_native(device) else torch.float32
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32


def _says_bfloat16_is_native(device: torch.device) -> bool:
    """Whether what torch has for a kind of device knows the question, and says yes."""
    ask = getattr(getattr(torch, device.type, None), "is_bf16_supported", None)
    try:
        return ask is not None and bool(ask(including_emulation=False))
    except TypeError:
        return False


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a precision as users write it, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def cast(backbone: torch.nn.Module, dtype: torch.dtype) -> None:
    """Converts the weights to a precision. Buffers that are not in the checkpoint stay as the model made
    them: rotary frequencies among them, whose rounding would lose far positions."""
    for module in backbone.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                module.register_buffer(name, buffer.to(dtype))
