"""An accelerator that does not exist: `imaginary`, a type of device that torch takes for a real one.

Operations run on the host's memory. As on a real device these are refused: tensors of two devices in one
operation, float64 (as on Apple's GPUs), and arrays of numpy that would share its memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "imaginary"

aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_BETWEEN_DEVICES = {aten.copy_, aten._to_copy}

# Methods that Python answers from a copy of a tensor's numbers.
_OF_THE_HOST = (torch.Tensor.tolist, torch.Tensor.__format__, torch.Tensor.__repr__)

# The operation whose results are wrong, by its full name, if any is.
broken: str | None = None


class MixedDevices(AssertionError):
    """An operation on tensors of the host and of the device."""


class ImaginaryTensor(torch.Tensor):
    """A tensor of the device; `on_host` has its numbers."""

    on_host: torch.Tensor

    @staticmethod
    def __new__(cls, on_host: torch.Tensor) -> "ImaginaryTensor":
        made: ImaginaryTensor = torch.Tensor._make_wrapper_subclass(
            cls, on_host.size(), on_host.stride(), on_host.storage_offset(), dtype=on_host.dtype,
            device=f"{NAME}:0",
        )  # fmt: skip
        made.on_host = on_host
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if func in _OF_THE_HOST:
            return func(args[0].cpu(), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            args[0].on_host = args[1].on_host
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def add_device() -> None:
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    for name, implementation in _OPERATIONS.items():
        _LIBRARY.impl(name, implementation, "PrivateUse1")


_LIBRARY = torch.library.Library("aten", "IMPL")

# Operations that torch asks of the device itself.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "empty.memory_format": lambda size, dtype=None, *_, **__: _new(torch.empty(size, dtype=dtype)),
    "empty_strided": lambda size, stride, dtype=None, *_, **__: _new(
        torch.empty_strided(size, stride, dtype=dtype)
    ),
    "_copy_from": lambda source, into, non_blocking=False: _run(aten.copy_.default, (into, source), {}),
}


def _new(on_host: torch.Tensor) -> ImaginaryTensor:
    if on_host.dtype is torch.float64:
        raise TypeError(f"{NAME} devices have no float64")
    with torch.inference_mode(False):
        return ImaginaryTensor(on_host)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    packet = func.overloadpacket
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
        return func._op_dk(_COMPOSITE, *args, **kwargs)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    # A number of the host may be an operand.
    strangers = [each for each in tensors if not isinstance(each, ImaginaryTensor) and each.dim() > 0]
    if strangers and packet not in _BETWEEN_DEVICES:
        raise MixedDevices(f"{func} is handed {tuple(strangers[0].shape)} of the host")
    device = kwargs.get("device")
    # Numbers are made and changed as outside of inference mode, so that weights and results are alike.
    with torch.inference_mode(False), torch.no_grad():
        made = func(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))
        if func._schema.name == broken:
            made.mul_(1.5)
        if packet is aten.copy_:
            return args[0]
        if device is not None and device.type == "cpu":
            return made.clone() if packet is aten._to_copy else made
        given = {id(each.on_host): each for each in tensors if isinstance(each, ImaginaryTensor)}
        return tree_map(lambda x: given[id(x)] if id(x) in given else _wrapped(x), made)


def _wrapped(made: Any) -> Any:
    return _new(made) if isinstance(made, torch.Tensor) else made


def _on_host(given: Any) -> Any:
    if isinstance(given, ImaginaryTensor):
        return given.on_host
    is_there = isinstance(given, torch.device) and given.type == NAME
    return torch.device("cpu") if is_there else given
