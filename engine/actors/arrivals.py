"""Waits until results have arrived from the device, beside the device thread's event loop."""

import asyncio
import queue
import threading
from concurrent.futures import Future

import torch

from maxsimd.engine.execution.devices import use_device
from maxsimd.engine.scoring.outcome import Arrival


class Arrivals:
    """Waits for one arrival after the other, in the order in which the device comes to them, in a thread that
    begins with the first. No process waits for that thread as it ends: the device may be stuck."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asked: queue.SimpleQueue[tuple[Arrival, Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def until(self, arrival: Arrival) -> None:
        """Returns when the device has come to it; raises what waiting for it raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="maxsimd-arrivals", daemon=True)
            self._thread.start()
        arrived: Future[None] = Future()
        self._asked.put((arrival, arrived))
        await asyncio.wrap_future(arrived)

    def close(self) -> None:
        """Ends the thread, when it next can; does not wait for it."""
        self._asked.put(None)

    def _run(self) -> None:
        use_device(self._device)
        while (asked := self._asked.get()) is not None:
            arrival, arrived = asked
            if not arrived.set_running_or_notify_cancel():
                continue
            try:
                arrival.synchronize()
            except BaseException as error:
                arrived.set_exception(error)
            else:
                arrived.set_result(None)
