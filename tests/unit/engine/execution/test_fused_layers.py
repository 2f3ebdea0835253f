"""Fused layers: whole models with and without them, interpreted."""

import asyncio
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.execution.attention import interface
from maxsimd.engine.execution.fused_layers import bert, decoder, linears, replace, trial
from maxsimd.engine.execution.prepare import PreparedModel, prepare
from maxsimd.engine.ops.triton import layer_norm, rms_norm, rotary, swiglu
from tests.checkpoints import cross_encoders
from tests.unit.engine.ops.interpreted import run_interpreted

CPU = torch.device("cpu")
QUERY = "what is a fox"
DOCUMENTS = ["the quick brown fox jumps over the dog", "the moon"]
FUSED = (bert.FusedSelfAttention, bert.FusedOutput, decoder.FusedDecoderLayer)


def check_scores(name: str) -> None:
    """Scores of an engine whose kernels are interpreted once it has started; a long document is prefilled in
    chunks where the model allows it."""
    path = _checkpoint(name)
    plain = _scores(path, kernels="torch")
    fused = _scores(path, plain_kernels, kernels="auto", attention="triton")
    assert np.ptp(plain) > 1e-3, plain
    np.testing.assert_allclose(fused, plain, atol=1e-4, rtol=1e-4)
    with plain_kernels():  # in the precision of GPUs
        plain, fused = (_scores(path, kernels=kernels, dtype="bfloat16") for kernels in ("torch", "auto"))
    np.testing.assert_allclose(fused, plain, atol=4e-2, rtol=4e-2)


def check_broken_kernels() -> None:
    """Modules whose kernel gives something else or fails stay as they are. A failure is warned of."""

    def wrong(*given: Any) -> torch.Tensor:
        return 1.01 * layer_norm.add_layer_norm_reference(*given)

    def failing(*given: Any) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    for broken in (wrong, failing):
        with plain_kernels(), patch.object(layer_norm, "add_layer_norm", broken), warnings() as warned:
            assert _fused_modules(_checkpoint("bert"), kernels="auto") == {"FusedSelfAttention": 3}
    expected = "layers are left as they are, which is slower: Output: RuntimeError: no kernel image"
    assert expected in warned


