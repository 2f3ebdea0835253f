"""Loads a model and makes it ready on its device; called on the device thread."""

import asyncio
import atexit
import concurrent.futures
import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace

import torch

from maxsimd.engine.cache import EmbeddingCache
from maxsimd.engine.checkpoint import LoadedModel, Task, load_model
from maxsimd.engine.checkpoint.model import HYBRID_EMBED
from maxsimd.engine.checkpoint.recipe_store import texts_content
from maxsimd.engine.checkpoint.stages import LOADING, StagedLoad, next_stage
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.checks import checked_maxsim, refuse_wrong_scores, warm_up
from maxsimd.engine.device.host import settle_allocators, usable_cores
from maxsimd.engine.device.stores import open_cache, open_calibration, open_slab
from maxsimd.engine.device.thread import DeviceThread
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution.attention.backend import CaptureSize, GroupedBackend
from maxsimd.engine.execution.attention.cpu import is_compiled_supported
from maxsimd.engine.execution.attention.select import choose_attention
from maxsimd.engine.execution.cuda_graphs import GraphedRunner, with_graphs
from maxsimd.engine.execution.devices import (
    cast,
    choose_device,
    choose_dtype,
    dtype_name,
    lacks_bfloat16,
    one_thread,
    process_threads,
    step_tokens,
    use_device,
)
from maxsimd.engine.execution.fused_layers import Fused, fuse
from maxsimd.engine.execution.modes import (
    OneByOne,
    Packed,
    choose_execution,
    make_runner,
    tasks_for,
)
from maxsimd.engine.execution.one_call import with_one_call
from maxsimd.engine.execution.runner import ModelRunner, PackedRunner
from maxsimd.engine.execution.self_check.proof import Finding, findings_of, refuse_unlike_cpu
from maxsimd.engine.execution.self_check.rules import why_not_float16
from maxsimd.engine.execution.self_check.samples import Sample, in_float32, make_samples, sample_layers
from maxsimd.engine.execution.weights import lay_out_weights, proven_fused, why_not_replaced
from maxsimd.engine.ops import triton as triton_ops
from maxsimd.engine.ops.triton.launch import runs_plain_torch
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.processors.text_check import check_texts, probe_sequences
from maxsimd.engine.scoring.maxsim import MaxSim, choose_maxsim
from maxsimd.engine.scoring.scale import Calibration
from maxsimd.engine.workers import give_back_memory, take_short_slices
from maxsimd.pooling.dispatch import DispatchPooler, pooling_method
from maxsimd.pooling.methods import PASSAGES, PassageMeanPool, PoolingMethod
from maxsimd.scheduler import TokenSequence

log = logging.getLogger(__name__)

# A start waits this long for the newest disk entries to be in memory.
_WARMING_SECONDS = 0.5


_LOOK_SECONDS = 0.02
# At exit the process waits this long for loads that still run.
_EXIT_SECONDS = 5.0


class ModelLoad(StagedLoad):
    """A load on a device thread that can be given up.

    `shares_thread` says whether the thread outlives the load."""

    def __init__(
        self, load: Callable[[], "DeviceModel"], thread: DeviceThread, *, shares_thread: bool = False
    ) -> None:
        super().__init__()
        self._load = load
        self._thread = thread
        self._shares_thread = shares_thread
        self._has_begun = self._is_freed = False
        self._model: DeviceModel | None = None

    def run(self) -> "DeviceModel":
        """Raises ModelLoadError also for SystemExit, CancelledError and the like: nobody here raises them."""
        self.check()
        self._has_begun = True
        _loads.add(self)
        try:
            with self.on_this_thread():
                self.check()
                self._model = self._load()
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, concurrent.futures.CancelledError):
                raise
            raise ModelLoadError(
                f"the load was ended by {error!r} from inside, by the model's own code or a library; correct "
                "that code, or load the model without it"
            ) from error
        finally:
            if not self.is_given_up:
                _loads.discard(self)
        return self._model

    def give_up(self) -> None:
        """Ends the load at its next stage, and frees its model if it is too late for that."""
        super().give_up()
        with suppress(RuntimeError):  # the thread has ended
            self._thread.loop.call_soon_threadsafe(self._free)
            _loads.add(self)

    @property
    def is_over(self) -> bool:
        """Whether a load that was given up has ended, or will never begin."""
        if not self._thread.is_alive:
            return True
        return self._shares_thread and (self._is_freed or not self._has_begun)

    def _free(self) -> None:
        if self._model is not None and self._model.cache is not None:
            self._model.cache.close()
        self._model = None
        free_memory()
        self._is_freed = True


