"""Choices and checks on GPUs, several GPUs, and CUDA graphs, with stand-ins for all of them."""

import asyncio
import functools
import logging
import threading
from collections.abc import Callable
from contextlib import closing, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import BertConfig, Gemma3nTextConfig

from maxsimd.engine import Engine, EngineConfig, ModelLoadError, runtime
from maxsimd.engine.actors.runner import Arrivals
from maxsimd.engine.cache import EmbeddingCache
from maxsimd.engine.cache.store import MemoryStore
from maxsimd.engine.checkpoint import LoadedModel, load_model
from maxsimd.engine.device import checks, load, stores
from maxsimd.engine.device.load import prepare_thread
from maxsimd.engine.device.shared import DeviceLostError, SharedDevice
from maxsimd.engine.execution import cuda_graphs, devices
from maxsimd.engine.execution.attention import gpu as gpu_attention
from maxsimd.engine.execution.attention import select as choice
from maxsimd.engine.execution.attention.backend import CaptureSize, GroupedBackend, OneByOneBackend
from maxsimd.engine.execution.attention.gpu import TritonBackend
from maxsimd.engine.execution.attention.select import find_mismatch
from maxsimd.engine.execution.cuda_graphs import Cost, CudaRecorder, GraphedRunner, sizes_for
from maxsimd.engine.execution.modes import Packed, try_packed
from maxsimd.engine.execution.runner import ClsOnlyLastLayer, PackedRunner
from maxsimd.engine.execution.self_check.samples import make_samples, random_sequences
from maxsimd.engine.ops.qkv import KV, QKV
from maxsimd.engine.processors.processor import PrefixSharing
from maxsimd.engine.scoring.maxsim import maxsim_reference, maxsim_tiled
from maxsimd.engine.scoring.scorer import record_arrival
from maxsimd.pooling.ragged import Ragged
from maxsimd.scheduler import TokenSequence
from tests.checkpoints import cross_encoders, nomic
from tests.checkpoints.shared import Build, SharedCheckpoints
from tests.unit.engine.execution.test_packed import make_step

CPU = torch.device("cpu")


def packed_model(path: str, layers: int | None = None) -> LoadedModel:
    """A checkpoint in float32, with packed attention, and all its layers or the first of them."""
    model = load_model(EngineConfig(model=path), CPU)
    backbone: Any = model.backbone.float()
    if layers is not None:
        del (backbone.layers if hasattr(backbone, "layers") else backbone.encoder.layer)[layers:]
    assert isinstance(try_packed(model, CPU, GroupedBackend(), make_samples(model)), Packed)
    return model


def runner_of(model: LoadedModel, backend: TritonBackend) -> PackedRunner:
    """The last layer of BERT, which is pooled by its first token, computes first rows alone."""
    firsts = (each for each in model.backbone.modules() if isinstance(each, ClsOnlyLastLayer))
    return PackedRunner(model, CPU, backend, next(firsts, None))


@pytest.fixture(scope="module", params=["bert", "qwen3"])
def model(request: pytest.FixtureRequest, checkpoints: SharedCheckpoints) -> LoadedModel:
    return packed_model(checkpoints(getattr(cross_encoders, request.param)))


class DoublingBackend(OneByOneBackend):
    def __init__(self, part: str) -> None:
        right = getattr(self, part)

        def doubled(*arguments: Any) -> torch.Tensor | None:
            made: torch.Tensor | None = right(*arguments)
            if made is None:
                arguments[-1].mul_(2)
            return None if made is None else 2 * made

        setattr(self, part, doubled)


class NanBackend(OneByOneBackend):
    def full(self, qkv: QKV, metadata: Any) -> torch.Tensor:
        return super().full(qkv, metadata).index_fill_(0, torch.tensor([5]), torch.nan)


def test_every_part_of_attention_is_checked(model: LoadedModel) -> None:
    assert find_mismatch(OneByOneBackend(), model, CPU, torch.float32) is None
    for broken in (NanBackend(), *map(DoublingBackend, ("full", "with_prefill_kv", "shared_prefix"))):
        is_used = model.causal or isinstance(broken, NanBackend) or "full" in vars(broken)
        mismatch = find_mismatch(broken, model, CPU, torch.float32)
        assert (mismatch is not None and "differs" in mismatch) == is_used


