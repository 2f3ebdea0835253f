"""GGUF files score as the weights that their blocks stand for do in transformers."""

import itertools
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from maxsimd.bench.datasets import Pair
from maxsimd.engine import EngineConfig, ModelLoadError
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.checkpoint.gguf.container import GgufFile
from maxsimd.engine.checkpoint.gguf.folder import from_gguf
from tests.checkpoints import gguf_models
from tests.checkpoints.gguf_blocks import SUPER, pack, unpack_plainly
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity import references
from tests.parity.selection import with_default

CPU = torch.device("cpu")
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


def _plain(path: str) -> str:
    return str(Path(path).parent / "plain")


def _stated(path: str) -> dict[str, torch.Tensor]:
    """The tensors that transformers is handed."""
    with from_gguf(path) as (_, stored):
        assert stored is not None
        return stored.read()


_KINDS = {
    kind: partial(gguf_models.qwen3, kind=kind)
    for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")
}
# Which answer by their rows for yes and no.
_RERANKERS = {f"tied={tied}": partial(gguf_models.qwen3_reranker, tied=tied) for tied in (True, False)}
_SCORED = _KINDS | _RERANKERS


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("named", with_default(_SCORED, ["Q4_0", "Q6_K", "tied=False"]))
async def test_blocks_score_as_their_dequantised_weights(
    named: str, checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair]
) -> None:
    path = checkpoints(_SCORED[named])
    few = pairs[:12]
    ours = await engines.scores(EngineConfig(model=path, dtype="float32"), few)
    texts = [pair.query for pair in few], [pair.document for pair in few]
    theirs = references.qwen3_reranker(_plain(path), *texts)
    assert theirs.std() > 0.005
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "build",
    with_default(
        [gguf_models.llama, gguf_models.qwen2, gguf_models.gemma], [gguf_models.llama, gguf_models.gemma]
    ),
)
async def test_decoders_score_as_what_they_were_made_from(
    build: Any, checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair]
) -> None:
    path = checkpoints(build)
    settings: dict[str, Any] = {"dtype": "float32"}
    if build is gguf_models.llama:
        settings["score_template"] = "{{ query }} is in {{ document }}?"
    scores = [
        await engines.scores(EngineConfig(model=model, **settings), pairs[:12])
        for model in (path, str(Path(path).parent / "hf"))
    ]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-5)


@pytest.mark.parametrize("kind", SUPER)
def test_blocks_are_read_as_their_definition_says(kind: Kind, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(3, 768)).astype(np.float32)
    packed = pack(values, kind)
    writer = gguf.GGUFWriter(tmp_path / "some.gguf", "qwen3")
    writer.add_tensor("some.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ((name, read),) = GgufFile(tmp_path / "some.gguf").tensors()
    assert (name, read.shape, read.dtype) == ("some.weight", (3, 768), torch.float32)
    np.testing.assert_allclose(read, [unpack_plainly(row, kind) for row in packed], rtol=1e-6)
    assert np.abs(read.numpy() - values).max() < 0.3


@pytest.mark.parametrize("build", [gguf_models.qwen3, gguf_models.llama, gguf_models.qwen2])
def test_tensors_are_those_that_transformers_reads(build: Any, checkpoints: SharedCheckpoints) -> None:
    path = checkpoints(build)
    model = AutoModelForCausalLM.from_pretrained(Path(path).parent / "hf")
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    ours = _stated(path)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].float()), name


@pytest.mark.parametrize("build", [gguf_models.llama, gguf_models.qwen2, gguf_models.gemma])
def test_tensors_are_those_of_the_checkpoint(build: Any, checkpoints: SharedCheckpoints) -> None:
    path = checkpoints(build)
    published = load_file(Path(path).parent / "hf" / "model.safetensors")
    ours = _stated(path)
    assert ours.keys() == published.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, published[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "build",
    [gguf_models.qwen3, gguf_models.qwen3_embedding, gguf_models.bge, gguf_models.bge_reranker],
)
def test_texts_have_the_tokens_of_the_original(
    build: Any, checkpoints: SharedCheckpoints, pairs: list[Pair]
) -> None:
    path = checkpoints(build)
    with from_gguf(path) as (folder, _):
        ours = AutoTokenizer.from_pretrained(folder)
    theirs = AutoTokenizer.from_pretrained(_plain(path))
    texts = [*TEXTS, *(pair.document for pair in pairs[:40])]
    for text in texts:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"], text
        bare = {"add_special_tokens": False}
        assert ours(text, **bare)["input_ids"] == theirs(text, **bare)["input_ids"], text
    for first, second in itertools.pairwise(texts):
        assert dict(ours(first, second)) == dict(theirs(first, second))


def test_without_the_package_the_error_says_what_to_install(
    checkpoints: SharedCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints(gguf_models.qwen3)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelLoadError, match=r"pip install 'maxsimd\[gguf\]'"):
        load_model(EngineConfig(model=path), CPU)
