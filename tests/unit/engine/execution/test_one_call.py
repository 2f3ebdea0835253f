"""All layers of an encoder in one call, to the same bits as layer by layer, and compiled embeddings."""

import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AlbertConfig, BertConfig, XLMRobertaConfig
from transformers.models.albert.modeling_albert import AlbertEmbeddings
from transformers.models.bert.modeling_bert import BertEmbeddings
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaEmbeddings

from maxsimd.bench import single
from maxsimd.engine import Engine, EngineConfig
from maxsimd.engine.checkpoint import LoadedModel, load_model
from maxsimd.engine.device.load import prepare
from maxsimd.engine.execution import one_call
from maxsimd.engine.execution.fused_layers.rotary_layers import FusedRotaryLayer
from maxsimd.engine.execution.linear import CompiledEmbeddings, CompiledGated, compile_embeddings
from maxsimd.engine.execution.one_call import FEW_ROWS, MOST_ROWS, OneCallRunner, with_one_call
from maxsimd.engine.execution.runner import PackedRunner
from maxsimd.engine.execution.self_check.samples import random_sequences
from maxsimd.engine.ops.cpu import linear as products
from maxsimd.engine.ops.cpu.attention import attention
from maxsimd.engine.ops.qkv import QKV
from tests.checkpoints import bi_encoders, cross_encoders, gte
from tests.checkpoints.shared import Build, SharedCheckpoints
from tests.unit.engine.execution.test_packed import CPU, make_step
from tests.unit.engine.ops.test_kernels import amx, needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("two_threads")]

Pack = Callable[[torch.Tensor], products.Weights]
# Hidden states are no multiple of what the kernels take at a time, and narrower than all heads together; or
# their rows lie at distances of 2 KiB, and are multiplied in chunks.
HIDDEN, HEADS, HEAD_DIM, WIDE, SCALING = 90, 3, 32, 160, 0.2
# A few sequences, or so many that threads have first rows of their own.
FEW = st.lists(st.integers(1, 70), min_size=1, max_size=6)
LENGTHS = FEW | st.lists(st.integers(1, 9), min_size=24, max_size=90)


def random_layer(pack: Pack, seed: int, hidden: int = HIDDEN) -> products.Layer:
    random = torch.Generator().manual_seed(seed)

    def product(inputs: int, columns: int, bias: bool = True) -> products.Product:
        weights = pack(torch.randn(columns, inputs, generator=random) * inputs**-0.5)
        return products.Product(weights, torch.randn(columns, generator=random) if bias else None)

    def norm() -> products.Norm:
        weight, bias = torch.randn(2, hidden, generator=random)
        return products.Norm(weight, bias, 1e-5)

    attended = HEADS * HEAD_DIM
    query, key, value = product(hidden, attended), product(hidden, attended, False), product(hidden, attended)
    rest = product(attended, hidden), norm(), product(hidden, WIDE), product(WIDE, hidden), norm()
    return products.Layer(query, key, value, *rest)


def plainly(layer: products.Layer, hidden: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    query, key, value = (
        each.linear(hidden).view(len(hidden), HEADS, HEAD_DIM).transpose(0, 1)
        for each in (layer.query, layer.key, layer.value)
    )
    qkv = QKV(query, key, value, SCALING)
    out = qkv.new_output()
    attention(qkv, sequences, [], False, out)
    total = layer.attended.linear_norm(out.flatten(1), hidden, layer.attended_norm)
    return layer.narrowed.linear_norm(layer.widened.linear(total, True), total, layer.narrowed_norm)


@pytest.mark.parametrize("pack", [products.pack_float32, products.pack_bfloat16, products.pack_int8])
@given(
    lengths=LENGTHS, size=st.sampled_from([HIDDEN, 1024]), count=st.integers(1, 3),
    firsts_only=st.booleans(), tiles=st.booleans(),
)  # fmt: skip
# Several blocks of rows for each thread, and one.
@example(lengths=[70] * 22, size=HIDDEN, count=2, firsts_only=False, tiles=True)
@example(lengths=[61] * 10, size=1024, count=3, firsts_only=False, tiles=True)
@example(lengths=[61] * 10, size=HIDDEN, count=3, firsts_only=False, tiles=False)
@settings(deadline=None, max_examples=25)
def test_a_call_is_exact(
    pack: Pack, lengths: list[int], size: int, count: int, firsts_only: bool, tiles: bool
) -> None:
    layers = [random_layer(pack, seed, size) for seed in range(2)]
    rows = sum(lengths)
    random = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, size, generator=random).to(layers[0].query.weights.dtype)
    firsts = torch.tensor([0, *itertools.accumulate(lengths)][:-1])
    sequences = torch.tensor([(int(first), n, n, -1) for first, n in zip(firsts, lengths, strict=True)])
    together = products.Layers(layers, HEADS, SCALING, rows)
    torch.set_num_threads(count)
    with amx(tiles):
        expected = hidden
        for layer in layers:
            expected = plainly(layer, expected, sequences)
        ours = together.run(hidden.clone(), sequences, firsts_only=firsts_only)
    assert torch.equal(ours, expected[firsts] if firsts_only else expected)