def test_on_a_gpu_attention_is_ours_where_right(model: LoadedModel, monkeypatch: Any, caplog: Any) -> None:
    right = OneByOneBackend()
    failing: Any = OneByOneBackend()
    failing.full = Mock(side_effect=RuntimeError("no kernel image is available"))

    def chosen(ours: Any, name: str = "auto") -> Any:
        monkeypatch.setattr(choice.triton_ops, "runs_on", lambda device: ours is not None)
        monkeypatch.setattr(choice, "TritonBackend", lambda: ours)
        return choice.choose_attention(name, model, torch.device("meta"), torch.float32, False)

    on_cpu = functools.partial(find_mismatch, device=CPU, dtype=torch.float32)
    monkeypatch.setattr(choice, "find_mismatch", lambda backend, model, *where: on_cpu(backend, model))
    assert chosen(right) is right
    for wrong, reason in ((DoublingBackend("full"), "it differs"), (failing, "it failed: no kernel image")):
        assert type(chosen(wrong)) is GroupedBackend
        assert f"attention by triton is not used: {reason}" in caplog.text
        assert chosen(wrong, "triton") is wrong
    assert type(chosen(None)) is GroupedBackend
    assert type(chosen(right, "torch")) is GroupedBackend
    with pytest.raises(ModelLoadError, match="by triton cannot run on this meta; use auto"):
        chosen(None, "triton")


def test_maxsim_is_checked_in_every_length_and_type(caplog: pytest.LogCaptureFixture) -> None:
    def wrong_where(condition: Callable[[Ragged, Ragged], bool]) -> Any:
        def scores(queries: Ragged, documents: Ragged, pairs: Any) -> torch.Tensor:
            exact = maxsim_reference(queries, documents.decoded(torch.float32), pairs)
            return exact / 2 if condition(queries, documents) else exact

        return scores

    def name(condition: Callable[[Ragged, Ragged], bool], *, int8: bool = False) -> str:
        return checks.checked_maxsim("x", wrong_where(condition), 16, CPU, torch.float32, int8=int8)[0]

    assert name(lambda queries, documents: False, int8=True) == "x"
    assert name(lambda queries, documents: documents.scales is not None) == "x"
    assert name(lambda queries, documents: documents.scales is not None, int8=True) == "tiled"
    assert name(lambda queries, documents: max(documents.lengths) > 1000) == "tiled"
    assert name(lambda queries, documents: max(queries.lengths) > 256) == "tiled"
    assert "MaxSim by x is not used: its scores differ" in caplog.text
    assert checks.checked_maxsim("other", maxsim_tiled, 16, CPU, torch.float32) == ("other", maxsim_tiled)


