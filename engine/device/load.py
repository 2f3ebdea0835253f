"""Loads a model and makes it ready on its device; called on the device thread."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from maxsimd.engine.cache import EmbeddingCache
from maxsimd.engine.checkpoint import LoadedModel, load_model
from maxsimd.engine.checkpoint.model import HYBRID_EMBED
from maxsimd.engine.checkpoint.recipe_store import texts_content
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.allocators import settle_allocators
from maxsimd.engine.device.cores import usable_cores
from maxsimd.engine.device.open_cache import open_cache
from maxsimd.engine.device.open_calibration import open_calibration
from maxsimd.engine.device.open_slab import open_slab
from maxsimd.engine.device.scoring_check import refuse_wrong_scores
from maxsimd.engine.device.time_slices import take_short_slices
from maxsimd.engine.device.warmup import checked_maxsim, warm_up
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution import PreparedModel, choose_device, choose_dtype, prepare
from maxsimd.engine.execution.devices import use_device
from maxsimd.engine.ops.nvidia import runs_plain_torch
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.processors.text_check import check_texts, probe_sequences
from maxsimd.engine.scoring.calibration import Calibration
from maxsimd.engine.scoring.maxsim import MaxSim, choose_maxsim
from maxsimd.pooling.dispatch import DispatchPooler, pooling_method
from maxsimd.pooling.methods import PoolingMethod
from maxsimd.pooling.passages import PASSAGES, PassageMeanPool

log = logging.getLogger(__name__)

# How much longer a start may take so that the newest of what is on disk is in memory.
_WARMING_SECONDS = 0.5


class _Stages(threading.local):
    """What this thread calls between the stages of a load; it may raise to end the load."""

    check: Callable[[], None] | None = None


_stages = _Stages()


@contextmanager
def stages(check: Callable[[], None]) -> Iterator[None]:
    """Has `check` called on this thread before each stage of a load."""
    _stages.check = check
    try:
        yield
    finally:
        _stages.check = None


def _next_stage() -> None:
    if _stages.check is not None:
        _stages.check()


@dataclass(frozen=True, slots=True, eq=False)
class DeviceModel:
    """The model as it stands ready on its device."""

    model: LoadedModel
    prepared: PreparedModel
    pooler: DispatchPooler
    device: torch.device
    maxsim_name: str
    maxsim: MaxSim
    cache: EmbeddingCache | None
    tokenizer: TextTokenizer
    calibration: Calibration | None = None

    @property
    def scored_in(self) -> torch.dtype:
        """The precision in which items are compared."""
        return scored_in(self.model, self.prepared)


def scored_in(model: LoadedModel, prepared: PreparedModel) -> torch.dtype:
    """The precision in which a model's items are compared."""
    return torch.float32 if model.items_have_ids else prepared.dtype


def load_device_model(
    config: EngineConfig, while_reading: AbstractContextManager[None] | None = None
) -> DeviceModel:
    """Loads and prepares the model; to be called on the device thread. Where others compute meanwhile, the
    checkpoint is read inside of `while_reading`. Raises ModelLoadError."""
    device = choose_device(config.device)
    prepare_thread(device, config.threads)
    try:
        maxsim_name, maxsim = choose_maxsim(config.maxsim, device, config.kernels == "auto")
    except ValueError as error:
        raise ModelLoadError(str(error)) from error
    content = texts_content(config)
    with while_reading or nullcontext():
        _next_stage()
        model = load_model(config, device)
        _next_stage()
        tokenizer = TextTokenizer(model.tokenizer, model.token_rows)
        check_texts(model, config, tokenizer, content)
    model = replace(model, reader=None)  # it holds the library's model
    calibration = open_calibration(config, model)
    _next_stage()
    cache = open_cache(config, model, choose_dtype(config.dtype, device))
    try:
        loaded = _made_ready(config, model, device, (maxsim_name, maxsim), cache, tokenizer, calibration)
        _next_stage()
    except BaseException:
        if cache is not None:
            cache.close()
        raise
    return loaded


