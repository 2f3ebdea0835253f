"""The proof at load: what is broken on purpose is noticed, and scores come out right all the same."""

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, inspection
from maxsimd.engine.checkpoint import cross_encoder, heads, load_model
from maxsimd.engine.checkpoint.heads import ClassifierHead, ModuleHead
from maxsimd.engine.device import load
from maxsimd.engine.device.load import samples_of
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution import modes
from maxsimd.engine.execution.attention import select
from maxsimd.engine.execution.attention.backend import GroupedBackend
from maxsimd.engine.execution.runner import PackedRunner
from maxsimd.engine.execution.self_check.proof import compare_in_parts, pooler_for
from maxsimd.engine.execution.self_check.samples import compare_items, largest, make_samples
from maxsimd.engine.ops.qkv import KV, QKV
from tests.checkpoints import bi_encoders, cross_encoders, language_models, late_interaction
from tests.parity import references
from tests.parity.selection import with_default
from tests.unit.engine.execution.test_packed import LeakyBackend

Patch = pytest.MonkeyPatch
CPU = torch.device("cpu")


def with_biases(folder: str) -> str:
    for file in Path(folder).rglob("model.safetensors"):
        tensors = load_file(file)
        torch.manual_seed(3)
        for name, tensor in tensors.items():
            if name.endswith("bias"):
                tensors[name] = torch.randn_like(tensor) * 0.3
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


class _WithoutActivation(torch.nn.Module):
    def __init__(self, pooler: Any) -> None:
        super().__init__()
        self.dense = pooler.dense

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dense(rows[:, 0])
        return out


def leave_out_an_activation(patch: Patch) -> None:
    patch.setattr(heads, "_pooler_of", lambda backbone: _WithoutActivation(backbone.pooler))


def pool_another_position(patch: Patch) -> None:
    patch.setattr(cross_encoder, "is_causal", lambda backbone: True)


def drop_the_bias_of_the_head(patch: Patch) -> None:
    call = ClassifierHead.__call__
    patch.setattr(ClassifierHead, "__call__", lambda head, x: call(head, x) - head.model.classifier.bias)


def leave_out_a_normalisation(patch: Patch) -> None:
    original = ModuleHead.__init__

    def without_normalize(head: ModuleHead, modules: Sequence[torch.nn.Module], feature: str) -> None:
        others = [module for module in modules if type(module).__name__ != "Normalize"]
        original(head, others, feature)

    patch.setattr(ModuleHead, "__init__", without_normalize)


def put_positions_off_by_one(patch: Patch) -> None:
    right = PackedRunner.inputs_of

    def shifted(runner: PackedRunner, batch: Any) -> dict[str, torch.Tensor]:
        inputs = right(runner, batch)
        return inputs | {"position_ids": (inputs["position_ids"] + 1).clamp(max=511)}

    patch.setattr(PackedRunner, "inputs_of", shifted)


def let_sequences_leak(patch: Patch) -> None:
    for name in ("GroupedBackend", "CompiledBackend"):
        patch.setattr(select, name, LeakyBackend)


def let_padding_leak(patch: Patch) -> None:
    right = modes.PaddedRunner._run

    def leaky(runner: modes.PaddedRunner, chunks: list[Any]) -> torch.Tensor:
        longest = max(len(chunk) for chunk in chunks)
        backbone = runner._backbone
        try:
            # The mask is made before the backbone is called, so the backbone is where it can be lost.
            runner._backbone = lambda attention_mask, **inputs: backbone(
                attention_mask=torch.ones(len(chunks), longest, dtype=torch.int64), **inputs
            )
            runner._backbone.config = backbone.config
            runner._backbone.forward = backbone.forward
            return right(runner, chunks)
        finally:
            runner._backbone = backbone

    patch.setattr(modes.PaddedRunner, "_run", leaky)


Broken = tuple[Callable[[Patch], None], str, dict[str, Any], str]
BROKEN: list[Broken] = [
    (leave_out_an_activation, "cross-encoder", {}, "one by one"),
    (pool_another_position, "cross-encoder", {}, "one by one"),
    (drop_the_bias_of_the_head, "cross-encoder", {}, "one by one"),
    (leave_out_a_normalisation, "bi-encoder", {}, "one by one"),
    (leave_out_a_normalisation, "late-interaction", {}, "one by one"),
    (let_sequences_leak, "cross-encoder", {}, "padded"),
    (put_positions_off_by_one, "cross-encoder", {}, "padded"),
    (put_positions_off_by_one, "bi-encoder", {}, "padded"),
    (let_padding_leak, "cross-encoder", {"packing": "off"}, "one by one"),
    (let_padding_leak, "bi-encoder", {"packing": "off"}, "one by one"),
]

