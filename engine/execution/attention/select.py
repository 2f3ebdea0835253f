"""Which attention backend a device runs: the fastest that is installed and shown to be right on it."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution.attention.base import AttentionBackend
from maxsimd.engine.execution.attention.check import find_mismatch
from maxsimd.engine.execution.attention.cpu_kernel import CompiledBackend
from maxsimd.engine.execution.attention.timing import fastest, time_backends, time_on_cuda
from maxsimd.engine.execution.attention.torch_grouped import GroupedBackend
from maxsimd.engine.execution.attention.triton_kernel import TritonBackend
from maxsimd.engine.execution.attention.varlen import (
    FlashBackend,
    VarlenBackend,
    is_flash_available,
    is_varlen_available,
)
from maxsimd.engine.execution.precision import dtype_name
from maxsimd.engine.execution.relative import has_relative_positions
from maxsimd.engine.ops import triton as triton_ops

log = logging.getLogger(__name__)

Backend = AttentionBackend[Any]


def choose_attention(
    name: str, model: LoadedModel, device: torch.device, dtype: torch.dtype, compiled: bool
) -> Backend:
    """The backend for a name (auto, varlen, flash, triton, torch).

    `auto` takes the fastest that runs here and agrees with plain torch on random sequences, with a warning
    for each that does not. `compiled` says whether the compiled kernels may be used. Raises ModelLoadError
    for a name that cannot run here."""
    if name == "torch":
        return GroupedBackend()
    if name == "auto" and device.type == "cpu":
        return CompiledBackend() if compiled else GroupedBackend()
    found = candidates(device, dtype)
    if name not in ("auto", *found):
        is_missing = name == "triton" and triton_ops.is_missing_on(device)
        raise ModelLoadError(
            f"attention by {name} cannot run on this {device.type} in {dtype_name(dtype)}; "
            + (triton_ops.MISSING if is_missing else "use auto")
        )
    if has_relative_positions(model.backbone):
        level = logging.INFO if name == "auto" else logging.WARNING
        log.log(level, "attention: plain torch, which alone adds relative positions on this device")
        return GroupedBackend()
    if name != "auto":
        return found[name]()
    right: dict[str, Backend] = {}
    for candidate, make in found.items():
        backend = make()
        mismatch = find_mismatch(backend, model, device, dtype)
        if mismatch is None:
            right[candidate] = backend
        else:
            log.warning("attention by %s is not used: %s", candidate, mismatch)
    if not right:
        log.debug("attention: plain torch, because nothing else is right on this device")
        return GroupedBackend()
    return right[_choose(right, model, device, dtype)]


def _choose(
    right: Mapping[str, Backend], model: LoadedModel, device: torch.device, dtype: torch.dtype
) -> str:
    """The name of the fastest of the backends that are right; without a timing where there is one, or no
    GPU to time it on."""
    if len(right) == 1 or device.type != "cuda":
        chosen = next(iter(right))
        log.debug("attention: %s, the first that is right on this device", chosen)
        return chosen
    times = time_backends(right, model, device, dtype, time_on_cuda)
    chosen = fastest(times)
    measured = ", ".join(f"{name} {taken:.3f} ms" for name, taken in times.items())
    log.debug("attention: %s, by a short timing on this device: %s", chosen, measured)
    return chosen


def candidates(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], Backend]]:
    """What can run on a device besides the backends for CPUs, preferred where they are as fast as others."""
    found: dict[str, Callable[[], Backend]] = {}
    if triton_ops.runs_on(device):
        # First, because CUDA graphs of any size can be captured with it.
        found["triton"] = TritonBackend
    if is_varlen_available(device, dtype):
        found["varlen"] = lambda: VarlenBackend(device)
    if is_flash_available(device, dtype):
        found["flash"] = lambda: FlashBackend(device)
    return found
