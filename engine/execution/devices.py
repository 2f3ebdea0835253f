"""Devices: choosing one by name, its precision, the time that work takes on it, and the tokens of a step that
its memory holds."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.ops.cpu.library import multiplies_bfloat16

# Kinds of devices besides the CPU and an accelerator that a package adds to torch.
_KINDS = ("cuda", "xpu", "mps", "mtia", "hpu")


def choose_device(name: str) -> torch.device:
    """The device of a name: auto, which is CUDA or the CPU, or one of torch's with or without a number; hip
    means AMD's GPUs, which torch calls cuda. Raises ModelLoadError, with the available devices, for one that
    is unknown or does not add two numbers."""
    if name == "auto":
        has_cuda = torch.cuda.is_available() and torch.version.hip is None
        return torch.device("cuda" if has_cuda else "cpu")
    kind, colon, number = name.partition(":")
    if kind == "hip" and torch.version.hip is None:
        raise _refusal(name, "this build of torch is not for ROCm")
    try:
        device = torch.device(("cuda" if kind == "hip" else kind) + colon + number)
    except RuntimeError:
        raise _refusal(name, "torch knows no device of that name") from None
    reason = None if device.type == "cpu" else _usage_error(device)
    if reason is not None:
        raise _refusal(name, reason)
    return device


def use_device(device: torch.device) -> None:
    """Makes a device the calling thread's current one, for streams, events and kernels that name none. Each
    thread that uses the device calls this first: a new thread begins with device 0."""
    set_device = getattr(getattr(torch, device.type, None), "set_device", None)
    if device.index is not None and set_device is not None:
        set_device(device.index)


def device_names() -> list[str]:
    """The devices that torch can use on this machine."""
    names = ["cpu"]
    for kind in dict.fromkeys((*_KINDS, torch._C._get_privateuse1_backend_name())):
        module = getattr(torch, kind, None)
        if module is None or not module.is_available():
            continue
        count = module.device_count()
        names += [kind] if count == 1 else [f"{kind}:{number}" for number in range(count)]
    return names


def _refusal(name: str, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"the device {name!r} cannot be used: {reason}; this machine has {', '.join(device_names())}"
    )


def _usage_error(device: torch.device) -> str | None:
    """None if a device adds two numbers, else its error."""
    try:
        found = (torch.full((2,), 1.0, device=device, dtype=torch.float32) + 1.0).cpu().tolist()
    except Exception as error:  # each kind of device has errors of its own
        return str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
    return None if found == [2.0, 2.0] else f"1 and 1 are {found[0]} there"


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 if the hardware multiplies it natively, else float32: models that were trained in
    bfloat16 may leave the range of float16."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    if device.type == "cuda":
        return torch.float32 if lacks_bfloat16(device) else torch.bfloat16
    if device.type != "cpu":
        return torch.bfloat16 if _says_bfloat16_is_native(device) else torch.float32
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32


def lacks_bfloat16(device: torch.device) -> bool:
    """Whether a device is a CUDA GPU that does not multiply bfloat16, such as a T4."""
    # torch's own question is about the thread's current device.
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) < (8, 0)


def _says_bfloat16_is_native(device: torch.device) -> bool:
    ask = getattr(getattr(torch, device.type, None), "is_bf16_supported", None)
    try:
        return ask is not None and bool(ask(including_emulation=False))
    except TypeError:
        return False


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a precision for users, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def cast(backbone: torch.nn.Module, dtype: torch.dtype) -> None:
    """Converts weights to a precision. Buffers that are not in the checkpoint stay: rounded rotary
    frequencies would lose far positions."""
    for module in backbone.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                module.register_buffer(name, buffer.to(dtype))


Run = Callable[[], object]
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds until the host has launched a run, and from its first kernel to its last on the device."""

    host: float
    device: float