def turns(*seconds: float) -> one_call.Timer:
    """A clock that shows these milliseconds in turn: first of one call, then of layer by layer."""
    shown = itertools.cycle(seconds)
    return lambda run: (run(), next(shown) / 1000)[1]


def loaded(checkpoint: str | None, dtype: Any, **options: Any) -> tuple[LoadedModel, PackedRunner]:
    config = EngineConfig(model=checkpoint, dtype=dtype, device="cpu", **options)
    model = load_model(config, CPU)
    runner = prepare(model, config, CPU).runner
    plain = runner.inner if isinstance(runner, OneCallRunner) else runner
    assert isinstance(plain, PackedRunner)
    return model, plain


@pytest.fixture(scope="module")
def served(bert_cross_encoder: str) -> tuple[LoadedModel, PackedRunner]:
    return loaded(bert_cross_encoder, "bfloat16")


def choice(served: tuple[LoadedModel, PackedRunner], *seconds: float) -> PackedRunner | OneCallRunner:
    """The layers that run a model for which the clock shows these in turn."""
    model, plain = served
    texts = random_sequences(model, next(iter(model.tasks)))
    return with_one_call(plain, model.backbone, texts, turns(*seconds))


def one_call_of(served: tuple[LoadedModel, PackedRunner], *seconds: float) -> OneCallRunner:
    fast = choice(served, *(seconds or (1.0, 2.0)))
    assert isinstance(fast, OneCallRunner)
    assert single.is_one_call(fast)
    with single.layer_by_layer():
        assert choice(served, 1.0, 2.0) is served[1]
    return fast


@pytest.fixture
def why_not(served: tuple[LoadedModel, PackedRunner], caplog: pytest.LogCaptureFixture) -> Callable[..., str]:
    def reason(*seconds: float) -> str:
        with caplog.at_level(logging.DEBUG, logger="maxsimd"):
            assert choice(served, *seconds) is served[1]
        return caplog.text.partition("steps run layer by layer: ")[2]

    return reason


@pytest.mark.parametrize(
    ("build", "dtype", "quantization"),
    [
        (cross_encoders.bert, "bfloat16", "none"), (cross_encoders.bert, "bfloat16", "int8"),
        (cross_encoders.bert, "float32", "none"), (cross_encoders.xlm_roberta, "bfloat16", "none"),
        (None, "bfloat16", "none"),
        (cross_encoders.modernbert, "bfloat16", "none"), (cross_encoders.modernbert, "bfloat16", "int8"),
        (cross_encoders.qwen3, "float32", "none"), (cross_encoders.qwen3, "bfloat16", "int8"),
        (cross_encoders.gemma, "bfloat16", "none"), (gte.multilingual, "bfloat16", "none"),
        (bi_encoders.nomic, "float32", "none"), (bi_encoders.jina_v3, "bfloat16", "none"),
        (bi_encoders.embeddinggemma, "bfloat16", "none"), (bi_encoders.embeddinggemma, "float32", "none"),
    ],
)  # fmt: skip
def test_steps_give_the_bits_of_the_model_layer_by_layer(
    build: Build | None, dtype: str, quantization: str, checkpoints: SharedCheckpoints
) -> None:
    model, plain = loaded(None if build is None else checkpoints(build), dtype, quantization=quantization)
    fast = one_call_of((model, plain))
    random = torch.Generator().manual_seed(0)
    for count, shortest in ((1, 1), (2, 1), (7, 1), (12, 90)):
        lengths = torch.randint(shortest, shortest + 69, (count,), generator=random).tolist()
        # Some tokens behind the first are not to be attended to.
        step = make_step(lengths, [max(1, length - count) for length in lengths])
        assert fast.takes(step)
        (ours, cursor), (expected, plain_cursor) = fast.forward(step), plain.forward(step)
        assert torch.equal(ours, expected)
        rows = count if plain.cls_only else step.num_tokens
        assert (cursor.starts, len(ours)) == (plain_cursor.starts, rows)
    assert step.num_tokens > 2 * FEW_ROWS


