"""Fused layers and the head of late interaction as one kernel: models with and without them, interpreted."""

import asyncio
import functools
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers.base.modules import Dense, Normalize
from transformers import AutoConfig, AutoModel
from transformers.models.jina_embeddings_v3.modeling_jina_embeddings_v3 import JinaEmbeddingsV3Layer
from transformers.models.modernbert.modeling_modernbert import ModernBertMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.checkpoint.heads import FirstColumns, ModuleHead
from maxsimd.engine.device.load import DeviceModel, prepare
from maxsimd.engine.execution import fused_layers, runner
from maxsimd.engine.execution.attention.backend import OneByOneBackend
from maxsimd.engine.execution.fused_layers import parts, rotary_layers
from maxsimd.engine.execution.runner import StepAttention
from maxsimd.engine.ops import elementwise
from tests.checkpoints import cross_encoders
from tests.exhaustive import exhaustive
from tests.logged import logged
from tests.unit.engine.execution.test_packed import laid_out
from tests.unit.engine.ops.interpreted import interpreted
from tests.unit.engine.ops.kernel_checks import plainly_turned

CPU = torch.device("cpu")
QUERY = "what is a fox"
DOCUMENTS = ["the quick brown fox jumps over the dog", "the moon"]
FUSED = (fused_layers.FusedSelfAttention, fused_layers.FusedOutput, rotary_layers.FusedRotaryLayer)


class Adapted(torch.nn.Linear):
    """A linear layer with an adapter of rank one, as jina-embeddings-v3 has them for its tasks."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features)
        self.weight, self.bias = layer.weight, layer.bias
        self.down, self.up = torch.ones(1, layer.in_features), torch.ones(layer.out_features, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


SMALL = {
    "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_hidden_layers": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
# ModernBERT's layers see all, then 9 tokens to either side twice, and so on.
WINDOWED = {"num_hidden_layers": 4, "local_attention": 16}
BIASED = {"attention_bias": True, "mlp_bias": True, "norm_bias": True}
TYPED = {"type_vocab_size": 2}
CAUSAL = {"gemma", "qwen3"}
ROTARY: dict[str, dict[str, Any]] = {
    "jina_embeddings_v3": TYPED,
    "modernbert": WINDOWED,
    "modernbert, biased": WINDOWED | BIASED,
    "gte": TYPED,
    "nomic_bert": TYPED,
    "gemma": {"head_dim": 16, "num_key_value_heads": 2},
    "gemma3_text": {"head_dim": 16, "num_key_value_heads": 2, "use_bidirectional_attention": True,
                    "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3": {"head_dim": 16, "num_key_value_heads": 2},
}  # fmt: skip

# One of each place of norms, kind of norm and activation.
MAIN = {"jina_embeddings_v3", "modernbert, biased", "gemma3_text", "qwen3"}


def rotary_model(name: str, attention: str) -> Any:
    """A small backbone with random weights: the same for the same name."""
    runner.register_attention()
    config = AutoConfig.for_model(name.split(",")[0], **SMALL | ROTARY[name])
    backbone: Any = AutoModel.from_config(config, attn_implementation=attention).eval()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in backbone.parameters():
            around = parameter.mean() if parameter.dim() == 1 else 0.0
            parameter.copy_(around + 0.2 * torch.randn(parameter.shape, generator=random))
    return backbone


def _fused_layers(backbone: Any) -> dict[str, int]:
    fused_layers.fuse(backbone)
    return _count(backbone)


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Plain torch in place of kernels, which take a hundred times as long in the interpreter."""
    turn_ = lambda qkv, *given: qkv.copy_(plainly_turned(qkv, *given))  # noqa: E731

    def sum_and_norm(x: torch.Tensor, residual: torch.Tensor, *given: Any, **options: Any) -> Any:
        return x + residual, elementwise.norm_reference(x + residual, *given, **options)

    plain = {"norm": elementwise.norm_reference, "gated": elementwise.gated_reference}
    with patch.multiple(elementwise, norm_rotary_=turn_, sum_and_norm=sum_and_norm, **plain):
        yield


