"""Prepares a loaded model to run on its device: precision, execution and its proof, weight layout."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from maxsimd.engine.checkpoint import LoadedModel, Task, load_model
from maxsimd.engine.checkpoint.load import LOADING
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution.attention.base import AttentionBackend, CaptureSize
from maxsimd.engine.execution.attention.cpu_kernel import is_compiled_supported
from maxsimd.engine.execution.attention.select import choose_attention
from maxsimd.engine.execution.attention.torch_grouped import GroupedBackend
from maxsimd.engine.execution.budget import step_tokens
from maxsimd.engine.execution.cuda_graphs import GraphedRunner, with_graphs
from maxsimd.engine.execution.devices import use_device
from maxsimd.engine.execution.fused_layers import Fused, fuse
from maxsimd.engine.execution.modes import (
    OneByOne,
    Packed,
    choose_execution,
    make_runner,
    tasks_for,
)
from maxsimd.engine.execution.one_call import with_one_call
from maxsimd.engine.execution.packed_runner import ModelRunner, PackedRunner
from maxsimd.engine.execution.precision import cast, choose_dtype, dtype_name, lacks_bfloat16
from maxsimd.engine.execution.selfcheck.beside_cpu import refuse_unlike_cpu
from maxsimd.engine.execution.selfcheck.findings import Finding, findings_of
from maxsimd.engine.execution.selfcheck.float32 import in_float32
from maxsimd.engine.execution.selfcheck.rules import why_not_float16
from maxsimd.engine.execution.selfcheck.sample_layers import sample_layers
from maxsimd.engine.execution.selfcheck.samples import Sample, make_samples
from maxsimd.engine.execution.selfcheck.threads import one_thread
from maxsimd.engine.execution.weights import lay_out_weights, proven_fused, why_not_replaced
from maxsimd.engine.ops import triton as triton_ops
from maxsimd.engine.ops.nvidia import runs_plain_torch
from maxsimd.scheduler import TokenSequence

log = logging.getLogger(__name__)

Backend = AttentionBackend[Any]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedModel:
    """A model that is ready to run.

    `tasks` pool the runner's rows. `execution` is packed, padded or one by one, `attention` the name of the
    backend if it is packed, and `not_packed` the reason if it is not. `proof_seconds` is how long the proof
    took, `findings` what was compared, and `quantized` how many of the weights are int8. `step_tokens` is the
    most tokens of a step. `launch_tokens` are a `GraphedRunner`'s, None where steps are not replayed."""

    runner: ModelRunner
    tasks: Mapping[str, Task]
    dtype: torch.dtype
    execution: str
    attention: str | None
    not_packed: str | None
    findings: tuple[Finding, ...]
    proof_seconds: float
    quantized: int
    step_tokens: int
    launch_tokens: int | None = None


def prepare(
    model: LoadedModel, config: EngineConfig, device: torch.device, probes: Sequence[TokenSequence] = ()
) -> PreparedModel:
    """Decides precision and execution. The execution is proven in float32, whatever the model then runs in,
    on the `probes`, sequences as requests make them, and on random ones.

    Raises ModelLoadError where int8 weights are asked for and cannot be multiplied here, and for a model that
    cannot be run or whose results are not finite."""
    with LOADING:
        try:
            return _prepare(model, config, device, probes)
        except ModelLoadError:
            raise
        except Exception as error:
            precision = dtype_name(choose_dtype(config.dtype, device))
            raise ModelLoadError(
                f"{model.name!r} cannot be run in {precision}: {type(error).__name__}: {error}; try another "
                'dtype, or kernels="torch"'
            ) from error


def _prepare(
    model: LoadedModel, config: EngineConfig, device: torch.device, probes: Sequence[TokenSequence]
) -> PreparedModel:
    dtype = choose_dtype(config.dtype, device)
    compiled = config.kernels == "auto" and is_compiled_supported(device, dtype)
    overflow = why_not_float16(model) if dtype is torch.float16 else None
    if overflow is not None:
        raise ModelLoadError(f"{model.name!r} cannot be run in float16: {overflow}")
    _refuse_quantization(config, device)
    if config.dtype == "auto" and lacks_bfloat16(device):
        log.warning(
            "%s has no bfloat16, so the model runs in float32; dtype=float16 is faster, but some models "
            "overflow in it",
            device,
        )
    backend = choose_attention(config.attention, model, device, dtype, compiled)
    use_device(device)
    started = time.perf_counter()
    with one_thread(), _samples(model, probes) as (samples, layers):
        if runs_plain_torch(device):
            with _samples(load_model(config, torch.device("cpu")), probes) as (on_cpu, _):
                refuse_unlike_cpu(model.name, device, samples, on_cpu)
        in_proof = _in_float32(backend)
        execution = choose_execution(model, device, in_proof, samples, config.packing == "auto")
        fused = isinstance(execution, Packed) and _may_fuse(config, device)
        mismatch: str | None = None
        fusible: frozenset[Fused] | str = ""
        if fused:
            fusible = proven_fused(model, make_runner(execution, model, device, in_proof), samples)
        elif not isinstance(execution, OneByOne) and device.type == "cpu":
            runner = make_runner(execution, model, device, in_proof)
            if compiled and isinstance(execution, Packed) and not triton_ops.runs_on(device):
                fusible = proven_fused(model, runner, samples)
            known = fusible if isinstance(fusible, frozenset) else ()
            mismatch = why_not_replaced(model, runner, samples, compiled, known)
            if mismatch is not None and known:
                fusible = f"with their weights laid out, {mismatch}"
                mismatch = why_not_replaced(model, runner, samples, compiled)
    proof_seconds = time.perf_counter() - started
    if isinstance(execution, OneByOne):
        return _one_by_one(model, execution, config, samples, proof_seconds)
    for module in model.encoders:
        cast(module, dtype)
    quantized = 0
    if (fused or fusible) and mismatch is None:
        _fuse(model, fusible)
    if not fused and mismatch is None:
        quantized = lay_out_weights(model, device, dtype, config, compiled)
    elif mismatch is not None and config.quantization == "int8":
        raise ModelLoadError(f"the linear layers of {model.name!r} cannot have int8 weights: {mismatch}")
    elif mismatch is not None:
        log.warning("linear layers are left as they are, which is slower: %s", mismatch)
    runner = make_runner(execution, model, device, backend)
    with layers(model):
        findings = findings_of(model, execution, dtype, runner, samples, quantized > 0)
    budget = step_tokens(config, model, device, dtype, runner.chunked)
    if isinstance(runner, PackedRunner):
        most = CaptureSize(budget, config.max_batch_sequences, model.max_tokens)
        runner = _sped_up(runner, model, config, device, [sample.sequence for sample in samples], most)
    is_packed = isinstance(execution, Packed)
    return PreparedModel(
        runner,
        tasks_for(execution, model),
        dtype,
        "packed" if is_packed else "padded",
        backend.name if is_packed else None,
        None if isinstance(execution, Packed) else execution.not_packed,
        findings,
        proof_seconds,
        quantized,
        budget,
        runner.launch_tokens if isinstance(runner, GraphedRunner) else None,
    )


