"""Counts what a piece of code would launch on a GPU, on a CPU without one: torch's operations that compute or
copy, and our Triton kernels, which are not run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that only make a tensor or another look at one.
_WITHOUT_LAUNCH = {"empty", "new_empty", "empty_like", "empty_strided", "_unsafe_view", "detach", "alias"}


class _Operations(TorchDispatchMode):
    def __init__(self, launched: list[str]) -> None:
        super().__init__()
        self._launched = launched

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _WITHOUT_LAUNCH:
            self._launched.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def launches() -> Iterator[list[str]]:
    """The names of what is launched inside, in order. What kernels would compute is left as it was in
    memory. Without gradients, but not in inference mode, where operations come here before they are taken
    apart."""
    launched: list[str] = []

    def count(kernel: Any, *args: Any, **kwargs: Any) -> None:
        launched.append(kernel.fn.__name__)

    with patch("triton.runtime.jit.JITFunction.run", count), torch.no_grad(), _Operations(launched):
        yield launched
