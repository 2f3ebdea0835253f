"""What capturing CUDA graphs needs of the device: to record what a function launches, and to say what a run
costs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from maxsimd.engine.execution.device_clock import Times, times_on_cuda

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run takes: its times, and the share of the device's free memory that it needs meanwhile."""

    times: Times
    memory: float


class Recorder(Protocol):
    """Records launches for one model."""

    def cost(self, run: Run) -> Cost:
        """What a run takes that has been run before."""
        ...

    def capture(self, run: Run) -> Callable[[], None]:
        """Runs a function and captures what it launches; returns what launches it again."""
        ...


class CudaRecorder:
    """CUDA graphs of the thread's current device. They share their memory, because only one runs at a
    time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream()

    def cost(self, run: Run) -> Cost:
        torch.cuda.synchronize()
        before, (free, _) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
        # What torch holds for itself is free as well.
        free += torch.cuda.memory_reserved() - before
        torch.cuda.reset_peak_memory_stats()
        times = times_on_cuda(run)
        return Cost(times, (torch.cuda.max_memory_allocated() - before) / max(free, 1))

    def capture(self, run: Run) -> Callable[[], None]:
        # A run beside the default stream, as torch asks for: libraries set up there what a graph may not.
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            run()
        torch.cuda.current_stream().wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay
