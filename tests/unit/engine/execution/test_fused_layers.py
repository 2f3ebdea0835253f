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
from maxsimd.engine.execution.fused_layers import bert, decoder, replace, trial
from maxsimd.engine.execution.prepare import PreparedModel, prepare
from maxsimd.engine.ops.triton import layer_norm, rms_norm, rotary, swiglu
from tests.checkpoints import cross_encoders, vision_language
from tests.unit.engine.ops.interpreted import run_interpreted

CPU = torch.device("cpu")
QUERY = "what is a fox"
DOCUMENTS = ["the quick brown fox jumps over the dog", "the moon"]
FUSED = (bert.FusedSelfAttention, bert.FusedOutput, decoder.FusedDecoderLayer)
# The model has three layers.
EXPECTED = {
    "bert": {"FusedSelfAttention": 3, "FusedOutput": 6},
    "xlm_roberta": {"FusedSelfAttention": 3, "FusedOutput": 6},
    "qwen2": {"FusedDecoderLayer": 3},
    "qwen3": {"FusedDecoderLayer": 3},
    "llama": {"FusedDecoderLayer": 3},
    "gemma": {},
    "modernbert": {},
}


def check_scores(name: str) -> None:
    """Scores of an engine whose kernels are interpreted once it has started; a long document is prefilled in
    chunks where the model allows it."""
    path = _checkpoint(name)
    plain = _scores(path, kernels="torch")
    fused = _scores(path, plain_kernels, kernels="auto", attention="triton")
    _equal(fused, plain)


def check_scores_from_the_start(name: str) -> None:
    """The same with kernels that are interpreted in the proof at load too, which takes minutes."""
    path = _checkpoint(name)
    plain, fused = (_scores(path, kernels=kernels, attention="triton") for kernels in ("torch", "auto"))
    _equal(fused, plain)


def _equal(fused: np.ndarray, plain: np.ndarray) -> None:
    assert np.ptp(plain) > 1e-3, plain
    np.testing.assert_allclose(fused, plain, atol=1e-4, rtol=1e-4)


def check_modules(name: str) -> None:
    """Which modules are fused, and that the switch is heeded."""
    path = _checkpoint(name)
    with plain_kernels():
        assert _fused_modules(path, kernels="auto") == EXPECTED[name]
        assert _fused_modules(path, kernels="torch") == {}


def check_bfloat16(name: str) -> None:
    """In the precision of GPUs."""
    path = _checkpoint(name)
    with plain_kernels():
        plain, fused = (_scores(path, kernels=kernels, dtype="bfloat16") for kernels in ("torch", "auto"))
    np.testing.assert_allclose(fused, plain, atol=4e-2, rtol=4e-2)


def check_wrong_kernel() -> None:
    """A kernel that gives something else is found out when its modules are tried, and they stay."""

    def wrong(*given: Any) -> torch.Tensor:
        return 1.01 * layer_norm.add_layer_norm_reference(*given)

    with plain_kernels(), patch.object(layer_norm, "add_layer_norm", wrong):
        found = _fused_modules(_checkpoint("bert"), kernels="auto")
    assert found == {"FusedSelfAttention": 3}


def check_failing_kernel() -> None:
    """One that fails to run is warned of, and its modules stay."""

    def failing(*given: Any) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    with plain_kernels(), patch.object(layer_norm, "add_layer_norm", failing), warnings() as warned:
        found = _fused_modules(_checkpoint("bert"), kernels="auto")
    assert found == {"FusedSelfAttention": 3}
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


def check_pictures() -> None:
    """A language model that reads pictures at positions of its own, with layers of a tower added to its."""
    path = vision_language.qwen3_vl_reranker(Path(tempfile.mkdtemp()))
    with plain_kernels():
        assert set(_fused_modules(path, kernels="auto")) == {"FusedDecoderLayer"}


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


@pytest.mark.parametrize(
    ("check", "name"),
    [
        (check_scores, "bert"),
        (check_bfloat16, "bert"),
        *(
            pytest.param(check, name, marks=pytest.mark.exhaustive)
            for check, name in (
                (check_scores, "qwen3"),
                (check_bfloat16, "qwen3"),
                (check_scores_from_the_start, "bert"),
                (check_scores_from_the_start, "qwen3"),
            )
        ),
    ],
)
def test_a_model_with_fused_layers_scores_as_without(check: Callable[[str], None], name: str) -> None:
    run_interpreted(check, name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("bert", "llama", "gemma") else pytest.mark.exhaustive)
        for name in EXPECTED
    ],
)
def test_layers_are_fused_where_they_are_built_as_expected(name: str) -> None:
    run_interpreted(check_modules, name)


@pytest.mark.parametrize(
    "check",
    [
        check_wrong_kernel,
        check_failing_kernel,
        check_mismatch,
        check_others_stay,
        check_pictures,
    ],
)
def test_only_layers_that_give_the_same_are_fused(check: Callable[[], None]) -> None:
    run_interpreted(check)
