"""Loading: what is refused, and with which words; tokens that the model has no embedding for."""

import asyncio
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, processors

from maxsimd.engine import CUT_LONG, Engine, EngineConfig, InvalidRequestError, ModelLoadError
from maxsimd.engine.checkpoint import LoadedModel, load_model
from maxsimd.engine.checkpoint.model import token_rows
from maxsimd.engine.device.load import prepare
from tests.checkpoints import bi_encoders, cross_encoders, language_models, late_interaction
from tests.checkpoints.architectures import Architecture, build
from tests.checkpoints.shared import Build, SharedCheckpoints
from tests.checkpoints.weights import change_config
from tests.exhaustive import exhaustive
from tests.unit.calling_handlers import Caller, RecordingEngine

CPU = torch.device("cpu")


@pytest.fixture
def cross_encoder(tmp_path: Path, checkpoints: SharedCheckpoints) -> Path:
    return checkpoints.copy(cross_encoders.bert, tmp_path / "model")


def _load(folder: Path | str, **options: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), **options), CPU)


def _pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def test_pickles_need_permission(cross_encoder: Path, tmp_path: Path, checkpoints: SharedCheckpoints) -> None:
    _pickle(cross_encoder)
    with pytest.raises(ModelLoadError, match="allow_pickle=True"):
        _load(cross_encoder)
    assert _load(cross_encoder, allow_pickle=True).labels == ("LABEL_0",)
    folder = checkpoints.copy(bi_encoders.embeddinggemma, tmp_path / "gemma")
    _pickle(folder / "2_Dense")
    with pytest.raises(ModelLoadError, match="2_Dense"):
        _load(folder)