def test_a_gpu_without_bfloat16_runs_float32_and_says_so(model: Any, monkeypatch: Any, caplog: Any) -> None:
    capabilities = {0: (8, 0), 1: (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    ampere, t4 = torch.device("cuda", 0), torch.device("cuda", 1)
    chosen = [
        devices.choose_dtype(name, on) for name, on in (("auto", ampere), ("auto", t4), ("float16", t4))
    ]
    assert chosen == [torch.bfloat16, torch.float32, torch.float16]
    monkeypatch.setattr(
        load, "choose_attention", Mock(side_effect=ModelLoadError("the rest is of no interest"))
    )
    for device, dtype, is_said in ((t4, "auto", True), (t4, "float32", False), (ampere, "auto", False)):
        caplog.clear()
        with pytest.raises(ModelLoadError, match="the rest is of no interest"):
            load.prepare(model, EngineConfig(dtype=dtype), device)
        assert ("cuda:1 has no bfloat16" in caplog.text) is is_said
        assert ("dtype=float16 is faster" in caplog.text) is is_said
    with pytest.raises(ModelLoadError, match="on a CPU alone, not on cuda"):
        load.prepare(model, EngineConfig(quantization="int8"), t4)


def test_the_budget_of_a_step_fits_into_what_a_gpu_has_free() -> None:
    gib = 1 << 30
    of_a_token = devices.bytes_a_token(BertConfig(hidden_size=1024, intermediate_size=4096), torch.bfloat16)
    assert of_a_token == (6 * 1024 + 2 * 4096) * 2 + 4 * 1024
    widths = Gemma3nTextConfig(hidden_size=1024, intermediate_size=[512, 4096], num_hidden_layers=2)
    assert devices.bytes_a_token(widths, torch.bfloat16) == of_a_token
    assert devices.tokens_that_fit(100 * gib, of_a_token) == 16_384
    # 32 KiB a token, of half of 256 MiB.
    assert devices.tokens_that_fit(gib // 4, of_a_token) == 4_096
    assert devices.tokens_that_fit(0, of_a_token) == 1_024


def with_free(monkeypatch: pytest.MonkeyPatch, free: int, unused: int = 0) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: unused + (1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 30)


def test_graphs_are_for_steps_that_will_be_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, mib = torch.device("cuda", 1), 1 << 20
    sized = BertConfig(hidden_size=1024, intermediate_size=4096)
    model: Any = SimpleNamespace(backbone=SimpleNamespace(config=sized), max_tokens=512)
    for free, unused, configured, tokens in (
        (80 << 30, 0, None, 16_384), (256 * mib, 0, None, 4_096), (128 * mib, 128 * mib, None, 4_096),
        (256 * mib, 0, 512, 512), (256 * mib, 0, 65_536, 65_536),
    ):  # fmt: skip
        config = EngineConfig(max_batch_tokens=configured)
        with_free(monkeypatch, free, unused)
        assert devices.step_tokens(config, model, gpu, torch.bfloat16, chunked=False) == tokens
        assert max(size.rows for size in sizes_for(tokens, 512, 512)) == min(tokens, 16_384)


async def test_graphs_and_prefixes_know_steps(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, tokenizing = list[int](), list[tuple[str, int]]()

    def with_one_call(runner: PackedRunner, *given: Any) -> GraphedRunner:
        graphed = GraphedRunner(runner, CPU)
        graphed.launch_tokens = 7
        return graphed

    monkeypatch.setattr(load, "CaptureSize", lambda rows, *others: sizes.append(rows))
    monkeypatch.setattr(load, "with_one_call", with_one_call)
    monkeypatch.setattr(runtime, "tokenizer_threads", lambda *asked: tokenizing.append(asked) or 2)
    for configured, tokens in ((None, 2_048), (100, 100)):
        async with Engine(EngineConfig(model=model.name, max_batch_tokens=configured, threads=1)) as engine:
            assert tokenizing.pop() == ("cpu", 1)
            running: Any = engine._running
            assert sizes.pop() == running.facts.step_tokens == tokens
            assert running.processors.scores._context.sharing == (PrefixSharing(7) if model.causal else None)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, int, torch.dtype] | None]:
    """Opens a slab: its rows, dimensions and precision, or None. There is no memory for 77 dimensions."""
    made: list[tuple[int, int, torch.dtype]] = []

    def slab(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> Any:
        made.append((rows, dim, dtype))
        if dim == 77:
            raise torch.OutOfMemoryError
        return SimpleNamespace(nbytes=0)

    monkeypatch.setattr(stores, "EmbeddingSlab", slab)

    def opened(precision: Any, takes_int8: bool, dim: int = 64, memory: int = 1 << 20, **options: Any) -> Any:
        made.clear()
        backbone = SimpleNamespace(config=BertConfig(hidden_size=1024, intermediate_size=4096))
        tasks = {"embed": SimpleNamespace(dim=dim)}
        model: Any = SimpleNamespace(tasks=tasks, score_task="embed", backbone=backbone)
        with closing(EmbeddingCache(b"", precision, MemoryStore(memory), None)) as cache:
            gpu, dtype = torch.device("cuda", 1), torch.bfloat16
            stores.open_slab(EngineConfig(**options), model, cache, gpu, dtype, takes_int8, 2_048)
        return made[0] if made else None

    return opened


def test_a_slab_is_a_share_of_the_memory(monkeypatch: pytest.MonkeyPatch, opened: Callable[..., Any]) -> None:
    with_free(monkeypatch, 600 << 20)
    # 64 bytes a row, of a quarter of what 2,048 tokens of 32 KiB leave.
    assert opened("int8", True, dim=60, memory=1 << 30)[0] == (600 - 64) * (1 << 20) // 4 // 64
    with_free(monkeypatch, 60 << 20)
    assert opened("int8", True) is None, "a step needs more than is free"
    with_free(monkeypatch, 80 << 30)
    for precision, takes_int8, expected in (
        *(("int8", True, torch.int8), ("int8", False, torch.bfloat16), ("float32", True, torch.bfloat16)),
    ):
        size = 64 + 4 if expected is torch.int8 else 128
        assert opened(precision, takes_int8, device_cache_mb=0) is None
        assert opened(precision, takes_int8) == ((1 << 20) // size, 64, expected)
        assert opened(precision, takes_int8, device_cache_mb=8) == ((8 << 20) // size, 64, expected)
        with pytest.raises(ModelLoadError, match=r"no 8 MiB left .* device_cache_mb lower"):
            opened(precision, takes_int8, device_cache_mb=8, dim=77)


SECOND = torch.device("cuda:1")


class Cuda:
    """Two GPUs; each thread has a current one, at first GPU 0. `used` says what was done on which."""

    def __init__(self) -> None:
        self._threads = threading.local()
        self.used: list[tuple[str, int]] = []
        self.blocking: list[bool] = []

    def current(self) -> int:
        return getattr(self._threads, "current", 0)

    def set_device(self, device: Any) -> None:
        self._threads.current = device if isinstance(device, int) else torch.device(device).index

    def use(self, what: str, device: Any = None) -> int:
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        self.used.append((what, self.current() if index is None else index))
        return self.used[-1][1]

    def stream(self, device: Any = None) -> Any:
        return SimpleNamespace(device=self.use("stream", device))

    def event(self, enable_timing: bool = False, blocking: bool = False) -> Any:
        self.blocking.append(blocking)
        return SimpleNamespace(
            record=lambda stream=None: self.use("record", stream and stream.device),
            synchronize=lambda: self.use("wait"),
            elapsed_time=lambda end: 1.0,
        )

    def asked(self, what: str, result: Any) -> Any:
        return lambda device=None: (self.use(what, device), result)[1]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    sizes = ("memory_allocated", "memory_reserved", "max_memory_allocated", "reset_peak_memory_stats")
    replaced = {
        "set_device": found.set_device, "current_device": found.current, "graph_pool_handle": lambda: (0, 0),
        "mem_get_info": found.asked("memory", (1, 1)), "synchronize": found.asked("synchronize", None),
        **dict.fromkeys(("current_stream", "Stream"), found.stream), "Event": found.event,
        **dict.fromkeys(sizes, found.asked("memory", 0)),
    }  # fmt: skip
    for name, replacement in replaced.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    return found


async def test_results_are_waited_for_on_the_gpu_that_makes_them(cuda: Cuda) -> None:
    """Another GPU's stream is idle: numbers would be read that are not there yet."""
    assert record_arrival(SECOND) is not None
    assert ("record", 1) in cuda.used
    assert ({device for _, device in cuda.used}, cuda.blocking) == ({1}, [True])
    assert record_arrival(torch.device("cpu")) is None
    cuda.used.clear()
    arrivals = Arrivals(SECOND)
    await arrivals.until(cuda.event())
    arrivals.close()
    assert cuda.used == [("wait", 1)]


async def test_a_device_thread_has_its_gpu_as_the_current_one(cuda: Cuda) -> None:
    shared = SharedDevice(SECOND, None)
    try:
        assert await shared.thread.call(torch.cuda.current_device) == 1
        await shared.thread.call(lambda: devices.times_on_cuda(lambda: None))
        await shared.thread.call(lambda: CudaRecorder().cost(lambda: None))
    finally:
        shared.close()
    assert {what for what, _ in cuda.used} >= {"record", "stream", "synchronize", "memory"}
    assert {device for _, device in cuda.used} == {1}
    prepare_thread(torch.device("cuda"), None)
    assert torch.cuda.current_device() == 0, "this thread is not the device's"


async def test_nothing_begins_on_a_thread_that_is_stuck() -> None:
    shared, may_go_on = SharedDevice(CPU, None), threading.Event()
    seat = shared.seat(1.0, None)
    shared.thread.loop.call_soon_threadsafe(may_go_on.wait)
    shared.lose()
    with pytest.raises(DeviceLostError, match="is stuck with a step of another model"):
        seat.run(asyncio.sleep(0)).result(timeout=600)
    may_go_on.set()


def test_a_load_does_not_lower_the_threads_of_others() -> None:
    found: list[int] = []
    prepare = lambda: prepare_thread(CPU, None) or found.append(torch.get_num_threads())  # noqa: E731
    for other in (nullcontext(), devices.one_thread()):
        with other:
            thread = threading.Thread(target=prepare)
            thread.start()
            thread.join()
    assert found[0] == found[1]


# CUDA graphs

SIZES = (CaptureSize(256, 40, 128), CaptureSize(64, 32, 64), CaptureSize(64, 4, 64), CaptureSize(32, 4, 32))


class CallRecorder(CudaRecorder):
    """Calls in the place of graphs, whose `replays` are counted; every run has this cost."""

    def __init__(self, host: float = 1.0, device: float = 1.0, memory: float = 0.0) -> None:
        self.replays: list[int] = []
        self._cost = Cost(devices.Times(host, device), memory)

    def cost(self, run: Callable[[], object]) -> Cost:
        return self._cost

    def capture(self, run: Callable[[], object]) -> Callable[[], None]:
        run()
        number = len(self.replays)
        self.replays.append(0)

        def replay() -> None:
            self.replays[number] += 1
            run()

        return replay


def texts_of(model: LoadedModel) -> list[TokenSequence]:
    return [sequence for sequence in random_sequences(model, model.score_task) if not sequence.tokens.images]


def attention_by_blocks(qkv: QKV, blocks: Any, causal: bool, out: Any, prefix: KV | None = None) -> None:
    """Attention as our kernel computes it, in plain torch."""
    # Read without torch, which is not to see that the host does so: on a GPU it does not.
    for row, queries, position, key, keys in blocks.numpy().tolist():
        if queries == 0:
            continue  # captured tables are filled up with such blocks
        rows, seen = slice(row, row + queries), slice(key, key + keys)
        parts = [KV(qkv.key[:, seen], qkv.value[:, seen])]
        parts = parts if prefix is None else [prefix, *parts]
        keys_and_values = (torch.cat(each, dim=1)[None] for each in zip(*parts, strict=True))
        at = torch.arange(position, position + queries)[:, None]
        ahead = torch.arange(sum(each.key.shape[1] for each in parts)) - at
        mask = ahead <= 0 if causal else ahead < (qkv.window or len(ahead[0]))
        mask &= -ahead < (qkv.window or position + queries)
        attended = torch.nn.functional.scaled_dot_product_attention(
            qkv.query[None, :, rows], *keys_and_values, mask, scale=qkv.scaling, enable_gqa=True
        )
        out[rows] = attended[0].transpose(0, 1)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> TritonBackend:
    """Attention for GPUs, with plain torch in place of the kernel."""
    monkeypatch.setattr(gpu_attention, "_kernel_takes", lambda qkv: True)
    monkeypatch.setattr("maxsimd.engine.ops.triton.attention.attention", attention_by_blocks)
    return TritonBackend()


@pytest.fixture(scope="module")
def small(bert_cross_encoder: str) -> LoadedModel:
    return packed_model(bert_cross_encoder, layers=1)


Captured = tuple[GraphedRunner, Any]


@pytest.fixture
def capture(small: LoadedModel, backend: TritonBackend) -> Callable[..., Captured]:
    """Captures sizes, and gives the runner and the sizes that are left out."""

    def captured(recorder: CallRecorder, sizes: Any = SIZES, **other: Any) -> Captured:
        used, by = other.get("model", small), other.get("backend", backend)
        graphed = GraphedRunner(runner_of(used, by), CPU)
        return graphed, graphed.capture_all(sizes, texts_of(used), recorder)

    return captured


@pytest.mark.parametrize("build", [cross_encoders.bert, cross_encoders.qwen3])
def test_replays_change_nothing(build: Build, checkpoints: SharedCheckpoints, backend: TritonBackend) -> None:
    model, recorder = packed_model(checkpoints(build), layers=1), CallRecorder()
    assert find_mismatch(backend, model, CPU, torch.float32) is None
    plain = runner_of(model, backend)
    graphed = GraphedRunner(plain, CPU)
    assert graphed.capture_all(SIZES, texts_of(model), recorder) == {}
    before = list(recorder.replays)
    for lengths in ([9, 12, 1], [20], [3] * 4, [60, 4], [3] * 9, [128, 128], [2] * 41, [300], [5]):
        ours, cursor = graphed.forward(make_step(lengths))
        exact, expected = plain.forward(make_step(lengths))
        assert (cursor.starts, len(ours)) == (expected.starts, sum(lengths) if model.causal else len(lengths))
        torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)
    assert [now - then for now, then in zip(recorder.replays, before, strict=True)] == [1, 1, 1, 4]


def test_the_next_replay_leaves_hidden_states_as_they_were(capture: Callable[..., Captured]) -> None:
    graphed, _ = capture(CallRecorder(host=3.0, device=1.0), SIZES[-1:])
    # The host takes three times as long as the device takes for the largest size.
    assert graphed.launch_tokens == 3 * SIZES[-1].rows
    hidden, _ = graphed.forward(make_step([9, 3]))
    before = hidden.clone()
    graphed.forward(make_step([4, 8]))
    assert torch.equal(hidden, before)


def test_a_model_that_waits_for_the_device_has_no_graphs(checkpoints: Any, capture: Any, caplog: Any) -> None:
    experts, recorder = packed_model(checkpoints(nomic.v2_moe), layers=2), CallRecorder()
    with caplog.at_level(logging.DEBUG, logger="maxsimd"):
        graphed, left_out = capture(recorder, model=experts)
    assert (graphed.sizes, left_out, recorder.replays) == ((), {}, [])
    assert "no CUDA graphs: the model waits for the device (aten.nonzero" in caplog.text


class BrokenRecorder(CallRecorder):
    """The first graph does nothing when it is replayed, the second cannot be captured, the third fails."""

    def capture(self, run: Callable[[], object]) -> Callable[[], None]:
        replay = super().capture(run)
        if len(self.replays) == 2:
            raise RuntimeError("operation not permitted when the stream is capturing")
        bad = {1: lambda: None, 3: Mock(side_effect=RuntimeError("too little memory"))}
        return bad.get(len(self.replays), replay)


class FirstTokensBackend(TritonBackend):
    """In graphs alone, tokens behind a sequence's first 100 are attended to wrongly."""

    def full(self, qkv: QKV, metadata: Any) -> torch.Tensor:
        out = super().full(qkv, metadata)
        if metadata.captured is not None and len(out) > 100:
            out[100:] = 0
        return out


def test_bad_graphs_are_dropped(capture: Callable[..., Captured], caplog: pytest.LogCaptureFixture) -> None:
    _, mismatches = capture(CallRecorder(), backend=FirstTokensBackend())
    assert list(mismatches) == [SIZES[0]]
    for recorder, reason in (
        (CallRecorder(host=1.0, device=9.0), "bound by the device"),
        (CallRecorder(memory=0.5), "50% of the memory"),
    ):
        with caplog.at_level(logging.DEBUG, logger="maxsimd"):
            graphed, left_out = capture(recorder, SIZES[-1:])
        assert (graphed.sizes, left_out, recorder.replays) == ((), {}, [])
        assert reason in caplog.text


def test_only_graphs_without_fault_are_used(small: Any, backend: Any, monkeypatch: Any, caplog: Any) -> None:
    recorder, most = BrokenRecorder(), SIZES[0]
    gpu, plain = torch.device("cuda"), runner_of(small, backend)
    monkeypatch.setattr(cuda_graphs, "sizes_for", lambda *most: SIZES)
    monkeypatch.setattr(cuda_graphs, "GraphedRunner", lambda runner, device: GraphedRunner(runner, CPU))
    monkeypatch.setattr(cuda_graphs, "CudaRecorder", lambda: recorder)
    with caplog.at_level(logging.WARNING, logger="maxsimd"):
        found = cuda_graphs.with_graphs(plain, gpu, texts_of(small), most)
    assert (type(found), found.sizes) == (GraphedRunner, SIZES[3:])
    what = "not replayed as CUDA graphs of"
    assert f"{what} 256 rows and 40 sequences: their hidden states differ" in caplog.text
    assert "operation not permitted when the stream is capturing" in caplog.text
    assert "too little memory" in caplog.text
    for lengths in ([5, 5], [100]):
        found.forward(make_step(lengths))
    assert recorder.replays[0] == 0
    assert cuda_graphs.with_graphs(plain, CPU, texts_of(small), most) is plain
    assert cuda_graphs.with_graphs(plain, gpu, [], most) is plain