@functools.cache
def _checkpoint(name: str) -> str:
    return str(getattr(cross_encoders, name)(Path(tempfile.mkdtemp())))


def _config(path: str, **options: Any) -> EngineConfig:
    return EngineConfig(**({"model": path, "dtype": "float32", "attention": "torch"} | options))


def _scores(path: str, starting: Callable[[], Any] = nullcontext, **options: Any) -> np.ndarray:
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
    prepared: DeviceModel = prepare(model, config, CPU)
    assert prepared.execution == "packed"
    return _count(model.backbone)


def _count(backbone: torch.nn.Module) -> dict[str, int]:
    names = [type(module).__name__ for module in backbone.modules() if isinstance(module, FUSED)]
    return {name: names.count(name) for name in dict.fromkeys(names)}


pytest.importorskip("triton")


@pytest.mark.parametrize("name", ["bert", *exhaustive("qwen3", "modernbert", "gemma")])
@interpreted
def test_a_model_with_fused_layers_scores_as_without(name: str) -> None:
    """Kernels are interpreted once the engine has started; a long document is prefilled in chunks."""
    path = _checkpoint(name)
    plain = _scores(path, kernels="torch")
    fused = _scores(path, plain_kernels, kernels="auto", attention="triton")
    assert np.ptp(plain) > 1e-3, plain
    np.testing.assert_allclose(fused, plain, atol=1e-4, rtol=1e-4)
    with plain_kernels():  # in the precision of GPUs
        plain, fused = (_scores(path, kernels=kernels, dtype="bfloat16") for kernels in ("torch", "auto"))
    np.testing.assert_allclose(fused, plain, atol=4e-2, rtol=4e-2)


@interpreted
def test_modules_with_broken_kernels_stay() -> None:
    """Modules whose kernel gives something else or fails stay as they are. A failure is warned of."""
    wrong = lambda *given, **options: 1.01 * elementwise.norm_reference(*given, **options)  # noqa: E731
    for broken in (wrong, Mock(side_effect=RuntimeError("no kernel image"))):
        with plain_kernels(), patch.object(elementwise, "norm", broken), logged() as warned:
            assert _fused_modules(_checkpoint("bert"), kernels="auto") == {"FusedSelfAttention": 3}
    assert "layers are left as they are, which is slower: Output: RuntimeError: no kernel image" in warned