def _mapped() -> str:
    return Path("/proc/self/maps").read_text()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux shows what is mapped")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_files_that_change_after_they_are_read_change_nothing(cross_encoder: Path, dtype: Any) -> None:
    weights = cross_encoder / "model.safetensors"
    async with Engine(EngineConfig(model=str(cross_encoder), dtype=dtype)) as engine:
        before = await engine.score("a", ["b", "c"])
        assert str(cross_encoder) not in _mapped()
        weights.write_bytes(b"\xff" * (weights.stat().st_size // 2))
        assert (await engine.score("a", ["b", "c"])).scores == before.scores


async def test_the_query_prompt_replaces_the_checkpoints(bge: str) -> None:
    async with Engine(EngineConfig(model=bge, dtype="float32", query_prompt="query: ")) as engine:
        ours = (await engine.embed(["why"], input_type="query")).embeddings
        written = (await engine.embed(["query: why"])).embeddings
    assert ours == pytest.approx(written, abs=1e-6)


def test_a_tokenizer_without_words_is_refused(cross_encoder: Path) -> None:
    tokenizer = json.loads((cross_encoder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {token["content"]: i for i, token in enumerate(tokenizer["added_tokens"])}
    for i, token in enumerate(tokenizer["added_tokens"]):
        token["id"] = i
    (cross_encoder / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = _load(cross_encoder)
    with pytest.raises(ModelLoadError, match="knows no words"):
        prepare(model, EngineConfig(dtype="float32"), CPU)


def test_a_bigbird_reads_to_where_its_attention_would_change(tmp_path: Path) -> None:
    folder = build(Architecture("bi-encoder", "big_bird"), tmp_path)
    change_config(Path(folder), block_size=4, num_random_blocks=1, attention_type="block_sparse")
    assert _load(folder).max_tokens == 7 * 4


def test_a_reformer_that_its_first_text_would_set_is_refused(tmp_path: Path) -> None:
    folder = Path(build(Architecture("bi-encoder", "reformer"), tmp_path))
    change_config(folder, num_buckets=None)
    with pytest.raises(ModelLoadError, match="num_buckets"):
        _load(folder)


EXTRA = "<extra>"
BUILDS = [bi_encoders.bge, cross_encoders.bert, language_models.qwen3_reranker]
BUILDS += exhaustive(cross_encoders.qwen3, late_interaction.stanford)


@pytest.fixture(scope="module")
def with_extra_token(checkpoints: SharedCheckpoints, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints with one token too many in their tokenizers, which no test may change."""
    folder = tmp_path_factory.mktemp("extra")

    @functools.cache
    def made(build: Build) -> str:
        copy = checkpoints.copy(build, folder / build.__module__ / build.__name__)
        for path in copy.rglob("tokenizer.json"):
            rows = json.loads((path.parent / "config.json").read_text())["vocab_size"]
            tokenizer = Tokenizer.from_file(str(path))
            tokenizer.add_tokens([f"<filler {i}>" for i in range(rows - tokenizer.get_vocab_size())])
            tokenizer.add_tokens([EXTRA])
            assert tokenizer.token_to_id(EXTRA) == rows
            tokenizer.save(str(path))
        return str(copy)

    return made


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
async def test_a_text_with_such_a_token_is_refused(with_extra_token: Any, build: Build, caplog: Any) -> None:
    async with RecordingEngine(EngineConfig(model=with_extra_token(build), dtype="float32")) as engine:
        assert engine.model.token_rows is not None
        assert "has no embedding for 1 of the tokens that its tokenizer adds" in caplog.text
        good = await engine.score("a query", ["a document", "another"])
        refused = [
            engine.score(f"a {EXTRA} query", ["a document"]),
            engine.score("a query", ["fine", f"a document {EXTRA}"]),
            engine.score("a query", ["fine", "long " * 2000 + EXTRA], truncation="window"),
        ]
        if engine.model.encodes_apart:
            refused += [engine.embed_tokens(each) for each in (["fine", EXTRA], [[engine.model.token_rows]])]
        asked = engine.score("a query", ["a document", "another"], cache="bypass"), *refused
        beside, *errors = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(error, InvalidRequestError) for error in errors), errors
        assert "documents[1] holds the token '<extra>', for which" in str(errors[1])
        assert all("holds the token '<extra>'" in str(error) for error in errors)
        assert {error.param for error in errors[:3]} == {"queries", "documents"}
        assert beside.scores == pytest.approx(good.scores, abs=1e-4)
        cut_off = await engine.score("a query", ["word " * 3000 + EXTRA], truncation=CUT_LONG)
        assert np.isfinite(cut_off.scores).all(), "it is cut off before that token"
        some = await engine.score("a query", [EXTRA, "a document", "another"], on_error="report")
        assert some.scores[1:] == pytest.approx(good.scores, abs=1e-4)
        assert "documents[0] holds the token '<extra>'" in some.errors[0]
        assert EXTRA in engine.tokenizer.decode([engine.model.token_rows]), "it is still a token"
        if engine.model.takes_instruction:
            with pytest.raises(InvalidRequestError, match="instruction holds the token '<extra>'") as error:
                await engine.score("a query", ["a document"], instruction=f"find {EXTRA}")
            assert error.value.param == "instruction"
        caller = Caller(engine)
        status, told = await caller.error("/rerank", {"query": "q", "documents": ["fine", f"not {EXTRA}"]})
        assert (status, "documents[1] holds the token '<extra>'" in told["message"]) == (400, True), told
        assert "tokens" in await caller.json("/tokenize", {"text": EXTRA})


async def test_extra_tokens_are_refused(with_extra_token: Callable[[Build], str], tmp_path: Path) -> None:
    folder = shutil.copytree(with_extra_token(bi_encoders.qwen3), tmp_path / "copy")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [(EXTRA, tokenizer.token_to_id(EXTRA))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {EXTRA}", special_tokens=ids)
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelLoadError, match="puts '<extra>' into every text, but the model has only"):
        await Engine(EngineConfig(model=str(folder))).start()


async def test_unembedded_padding_is_fine(with_extra_token: Callable[[Build], str], tmp_path: Path) -> None:
    folder = shutil.copytree(with_extra_token(bi_encoders.bge), tmp_path / "copy")
    path = str(Path(folder, "tokenizer.json"))
    tokenizer = Tokenizer.from_file(path)
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id(EXTRA), pad_token=EXTRA, length=16)
    tokenizer.save(path)
    async with Engine(EngineConfig(model=str(folder), dtype="float32")) as engine:
        assert len((await engine.score("a query", ["a document"])).scores) == 1
    assert token_rows(object()) is None, "a backbone that does not say has no known number of them"


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (cross_encoders.qwen3, {"score_template": "{{ query }} " + EXTRA + " {{ document }}"}),
        (cross_encoders.bert, {"query_prompt": EXTRA}),
        (late_interaction.stanford, {"document_prompt": EXTRA}),
    ],
    ids=("template", "prompt of pairs", "marker"),
)
async def test_what_stands_around_texts_is_refused(with_extra_token: Any, build: Build, options: Any) -> None:
    folder = with_extra_token(build)
    with pytest.raises(ModelLoadError, match=f"puts around texts cannot be run: .*'{EXTRA}'"):
        await Engine(EngineConfig(model=folder, **options)).start()