# Loads that run, and loads that were given up. Several threads change it, each by atomic operations.
_loads: set[ModelLoad] = set()


async def load_on_thread(load: Callable[[], "DeviceModel"]) -> tuple[DeviceThread, "DeviceModel"]:
    """Loads a model on a new thread, once loads that were given up have ended or are stuck: few models should
    be in memory at a time. When this is cancelled, the load is given up and its thread ends soon. The thread
    also ends when the load raises an error."""
    while True:
        if all(each.is_stuck for each in _given_up()):
            break
        await asyncio.sleep(_LOOK_SECONDS)
    thread = DeviceThread()
    model_load = ModelLoad(load, thread)
    try:
        return thread, await thread.call(model_load.run)
    except asyncio.CancelledError:
        model_load.give_up()
        thread.request_end()
        raise
    except BaseException:
        thread.close()
        raise


def _given_up() -> list[ModelLoad]:
    """The loads that were given up and are not over."""
    given_up = [load for load in _loads.copy() if load.is_given_up]
    _loads.difference_update(load for load in given_up if load.is_over)
    return [load for load in given_up if load in _loads]


def num_given_up() -> int:
    """The number of loads of this process that were given up and still run."""
    return len(_given_up())


@atexit.register
def _end_loads() -> None:
    """Ends loads that still run: a thread inside torch may abort a process that exits."""
    deadline = time.monotonic() + _EXIT_SECONDS
    while time.monotonic() < deadline:
        running = [load for load in _loads.copy() if load.is_running]
        for load in running:
            load.interrupt()
        if not running and not num_given_up():
            break
        time.sleep(_LOOK_SECONDS)


