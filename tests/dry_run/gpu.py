"""A GPU that is not there. Its tensors are torch's fake ones on "cuda", which have a shape and no contents,
so a CPU build of torch runs whole models on it. Tensors of the host are real.

`FakeGPU` sees every operation. It raises a `Fault` where a real GPU would fail or the host would wait, and
counts kernels, copies and allocations. Launches of our Triton kernels are checked and counted, not run."""

import ctypes
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from maxsimd.engine.device import fused_head
from maxsimd.engine.ops.triton import launch


class Fault(AssertionError):
    """An operation that would be an error or a wait on a real GPU."""


class MixedDevices(Fault):
    """An operation on tensors of both the host and the device."""


class HostWaits(Fault):
    """The host would wait for the device: for a number, or for a copy of memory that is not pinned."""


class Race(Fault):
    """Memory of the host is read or overwritten while the device may still write or read it."""


class NotCapturable(Fault):
    """Something that a replay of a graph would not do again: a copy, or memory of the host."""


class FreedMemory(Fault):
    """A replay would read memory that was freed since the capture."""


aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

GPU = torch.device("cuda")

# One for the process, so that what has been moved to the device can be used whenever it is entered.
_MEMORY = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)

# Operations that change or allocate no more than what describes a tensor, or memory without contents.
_NO_KERNEL = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided,
    aten.detach_, aten.squeeze_, aten.unsqueeze_, aten.t_, aten.transpose_, aten.as_strided_, aten.resize_,
    aten.set_,
}  # fmt: skip
_MASKED = {aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index_put}


@dataclass(slots=True)
class Counts:
    """Kernels by name, copies both ways with their bytes, allocations on the device, and waits of the host.
    Operations on nothing at all launch no kernel."""

    launches: Counter[str] = field(default_factory=Counter)
    to_device: int = 0
    bytes_to_device: int = 0
    to_host: int = 0
    allocations: int = 0
    waits: int = 0


