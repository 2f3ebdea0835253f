"""Enters the GPU that is not there, with stand-ins for what only a CUDA build of torch answers.

Our Triton kernels are replaced where Triton starts them: each launch is checked and counted, and nothing
runs. What surrounds them is real, and a new kernel needs no line here.
"""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from maxsimd.engine.device import fused_head
from maxsimd.engine.ops.triton import launch
from tests.dry_run.gpu import FakeGPU, Fault

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


# What a grid may be: 2^31 - 1 programs along x, 65535 along y and z.
_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)


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

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names = kernel.arg_names
        given = dict(zip(names, args, strict=False)) | {x: options[x] for x in names if x in options}
        missing = [param.name for param in kernel.params if param.name not in given and not param.has_default]
        if missing or len(args) > len(names):
            raise Fault(f"{kernel.__name__} is given {len(args)} arguments, not {', '.join(missing)}")
        programs = grid(given | options) if callable(grid) else grid
        if not all(0 < n <= most for n, most in zip(programs, _MOST_PROGRAMS, strict=False)):
            raise Fault(f"{kernel.__name__} is started on a grid of {programs}")
        gpu.launch(kernel.__name__, given)

    with ExitStack() as stack:
        for owner, name, stand_in in (
            (torch.cuda, "get_device_capability", lambda device=None: CAPABILITY),
            (torch.cuda, "get_device_properties", lambda device=None: PROPERTIES),
            (torch.cuda, "Event", _Event),
            (fused_head, "find_mismatch", lambda *given: None),
            (JITFunction, "run", run),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        # transformers leaves out what waits for the device where tensors are fake, but not on a real device.
        # It does so while a graph is captured.
        stand_in = lambda tensor: gpu.is_capturing  # noqa: E731
        stack.enter_context(mock.patch("transformers.utils.import_utils.is_fake_tensor", stand_in))
        # What is remembered of a device is remembered of this one for no longer than it is there.
        stack.callback(launch.limits.cache_clear)
        launch.limits.cache_clear()
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