def _sped_up(
    runner: PackedRunner,
    model: LoadedModel,
    config: EngineConfig,
    device: torch.device,
    sequences: Sequence[TokenSequence],
    most: CaptureSize,
) -> ModelRunner:
    """The runner with what makes steps of up to the size `most` faster on its device."""
    if device.type == "cpu":
        return with_one_call(runner, model.backbone, sequences)
    if config.cuda_graphs != "auto":
        return runner
    return with_graphs(runner, runner.backend, device, sequences, most)


def _may_fuse(config: EngineConfig, device: torch.device) -> bool:
    """Whether our kernels for whole layers are wanted and run here; they multiply no int8 weights."""
    return config.kernels == "auto" and config.quantization == "none" and triton_ops.runs_on(device)


def _fuse(model: LoadedModel, fusible: frozenset[Fused] | str) -> None:
    """Fuses the layers of a backbone that is as it will run, of the kinds that may be, or says why not."""
    if isinstance(fusible, str):
        log.warning("layers are not fused, which is slower: %s", fusible)
    else:
        log.debug("%d modules are fused", len(fuse(model.backbone, fusible)))


def _refuse_quantization(config: EngineConfig, device: torch.device) -> None:
    if config.quantization == "int8" and device.type != "cpu":
        raise ModelLoadError(
            f"int8 weights are multiplied on a CPU alone, not on {device}: leave out quantization, or"
            " the device"
        )


# Leaves a model's encoders with some of their layers inside a context: a sample of them, or all.
_Layers = Callable[[LoadedModel], ExitStack]


@contextmanager
def _samples(
    model: LoadedModel, probes: Sequence[TokenSequence] = ()
) -> Iterator[tuple[tuple[Sample, ...], _Layers]]:
    """The model's samples, with its encoders in float32 while they are compared, and the context manager that
    leaves them with the layers that the samples come from: a few, or all if the model's own library fails
    with fewer."""
    with _some_layers(model) as context:
        for module in model.encoders:
            context.enter_context(in_float32(module))
        try:
            samples = make_samples(model, probes)
        except ModelLoadError:
            samples = ()
        if samples:
            yield samples, _some_layers
            return
    _widen(model)
    yield make_samples(model, probes), lambda _: ExitStack()


def _some_layers(model: LoadedModel) -> ExitStack:
    """The encoders with a sample of their layers each, until this is closed."""
    with ExitStack() as context:
        for module in model.encoders:
            context.enter_context(sample_layers(module))
        return context.pop_all()


def _widen(model: LoadedModel) -> None:
    for module in model.encoders:
        module.float()


def _one_by_one(
    model: LoadedModel, execution: OneByOne, config: EngineConfig, samples: Sequence[Sample], seconds: float
) -> PreparedModel:
    """The model in float32, the only precision in which its own library surely runs with float32 heads."""
    if config.quantization == "int8":
        raise ModelLoadError(
            f"a model that is run one by one cannot have int8 weights: {execution.not_packed}"
        )
    if config.dtype not in ("auto", "float32"):
        log.warning("a model that is run one by one is run in float32, not in %s", config.dtype)
    _widen(model)
    device = next(model.backbone.parameters()).device
    runner = make_runner(execution, model, device, GroupedBackend())
    finding = Finding(
        "one by one", f"through the model's own library; it ran {len(samples)} random sequences"
    )
    return PreparedModel(
        runner,
        tasks_for(execution, model),
        torch.float32,
        "one by one",
        None,
        execution.not_packed,
        (finding,),
        seconds,
        0,
        step_tokens(config, model, device, torch.float32, runner.chunked),
    )


def _in_float32(backend: Backend) -> Backend:
    """The backend itself, or if it lacks float32 plain torch in its place, with which layout, positions and
    masks are proven."""
    if backend.supports_float32:
        return backend
    return GroupedBackend(
        backend.arrangement,
        supports_first_rows=backend.supports_first_rows,
        supports_causal_ends=backend.supports_causal_ends,
    )