@interpreted
def test_modules_that_differ_in_the_model_are_taken_back() -> None:
    """Modules that pass their trial and differ in the model are taken back, with a warning."""
    forward = fused_layers.FusedOutput.forward

    def wrong(self: Any, hidden: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = forward(self, hidden, given)
        return made if hidden.shape[1] == parts.ROWS else made.flip(-1)

    with plain_kernels(), patch.object(fused_layers.FusedOutput, "forward", wrong), logged() as warned:
        assert _fused_modules(_checkpoint("bert"), kernels="auto") == {}
    assert any(each.startswith("layers are not fused, which is slower: results differ") for each in warned)
    with plain_kernels():
        assert _fused_modules(_checkpoint("bert"), kernels="torch") == {}


@interpreted
def test_layers_with_an_adapter_or_a_hook_stay() -> None:
    backbone: Any = load_model(EngineConfig(model=_checkpoint("bert")), CPU).backbone.float()
    layers = backbone.encoder.layer
    layers[0].output.dense = torch.nn.Sequential(layers[0].output.dense)
    layers[1].output.dense.register_forward_hook(lambda *given: None)
    runner.register_attention()
    backbone.set_attn_implementation(runner.ATTENTION_NAME)
    with plain_kernels():
        assert _fused_layers(backbone) == {"FusedSelfAttention": 3, "FusedOutput": 4}


@pytest.mark.parametrize("name", [*sorted(MAIN), *exhaustive(*sorted(ROTARY.keys() - MAIN))])
@interpreted
def test_a_family_with_fused_layers_gives_what_its_library_gives(name: str) -> None:
    """Packed ragged steps of a small model with random weights, fused and interpreted, against the library's
    own layers, a text at a time: with token types, and with padding that is not attended to."""
    ours, library = rotary_model(name, runner.ATTENTION_NAME), rotary_model(name, "eager")
    assert _fused_layers(ours) == {"FusedRotaryLayer": library.config.num_hidden_layers}
    backend = OneByOneBackend()
    causal, takes_types = library.config.model_type in CAUSAL, "type_vocab_size" in ROTARY[name]

    @settings(max_examples=2, deadline=None)
    @given(st.lists(st.integers(1, 24), min_size=1, max_size=3), st.integers(0, 99))
    def compare(lengths: list[int], seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        attended = [length if causal else 1 + seed % length for length in lengths]
        ids, types = (torch.randint(n, (sum(lengths),), generator=random) for n in (50, 2))
        batch = laid_out(lengths, attended, backend, causal)
        step = StepAttention(backend, backend.prepare(batch.layout, CPU))
        inputs: dict[str, Any] = {"token_type_ids": types[None]} if takes_types else {}
        inputs |= {"position_ids": batch.position_ids[None], "attention_mask": None, "step_attention": step}
        found = ours(ids[None], **inputs).last_hidden_state[0]
        start = 0
        for length, seen in zip(lengths, attended, strict=True):
            rows = slice(start, start + length)
            mask = (torch.arange(length) < seen).long()[None]
            given_types = {"token_type_ids": types[None, rows]} if takes_types else {}
            exact = library(ids[None, rows], attention_mask=mask, **given_types).last_hidden_state[0]
            torch.testing.assert_close(found[start : start + seen], exact[:seen], atol=1e-5, rtol=1e-5)
            start += length

    with torch.inference_mode():
        compare()


@interpreted
def test_others_of_this_structure_stay() -> None:
    """Layers that look as others do and compute something else, and layers with an adapter, stay."""

    def second_half(self: Any, x: torch.Tensor) -> Any:
        up, gate = self.Wi(x).chunk(2, dim=-1)
        return self.Wo(up * self.act(gate))

    def doubled(self: Any, hidden: torch.Tensor, **kwargs: Any) -> Any:
        return hidden + forward(self, hidden, **kwargs)

    def scaled_far_away(self: Any, hidden_states: torch.Tensor, position_ids: Any, **kwargs: Any) -> Any:
        """As Ministral 3 scales queries, by their positions."""
        scale = 1 + 0.1 * torch.log1p(position_ids // 16_384)
        return project(self, hidden_states * scale[..., None], **kwargs)

    small = functools.partial(rotary_model, attention=runner.ATTENTION_NAME)
    with plain_kernels():
        assert _fused_layers(small("qwen3")) == {"FusedRotaryLayer": 2}
        project = Qwen3Attention.forward
        with patch.object(Qwen3Attention, "forward", scaled_far_away):
            assert _fused_layers(small("qwen3")) == {}
        backbone = small("qwen3")
        backbone.layers[0].register_buffer("layer_scalar", torch.ones(1))
        assert _fused_layers(backbone) == {"FusedRotaryLayer": 1}
        with patch.object(ModernBertMLP, "forward", second_half):
            assert _fused_layers(small("modernbert")) == {}
        forward = JinaEmbeddingsV3Layer.forward
        with patch.object(JinaEmbeddingsV3Layer, "forward", doubled):
            assert _fused_layers(small("jina_embeddings_v3")) == {}
        backbone = small("modernbert")
        backbone.layers[1].mlp.act = torch.nn.Softplus()  # the kernel has none
        assert _fused_layers(backbone) == {"FusedRotaryLayer": 3}
        backbone = small("jina_embeddings_v3")
        backbone.layers[1].mlp.activation_fn = torch.nn.Softplus()  # it is called as it is
        assert _fused_layers(backbone) == {"FusedRotaryLayer": 2}
        backbone = small("jina_embeddings_v3")
        backbone.layers[0].self_attn.q_proj = Adapted(backbone.layers[0].self_attn.q_proj)
        backbone.layers[1].mlp.fc2 = torch.nn.utils.parametrizations.weight_norm(backbone.layers[1].mlp.fc2)
        assert _fused_layers(backbone) == {}


@interpreted
def test_hooks_that_do_nothing_are_no_hindrance() -> None:
    """transformers leaves hooks in them, which do nothing."""
    backbone = rotary_model("modernbert", "eager")
    backbone(torch.arange(5)[None], output_hidden_states=True)
    assert any(module._forward_hooks for module in backbone.layers.modules())
    backbone.set_attn_implementation(runner.ATTENTION_NAME)
    with plain_kernels():
        assert _fused_layers(backbone) == {"FusedRotaryLayer": 4}


@contextmanager
def joining(product: Callable[..., torch.Tensor], joined: float, apart: float) -> Iterator[None]:
    """A device that may join GELU with products, by `product`, and on which these are the milliseconds."""
    times = {"joined": joined, "apart": apart}
    parts._is_right_and_faster.cache_clear()
    with (
        patch.object(parts, "_may_join", lambda device: True),
        patch.object(parts, "joined_gelu", product),
        patch.object(parts, "milliseconds_in_turns_on_cuda", lambda runs, budget: times),
    ):
        yield
    parts._is_right_and_faster.cache_clear()


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


@torch.inference_mode()
@pytest.mark.parametrize("product", [by_tanh, parts.joined_gelu])
def test_gelu_is_part_of_the_product_where_that_is_right(product: Any, caplog: Any) -> None:
    plain, x = intermediate(), torch.randn(1, 9, 64).bfloat16()
    expected = plain(x)
    with joining(product, 0.2, 0.3), caplog.at_level(logging.DEBUG, logger="maxsimd"):
        fused = fused_layers.fused_intermediate(plain)
        assert isinstance(fused, fused_layers.FusedIntermediate)
        torch.testing.assert_close(fused(x), expected, atol=2e-2, rtol=2e-2)
        fused_layers.fused_intermediate(intermediate())  # tried once for layers of one shape
    assert caplog.text.count("GELU behind a product of 64 to 256: in one launch, by a short timing") == 1


@interpreted
def test_layers_that_only_rounding_hides_are_told_apart() -> None:
    norm = rotary_model("gemma", runner.ATTENTION_NAME).layers[0].input_layernorm
    with torch.no_grad():
        norm.weight[:] = torch.linspace(0, 2, 64)
        norm.weight[:3] = 100  # beside these, a 1 more or less is rounding
        x = torch.randn(4, 64).bfloat16()
        rounded = norm.bfloat16()
        with plain_kernels():
            ours = rotary_layers._norm_of(rounded)
            assert ours is not None
            torch.testing.assert_close(ours(x)[:, 3:], rounded(x)[:, 3:], atol=1e-2, rtol=2e-2)
    backbone = rotary_model("qwen3", runner.ATTENTION_NAME)
    with plain_kernels():
        assert fused_layers.fuse(backbone, frozenset()) == []
        kinds = fused_layers.fuse(rotary_model("qwen3", runner.ATTENTION_NAME))
        assert fused_layers.fuse(backbone.bfloat16(), frozenset(kinds)) == kinds


@interpreted
def test_rotary_layers_take_gelu_as_part_of_the_product() -> None:
    """A plain feed-forward takes GELU as part of its product where that may be."""
    for milliseconds, expected in ((0.2, 2), (0.4, 0)):
        backbone = rotary_model("jina_embeddings_v3", runner.ATTENTION_NAME).bfloat16()
        with plain_kernels(), joining(by_tanh, milliseconds, 0.3):
            assert _fused_layers(backbone) == {"FusedRotaryLayer": 2}
        assert sum(isinstance(module, parts.GeluLinear) for module in backbone.modules()) == expected


REFUSED = Mock(side_effect=RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED"))
COLUMN = torch.eye(256, dtype=torch.bfloat16)[-1]
NOT_JOINED: dict[str, tuple[Callable[..., torch.Tensor], float, str]] = {
    "without bias": (lambda x, layer: torch.nn.functional.gelu(x @ layer.weight.T), 0.2, "is less exact"),
    "one column": (lambda x, layer: by_tanh(x, layer) + 0.05 * COLUMN, 0.2, "is less exact"),
    "NaN": (lambda x, layer: by_tanh(x, layer) * torch.nan, 0.2, "the fused result is less exact"),
    "refused": (REFUSED, 0.2, "the fused product failed: CUBLAS_STATUS_NOT_SUPPORTED"),
    "slow": (by_tanh, 0.3, "in two, by a short timing"),
}


@pytest.mark.parametrize("why", NOT_JOINED)
def test_gelu_stays_apart_where_joining_is_wrong_or_slow(why: str, caplog: pytest.LogCaptureFixture) -> None:
    product, milliseconds, reason = NOT_JOINED[why]
    with joining(product, milliseconds, 0.3), caplog.at_level(logging.DEBUG, logger="maxsimd"):
        assert fused_layers.fused_intermediate(intermediate()) is None
    assert reason in caplog.text


def test_only_the_exact_gelu_in_bfloat16_on_a_gpu_is_joined() -> None:
    assert fused_layers.fused_intermediate(intermediate()) is None  # on a CPU
    with joining(parts.joined_gelu, 0.2, 0.3):
        others = [intermediate(activation) for activation in ("gelu_new", "relu")]
        for other in [*others, *(intermediate(dtype=dtype) for dtype in (torch.float32, torch.float16))]:
            assert fused_layers.fused_intermediate(other) is None


# The head of late interaction as one kernel


def _heads() -> list[tuple[Any, bool]]:
    """Heads of 24 inputs, and whether one kernel can take their place."""
    identity, norm = torch.nn.Identity(), Normalize(module_input_name="x")

    def dense(**options: Any) -> Dense:
        torch.manual_seed(0)
        return Dense(24, 32, **{"activation_function": identity, "module_input_name": "x", **options})

    whole = ModuleHead([dense(bias=False), norm], "x")
    return [
        *((whole, True), (ModuleHead([dense()], "x"), True)),
        (FirstColumns(ModuleHead([dense(), norm], "x"), 20, True), True),
        (FirstColumns(ModuleHead([dense()], "x"), 20, False), True),
        *((FirstColumns(whole, 20, False), False), (ModuleHead([norm], "x"), False)),
        (ModuleHead([dense(activation_function=torch.nn.Tanh()), norm], "x"), False),
        (ModuleHead([dense(use_residual=True), norm], "x"), False),
        (ModuleHead([dense(), norm, norm], "x"), False),
    ]


@interpreted
def test_a_fused_head_equals_the_plain_head() -> None:
    from maxsimd.engine.device.fused_head import FusedProjection, fused

    hidden, rows = torch.randn(30, 24), np.array([0, 3, 29, 3])
    for head, possible in _heads():
        ours = fused(head, torch.float32, torch.float32)
        assert isinstance(ours, FusedProjection) == possible, str(head)
        if isinstance(ours, FusedProjection):
            exact = head(hidden[rows]).detach()
            torch.testing.assert_close(ours.gather(hidden, rows), exact, atol=1e-5, rtol=1e-5)
            assert str(ours) == str(head)


def plain_project(hidden: torch.Tensor, rows: Any, projection: Any, dtype: torch.dtype) -> torch.Tensor:
    out = torch.nn.functional.linear(hidden[rows].float(), projection.weight.float(), projection.bias)
    if projection.epsilon is not None:
        out = torch.nn.functional.normalize(out, dim=-1)
    return out.to(dtype)


def test_broken_heads_are_unused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from maxsimd.engine.device import fused_head

    breaks: list[tuple[Callable[[torch.Tensor], torch.Tensor], str]] = [
        (lambda out: 2 * out, "it differs from the plain head by"),
        (lambda out: out.index_fill(0, torch.tensor(7), torch.nan), "it differs from the plain head by nan"),
        (lambda out: out.flip(0), "it differs from the plain head by"),
        (lambda out: out.view(3, 0), "it failed: shape"),
    ]
    for (broken, said), dtype in product(breaks, (torch.float32, torch.bfloat16)):
        monkeypatch.setattr(fused_head, "project", lambda *args, broken=broken: broken(plain_project(*args)))
        for head, possible in _heads():
            caplog.clear()
            assert fused_head.fused(head, dtype, dtype) is head
            assert (f"the fused projection is not used: {said}" in caplog.text) == possible
