"""Enters the GPU that is not there, with stand-ins for what only a CUDA build of torch answers."""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from maxsimd.engine.device import fused_head
from maxsimd.engine.ops.triton import launch
from tests.dry_run.gpu import FakeGPU
from tests.dry_run.launches import launches_on

# An H100.
CAPABILITY = (9, 0)
PROPERTIES = SimpleNamespace(
    name="a GPU that is not there",
    major=9,
    multi_processor_count=132,
    shared_memory_per_block_optin=227 * 1024,
    shared_memory_per_multiprocessor=228 * 1024,
    total_memory=80 << 30,
)


class _Event:
    """A moment that the host must not wait for before the step is over."""

    def __init__(self, **options: Any) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass


@contextmanager
def fake_gpu() -> Iterator[FakeGPU]:
    """The device, entered. What compares numbers of the device at load is left out: there are none."""
    gpu = FakeGPU()
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (torch.cuda, "get_device_capability", lambda device=None: CAPABILITY),
            (torch.cuda, "get_device_properties", lambda device=None: PROPERTIES),
            (torch.cuda, "Event", _Event),
            (fused_head, "find_mismatch", lambda *given: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        # transformers leaves out what waits for the device where tensors are fake, but not on a real device.
        # It does so while a graph is captured.
        stand_in = lambda tensor: gpu.is_capturing  # noqa: E731
        stack.enter_context(mock.patch("transformers.utils.import_utils.is_fake_tensor", stand_in))
        stack.enter_context(launches_on(gpu))
        stack.callback(_forget_device)
        _forget_device()
        stack.enter_context(_no_guard())
        stack.enter_context(gpu)
        yield gpu


# Where torch's library has what switches between the devices of a type, and the numbers of two types.
_GUARDS, _TYPES, _CUDA, _META = "_ZN3c104impl26device_guard_impl_registryE", 21, 1, 14


@contextmanager
def _no_guard() -> Iterator[None]:
    """Lets tensors on "cuda" be indexed by a build of torch without CUDA, which asks for what switches to
    their device before anything else; "meta" has one that does nothing. torch does the same itself in builds
    with CUDA on machines without a GPU."""
    if torch.backends.cuda.is_built():
        yield
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * _TYPES).in_dll(library, _GUARDS)
    before, guards[_CUDA] = guards[_CUDA], guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before


def _forget_device() -> None:
    """What is remembered of a device is remembered of this one for no longer than it is there."""
    launch.limits.cache_clear()
