"""Precisions: which one a configuration means, and how weights are converted."""

import torch

from maxsimd.engine.ops.cpu.instruction_sets import multiplies_bfloat16


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it natively, else float32: models that are trained in
    bfloat16 may leave the range of float16."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    if device.type == "cuda":
        return torch.float32 if lacks_bfloat16(device) else torch.bfloat16
    if device.type != "cpu":
        return torch.bfloat16 if _says_bfloat16_is_native(device) else torch.float32
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32


def lacks_bfloat16(device: torch.device) -> bool:
    """Whether a device is a CUDA GPU that does not multiply bfloat16, such as a T4."""
    # torch's own question is about the thread's current device.
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) < (8, 0)


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
