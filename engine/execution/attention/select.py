"""Which attention backend a device runs: the fastest that is installed and shown to be right on it."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution.attention.base import AttentionBackend
from maxsimd.engine.execution.attention.check import find_mismatch
from maxsimd.engine.execution.attention.cpu_kernel import CompiledBackend
from maxsimd.engine.execution.attention.torch_grouped import GroupedBackend
from maxsimd.engine.execution.attention.triton_kernel import TritonBackend
from maxsimd.engine.execution.attention.varlen import (
    FlashBackend,
    VarlenBackend,
    is_flash_available,
    is_varlen_available,
)
from maxsimd.engine.execution.precision import dtype_name
from maxsimd.engine.ops import triton as triton_ops

log = logging.getLogger(__name__)

Backend = AttentionBackend[Any]


def choose_attention(
    name: str, model: LoadedModel, device: torch.device, dtype: torch.dtype, compiled: bool
) -> Backend:
    """The backend for a name (auto, varlen, flash, triton, torch).

    `auto` takes the first that runs here and agrees with plain torch on random sequences, with a warning for
    each that does not. `compiled` says whether the compiled kernels may be used. Raises ModelLoadError for a
    name that cannot run here."""
    if name == "torch":
        return GroupedBackend()
    if name == "auto" and device.type == "cpu":
        return CompiledBackend() if compiled else GroupedBackend()
    found = candidates(device, dtype)
    if name != "auto":
        if name not in found:
            raise ModelLoadError(
                f"attention by {name} cannot run on this {device.type} in {dtype_name(dtype)}; use auto"
            )
        return found[name]()
    for candidate, make in found.items():
        backend = make()
        mismatch = find_mismatch(backend, model, device, dtype)
        if mismatch is None:
            return backend
        log.warning("attention by %s is not used: %s", candidate, mismatch)
    return GroupedBackend()


def candidates(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], Backend]]:
    """What can run on a device besides the backends for CPUs, fastest first."""
    found: dict[str, Callable[[], Backend]] = {}
    if is_varlen_available(device, dtype):
        found["varlen"] = lambda: VarlenBackend(device)
    if is_flash_available(device, dtype):
        found["flash"] = lambda: FlashBackend(device)
    if triton_ops.runs_on(device):
        found["triton"] = TritonBackend
    return found
