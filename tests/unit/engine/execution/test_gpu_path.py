"""What surrounds the kernels on a GPU, with stand-ins for what only a GPU has."""

import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertConfig

from maxsimd.engine import EngineConfig, ModelLoadError
from maxsimd.engine.cache import EmbeddingCache, Precision
from maxsimd.engine.cache.memory import MemoryStore
from maxsimd.engine.checkpoint import LoadedModel, load_model
from maxsimd.engine.device import open_slab, warmup
from maxsimd.engine.execution import budget
from maxsimd.engine.execution.attention import select as choice
from maxsimd.engine.execution.attention.base import AttentionMetadata, CaptureSize
from maxsimd.engine.execution.attention.check import find_mismatch
from maxsimd.engine.execution.attention.one_by_one import OneByOneBackend
from maxsimd.engine.execution.attention.timing import LENGTHS
from maxsimd.engine.execution.attention.torch_grouped import GroupedBackend
from maxsimd.engine.execution.attention.varlen import (
    FlashBackend,
    VarlenBackend,
)
from maxsimd.engine.execution.budget import bytes_a_token, tokens_that_fit
from maxsimd.engine.execution.graph_sizes import sizes_for
from maxsimd.engine.execution.modes import Packed, try_packed
from maxsimd.engine.execution.precision import choose_dtype
from maxsimd.engine.execution.selfcheck.samples import make_samples
from maxsimd.engine.ops.qkv import QKV
from maxsimd.engine.scoring.maxsim import maxsim_reference, maxsim_tiled
from maxsimd.pooling.ragged import Ragged
from tests.checkpoints import cross_encoders
from tests.unit.engine.execution.test_packed import plain_varlen

CPU = torch.device("cpu")
# The package has a function of this name.
preparing = sys.modules["maxsimd.engine.execution.prepare"]


