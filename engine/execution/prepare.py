"""Makes a loaded model ready to run on its device: precision, proof of packing, weight layout."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from maxsimd.engine.checkpoint import LoadedModel, Task
from maxsimd.engine.checkpoint.load import LOADING
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution.attention.base import PackedAttention
from maxsimd.engine.execution.attention.cpu_kernel import is_compiled_supported
from maxsimd.engine.execution.attention.select import choose_attention
from maxsimd.engine.execution.attention.torch_grouped import GROUPED
from maxsimd.engine.execution.cuda_graphs import with_graphs
from maxsimd.engine.execution.modes import (
    OneByOne,
    Packed,
    choose_execution,
    make_runner,
    tasks_for,
)
from maxsimd.engine.execution.packed_runner import ModelRunner, PackedRunner
from maxsimd.engine.execution.selfcheck.findings import Finding, findings_of
from maxsimd.engine.execution.selfcheck.float32 import in_float32
from maxsimd.engine.execution.selfcheck.proof import step_of
from maxsimd.engine.execution.selfcheck.sample_layers import sample_layers
from maxsimd.engine.execution.selfcheck.samples import Sample, make_samples
from maxsimd.engine.execution.selfcheck.threads import one_thread
from maxsimd.engine.execution.weights import lay_out_weights, why_not_replaced

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedModel:
    """How a model is run: its `tasks` as they pool the runner's rows, by which `execution` (packed, padded or
    one by one) and `attention`, and `not_packed` for what reason, if it is not. `proof_seconds` is how long
    it took to find out, `findings` what was compared, `quantized` how many of its weights are int8."""

    runner: ModelRunner
    tasks: Mapping[str, Task]
    dtype: torch.dtype
    execution: str
    attention: str | None
    not_packed: str | None
    findings: tuple[Finding, ...]
    proof_seconds: float
    quantized: int


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it natively, else float32."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    capable = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if capable else torch.float32


def cast(backbone: torch.nn.Module, dtype: torch.dtype) -> None:
    """Puts the weights into a precision. Buffers that are not in the checkpoint stay as the model made them:
    rotary frequencies, which must be float32 or far positions are lost."""
    for module in backbone.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                module.register_buffer(name, buffer.to(dtype))


def prepare(model: LoadedModel, config: EngineConfig, device: torch.device) -> PreparedModel:
    """Settles precision and execution. The execution is proven in float32, whatever the model then runs in.

    Raises ModelLoadError where int8 weights are asked for and cannot be multiplied here, and for a model that
    cannot be run or whose results are not finite."""
    with LOADING:
        try:
            return _prepare(model, config, device)
        except ModelLoadError:
            raise
        except Exception as error:
            precision = _shown(choose_dtype(config.dtype, device))
            raise ModelLoadError(
                f"{model.name!r} cannot be run in {precision}: {type(error).__name__}: {error}; try another "
                "--dtype, or --kernels torch"
            ) from error


def _prepare(model: LoadedModel, config: EngineConfig, device: torch.device) -> PreparedModel:
    dtype = choose_dtype(config.dtype, device)
    compiled = config.kernels == "auto" and is_compiled_supported(device, dtype)
    _refuse_quantization(config, compiled and dtype is torch.bfloat16)
    attention = choose_attention(config.attention, model, device, dtype, compiled)
    started = time.perf_counter()
    with one_thread(), _samples(model) as (samples, layers):
        stand_in = _that_knows_float32(attention)
        execution = choose_execution(model, device, stand_in, samples, config.packing == "auto")
        mismatch = None
        if not isinstance(execution, OneByOne) and device.type == "cpu":
            runner = make_runner(execution, model, device, stand_in)
            mismatch = why_not_replaced(model, runner, samples, compiled)
    proof_seconds = time.perf_counter() - started
    if isinstance(execution, OneByOne):
        return _one_by_one(model, execution, config, samples, proof_seconds)
    cast(model.backbone, dtype)
    quantized = 0
    if mismatch is None:
        quantized = lay_out_weights(model, device, dtype, config.quantization, compiled)
    elif config.quantization == "int8":
        raise ModelLoadError(f"the linear layers of {model.name!r} cannot have int8 weights: {mismatch}")
    else:
        log.warning("linear layers are left as they are, which is slower: %s", mismatch)
    runner = make_runner(execution, model, device, attention)
    with layers(model.backbone):
        findings = findings_of(model, execution, dtype, runner, samples)
    if isinstance(runner, PackedRunner) and config.cuda_graphs == "auto":
        sequences = [sample.sequence for sample in samples]
        steps = [step_of(sequences), step_of(sequences[:1])]
        runner = with_graphs(runner, attention, model.causal, device, steps)
    is_packed = isinstance(execution, Packed)
    return PreparedModel(
        runner,
        tasks_for(execution, model),
        dtype,
        "packed" if is_packed else "padded",
        attention.name if is_packed else None,
        None if isinstance(execution, Packed) else execution.not_packed,
        findings,
        proof_seconds,
        quantized,
    )


def _refuse_quantization(config: EngineConfig, possible: bool) -> None:
    if config.quantization == "int8" and not possible:
        raise ModelLoadError(
            "int8 weights need a CPU with AVX-512 (VNNI and BF16), the compiled kernels and the precision"
            " bfloat16: leave out --quantization, or the --device, --dtype or --kernels that rules these out"
        )


# Which of its layers a backbone has for a while: a sample of them, or all.
_Layers = Callable[[torch.nn.Module], AbstractContextManager[object]]


@contextmanager
def _samples(model: LoadedModel) -> Iterator[tuple[tuple[Sample, ...], _Layers]]:
    """The model's samples, and for the time of comparing with them its backbone in float32 with the layers
    that the samples come from: a few, or all of them where the model's own library cannot do with fewer."""
    with sample_layers(model.backbone), in_float32(model.backbone):
        try:
            samples = make_samples(model)
        except ModelLoadError:
            samples = ()
        if samples:
            yield samples, sample_layers
            return
    model.backbone.float()
    yield make_samples(model), nullcontext


def _one_by_one(
    model: LoadedModel, execution: OneByOne, config: EngineConfig, samples: Sequence[Sample], seconds: float
) -> PreparedModel:
    """The model in float32, in which alone its own library is sure to run with the heads as they are."""
    if config.quantization == "int8":
        raise ModelLoadError(
            f"a model that is run one by one cannot have int8 weights: {execution.not_packed}"
        )
    if config.dtype not in ("auto", "float32"):
        log.warning("a model that is run one by one is run in float32, not in %s", config.dtype)
    model.backbone.float()
    device = next(model.backbone.parameters()).device
    runner = make_runner(execution, model, device, GROUPED)
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
    )


def _that_knows_float32(attention: PackedAttention) -> PackedAttention:
    """What stands in for an attention that knows no float32: with it layout, positions and masks are
    proven."""
    if attention.knows_float32:
        return attention
    first_rows = None if attention.first_rows is None else GROUPED.first_rows
    return replace(GROUPED, first_rows=first_rows, arrangement=attention.arrangement)


def _shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
