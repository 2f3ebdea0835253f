"""On a machine with several GPUs an engine uses its own, with stand-ins for what torch has of GPUs."""

import threading
from typing import Any

import pytest
import torch

from maxsimd.engine.actors.arrivals import Arrivals
from maxsimd.engine.actors.scoring import record_arrival
from maxsimd.engine.device.load import prepare_thread
from maxsimd.engine.device.shared import SharedDevice
from maxsimd.engine.execution.device_clock import times_on_cuda
from maxsimd.engine.execution.graph_recorder import CudaRecorder

SECOND = torch.device("cuda:1")


class Cuda:
    """Two GPUs. As in CUDA, each thread has a current one, at first GPU 0. `used` says, for all that was
    launched, recorded or waited for, on which GPU."""

    def __init__(self) -> None:
        self._threads = threading.local()
        self.used: list[tuple[str, int]] = []
        self.blocking: list[bool] = []

    @property
    def current(self) -> int:
        return getattr(self._threads, "current", 0)

    def set_device(self, device: Any) -> None:
        self._threads.current = device if isinstance(device, int) else torch.device(device).index

    def index(self, device: Any = None) -> int:
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        return self.current if index is None else index

    def stream(self, device: Any = None) -> "Stream":
        return Stream(self, self.index(device))

    def event(self, enable_timing: bool = False, blocking: bool = False) -> "Event":
        self.blocking.append(blocking)
        return Event(self)

    def synchronize(self, device: Any = None) -> None:
        self.used.append(("synchronize", self.index(device)))

    def asked(self, what: str, result: Any) -> Any:
        def ask(device: Any = None) -> Any:
            self.used.append((what, self.index(device)))
            return result

        return ask


class Stream:
    def __init__(self, cuda: Cuda, device: int) -> None:
        self.cuda, self.device = cuda, device
        cuda.used.append(("stream", device))


class Event:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def record(self, stream: Stream | None = None) -> None:
        self.cuda.used.append(("record", self.cuda.current if stream is None else stream.device))

    def synchronize(self) -> None:
        self.cuda.used.append(("wait", self.cuda.current))

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    replaced = {
        "set_device": found.set_device,
        "current_device": lambda: found.current,
        "current_stream": found.stream,
        "Stream": found.stream,
        "Event": found.event,
        "synchronize": found.synchronize,
        "graph_pool_handle": lambda: (0, 0),
        "memory_allocated": found.asked("memory", 0),
        "memory_reserved": found.asked("memory", 0),
        "max_memory_allocated": found.asked("memory", 0),
        "reset_peak_memory_stats": found.asked("memory", None),
        "mem_get_info": found.asked("memory", (1, 1)),
    }
    for name, replacement in replaced.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    return found


def test_results_are_waited_for_on_the_stream_that_makes_them(cuda: Cuda) -> None:
    """From whichever thread: on another GPU's stream, which is idle, numbers would be read that are not there
    yet. The thread that waits sleeps."""
    arrival = record_arrival(SECOND)
    assert arrival is not None
    assert ("record", 1) in cuda.used
    assert {device for _, device in cuda.used} == {1}
    assert cuda.blocking == [True]
    assert record_arrival(torch.device("cpu")) is None


async def test_the_thread_that_waits_begins_no_work_on_another_gpu(cuda: Cuda) -> None:
    arrivals = Arrivals(SECOND)
    await arrivals.until(Event(cuda))
    arrivals.close()
    assert cuda.used == [("wait", 1)]


async def test_a_device_thread_has_its_gpu_as_the_current_one(cuda: Cuda) -> None:
    """Triton launches kernels on the current GPU, and torch records events there that name no stream."""
    shared = SharedDevice(SECOND, None)
    try:
        assert await shared.thread.call(torch.cuda.current_device) == 1
        await shared.thread.call(_measure)
    finally:
        shared.close()
    assert {what for what, _ in cuda.used} >= {"record", "stream", "synchronize", "memory"}
    assert {device for _, device in cuda.used} == {1}
    assert torch.cuda.current_device() == 0, "this thread is not the device's"


def _measure() -> None:
    times_on_cuda(lambda: None)
    CudaRecorder().cost(lambda: None)


def test_each_thread_has_a_gpu_of_its_own(cuda: Cuda) -> None:
    found = {}

    def prepare(number: int) -> None:
        prepare_thread(torch.device("cuda", number), None)
        found[number] = torch.cuda.current_device()

    threads = [threading.Thread(target=prepare, args=(number,)) for number in (1, 0)]
    for thread in threads:
        thread.start()
        thread.join()
    assert found == {0: 0, 1: 1}
    prepare_thread(torch.device("cuda"), None)
    assert torch.cuda.current_device() == 0
