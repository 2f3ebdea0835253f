"""Where a forward pass waits for what it has computed: it cannot be captured as a CUDA graph, and an attempt
leaves torch's generator and memory of the device in a state in which later ones fail too."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Torch marks functions so whose result, or its size, depends on numbers in their arguments.
_DEPENDS_ON_NUMBERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_AS_NUMBERS = (torch.bool, torch.uint8)


def waits_in(run: Callable[[], object], device: torch.device) -> list[str]:
    """Runs a function; returns the names of torch's functions in it that wait for what was computed on the
    device, in order."""
    watch = _Watch(device)
    with watch:
        run()
    return sorted(watch.waits)


class _Watch(TorchDispatchMode):
    """For the thread that enters it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: set[str] = set()
        self._device = device

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func.namespace == "aten" and "device" not in given:
            with self:  # in inference mode functions come here that are made of others
                result = func.decompose(*args, **given)
            if result is not NotImplemented:
                return result
        result = func(*args, **given)
        is_of_device = any(
            isinstance(each, torch.Tensor) and each.device.type == self._device.type for each in args
        )
        if is_of_device and (_reads_numbers(func, args, given) or self._is_of_host(result)):
            self.waits.add(str(func))
        return result

    def _is_of_host(self, result: Any) -> bool:
        is_tensor = isinstance(result, torch.Tensor)
        return is_tensor and self._device.type != "cpu" and result.device.type == "cpu"


def _reads_numbers(func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    if not _DEPENDS_ON_NUMBERS & set(func.tags):
        return False
    if func is torch.ops.aten.index.Tensor:  # by positions it does not
        return any(index is not None and index.dtype in _AS_NUMBERS for index in args[1])
    if func is torch.ops.aten.repeat_interleave.Tensor:
        return given.get("output_size") is None
    return True