BUILDERS: dict[str, tuple[Callable[[Path], str], Callable[..., np.ndarray]]] = {
    "cross-encoder": (cross_encoders.bert, references.cross_encoder),
    "bi-encoder": (bi_encoders.bge, references.bi_encoder),
    "late-interaction": (late_interaction.stanford, references.multi_vector),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("proof")
    return {kind: with_biases(build(folder / kind)) for kind, (build, _) in BUILDERS.items()}


async def _scores(engine: Engine, pairs: list[Pair]) -> np.ndarray:
    queries, documents = [pair.query for pair in pairs], [pair.document for pair in pairs]
    return np.array((await engine.score(queries, documents, truncation=CUT_LONG)).scores)


@pytest.mark.parametrize(
    "case",
    with_default([(each,) for each in BROKEN], [(BROKEN[i],) for i in (0, 4, 5, 8)]),
    ids=lambda case: case[0].__name__,
)
async def test_what_is_broken_is_noticed_and_scores_are_right(
    case: Broken, checkpoints: Any, pairs: list[Pair], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    break_it, kind, settings, expected = case
    few = pairs[:12]
    texts = [pair.query for pair in few], [pair.document for pair in few]
    reference = BUILDERS[kind][1](checkpoints[kind], *texts)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, logger="maxsimd"):
        # Changed code has no recipes of code that was right.
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        break_it(patch)
        async with Engine(EngineConfig(model=checkpoints[kind], dtype="float32", **settings)) as engine:
            prepared = engine.device_model
            scores = await _scores(engine, few)
    assert prepared.execution == expected, prepared
    assert "slower" in caplog.text
    np.testing.assert_allclose(scores, reference, atol=1e-4)


class WrongChunks(GroupedBackend):
    def with_prefill_kv(self, qkv: QKV, contexts: Sequence[KV], metadata: Any, out: torch.Tensor) -> None:
        super().with_prefill_kv(qkv, contexts, metadata, out)
        for chunk in metadata.layout.prefill_chunks:
            out[chunk.rows] *= 2


class WrongPrefixes(GroupedBackend):
    def shared_prefix(self, qkv: QKV, prefixes: Sequence[KV], metadata: Any, out: torch.Tensor) -> None:
        super().shared_prefix(qkv, prefixes, metadata, out)
        for group in metadata.layout.shared_groups:
            out[group.rows] *= 2


@pytest.mark.parametrize("wrong", [WrongChunks, WrongPrefixes])
async def test_wrong_chunks_and_prefixes_are_not_used(wrong: type[GroupedBackend], tmp_path: Path) -> None:
    model = load_model(EngineConfig(model=language_models.qwen3_reranker(tmp_path / "model")), CPU)
    model.backbone.float()
    samples = make_samples(model)
    found = modes.try_packed(model, CPU, GroupedBackend(), samples)
    assert isinstance(found, modes.Packed)
    assert found.chunked
    # The score of the longest alone may be near 0.
    runner = modes.make_runner(found, model, CPU, GroupedBackend())
    parts = compare_in_parts(runner, pooler_for(model.tasks), samples)
    assert parts.largest == largest(sample.expected for sample in samples)
    found = modes.try_packed(model, CPU, wrong(), samples)
    assert isinstance(found, modes.Packed)
    assert not found.chunked


def test_language_models_are_checked_with_some_of_their_layers(
    tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    path = language_models.qwen3_reranker(tmp_path / "model", num_hidden_layers=5)
    model = load_model(EngineConfig(model=path), CPU)
    with samples_of(model):
        layers: Any = model.backbone.layers
        assert len(layers) == 2
    failing = Mock(wraps=make_samples, side_effect=[ModelLoadError("layer 4 is missing"), DEFAULT])
    monkeypatch.setattr(load, "make_samples", failing)
    with caplog.at_level(logging.DEBUG, logger="maxsimd"), samples_of(model):
        layers = model.backbone.layers
        assert len(layers) == 5
    assert "all layers, because a few of them do not run alone: layer 4 is missing" in caplog.text


def test_inspect_says_what_it_compares_from_text_to_score(checkpoints: dict[str, str]) -> None:
    config = EngineConfig(model=checkpoints["late-interaction"], dtype="float32")
    *checked, said = inspection.inspect_model(config, check=True)["checked"]
    for line in (
        "as transformers reads and runs it: 6 texts, largest difference",
        *(f"{how}: .*\\b6 sequences" for how in
          ("packed, in float32", "as it is run, in float32", "alone and together")),
    ):  # fmt: skip
        assert any(re.search(line, each) for each in checked), checked
    found = re.fullmatch(r"from text .*: 8 pairs, largest difference (\S+) of .*, the order [\d ]+", said)
    assert found is not None
    assert float(found[1]) < 1e-4
    with pytest.raises(ModelLoadError, match=r"not scored as its own .*, THE LIBRARY'S 8 7 6 5 4 3 2 1"):
        inspection._scored(config, [float(i) for i in range(8)])


def test_a_nan_and_another_shape_do_not_agree() -> None:
    assert np.isnan(largest([torch.ones(2), torch.tensor([torch.nan]), torch.zeros(1)]))
    assert largest([torch.empty(0), torch.tensor([-3.0, 2.0])]) == 3
    for found, expected in ((torch.tensor([torch.nan]), torch.ones(1)), (torch.ones(2, 3), torch.ones(3, 3))):
        assert not compare_items([found], [expected], rounding=0.0).agrees
