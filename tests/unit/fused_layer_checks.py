"""Models with fused layers beside the same models without, in a process that interprets the kernels."""

import asyncio
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.execution.fused_layers import bert, decoder, replace
from maxsimd.engine.execution.prepare import PreparedModel, prepare
from maxsimd.engine.ops.triton import gelu_product
from tests.checkpoints import cross_encoders, vision_language

CPU = torch.device("cpu")
QUERIES = ["what is a fox", "how far is the moon"]
DOCUMENTS = ["the quick brown fox jumps over the lazy dog " * 3, "the moon"]
FUSED = (
    bert.FusedSelfAttention,
    bert.FusedIntermediate,
    bert.FusedOutput,
    decoder.FusedDecoderLayer,
)
# Of a model of three layers.
EXPECTED = {
    "bert": {"FusedSelfAttention": 3, "FusedIntermediate": 3, "FusedOutput": 6},
    "xlm_roberta": {"FusedSelfAttention": 3, "FusedIntermediate": 3, "FusedOutput": 6},
    "qwen2": {"FusedDecoderLayer": 3},
    "qwen3": {"FusedDecoderLayer": 3},
    "llama": {"FusedDecoderLayer": 3},
    "gemma": {},
    "modernbert": {},
}


def check_scores(name: str) -> None:
    """Scores through a whole engine; a long document is prefilled in chunks where the model allows it."""
    path = _checkpoint(name)
    plain, fused = (_scores(path, kernels=kernels) for kernels in ("torch", "auto"))
    assert np.ptp(plain) > 1e-3, plain
    np.testing.assert_allclose(fused, plain, atol=1e-4, rtol=1e-4)


def check_modules(name: str) -> None:
    """Which modules are fused, and that the switch is heeded."""
    path = _checkpoint(name)
    assert _fused_modules(path, kernels="auto") == EXPECTED[name]
    assert _fused_modules(path, kernels="torch") == {}


def check_bfloat16(name: str) -> None:
    """In the precision of GPUs, with GELU in the product."""
    path = _checkpoint(name)
    used: list[int] = []
    original = gelu_product.gelu_product
    gelu_product.gelu_product = lambda *given: used.append(1) or original(*given)  # type: ignore[func-returns-value]
    plain, fused = (_scores(path, kernels=kernels, dtype="bfloat16") for kernels in ("torch", "auto"))
    gelu_product.gelu_product = original
    assert bool(used) == (name == "bert")
    np.testing.assert_allclose(fused, plain, atol=4e-2, rtol=4e-2)


def check_wrong_kernel() -> None:
    """A kernel that gives something else is found out when its modules are tried, and they stay."""
    from maxsimd.engine.ops.triton import layer_norm

    original = layer_norm.add_layer_norm
    layer_norm.add_layer_norm = lambda *given: 1.01 * original(*given)
    found = _fused_modules(_checkpoint("bert"), kernels="auto")
    layer_norm.add_layer_norm = original
    assert found == {"FusedSelfAttention": 3, "FusedIntermediate": 3}


def check_mismatch() -> None:
    """Modules that pass their trial but give something else in the model are all taken back, with a warning,
    and the model scores as it does without."""
    forward = bert.FusedOutput.forward

    def wrong(self: Any, hidden: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = forward(self, hidden, given)
        return made if hidden.shape[1] == 5 else made + 0.01

    path = _checkpoint("bert")
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("maxsimd").addHandler(handler)
    bert.FusedOutput.forward = wrong  # type: ignore[method-assign]
    found = _fused_modules(path, kernels="auto")
    bert.FusedOutput.forward = forward  # type: ignore[method-assign]
    assert found == {}
    assert any("layers are not fused, which is slower: results differ" in each for each in warned), warned


def check_pictures() -> None:
    """A language model that reads pictures at positions of its own, with layers of a tower added to its."""
    path = vision_language.qwen3_vl_reranker(Path(tempfile.mkdtemp()))
    assert set(_fused_modules(path, kernels="auto")) == {"FusedDecoderLayer"}


def check_others_stay() -> None:
    """Layers with an adapter, a hook, or another activation stay as they are."""
    path = _checkpoint("bert")
    model = load_model(EngineConfig(model=path), CPU)
    backbone: Any = model.backbone.float()
    layers = backbone.encoder.layer
    layers[0].output.dense = torch.nn.Sequential(layers[0].output.dense)
    layers[1].intermediate.register_forward_hook(lambda *given: None)
    layers[1].output.dense.register_forward_hook(lambda *given: None)
    layers[2].intermediate.intermediate_act_fn = torch.nn.GELU("tanh")
    replace.fuse(backbone)
    assert _count(backbone) == {"FusedIntermediate": 1, "FusedOutput": 4}


def _checkpoint(name: str) -> str:
    return str(getattr(cross_encoders, name)(Path(tempfile.mkdtemp())))


def _config(path: str, **options: Any) -> EngineConfig:
    return EngineConfig(**({"model": path, "dtype": "float32", "attention": "triton"} | options))


def _scores(path: str, **options: Any) -> np.ndarray:
    async def run() -> Sequence[float]:
        async with Engine(_config(path, max_step_tokens=32, **options)) as engine:
            result = await engine.score(QUERIES, DOCUMENTS, truncation=CUT_LONG)
            return list(result.scores)

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