@pytest.fixture(scope="module", params=["bert", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = getattr(cross_encoders, request.param)(tmp_path_factory.mktemp(request.param))
    found = load_model(EngineConfig(model=path), CPU)
    found.backbone.float()
    assert isinstance(
        try_packed(found, CPU, GroupedBackend(supports_first_rows=False), make_samples(found)), Packed
    )
    return found


def test_what_an_old_torch_lacks_runs_by_our_own_way(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def old(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *offsets: Any,
        scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:  # fmt: skip
        calls.append(window_size)
        return plain_varlen(query, key, value, *offsets, scale=scale, window_size=window_size)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", old)
    assert find_mismatch(VarlenBackend(CPU), model, CPU, torch.float32) is None
    heads = model.backbone.config.num_attention_heads
    grouped = getattr(model.backbone.config, "num_key_value_heads", heads) != heads
    assert len(calls) == (0 if grouped else 1)


class DoublingBackend(OneByOneBackend):
    """Doubles what one part of attention gives."""

    def __init__(self, part: str) -> None:
        right = getattr(self, part)

        def doubled(*arguments: Any) -> torch.Tensor | None:
            made: torch.Tensor | None = right(*arguments)
            if made is None:
                arguments[-1].mul_(2)
            return None if made is None else 2 * made

        setattr(self, part, doubled)


class FailingBackend(OneByOneBackend):
    def full(self, qkv: QKV, metadata: AttentionMetadata) -> torch.Tensor:
        raise RuntimeError("no kernel image is available")


class NanBackend(OneByOneBackend):
    def full(self, qkv: QKV, metadata: AttentionMetadata) -> torch.Tensor:
        return super().full(qkv, metadata).index_fill_(0, torch.tensor([5]), torch.nan)


def test_every_part_of_attention_is_checked(model: LoadedModel) -> None:
    """Chunks and prefixes only where a model has them."""
    assert find_mismatch(OneByOneBackend(), model, CPU, torch.float32) is None
    for broken in (NanBackend(), *map(DoublingBackend, ("full", "with_prefill_kv", "shared_prefix"))):
        is_used = model.causal or isinstance(broken, NanBackend) or "full" in vars(broken)
        mismatch = find_mismatch(broken, model, CPU, torch.float32)
        assert (mismatch is not None and "differs" in mismatch) == is_used


def test_the_fastest_right_attention_is_chosen(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is wrong or fails is passed over, and not timed."""
    slow, fast = OneByOneBackend(), OneByOneBackend()
    wrong = {"wrong": lambda: DoublingBackend("full"), "broken": FailingBackend}
    candidates = {"slow": lambda: slow, **wrong, "fast": lambda: fast}
    monkeypatch.setattr(choice, "candidates", lambda device, dtype: candidates)
    timed = []

    def time(run: Callable[[], object]) -> float:
        timed.append(run())
        return {1: 2.0, 2: 0.5}[len(timed)]

    time_backends = choice.time_backends
    monkeypatch.setattr(choice, "time_on_cuda", time)
    monkeypatch.setattr(torch.Tensor, "to", _to_cpu_instead(torch.Tensor.to))
    monkeypatch.setattr(
        choice,
        "time_backends",
        lambda backends, model, device, dtype, timer: time_backends(backends, model, CPU, dtype, timer),
    )

    def chosen() -> Any:
        return choice.choose_attention("auto", model, torch.device("cuda"), torch.float32, False)

    with caplog.at_level(logging.DEBUG, logger="maxsimd"):
        assert chosen() is fast
    assert "by wrong is not used: it differs" in caplog.text
    assert "by broken is not used: it failed: no kernel image" in caplog.text
    assert "attention: fast, by a short timing on this device: slow 2.000 ms, fast 0.500 ms" in caplog.text
    assert torch.equal(timed[0], timed[1])
    assert len(timed[0]) == sum(min(length, model.max_tokens) for length in LENGTHS)
    del candidates["slow"], candidates["fast"]
    assert isinstance(chosen(), GroupedBackend)


def _to_cpu_instead(to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda tensor, *arguments: to(
        tensor, *(CPU if isinstance(argument, torch.device) else argument for argument in arguments)
    )


def test_an_attention_that_cannot_run_is_refused_by_name(model: LoadedModel) -> None:
    for name in ("varlen", "flash", "triton"):
        with pytest.raises(ModelLoadError, match=f"by {name} cannot run on this cpu in float32"):
            choice.choose_attention(name, model, CPU, torch.float32, False)


def test_flash_attention_is_called_as_it_is_documented(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def flash(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *offsets: Any, softmax_scale: float, causal: bool,
        window_size: tuple[int, int],
    ) -> torch.Tensor:  # fmt: skip
        calls.append(causal)
        assert causal == (window_size[1] == 0)
        options = {"scale": softmax_scale, "window_size": window_size, "enable_gqa": q.shape[1] != k.shape[1]}
        return plain_varlen(q, k, v, *offsets, **options)  # type: ignore[arg-type]

    package = SimpleNamespace(flash_attn_varlen_func=flash)
    monkeypatch.setattr("importlib.import_module", lambda name: package)
    assert find_mismatch(FlashBackend(CPU), model, CPU, torch.float32) is None
    assert calls == [model.causal], "key lengths of their own are left to another backend"


def test_maxsim_is_checked_in_every_length_and_type(caplog: pytest.LogCaptureFixture) -> None:
    def wrong_where(condition: Callable[[Ragged, Ragged], bool]) -> Any:
        def scores(queries: Ragged, documents: Ragged, pairs: Any) -> torch.Tensor:
            exact = maxsim_reference(queries, documents.decoded(torch.float32), pairs)
            return exact / 2 if condition(queries, documents) else exact

        return scores

    def name(condition: Callable[[Ragged, Ragged], bool], *, int8: bool = False) -> str:
        return warmup.checked_maxsim("x", wrong_where(condition), 16, CPU, torch.float32, int8=int8)[0]

    assert name(lambda queries, documents: False, int8=True) == "x"
    assert name(lambda queries, documents: documents.scales is not None) == "x"
    assert name(lambda queries, documents: documents.scales is not None, int8=True) == "tiled"
    assert name(lambda queries, documents: max(documents.lengths) > 1000) == "tiled"
    assert name(lambda queries, documents: max(queries.lengths) > 256) == "tiled"
    assert "MaxSim by x is not used: its scores differ" in caplog.text
    assert warmup.checked_maxsim("other", maxsim_tiled, 16, CPU, torch.float32) == ("other", maxsim_tiled)


def test_a_gpu_without_bfloat16_runs_float32_and_the_log_says_what_is_faster(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each GPU is asked, not the one that the thread uses at the moment."""
    capabilities = {0: (8, 0), 1: (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    ampere, t4 = torch.device("cuda", 0), torch.device("cuda", 1)
    assert choose_dtype("auto", ampere) is torch.bfloat16
    assert choose_dtype("auto", t4) is torch.float32
    assert choose_dtype("float16", t4) is torch.float16
    monkeypatch.setattr(preparing, "choose_attention", stop)
    for device, dtype, is_said in ((t4, "auto", True), (t4, "float32", False), (ampere, "auto", False)):
        caplog.clear()
        with pytest.raises(ModelLoadError, match="the rest is of no interest"):
            preparing.prepare(model, EngineConfig(dtype=dtype), device)
        assert ("cuda:1 has no bfloat16" in caplog.text) is is_said
        assert ("dtype=float16 is faster" in caplog.text) is is_said


def stop(*_: Any) -> Any:
    raise ModelLoadError("the rest is of no interest")


def test_the_budget_of_a_step_fits_into_what_a_gpu_has_free() -> None:
    gib = 1 << 30
    config = BertConfig(hidden_size=1024, intermediate_size=4096)
    of_a_token = bytes_a_token(config, torch.bfloat16)
    assert of_a_token == (6 * 1024 + 2 * 4096) * 2 + 4 * 1024
    assert tokens_that_fit(100 * gib, of_a_token) == 16_384
    # 32 KiB a token, of half of 256 MiB.
    assert tokens_that_fit(gib // 4, of_a_token) == 4_096
    assert tokens_that_fit(0, of_a_token) == 1_024


def with_free(monkeypatch: pytest.MonkeyPatch, free: int, unused: int = 0) -> None:
    """A GPU with this much memory free, and this much that torch holds without using it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: unused + (1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 30)


@pytest.mark.parametrize(
    ("free", "unused", "configured", "tokens"),
    [
        (80 << 30, 0, None, 16_384),
        (256 << 20, 0, None, 4_096),
        (128 << 20, 128 << 20, None, 4_096),
        (256 << 20, 0, 512, 512),
        (256 << 20, 0, 65_536, 65_536),
    ],
)
def test_graphs_are_for_steps_that_will_be_formed(
    monkeypatch: pytest.MonkeyPatch, free: int, unused: int, configured: int | None, tokens: int
) -> None:
    """The token budget is decided first, by the memory that is free before graphs and a slab take theirs."""
    gpu, asked = torch.device("cuda", 1), []
    config = EngineConfig(max_batch_tokens=configured)
    sized = BertConfig(hidden_size=1024, intermediate_size=4096)
    model: Any = SimpleNamespace(backbone=SimpleNamespace(config=sized), max_tokens=512)
    with_free(monkeypatch, free, unused)
    found = budget.step_tokens(config, model, gpu, torch.bfloat16, chunked=False)
    assert found == tokens

    def with_graphs(runner: Any, backend: Any, device: torch.device, samples: Any, most: CaptureSize) -> Any:
        asked.append(most)

    monkeypatch.setattr(preparing, "with_graphs", with_graphs)
    runner: Any = SimpleNamespace(backend=None)
    preparing._sped_up(runner, model, config, gpu, [], CaptureSize(found, 512, 512))
    assert asked[0].rows == tokens
    assert max(size.rows for size in sizes_for(asked[0].rows, asked[0].sequences, asked[0].longest)) == min(
        tokens, 16_384
    )


def test_a_model_is_prepared_with_its_token_budget(model: LoadedModel) -> None:
    for configured, tokens in ((None, 2_048), (100, 100)):
        config = EngineConfig(max_batch_tokens=configured, dtype="float32")
        assert (
            preparing.prepare(load_model(EngineConfig(model=model.name), CPU), config, CPU).step_tokens
            == tokens
        )


def test_a_slab_leaves_room_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slab leaves room for a step in its own precision, also where embeddings are int8."""
    with_free(monkeypatch, 600 << 20)
    made = []
    monkeypatch.setattr(
        open_slab,
        "EmbeddingSlab",
        lambda rows, dim, dtype, device: made.append(rows) or SimpleNamespace(nbytes=0),
    )
    sized = BertConfig(hidden_size=1024, intermediate_size=4096)
    model: Any = SimpleNamespace(
        tasks={"embed": SimpleNamespace(dim=60)},
        score_task="embed",
        backbone=SimpleNamespace(config=sized),
    )
    cache = EmbeddingCache(b"", "int8", MemoryStore(1 << 30), None)
    arguments: Any = (EngineConfig(), model, cache, torch.device("cuda", 1), torch.bfloat16, True, 2_048)
    open_slab.open_slab(*arguments)
    # 64 bytes a row, of a quarter of what 2,048 tokens of 32 KiB leave.
    assert made == [(600 - 64) * (1 << 20) // 4 // 64]
    cache.close()


def test_a_slab_takes_a_share_of_free_memory() -> None:
    gib = 1 << 30
    assert open_slab.default_limit(free=80 * gib, step=4 * gib, cached=4 * gib) == 4 * gib
    assert open_slab.default_limit(free=12 * gib, step=4 * gib, cached=4 * gib) == 2 * gib
    assert open_slab.default_limit(free=gib, step=4 * gib, cached=4 * gib) == 0
    assert open_slab.rows_within(1 << 20, 128, torch.bfloat16) == 4096
    # Each row of int8 has a scale.
    assert open_slab.rows_within(1 << 20, 124, torch.int8) == 8192


@pytest.mark.parametrize(
    ("precision", "takes_int8", "expected"),
    [("int8", True, torch.int8), ("int8", False, torch.bfloat16), ("float32", True, torch.bfloat16)],
)
def test_a_slab_holds_embeddings_as_they_are_scored(
    monkeypatch: pytest.MonkeyPatch, precision: Precision, takes_int8: bool, expected: torch.dtype
) -> None:
    made: list[tuple[int, int, torch.dtype]] = []

    class Slab:
        nbytes = 0

        def __init__(self, rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
            made.append((rows, dim, dtype))
            if dim == 77:
                raise torch.OutOfMemoryError

    monkeypatch.setattr(open_slab, "EmbeddingSlab", Slab)
    with_free(monkeypatch, 80 << 30)
    cache = EmbeddingCache(b"", precision, MemoryStore(1 << 20), None)

    def opened(config: EngineConfig, dim: int = 64) -> Any:
        task = SimpleNamespace(dim=dim)
        model = SimpleNamespace(
            tasks={"embed": task}, score_task="embed", backbone=SimpleNamespace(config=BertConfig())
        )
        arguments: Any = (config, model, cache, torch.device("cuda"), torch.bfloat16, takes_int8, 16_384)
        return open_slab.open_slab(*arguments)

    assert opened(EngineConfig(device_cache_mb=0)) is None
    opened(EngineConfig())
    opened(EngineConfig(device_cache_mb=8))
    size = 64 + 4 if expected is torch.int8 else 128
    assert made == [((1 << 20) // size, 64, expected), ((8 << 20) // size, 64, expected)]
    with pytest.raises(ModelLoadError, match=r"no 8 MiB left .* device_cache_mb lower"):
        opened(EngineConfig(device_cache_mb=8), 77)
    cache.close()