def _made_ready(
    config: EngineConfig,
    model: LoadedModel,
    device: torch.device,
    named_maxsim: tuple[str, MaxSim],
    cache: EmbeddingCache | None,
    tokenizer: TextTokenizer,
    calibration: Calibration | None,
) -> DeviceModel:
    """Prepares, checks and warms up a model that was read."""
    maxsim_name, maxsim = named_maxsim
    prepared = prepare(model, config, device, probe_sequences(model, tokenizer))
    _next_stage()
    as_int8 = cache is not None and cache.precision == "int8"
    compares_vectors = not model.similarity.startswith("sparse")
    if device.type == "cuda" and maxsim_name == "triton" and config.maxsim == "auto" and compares_vectors:
        maxsim_name, maxsim = checked_maxsim(
            maxsim_name, maxsim, _compared_dim(model), device, scored_in(model, prepared), int8=as_int8
        )
    if runs_plain_torch(device):
        dim = _compared_dim(model)
        refuse_wrong_scores(model, maxsim, dim, device, scored_in(model, prepared))
    # Embeddings leave a fused head as they are cached and scored; int8 is rounded from float32.
    results = torch.float32 if as_int8 else prepared.dtype
    pooler = _pooler(model, prepared, results if maxsim_name == "triton" else None)
    _next_stage()
    if device.type != "cpu":
        warm_up(model, prepared.runner, pooler)
    if cache is not None:
        cache.slab = open_slab(
            config,
            model,
            cache,
            device,
            scored_in(model, prepared),
            maxsim_name == "triton",
            prepared.step_tokens,
        )
        cache.wait_until_warm(_WARMING_SECONDS)
    return DeviceModel(
        _without_references(model),
        prepared,
        pooler,
        device,
        maxsim_name,
        maxsim,
        cache,
        tokenizer,
        calibration,
    )


def prepare_thread(device: torch.device, threads: int | None) -> None:
    """Has the calling thread compute for a device, with as many `threads` as are asked for. To be called
    before anything else on it."""
    _choose_threads(threads)
    use_device(device)
    if device.type == "cpu":
        settle_allocators()
        take_short_slices()


def _compared_dim(model: LoadedModel) -> int:
    """How many dimensions the vectors of a model have that are compared, if any are."""
    hybrid = model.score_task == HYBRID_EMBED
    return model.tasks["token_embed" if hybrid else model.score_task].dim


def _choose_threads(asked: int | None) -> None:
    """As many threads as were asked for, here or in OMP_NUM_THREADS (which torch reads), else no more than
    there are cores to run them on. torch would count all cores of the machine."""
    if asked is not None:
        torch.set_num_threads(asked)
    elif "OMP_NUM_THREADS" not in os.environ:
        cores = usable_cores()
        if cores.threads < torch.get_num_threads():
            torch.set_num_threads(cores.threads)
            quota = "no quota" if cores.quota is None else f"a quota of {cores.quota:g}"
            log.debug("threads for computing: %d (%d cores, %s)", cores.threads, cores.affinity, quota)


def _without_references(model: LoadedModel) -> LoadedModel:
    """The model without what it was proven against, so that weights which only that needs are freed."""
    return replace(model, tasks={name: replace(task, reference=None) for name, task in model.tasks.items()})


def _pooler(model: LoadedModel, prepared: PreparedModel, results: torch.dtype | None) -> DispatchPooler:
    """The pooling of a model's tasks; with `results`, heads for all tokens are one kernel that writes
    these."""
    methods: dict[str, PoolingMethod] = {}
    for name, task in prepared.tasks.items():
        head = task.head
        if task.pooling == "all" and results is not None:
            from maxsimd.engine.device.fused_head import fused

            head = fused(head, prepared.dtype, results)
        methods[name] = pooling_method(task.pooling, head)
        if name == "embed" and task.pooling == "mean":
            methods[PASSAGES] = PassageMeanPool(head)
    return DispatchPooler(methods, model.token_pooling)
