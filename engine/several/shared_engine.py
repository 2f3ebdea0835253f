"""An engine that shares the thread of its device with others."""

from collections.abc import Callable

from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.shared import Seat
from maxsimd.engine.engine import Engine
from maxsimd.engine.runtime import Running, launch_beside


class SharedEngine(Engine):
    """As `Engine`, but started on a seat that `take_seat` gives it, a new one for each start."""

    def __init__(self, config: EngineConfig, take_seat: Callable[[], Seat]) -> None:
        super().__init__(config)
        self._take_seat = take_seat
        self._seat: Seat | None = None

    @property
    def device_seconds(self) -> float:
        """The time that it has used on the device since it was started."""
        return 0.0 if self._seat is None else self._seat.seconds

    async def _launch(self) -> Running:
        self._seat = self._take_seat()
        return await launch_beside(self._seat, self.config, self.metrics, self._died, self._tenants)
