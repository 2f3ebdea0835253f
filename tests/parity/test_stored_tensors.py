"""Tensors and tokenisers that are stored in other forms, GGUF and quantised safetensors, are what they stand
for. Scores are compared in test_families.py and test_variants.py."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from maxsimd.bench.datasets import Pair
from maxsimd.engine import EngineConfig
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.checkpoint.files import read_files
from maxsimd.engine.checkpoint.gguf.folder import from_gguf
from maxsimd.engine.checkpoint.quantized.formats import Format, Scales
from maxsimd.engine.checkpoint.quantized.tensors import _layer, quantized_weights
from tests.checkpoints import gguf_models, quantized
from tests.checkpoints.shared import SharedCheckpoints
from tests.parity.changes import CPU, Tensors
from tests.parity.stored_forms import dequantised

TEXTS = [
    "What is it?",
    "  two  spaces,\tand a tab\n\n\nand lines  ",
    "caf\u00e9 and cafe\u0301, na\u00efve \u00dcbung \u1e9e",
    "it's John's, they'LL 12345 3.14",
    "<|im_start|>user <think> </think><|im_end|> <|endoftext|> <|im_star",
    "\u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4",
    "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \U0001f600 \u0645\u0631\u062d\u0628\u0627",
    "def f(x):\n    return x[0] # [PAD4000] [MASK] [unused1] ##ing",
    "",
    " ",
]


def _stated(path: str) -> Tensors:
    """The tensors of a GGUF file that transformers is handed."""
    with from_gguf(path) as (_, stored):
        assert stored is not None
        return stored.read()


@pytest.mark.parametrize("build", [gguf_models.qwen3, gguf_models.llama, gguf_models.qwen2])
def test_tensors_are_those_that_transformers_reads(build: Any, checkpoints: SharedCheckpoints) -> None:
    path = checkpoints(build)
    model = AutoModelForCausalLM.from_pretrained(Path(path).parent / "hf")
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    ours = _stated(path)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].float()), name


def test_the_tensors_of_a_gemma_are_those_of_the_checkpoint(checkpoints: SharedCheckpoints) -> None:
    """transformers reads none."""
    path = checkpoints(gguf_models.gemma)
    published = load_file(Path(path).parent / "hf" / "model.safetensors")
    ours = _stated(path)
    assert ours.keys() == published.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, published[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "build", [gguf_models.qwen3, gguf_models.qwen3_embedding, gguf_models.bge, gguf_models.bge_reranker]
)
def test_texts_have_the_tokens_of_the_original(
    build: Any, checkpoints: SharedCheckpoints, pairs: list[Pair]
) -> None:
    path = checkpoints(build)
    with from_gguf(path) as (folder, _):
        ours = AutoTokenizer.from_pretrained(folder)
    theirs = AutoTokenizer.from_pretrained(dequantised(path))
    texts = [*TEXTS, *(pair.document for pair in pairs[:10])]
    for text in texts:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
        bare = {"add_special_tokens": False}
        assert ours(text, **bare)["input_ids"] == theirs(text, **bare)["input_ids"], text
    for first, second in itertools.pairwise(texts):
        assert dict(ours(first, second)) == dict(theirs(first, second))


@pytest.mark.parametrize("scheme", quantized.SCHEMES)
def test_quantised_tensors_are_what_the_formula_says(scheme: str, checkpoints: SharedCheckpoints) -> None:
    path = checkpoints(partial(quantized.qwen3_reranker, scheme=scheme))
    plain = load_file(f"{dequantised(path)}/model.safetensors")
    stored = quantized_weights(path, None, read_files(path, None))
    assert stored is not None
    ours = stored.read()
    assert ours.keys() == plain.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, plain[name], rtol=1e-6, atol=1e-7)


def test_blocks_of_float8_are_what_transformers_makes_of_them() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 384, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator)
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scales, torch.float32)
    stored = Format("fp8", (Scales("block", block=(128, 128)),), ("weight_scale_inv",))
    assert torch.equal(_layer({"weight": weight, "weight_scale_inv": scales}, stored), theirs)


def test_what_is_left_out_is_said(checkpoints: SharedCheckpoints, caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoints(partial(quantized.qwen3_reranker, scheme="w8a8"))
    model = load_model(EngineConfig(model=path, dtype="float32"), CPU)
    said = "compressed-tensors, int-quantized; the rounding of activations to int8 is left out"
    assert model.stored_as == said
    assert said in caplog.text