def check_mismatch() -> None:
    """Modules that pass their trial but give something else in the model are all taken back, with a
    warning."""
    forward = bert.FusedOutput.forward

    def wrong(self: Any, hidden: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = forward(self, hidden, given)
        return made if hidden.shape[1] == trial.ROWS else made.flip(-1)

    with plain_kernels(), patch.object(bert.FusedOutput, "forward", wrong), warnings() as warned:
        found = _fused_modules(_checkpoint("bert"), kernels="auto")
    assert found == {}
    assert any(each.startswith("layers are not fused, which is slower: results differ") for each in warned)
    with plain_kernels():
        assert _fused_modules(_checkpoint("bert"), kernels="torch") == {}


def check_others_stay() -> None:
    """Layers with an adapter or a hook stay as they are."""
    path = _checkpoint("bert")
    model = load_model(EngineConfig(model=path), CPU)
    backbone: Any = model.backbone.float()
    layers = backbone.encoder.layer
    layers[0].output.dense = torch.nn.Sequential(layers[0].output.dense)
    layers[1].output.dense.register_forward_hook(lambda *given: None)
    backbone.set_attn_implementation(interface.NAME)
    interface.register()
    with plain_kernels():
        replace.fuse(backbone)
    assert _count(backbone) == {"FusedSelfAttention": 3, "FusedOutput": 4}


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Plain torch, which the kernels are compared with elsewhere, does their work in a hundredth of the time
    that the interpreter takes."""

    def turn_(qkv: torch.Tensor, *given: Any) -> None:
        qkv.copy_(rotary.norm_rotary_reference(qkv, *given))

    with ExitStack() as patches:
        patches.enter_context(patch.object(rotary, "norm_rotary_", turn_))
        for module, name in (
            (layer_norm, "add_layer_norm"),
            (rms_norm, "rms_norm"),
            (rms_norm, "add_rms_norm"),
            (swiglu, "swiglu"),
        ):
            patches.enter_context(patch.object(module, name, getattr(module, f"{name}_reference")))
        yield


@contextmanager
def warnings() -> Iterator[list[str]]:
    """Collects the messages that are logged meanwhile."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("maxsimd").addHandler(handler)
    try:
        yield logged
    finally:
        logging.getLogger("maxsimd").removeHandler(handler)


def _checkpoint(name: str) -> str:
    return str(getattr(cross_encoders, name)(Path(tempfile.mkdtemp())))


def _config(path: str, **options: Any) -> EngineConfig:
    return EngineConfig(**({"model": path, "dtype": "float32", "attention": "torch"} | options))


def _scores(
    path: str, starting: Callable[[], AbstractContextManager[None]] = nullcontext, **options: Any
) -> np.ndarray:
    """The scores of an engine that starts inside of a context and scores outside of it."""

    async def run() -> Sequence[float]:
        engine = Engine(_config(path, max_batch_tokens=24, **options))
        with starting():
            await engine.start()
        try:
            return list((await engine.score(QUERY, DOCUMENTS, truncation=CUT_LONG)).scores)
        finally:
            await engine.stop()

    return np.array(asyncio.run(run()))


def _fused_modules(path: str, **options: Any) -> dict[str, int]:
    config = _config(path, **options)
    model = load_model(config, CPU)
    prepared: PreparedModel = prepare(model, config, CPU)
    assert prepared.execution == "packed"
    return _count(model.backbone)


def _count(backbone: torch.nn.Module) -> dict[str, int]:
    names = [type(module).__name__ for module in backbone.modules() if isinstance(module, FUSED)]
    return {name: names.count(name) for name in dict.fromkeys(names)}


pytest.importorskip("triton")


@pytest.mark.parametrize("name", ["bert", pytest.param("qwen3", marks=pytest.mark.exhaustive)])
def test_a_model_with_fused_layers_scores_as_without(name: str) -> None:
    run_interpreted(check_scores, name)


@pytest.mark.parametrize("check", [check_broken_kernels, check_mismatch, check_others_stay])
def test_only_layers_that_give_the_same_are_fused(check: Callable[[], None]) -> None:
    run_interpreted(check)


Timed = tuple[float, float]


@contextmanager
def joining(product: Callable[..., torch.Tensor], joined: float, apart: float) -> Iterator[None]:
    """A device that may join GELU with products, by `product`, and on which these are the milliseconds."""
    times = {"joined": joined, "apart": apart}
    linears._is_right_and_faster.cache_clear()
    with (
        patch.object(linears, "_may_join", lambda device: True),
        patch.object(linears, "joined_gelu", product),
        patch.object(linears, "milliseconds_in_turns_on_cuda", lambda runs, budget: times),
    ):
        yield
    linears._is_right_and_faster.cache_clear()


def intermediate(activation: str = "gelu", dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertIntermediate

    config = BertConfig(hidden_size=64, intermediate_size=256, hidden_act=activation)
    return BertIntermediate(config).to(dtype)


def by_tanh(x: torch.Tensor, layer: torch.nn.Linear) -> torch.Tensor:
    """As cuBLASLt has it: one rounding, of GELU by tanh."""
    assert layer.bias is not None
    product = torch.nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float())
    return torch.nn.functional.gelu(product, approximate="tanh").to(x.dtype)


def without_bias(x: torch.Tensor, layer: torch.nn.Linear) -> torch.Tensor:
    return torch.nn.functional.gelu(torch.nn.functional.linear(x, layer.weight))


def wrong_in_one_column(x: torch.Tensor, layer: torch.nn.Linear) -> torch.Tensor:
    made = by_tanh(x, layer)
    made[:, -1] += 0.05
    return made


def of_nan(x: torch.Tensor, layer: torch.nn.Linear) -> torch.Tensor:
    return by_tanh(x, layer) * float("nan")


def failing(x: torch.Tensor, layer: torch.nn.Linear) -> torch.Tensor:
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")


@torch.inference_mode()
@pytest.mark.parametrize("product", [by_tanh, linears.joined_gelu])
def test_gelu_is_part_of_the_product_where_that_is_right_and_faster(
    product: Callable[..., torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    plain, x = intermediate(), torch.randn(1, 9, 64).bfloat16()
    expected = plain(x)
    with joining(product, 0.2, 0.3), caplog.at_level(logging.DEBUG, logger="maxsimd"):
        fused = bert.fused_intermediate(plain)
        assert isinstance(fused, bert.FusedIntermediate)
        torch.testing.assert_close(fused(x), expected, atol=2e-2, rtol=2e-2)
        bert.fused_intermediate(intermediate())  # tried once for layers of one shape
    assert caplog.text.count("GELU behind a product of 64 to 256: joined, by a short timing") == 1


@pytest.mark.parametrize(
    ("product", "times", "reason"),
    [
        (without_bias, (0.2, 0.3), "the joined result is less exact"),
        (wrong_in_one_column, (0.2, 0.3), "the joined result is less exact"),
        (of_nan, (0.2, 0.3), "the joined result is less exact"),
        (failing, (0.2, 0.3), "the joined product failed: CUBLAS_STATUS_NOT_SUPPORTED"),
        (by_tanh, (0.3, 0.3), "apart, by a short timing"),
    ],
)
def test_gelu_stays_apart_where_joined_it_is_wrong_or_not_faster(
    product: Callable[..., torch.Tensor], times: Timed, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with joining(product, *times), caplog.at_level(logging.DEBUG, logger="maxsimd"):
        assert bert.fused_intermediate(intermediate()) is None
        layer: Any = intermediate().dense
        x = torch.randn(3, 64).bfloat16()
        assert torch.equal(linears.GeluLinear(layer)(x), torch.nn.functional.gelu(layer(x)))
    assert reason in caplog.text


def test_only_the_exact_gelu_in_bfloat16_on_a_gpu_is_joined() -> None:
    assert bert.fused_intermediate(intermediate()) is None  # on a CPU
    with joining(linears.joined_gelu, 0.2, 0.3):
        for other in (
            intermediate("gelu_new"),
            intermediate("relu"),
            intermediate(dtype=torch.float32),
            intermediate(dtype=torch.float16),
        ):
            assert bert.fused_intermediate(other) is None
