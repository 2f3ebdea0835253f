"""Where a forward pass waits for what it has computed: it cannot be captured as a CUDA graph, and an attempt
leaves torch's generator and memory of the device in a state in which later ones fail too."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Torch marks functions so whose result, or its size, depends on numbers in their arguments.
_DEPENDS_ON_NUMBERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_AS_NUMBERS = (torch.bool, torch.uint8)
_aten = torch.ops.aten
# Those with positions to write to, which may be given as a mask.
_WRITES = (_aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index_put)
_COPIES = (_aten._to_copy, _aten.to, _aten.copy_)


def waits_in(run: Callable[[], object], device: torch.device) -> list[str]:
    """Runs a function; returns the names of torch's functions in it that wait for what was computed on the
    device, sorted."""
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
        comes_back = func.overloadpacket in _COPIES and result.device.type != self._device.type
        if is_of_device and (comes_back or _reads_numbers(func, args, given)):
            self.waits.add(str(func))
        return result


def _reads_numbers(func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    if func.overloadpacket in _WRITES:
        return _has_mask(args[1]) and args[2].numel() > 1  # a number is written without a look
    if not _DEPENDS_ON_NUMBERS & set(func.tags):
        return False
    if func is _aten.index.Tensor:
        return _has_mask(args[1])
    if func is _aten.repeat_interleave.Tensor:
        return given.get("output_size") is None
    return True


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    """Whether any is a mask, not positions."""
    return any(index is not None and index.dtype in _AS_NUMBERS for index in indices)