class Graph:
    """A captured graph, as far as it can be wrong: the memory that it reads and does not own."""

    def __init__(self) -> None:
        self._own: set[int] = set()
        self._reads: dict[int, StorageWeakRef] = {}

    def note(self, read: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        self._own |= {_address(tensor) for tensor in made}
        for tensor in read:
            if _address(tensor) not in self._own:
                self._reads[_address(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def check(self) -> None:
        """Raises FreedMemory where a replay would read what is not there any more."""
        freed = sum(read.expired() for read in self._reads.values())
        if freed:
            raise FreedMemory(f"a replay reads {freed} tensors that were freed since the capture")


class FakeGPU(TorchDispatchMode):
    """The device, while it is entered. Where the host would wait, this raises, unless it `may_wait`: then the
    wait is counted, a number is 0, several are random, and any two tensors are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.compiled: set[tuple[Any, ...]] = set()  # kernels with what Triton specializes them on
        self.may_wait = False
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._graph: Graph | None = None
        # Memory of the host that copies may still be reading or writing.
        self._being_read: set[int] = set()
        self._being_written: set[int] = set()

    def __enter__(self) -> "FakeGPU":
        _MEMORY.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _MEMORY.__exit__(*raised)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """As `cuda_graphs.Capture`: while `run` runs, what a graph cannot hold raises."""
        graph = self._graph = Graph()
        try:
            run()
        finally:
            self._graph = None

        def replay() -> None:
            graph.check()
            self.counts.launches["graph"] += 1

        return replay

    @contextmanager
    def counted(self) -> Iterator[Counts]:
        """The counts of what is done in the meantime alone."""
        before, self.counts = self.counts, Counts()
        try:
            yield self.counts
        finally:
            self.counts = before

    def arrive(self) -> None:
        """All work that was launched so far is done."""
        self._being_read.clear()
        self._being_written.clear()

    def launch(self, name: str, arguments: Mapping[str, Any]) -> None:
        """One of our own kernels with its arguments by name."""
        tensors = {key: x for key, x in arguments.items() if isinstance(x, torch.Tensor)}
        for key, tensor in tensors.items():
            if not is_on_gpu(tensor):
                raise MixedDevices(f"{name} is handed {key} on the host")
        if self._graph is not None:
            self._graph.note([*tensors.values()], [])
        self.counts.launches[name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(map(_with_index, args))
        kwargs = {key: _with_index(x) for key, x in (kwargs or {}).items()}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if _is_composed(func):
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = kwargs.get("device")
        if func.overloadpacket is aten._to_copy and device is not None:
            if is_on_gpu(args[0]) and device.type == "cpu":
                self._wait(f"{_described(args[0])} is copied to memory of the host that is not pinned")
                with fake_tensor.unset_fake_temporarily():
                    return torch.rand(args[0].shape).to(kwargs.get("dtype") or args[0].dtype)
            if not is_on_gpu(args[0]) and device.type == "cuda":
                self._count_copy(args[0], kwargs, to_device=True)
                return self._allocated(func(*args, **kwargs))
        if func.overloadpacket is aten.copy_ and is_on_gpu(args[0]) != is_on_gpu(args[1]):
            return self._copy_between(*args, **kwargs)
        if device is not None and device.type == "cpu" and any(map(is_on_gpu, tensors)):
            with fake_tensor.unset_fake_temporarily():  # memory of the host like a tensor of the device
                like = torch.empty(args[0].shape, dtype=args[0].dtype)
            return self._on_host(func, (like, *args[1:]), kwargs, [like])
        if any(map(is_on_gpu, tensors)) or (device is not None and device.type == "cuda"):
            return self._on_device(func, args, kwargs, tensors)
        return self._on_host(func, args, kwargs, tensors)

    def _copy_between(self, into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        on_host = source if is_on_gpu(into) else into
        if torch.broadcast_shapes(into.shape, source.shape) != into.shape:
            raise RuntimeError(f"{_described(source)} does not fit into {_described(into)}")
        self._count_copy(on_host, {"non_blocking": non_blocking}, to_device=is_on_gpu(into))
        return into

    def _count_copy(self, on_host: torch.Tensor, how: Mapping[str, Any], *, to_device: bool) -> None:
        if on_host.numel() == 0:
            return
        way = f"{_described(on_host)} is copied {'to the device' if to_device else 'to the host'}"
        if self._graph is not None:
            raise NotCapturable(f"{way} within a captured graph")
        if to_device:
            self.counts.to_device += 1
            self.counts.bytes_to_device += on_host.nbytes
        else:
            self.counts.to_host += 1
        if not self._is_pinned(on_host):
            self._wait(f"{way}, and the memory of the host is not pinned")
        elif not how.get("non_blocking"):
            self._wait(f"{way}, and non_blocking is not set")
        else:
            (self._being_read if to_device else self._being_written).add(_address(on_host))

    def _wait(self, why: str) -> None:
        if self._graph is not None:
            raise NotCapturable(f"{why} within a captured graph")
        if not self.may_wait:
            raise HostWaits(why)
        self.counts.waits += 1
        self.arrive()

    def _on_host(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        if func.overloadpacket is aten.is_pinned:
            return self._is_pinned(args[0])
        self._check_races(func, tensors)
        is_new = func.overloadpacket is aten.lift_fresh  # of torch.tensor and torch.from_numpy
        pinned = func.overloadpacket is aten._pin_memory or kwargs.get("pin_memory")
        with fake_tensor.unset_fake_temporarily():
            if func.overloadpacket is aten._pin_memory:
                made = args[0].clone()
            else:
                made = func(*args, **(kwargs | {"pin_memory": False} if pinned else kwargs))
                if pinned:
                    made.zero_()  # so that what is read of it is the same in every run
        if pinned:
            self._pinned[_address(made)] = made.untyped_storage()
        if self._graph is not None and (is_new or _new(made, tensors)):
            raise NotCapturable(f"{func} makes a tensor of the host within a captured graph")
        return made

    def _on_device(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        for tensor in tensors:
            # A number of the host may be an operand.
            if not is_on_gpu(tensor) and tensor.dim() > 0:
                raise MixedDevices(f"{func} is handed {_described(tensor)} of the host")
        # Values that are written where a mask is set are counted first, unless there is only one.
        indices, masks = args[1] if func.overloadpacket in _MASKED else (), (torch.bool, torch.uint8)
        if any(x is not None and x.dtype in masks for x in indices) and args[2].numel() > 1:
            raise HostWaits(f"{_described(args[2])} is written where a mask says")
        try:
            made = func(*args, **kwargs)
        except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException) as error:
            why = f"{func} needs the contents of {_described(*tensors[:1])}"
            if func.overloadpacket in (aten._local_scalar_dense, aten.equal):
                self._wait(why)
                with fake_tensor.unset_fake_temporarily():
                    return func.overloadpacket is aten.equal or torch.zeros((), dtype=args[0].dtype).item()
            if self._graph is not None:
                raise NotCapturable(f"{why} within a captured graph") from error
            raise HostWaits(why) from error  # there is no telling how large the result is
        new = _new(made, tensors)
        self._allocated(*new)
        if self._graph is not None:
            self._graph.note([tensor for tensor in tensors if is_on_gpu(tensor)], new)
        changed = [args[0]] if func._schema.is_mutable and isinstance(args[0], torch.Tensor) else []
        if func.overloadpacket not in _NO_KERNEL and any(x.numel() for x in [*new, *changed]):
            self.counts.launches[func._schema.name.removeprefix("aten::")] += 1
        return made

    def _allocated(self, *made: torch.Tensor) -> Any:
        self.counts.allocations += len({_address(tensor) for tensor in made if tensor.numel()})
        return made[0] if made else None

    def _check_races(self, func: Any, tensors: list[torch.Tensor]) -> None:
        """During a copy, what it reads may not be written, and what it writes may not be read."""
        if any(_address(tensor) in self._being_written for tensor in tensors):
            raise Race(f"{func} reads what is still being copied to the host")
        is_written = func._schema.is_mutable and func.overloadpacket not in _NO_KERNEL
        if is_written and _address(tensors[0]) in self._being_read:
            raise Race(f"{func} overwrites what is still being copied to the device")

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return _address(tensor) in self._pinned


@functools.cache
def _is_composed(func: Any) -> bool:
    """Whether torch does an operation by others, with all devices alike."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE))


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, fake_tensor.FakeTensor)


def _with_index(argument: Any) -> Any:
    """The device with its index, which torch would ask CUDA for."""
    return torch.device("cuda:0") if isinstance(argument, torch.device) and argument == GPU else argument


def _address(tensor: torch.Tensor) -> int:
    """The address of the tensor's memory, which its views have in common with it."""
    return int(tensor.untyped_storage()._cdata)


def _new(made: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors among the results that have memory of their own."""
    before = {_address(tensor) for tensor in given}
    results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in results if tensor.numel() and _address(tensor) not in before]


def _described(tensor: torch.Tensor | None = None) -> str:
    return "nothing" if tensor is None else f"{str(tensor.dtype)[len('torch.') :]} {list(tensor.shape)}"


# An H100.
PROPERTIES = SimpleNamespace(
    name="a GPU that is not there", major=9, multi_processor_count=132,
    shared_memory_per_block_optin=227 * 1024, shared_memory_per_multiprocessor=228 * 1024,
    total_memory=80 << 30,
)  # fmt: skip

# The largest grid: 2^31 - 1 programs along x, 65535 along y and z.
_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)


def _specialized(parameter: Any, given: Any) -> Any:
    """The part of an argument for which Triton compiles a kernel of its own."""
    if isinstance(given, torch.Tensor):
        is_even = given.storage_offset() * given.itemsize % 16 == 0
        return given.dtype, is_even or parameter.do_not_specialize_on_alignment
    if parameter.is_constexpr:
        return given
    return isinstance(given, float) or parameter.do_not_specialize or (given == 1, given % 16 == 0)


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
        made_for = (_specialized(each, given.get(each.name)) for each in kernel.params)
        gpu.compiled.add((kernel.__name__, *made_for))

    with ExitStack() as stack:
        for owner, name, stand_in in (
            (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            (torch.cuda, "get_device_properties", lambda device=None: PROPERTIES),
            # A moment that the host must not wait for before the step is over.
            (torch.cuda, "Event", lambda **options: SimpleNamespace(record=lambda stream=None: None)),
            (torch.cuda, "current_stream", lambda device=None: None),
            (fused_head, "find_mismatch", lambda *given: None),
            (JITFunction, "run", run),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        # transformers leaves out what waits for the device where tensors are fake, but not on a real device.
        # It does so while a graph is captured.
        stand_in = lambda tensor: gpu._graph is not None  # noqa: E731
        stack.enter_context(mock.patch("transformers.utils.import_utils.is_fake_tensor", stand_in))
        # Limits that are cached for this device are forgotten once it is gone.
        stack.callback(launch.limits.cache_clear)
        launch.limits.cache_clear()
        stack.enter_context(_no_guard())
        stack.enter_context(gpu)
        yield gpu


# torch's table of guards, which switch between the devices of a type, its size, and the numbers of two types.
_GUARDS, _TYPES, _CUDA, _META = "_ZN3c104impl26device_guard_impl_registryE", 21, 1, 14


@contextmanager
def _no_guard() -> Iterator[None]:
    """Lets builds of torch without CUDA index tensors on "cuda": they get the guard of "meta", which does
    nothing. Builds with CUDA do the same themselves on machines without a GPU."""
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
