"""Our Triton kernels on the GPU that is not there: each launch is checked and counted, and nothing runs.

Kernels are replaced where Triton starts them, so what surrounds them is real, and a new kernel needs no line
here. A function that launches may have a check of its own arguments: a line in `CHECKS`.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import wraps
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from maxsimd.engine.ops.qkv import KV, QKV
from tests.dry_run.faults import MixedDevices, WrongLaunch
from tests.dry_run.gpu import FakeGPU, is_on_gpu

# What a grid may be: 2^31 - 1 programs along x, 65535 along y and z.
_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise WrongLaunch(what)


def check_attention(
    qkv: QKV, blocks: torch.Tensor, causal: bool, out: torch.Tensor, prefix: KV | None = None
) -> None:
    heads, _, head_dim = qkv.query.shape
    kv = [qkv.key, qkv.value, *(prefix or ())]
    on_one_gpu(attention=qkv.query, keys=qkv.key, values=qkv.value, blocks=blocks, out=out)
    _expect(all(x.dtype == qkv.query.dtype for x in [*kv, out]), "queries, keys and values differ in type")
    _expect(all(x.shape[-1] == head_dim for x in [*kv, out]), "heads differ in size")
    _expect(all(heads % len(x) == 0 for x in kv), "queries' heads are no multiple of the keys'")
    _expect(qkv.key.shape == qkv.value.shape, "there are not as many values as keys")
    _expect(out.shape[1] == heads and out.stride(-1) == 1, "there is no row of the result for each head")
    _expect(blocks.dtype == torch.int32 and blocks.is_contiguous(), "blocks are not int32 end to end")


def check_project(hidden: torch.Tensor, rows: torch.Tensor, projection: Any, dtype: torch.dtype) -> None:
    weight, bias = projection.weight, projection.bias
    on_one_gpu(hidden=hidden, rows=rows, weight=weight, **({} if bias is None else {"bias": bias}))
    _expect(hidden.dtype == weight.dtype, "states and weight differ in type")
    _expect(hidden.shape[1] == weight.shape[1], "states are not as wide as the weight")
    _expect(rows.dtype == torch.int64 and rows.is_contiguous(), "rows are not int64 end to end")
    _expect(weight.stride(-1) == 1, "the weight's rows do not lie end to end")
    if bias is not None:
        _expect(bias.dtype == torch.float32 and bias.is_contiguous(), "the bias is not float32 end to end")


def check_maxsim(queries: Any, documents: Any, pairs: Any, *others: Any, **options: Any) -> None:
    for texts in (queries, documents, pairs):
        for each in fields(texts):
            numbers = getattr(texts, each.name)
            if isinstance(numbers, torch.Tensor):
                on_one_gpu(**{f"{each.name} of {type(texts).__name__}": numbers})
                is_index = each.name not in ("values", "scales")
                _expect(not is_index or numbers.dtype == torch.int32, f"{each.name} are not int32")
                _expect(not is_index or numbers.stride(0) == 1, f"{each.name} do not lie end to end")
    _expect(len(pairs.queries) == len(pairs.documents), "pairs lack a side")
    _expect(queries.values.shape[1] == documents.values.shape[1], "dimensions differ")
    if documents.scales is None:
        _expect(queries.values.dtype == documents.values.dtype, "queries and documents differ in type")
    else:
        _expect(documents.values.dtype == torch.int8, "documents with scales are not int8")
        _expect(documents.scales.shape == documents.values.shape[:1], "there is not one scale a row")


# The functions that launch, with the check of what each is given.
CHECKS: Mapping[str, Callable[..., None]] = {
    "maxsimd.engine.ops.triton.attention.attention": check_attention,
    "maxsimd.engine.ops.triton.projection.project": check_project,
    "maxsimd.engine.ops.triton.maxsim.maxsim": check_maxsim,
}


def on_one_gpu(**tensors: torch.Tensor) -> None:
    """Raises MixedDevices for a tensor of the host."""
    for name, tensor in tensors.items():
        if not is_on_gpu(tensor):
            raise MixedDevices(f"{name} are on the host")


@contextmanager
def launches_on(gpu: FakeGPU) -> Iterator[None]:
    """Has all kernels checked and counted by the device."""

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names = kernel.arg_names
        _expect(len(args) <= len(names), f"{kernel.__name__} is given {len(args)} arguments")
        given = dict(zip(names, args, strict=False)) | {x: options[x] for x in names if x in options}
        missing = [param.name for param in kernel.params if param.name not in given and not param.has_default]
        _expect(not missing, f"{kernel.__name__} is not given {', '.join(missing)}")
        programs = grid(given | options) if callable(grid) else grid
        within = all(0 < n <= most for n, most in zip(programs, _MOST_PROGRAMS, strict=False))
        _expect(within, f"{kernel.__name__} is started on a grid of {programs}")
        gpu.launch(kernel.__name__, given)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        for function, check in CHECKS.items():
            _replace_everywhere(stack, function, check)
        yield


def _replace_everywhere(stack: ExitStack, function: str, check: Callable[..., None]) -> None:
    """Puts the check before a function, in all modules that have imported it."""
    module, name = function.rsplit(".", 1)
    original = getattr(importlib.import_module(module), name)

    @wraps(original)
    def checked(*args: Any, **options: Any) -> Any:
        check(*args, **options)
        return original(*args, **options)

    for each in list(sys.modules.values()):
        ours = getattr(each, "__name__", "").startswith(("maxsimd.", "tests."))
        if ours and vars(each).get(name) is original:
            stack.enter_context(mock.patch.object(each, name, checked))