def free_memory() -> None:
    """Gives back the memory of a model that is gone, reference cycles included."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    give_back_memory()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeviceModel:
    """A model as it runs on its device.

    `tasks` pool the runner's rows. `execution` is packed, padded or one by one. `attention` is the backend of
    packed execution, `not_packed` the reason for any other. `findings` are the results of comparisons, which
    took `proof_seconds`. `quantized` is the number of int8 weights. `step_tokens` is the token budget of a
    step, `launch_tokens` that of a `GraphedRunner`, None if steps are not replayed."""

    model: LoadedModel
    tokenizer: TextTokenizer
    device: torch.device
    runner: ModelRunner
    tasks: Mapping[str, Task]
    pooler: DispatchPooler
    dtype: torch.dtype
    execution: str
    attention: str | None
    not_packed: str | None
    findings: tuple[Finding, ...]
    proof_seconds: float
    quantized: int
    step_tokens: int
    launch_tokens: int | None = None
    maxsim_name: str
    maxsim: MaxSim
    cache: EmbeddingCache | None = None
    calibration: Calibration | None = None

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype)

    @property
    def scored_in(self) -> torch.dtype:
        """The precision in which items are compared."""
        return torch.float32 if self.model.items_have_ids else self.dtype


def load_device_model(
    config: EngineConfig, while_reading: AbstractContextManager[None] | None = None
) -> DeviceModel:
    """Loads and prepares the model, on the device thread. The checkpoint is read inside of `while_reading`,
    which keeps others from computing meanwhile. Raises ModelLoadError."""
    device = choose_device(config.device)
    prepare_thread(device, config.threads)
    maxsim = choose_maxsim(config.maxsim, device, config.kernels == "auto")  # before the model is read
    content = texts_content(config)
    with while_reading or nullcontext():
        next_stage()
        model = load_model(config, device)
        give_back_memory()  # of what was read: it would add to the memory of what is proven
        next_stage()
        tokenizer = TextTokenizer(model.tokenizer, model.token_rows)
        check_texts(model, config, tokenizer, content)
    model = replace(model, reader=None)  # it holds the library's model
    calibration = open_calibration(config, model)
    next_stage()
    cache = open_cache(config, model, choose_dtype(config.dtype, device))
    try:
        loaded = prepare(model, config, device, probe_sequences(model, tokenizer), tokenizer, maxsim)
        next_stage()
        loaded = _made_ready(replace(loaded, cache=cache, calibration=calibration), config)
        next_stage()
    except BaseException:
        if cache is not None:
            cache.close()
        raise
    return loaded


def _made_ready(loaded: DeviceModel, config: EngineConfig) -> DeviceModel:
    """Checks a prepared model's scores, warms it up and opens its slab."""
    model, device, cache = loaded.model, loaded.device, loaded.cache
    maxsim_name, maxsim = loaded.maxsim_name, loaded.maxsim
    dim = model.tasks["token_embed" if model.score_task == HYBRID_EMBED else model.score_task].dim
    as_int8 = cache is not None and cache.precision == "int8"
    compares_vectors = not model.similarity.startswith("sparse")
    if device.type == "cuda" and maxsim_name == "triton" and config.maxsim == "auto" and compares_vectors:
        maxsim_name, maxsim = checked_maxsim(maxsim_name, maxsim, dim, device, loaded.scored_in, int8=as_int8)
    if runs_plain_torch(device):
        refuse_wrong_scores(model, maxsim, dim, device, loaded.scored_in)
    # Embeddings leave a fused head as they are cached and scored; int8 is rounded from float32.
    results = torch.float32 if as_int8 else loaded.dtype
    pooler = pooler_of(model, loaded.tasks, loaded.dtype, results if maxsim_name == "triton" else None)
    next_stage()
    if device.type != "cpu":
        warm_up(model, loaded.runner, pooler)
    if cache is not None:
        cache.slab = open_slab(
            config, model, cache, device, loaded.scored_in, maxsim_name == "triton", loaded.step_tokens
        )
        cache.wait_until_warm(_WARMING_SECONDS)
    # Weights that only the references need are freed.
    tasks = {name: replace(task, reference=None) for name, task in model.tasks.items()}
    return replace(
        loaded, model=replace(model, tasks=tasks), pooler=pooler, maxsim_name=maxsim_name, maxsim=maxsim
    )


def pooler_of(
    model: LoadedModel, tasks: Mapping[str, Task], dtype: torch.dtype, results: torch.dtype | None
) -> DispatchPooler:
    """The pooling of a model's tasks; with `results`, heads for all tokens are one kernel that writes
    these."""
    methods: dict[str, PoolingMethod] = {}
    for name, task in tasks.items():
        head = task.head
        if task.pooling == "all" and results is not None:
            from maxsimd.engine.device.fused_head import fused

            head = fused(head, dtype, results)
        methods[name] = pooling_method(task.pooling, head)
        if name == "embed" and task.pooling == "mean":
            methods[PASSAGES] = PassageMeanPool(head)
    return DispatchPooler(methods, model.token_pooling)


def prepare_thread(device: torch.device, threads: int | None) -> None:
    """Sets up the calling thread to compute for a device with `threads` threads. Called before anything
    else.

    Without `threads`, here or in OMP_NUM_THREADS (which torch reads), there are at most as many as the cores
    of this process: torch would count all cores of the machine. Once the number is set, the thread keeps it,
    whatever loads set in other threads."""
    usual, cores = process_threads(), usable_cores()
    if threads is None and "OMP_NUM_THREADS" not in os.environ and cores.threads < usual:
        usual = cores.threads
        quota = "no quota" if cores.quota is None else f"a quota of {cores.quota:g}"
        log.debug("threads for computing: %d (%d cores, %s)", cores.threads, cores.affinity, quota)
    torch.set_num_threads(threads or usual)
    use_device(device)
    if device.type == "cpu":
        settle_allocators()
        take_short_slices()


