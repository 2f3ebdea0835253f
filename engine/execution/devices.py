"""Devices: which one a name means, and which ones this machine has."""

import torch

from maxsimd.engine.errors import ModelLoadError

# What may have devices besides the CPU and an accelerator that a package of its own adds to torch.
_KINDS = ("cuda", "xpu", "mps", "mtia", "hpu")


def choose_device(name: str) -> torch.device:
    """The device that a name means: auto, or a type of torch's with or without a number; hip means AMD's
    GPUs, which torch calls cuda. Raises ModelLoadError, with the names of those that there are, for one that
    torch does not know or that does not add two numbers."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, colon, number = name.partition(":")
    if kind == "hip" and torch.version.hip is None:
        raise _refusal(name, "this build of torch is not for ROCm")
    try:
        device = torch.device(("cuda" if kind == "hip" else kind) + colon + number)
    except RuntimeError:
        raise _refusal(name, "torch knows no device of that name") from None
    reason = None if device.type == "cpu" else _why_unusable(device)
    if reason is not None:
        raise _refusal(name, reason)
    return device


def use_device(device: torch.device) -> None:
    """Makes a device the calling thread's current one, which is where streams, events and kernels go that
    name none. Each thread that touches the device calls this first: a new thread begins with device 0."""
    if device.index is not None:
        set_device = getattr(getattr(torch, device.type, None), "set_device", None)
        if set_device is not None:
            set_device(device.index)


def device_names() -> list[str]:
    """The devices that torch can use on this machine."""
    names = ["cpu"]
    for kind in dict.fromkeys((*_KINDS, torch._C._get_privateuse1_backend_name())):
        module = getattr(torch, kind, None)
        if module is None or not module.is_available():
            continue
        count = module.device_count()
        names += [kind] if count == 1 else [f"{kind}:{number}" for number in range(count)]
    return names


def _refusal(name: str, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"the device {name!r} cannot be used: {reason}; this machine has {', '.join(device_names())}"
    )


def _why_unusable(device: torch.device) -> str | None:
    """None where a device adds two numbers, else what it says instead."""
    try:
        found = (torch.full((2,), 1.0, device=device) + 1.0).cpu().tolist()
    except Exception as error:  # each kind of device has errors of its own
        return str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
    return None if found == [2.0, 2.0] else f"1 and 1 are {found[0]} there"