def test_steps_run_faster(served: tuple[LoadedModel, PackedRunner], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="maxsimd"):
        # Small steps are clearly faster at once, large ones never.
        fast = one_call_of(served, 1.0, 2.0, *[2.0, 1.0] * 1000)
    assert fast.takes(make_step([FEW_ROWS]))
    assert not fast.takes(make_step([FEW_ROWS, 1]))
    assert not one_call_of(served).takes(make_step([256] * (MOST_ROWS // 256) + [1]))
    # A small gain of small steps, shown second to fourth, counts if no later timing takes it back.
    assert one_call_of(served, *[2.0] * 8, *[1.9, 2.0] * 1000).takes(make_step([FEW_ROWS, 1]))
    assert f"steps of up to {FEW_ROWS} rows run all layers in one call" in caplog.text
    roofline = r"\d+ rows: products of \d+\.\d GFLOP with \d+ MiB of weights, at \d+% of the peak of \d+ "
    assert re.search(roofline, caplog.text)


def test_a_wrong_one_call_is_not_used(why_not: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = products.Layers.run

    def wrong(self: products.Layers, *arguments: Any, **options: Any) -> torch.Tensor:
        made = run(self, *arguments, **options)
        made[-1, -1] += 1
        return made

    monkeypatch.setattr(products.Layers, "run", wrong)
    assert "they give something else" in why_not(1.0, 2.0)


def test_other_layers_than_berts_run_layer_by_layer(served: Any, why_not: Any, monkeypatch: Any) -> None:
    layers: Any = served[0].backbone.encoder.layer
    own = layers[0].attention.self
    forward = own.forward
    with monkeypatch.context() as patch:
        patch.setattr(own, "forward", lambda x, **options: forward(2 * x, **options))
        assert why_not(1.0, 2.0).startswith("layer 0 attends in another way")
    monkeypatch.setitem(layers[-1]._modules, "added", torch.nn.Identity())
    assert f"layer {len(layers) - 1} is not built as BERT's" in why_not(1.0, 2.0)


WORDS, POSITIONS = 50, 40
SIZES = {
    "vocab_size": WORDS, "hidden_size": 40, "max_position_embeddings": POSITIONS, "num_attention_heads": 2,
}  # fmt: skip
MAKERS: dict[str, Any] = {
    "bert": lambda: BertEmbeddings(BertConfig(**SIZES)),
    "albert": lambda: AlbertEmbeddings(AlbertConfig(**SIZES, embedding_size=40)),
    "xlm-roberta": lambda: XLMRobertaEmbeddings(XLMRobertaConfig(**SIZES, type_vocab_size=1)),
}
# The share of a number by which rounding once may differ from rounding after each sum.
NEAR = {torch.float32: {"atol": 2e-6, "rtol": 2e-6}, torch.bfloat16: {"atol": 4e-2, "rtol": 2e-2}}


def made(family: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    module = MAKERS[family]()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    module.to(dtype).eval()
    backbone = nn.ModuleDict({"embeddings": module})
    compile_embeddings(backbone)
    return module, backbone["embeddings"]


def ids(shape: tuple[int, ...], types: int) -> dict[str, torch.Tensor]:
    below = {"input_ids": WORDS, "position_ids": POSITIONS, "token_type_ids": types}
    return {name: torch.randint(count, shape) for name, count in below.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_types", [True, False])
@pytest.mark.parametrize("family", MAKERS)
@torch.inference_mode()
def test_the_compiled_sum_is_the_modules_rounded(family: str, with_types: bool, dtype: torch.dtype) -> None:
    module, ours = made(family, dtype)
    assert isinstance(ours, CompiledEmbeddings)
    for shape in ((1, 1), (1, 7), (3, 21), (1, 200)):
        given = ids(shape, module.token_type_embeddings.num_embeddings)  # type: ignore[union-attr]
        if not with_types:
            del given["token_type_ids"]
        torch.testing.assert_close(ours(**given), module(**given), **NEAR[dtype])


@pytest.mark.parametrize("name", ["input_ids", "position_ids", "token_type_ids"])
@pytest.mark.parametrize("wrong", [-1, 10_000])
@torch.inference_mode()
def test_an_id_that_is_in_no_table_is_refused(name: str, wrong: int) -> None:
    _, ours = made("bert", torch.float32)
    given = ids((1, 5), 2)
    given[name][0, 3] = wrong
    with pytest.raises(IndexError, match="not in its table"):
        ours(**given)


@torch.inference_mode()
def test_calls_with_more_than_ids_go_through_the_module() -> None:
    module, ours = made("bert", torch.float32)
    given: dict[str, Any] = {"inputs_embeds": torch.randn(1, 5, 40), "position_ids": torch.arange(5)[None]}
    assert torch.equal(ours(**given), module(**given))
    alone = {"input_ids": torch.arange(5)[None], "past_key_values_length": 3}
    assert torch.equal(ours(**alone), module(**alone))
    with pytest.raises(TypeError, match="mask"):  # as the module does
        ours(**ids((1, 5), 2), mask=torch.ones(1, 5))


class Scaled(BertEmbeddings):
    def forward(self, *arguments: Any, **named: Any) -> torch.Tensor:
        return 1.02 * super().forward(*arguments, **named)


@pytest.mark.parametrize("change", ["scaled", "another table", "precision", "hooks"])
def test_a_module_that_does_anything_else_stays(change: str) -> None:
    module = (Scaled if change == "scaled" else BertEmbeddings)(BertConfig(**SIZES)).eval().bfloat16()
    if change == "another table":
        module.word_embeddings = type("Other", (nn.Embedding,), {})(WORDS, 40).bfloat16()
    if change == "precision":
        module.half()
    if change == "hooks":
        module.LayerNorm.register_forward_hook(lambda _, __, output: output + 1)
    backbone = nn.ModuleDict({"embeddings": module})
    compile_embeddings(backbone)
    assert backbone["embeddings"] is module


QUERY, DOCUMENTS = "what is a fox", ["the quick brown fox jumps over the dog", "the moon", "a fox " * 40]


async def _scores(path: str, **options: Any) -> tuple[list[float], dict[type[nn.Module], int]]:
    async with Engine(EngineConfig(model=path, device="cpu", **options)) as engine:
        scores = (await engine.score(QUERY, DOCUMENTS)).scores
        return scores, Counter(map(type, engine.model.backbone.modules()))


@pytest.mark.parametrize("build", [cross_encoders.qwen3, cross_encoders.modernbert, cross_encoders.gemma])
async def test_rotary_layers_run_compiled(build: Build, checkpoints: SharedCheckpoints) -> None:
    path = checkpoints(build)
    expected, plain = await _scores(path, dtype="float32", kernels="torch")
    scores, modules = await _scores(path, dtype="float32")
    assert modules[FusedRotaryLayer] == modules[CompiledGated] > 1
    assert (plain[FusedRotaryLayer], modules[nn.Linear]) == (0, 0)
    np.testing.assert_allclose(scores, expected, atol=1e-5, rtol=1e-5)


async def test_rotary_layers_take_int8_in_float32(checkpoints: SharedCheckpoints) -> None:
    path = checkpoints(cross_encoders.qwen3)
    expected, _ = await _scores(path, dtype="float32", quantization="int8", kernels="torch")
    scores, modules = await _scores(path, dtype="float32", quantization="int8")
    assert modules[FusedRotaryLayer]
    np.testing.assert_allclose(scores, expected, atol=5e-2)