def prepare(
    model: LoadedModel,
    config: EngineConfig,
    device: torch.device,
    probes: Sequence[TokenSequence] = (),
    tokenizer: TextTokenizer | None = None,
    maxsim: tuple[str, MaxSim] | None = None,
) -> DeviceModel:
    """Decides precision and execution. The execution is proven in float32, whatever the model then runs in,
    on the `probes`, sequences as requests make them, and on random ones.

    Raises ModelLoadError for int8 weights that cannot be multiplied here, and for a model that
    cannot be run or whose results are not finite."""
    with LOADING:
        try:
            tokenizer = tokenizer or TextTokenizer(model.tokenizer, model.token_rows)
            maxsim = maxsim or choose_maxsim(config.maxsim, device, config.kernels == "auto")
            return _prepare(model, config, device, probes, tokenizer, *maxsim)
        except ModelLoadError:
            raise
        except Exception as error:
            precision = dtype_name(choose_dtype(config.dtype, device))
            raise ModelLoadError(
                f"{model.name!r} cannot be run in {precision}: {type(error).__name__}: {error}; try another "
                'dtype, or kernels="torch"'
            ) from error


def _prepare(
    model: LoadedModel,
    config: EngineConfig,
    device: torch.device,
    probes: Sequence[TokenSequence],
    tokenizer: TextTokenizer,
    maxsim_name: str,
    maxsim: MaxSim,
) -> DeviceModel:
    dtype = choose_dtype(config.dtype, device)
    compiled = config.kernels == "auto" and is_compiled_supported(device, dtype)
    overflow = why_not_float16(model) if dtype is torch.float16 else None
    if overflow is not None:
        raise ModelLoadError(f"{model.name!r} cannot be run in float16: {overflow}")
    if config.quantization == "int8" and device.type != "cpu":
        raise ModelLoadError(
            f"int8 weights are multiplied on a CPU alone, not on {device}: leave out quantization or device"
        )
    if config.dtype == "auto" and lacks_bfloat16(device):
        log.warning(
            "%s has no bfloat16, so the model runs in float32; dtype=float16 is faster, but some models "
            "overflow in it",
            device,
        )
    backend = choose_attention(config.attention, model, device, dtype, compiled)
    started = time.perf_counter()
    with one_thread(), samples_of(model, probes) as (samples, layers):
        if runs_plain_torch(device):
            with samples_of(load_model(config, torch.device("cpu")), probes) as (on_cpu, _):
                refuse_unlike_cpu(model.name, device, samples, on_cpu)
        execution = choose_execution(model, device, backend, samples, config.packing == "auto")
        # Our Triton kernels for whole layers do not multiply int8 weights.
        may_fuse = config.kernels == "auto" and config.quantization == "none" and triton_ops.runs_on(device)
        fused = isinstance(execution, Packed) and may_fuse
        mismatch: str | None = None
        fusible: frozenset[Fused] | str = ""
        if fused:
            fusible = proven_fused(model, make_runner(execution, model, device, backend), samples)
        elif not isinstance(execution, OneByOne) and device.type == "cpu":
            runner = make_runner(execution, model, device, backend)
            if compiled and isinstance(execution, Packed) and not triton_ops.runs_on(device):
                fusible = proven_fused(model, runner, samples)
            known = fusible if isinstance(fusible, frozenset) else ()
            mismatch = why_not_replaced(model, runner, samples, compiled, known)
            if mismatch is not None and known:
                fusible = f"with their weights laid out, {mismatch}"
                mismatch = why_not_replaced(model, runner, samples, compiled)
    proof_seconds = time.perf_counter() - started
    if isinstance(execution, OneByOne):
        dtype, quantized = torch.float32, 0
        runner, findings = _one_by_one(model, execution, config, samples)
    else:
        quantized = 0
        for module in model.encoders:
            cast(module, dtype)
        if (fused or fusible) and mismatch is None:
            if isinstance(fusible, str):
                log.warning("layers are not fused, which is slower: %s", fusible)
            else:
                log.debug("%d modules are fused", len(fuse(model.backbone, fusible)))
        if not fused and mismatch is None:
            quantized = lay_out_weights(model, device, dtype, config, compiled)
        elif mismatch is not None and config.quantization == "int8":
            raise ModelLoadError(f"the linear layers of {model.name!r} cannot have int8 weights: {mismatch}")
        elif mismatch is not None:
            log.warning("linear layers are left as they are, which is slower: %s", mismatch)
        runner = make_runner(execution, model, device, backend)
        with layers(model):
            findings = findings_of(
                model, execution.name, execution.comparison, dtype, runner, samples, quantized > 0
            )
    budget = step_tokens(config, model, device, dtype, runner.chunked)
    if isinstance(runner, PackedRunner):
        sequences = [sample.sequence for sample in samples]
        most = CaptureSize(budget, config.max_batch_sequences, model.max_tokens)
        if device.type == "cpu":
            runner = with_one_call(runner, model.backbone, sequences)
        elif config.cuda_graphs == "auto":
            runner = with_graphs(runner, device, sequences, most)
    tasks = tasks_for(execution, model)
    return DeviceModel(
        model=model,
        tokenizer=tokenizer,
        device=device,
        runner=runner,
        tasks=tasks,
        pooler=pooler_of(model, tasks, dtype, None),
        dtype=dtype,
        execution=execution.name,
        attention=backend.name if isinstance(execution, Packed) else None,
        not_packed=execution.not_packed,
        findings=findings,
        proof_seconds=proof_seconds,
        quantized=quantized,
        step_tokens=budget,
        launch_tokens=runner.launch_tokens if isinstance(runner, GraphedRunner) else None,
        maxsim_name=maxsim_name,
        maxsim=maxsim,
    )