def times_on_cuda(run: Run) -> Times:
    """The times of one run, after all that was launched before. Waits for it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    began = time.perf_counter()
    run()
    launched = time.perf_counter()
    end.record()
    end.synchronize()
    return Times((launched - began) * 1e3, start.elapsed_time(end))


def milliseconds_in_turns_on_cuda(runs: Mapping[str, Run], budget: float) -> dict[str, float]:
    """Median milliseconds of each of `runs` on the device, in rounds that take about `budget` milliseconds in
    all."""
    repeats = {}
    for name, run in runs.items():
        run()  # compiles kernels and loads libraries
        once = times_on_cuda(run).device
        repeats[name] = max(1, int(budget / len(runs) / _ROUNDS / max(once, 1e-3)))

    def several(name: str) -> None:
        for _ in range(repeats[name]):
            runs[name]()

    rounds = [
        {name: times_on_cuda(functools.partial(several, name)).device / repeats[name] for name in runs}
        for _ in range(_ROUNDS)
    ]
    return {name: statistics.median(each[name] for each in rounds) for name in runs}


@functools.cache
def process_threads() -> int:
    """torch's number of threads for this process, as it was before engines set it: whoever sets it for one
    thread sets it for all threads that start later."""
    return torch.get_num_threads()


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets torch and our kernels compute on the calling thread alone: for short sequences more threads cost
    more than they gain, and far more on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_TIMES = 3


def milliseconds_in_turns(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """The shortest processor time of a few runs of each on one thread of a CPU, after a warm-up."""
    best = dict.fromkeys(runs, float("inf"))
    with one_thread():
        for run in runs.values():
            run()
        for _ in range(_TIMES):
            for name, run in runs.items():
                started = time.thread_time()
                run()
                best[name] = min(best[name], (time.thread_time() - started) * 1e3)
    return best


ON_A_CPU, ON_A_GPU = 2_048, 16_384
_LEAST = 1_024
_LEAST_BESIDE_SMALL = 256
# Sixteenths of a step that larger requests get beside small ones.
_SIXTEENTHS = 8

# The share of the free memory for a step's tensors; keys, values and queries that are held need room too.
_SHARE = 0.5


def step_tokens(
    config: EngineConfig, model: LoadedModel, device: torch.device, dtype: torch.dtype, chunked: bool
) -> int:
    """Tokens of a step: as configured, else as many as keep the device busy and fit the memory that is free
    once the weights are loaded; as on a CPU if that is unknown. Without chunks a step must hold the longest
    sequence. Called before graphs are captured and a slab is opened, which depend on it."""
    if config.max_batch_tokens:
        return config.max_batch_tokens
    free = None if device.type == "cpu" else free_bytes(device)
    budget = ON_A_CPU if free is None else tokens_that_fit(free, bytes_a_token(model.backbone.config, dtype))
    return budget if chunked else max(budget, model.max_tokens)


def free_bytes(device: torch.device) -> int | None:
    """The free memory of a device other than the CPU, with what torch holds unused; None if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        if device.type == "mps":
            return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return int(torch.accelerator.get_memory_info(device)[0])
    except (AttributeError, RuntimeError):
        return None


def beside_small_requests(budget: int, device: torch.device) -> int | None:
    """The tokens of larger requests in a step while small requests come; None for as many as fit. On a CPU
    small requests wait for a step, but short steps lower the throughput: with half a step, small requests
    took 2.9 and 3.3 times as long at p99 as alone, and batches lost 9 and 12% (`maxsimd bench mixed`, two
    runs)."""
    if device.type != "cpu":
        return None
    return min(budget, max(_LEAST_BESIDE_SMALL, _SIXTEENTHS * min(budget, ON_A_CPU) // 16))


def tokens_that_fit(free: int, bytes_a_token: int) -> int:
    """A power of two of tokens, within bounds, that take no more than their share of the free bytes."""
    budget = ON_A_GPU
    while budget > _LEAST and budget * bytes_a_token > _SHARE * free:
        budget //= 2
    return budget


def bytes_a_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes of a token in the widest part of the widest layer: twice the feed-forward's width, and the
    layer's input, queries, keys, values and output; and its float32 row for pooling."""
    text = config.get_text_config()
    hidden = int(getattr(text, "hidden_size", 1024))
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    inner = max(inner) if isinstance(inner, list | tuple) else int(inner)  # Gemma3n has one for each layer
    return (6 * hidden + 2 * inner) * dtype.itemsize + 4 * hidden
