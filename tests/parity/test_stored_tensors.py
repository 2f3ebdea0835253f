"""Tensors and tokenisers that are stored in other forms, GGUF and quantised safetensors, are what they stand
for. Scores are compared in test_families.py and test_variants.py."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from maxsimd.bench.datasets import Pair
from maxsimd.engine import EngineConfig
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.checkpoint.files import read_files
from maxsimd.engine.checkpoint.gguf.folder import from_gguf
from maxsimd.engine.checkpoint.quantized.tensors import quantized_weights
from tests.checkpoints import gguf_models, quantized
from tests.checkpoints.shared import SharedCheckpoints
from tests.parity.changes import CPU
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


def test_what_is_left_out_is_said(checkpoints: SharedCheckpoints, caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoints(partial(quantized.qwen3_reranker, scheme="w8a8"))
    model = load_model(EngineConfig(model=path, dtype="float32"), CPU)
    said = "compressed-tensors, int-quantized; the rounding of activations to int8 is left out"
    assert model.stored_as == said
    assert said in caplog.text