def _one_by_one(
    model: LoadedModel, execution: OneByOne, config: EngineConfig, samples: Sequence[Sample]
) -> tuple[ModelRunner, tuple[Finding, ...]]:
    """The runner of a model in float32, the only precision in which its own library surely runs with float32
    heads, and what was found out."""
    if config.quantization == "int8":
        raise ModelLoadError(
            f"a model that is run one by one cannot have int8 weights: {execution.not_packed}"
        )
    if config.dtype not in ("auto", "float32"):
        log.warning("a model that is run one by one is run in float32, not in %s", config.dtype)
    _widen(model)
    runner = make_runner(execution, model, next(model.backbone.parameters()).device, GroupedBackend())
    found = f"through the model's own library; it ran {len(samples)} random sequences"
    return runner, (Finding("one by one", found),)


@contextmanager
def samples_of(
    model: LoadedModel, probes: Sequence[TokenSequence] = ()
) -> Iterator[tuple[tuple[Sample, ...], Callable[[LoadedModel], AbstractContextManager[object]]]]:
    """The model's samples, with its encoders in float32 while they are compared, and the context manager that
    leaves them with the layers that the samples come from: a few, or all if the model's own library fails
    with fewer."""
    with _some_layers(model) as context:
        for module in model.encoders:
            context.enter_context(in_float32(module))
        try:
            samples = make_samples(model, probes)
        except ModelLoadError as error:
            log.debug("the self-check runs all layers, because a few of them do not run alone: %s", error)
        else:
            yield samples, _some_layers
            return
    _widen(model)
    yield make_samples(model, probes), nullcontext


@contextmanager
def _some_layers(model: LoadedModel) -> Iterator[ExitStack]:
    """Leaves the encoders with a sample of their layers each."""
    with ExitStack() as context:
        for module in model.encoders:
            context.enter_context(sample_layers(module))
        yield context


def _widen(model: LoadedModel) -> None:
    for module in model.encoders:
        module.float()
