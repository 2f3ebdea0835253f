"""Tokenizers with more tokens than the model has embeddings: a text with such a token is refused before it
reaches the device, where a GPU would end the process, and other requests go on."""

import asyncio
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from maxsimd.engine import CUT_LONG, Engine, EngineConfig, InvalidRequestError, ModelLoadError
from maxsimd.engine.checkpoint.backbone import token_rows
from tests.checkpoints import bi_encoders, cross_encoders, language_models, late_interaction
from tests.checkpoints.shared import Build, SharedCheckpoints
from tests.unit.calling_handlers import Caller, RecordingEngine

EXTRA = "<extra>"
BUILDS = [
    bi_encoders.bge,
    cross_encoders.bert,
    cross_encoders.qwen3,
    pytest.param(late_interaction.stanford, marks=pytest.mark.exhaustive),
]


@pytest.fixture(scope="module")
def with_extra_token(
    checkpoints: SharedCheckpoints, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Build], str]:
    """Checkpoints with one token too many in their tokenizers, which no test may change."""
    folder = tmp_path_factory.mktemp("extra")
    return functools.cache(lambda build: _with_extra_token(checkpoints, build, folder))


def _with_extra_token(checkpoints: SharedCheckpoints, build: Build, folder: Path) -> str:
    copy = checkpoints.copy(build, folder / build.__module__ / build.__name__)
    for path in copy.rglob("tokenizer.json"):
        rows = json.loads((path.parent / "config.json").read_text())["vocab_size"]
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.add_tokens([f"<filler {number}>" for number in range(rows - tokenizer.get_vocab_size())])
        tokenizer.add_tokens([EXTRA])
        assert tokenizer.token_to_id(EXTRA) == rows
        tokenizer.save(str(path))
    return str(copy)


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
async def test_a_text_with_such_a_token_is_refused(
    with_extra_token: Callable[[Build], str], build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(EngineConfig(model=with_extra_token(build), dtype="float32"))
    async with engine:
        assert engine.model.token_rows is not None
        assert "has no embedding for 1 of the tokens that its tokenizer adds" in caplog.text
        good = await engine.score("a query", ["a document", "another"])
        refused = [
            engine.score(f"a {EXTRA} query", ["a document"]),
            engine.score("a query", ["fine", f"a document {EXTRA}"]),
            engine.score("a query", ["fine", "long " * 20_000 + EXTRA], truncation="window"),
        ]
        if engine.model.encodes_apart:
            refused.append(engine.embed_tokens(["fine", EXTRA]))
            refused.append(engine.embed_tokens([[engine.model.token_rows]]))
        beside, *errors = await asyncio.gather(
            engine.score("a query", ["a document", "another"], cache="bypass"),
            *refused,
            return_exceptions=True,
        )
        assert all(isinstance(error, InvalidRequestError) for error in errors), errors
        assert "documents[1] holds the token '<extra>', for which" in str(errors[1])
        assert all("holds the token '<extra>'" in str(error) for error in errors)
        assert {error.param for error in errors[:3]} == {"queries", "documents"}
        assert beside.scores == pytest.approx(good.scores, abs=1e-4)
        cut_off = await engine.score("a query", ["word " * 9000 + EXTRA], truncation=CUT_LONG)
        assert np.isfinite(cut_off.scores).all(), "it is cut off before that token"
        some = await engine.score("a query", [EXTRA, "a document", "another"], on_error="report")
        assert some.scores[1:] == pytest.approx(good.scores, abs=1e-4)
        assert "documents[0] holds the token '<extra>'" in some.errors[0]
        assert EXTRA in engine.tokenizer.decode([engine.model.token_rows]), "it is still a token"


async def test_over_http_the_answer_says_which_text(with_extra_token: Callable[[Build], str]) -> None:
    config = EngineConfig(model=with_extra_token(cross_encoders.bert), dtype="float32")
    async with RecordingEngine(config) as engine:
        caller = Caller(engine)
        status, error = await caller.error("/rerank", {"query": "q", "documents": ["fine", f"not {EXTRA}"]})
        assert status == 400
        assert "documents[1] holds the token '<extra>'" in error["message"]
        assert len((await caller.json("/rerank", {"query": "q", "documents": ["fine"]}))["results"]) == 1
        assert "tokens" in await caller.json("/tokenize", {"text": EXTRA})


async def test_a_tokenizer_that_puts_such_a_token_into_all_texts_is_refused(
    with_extra_token: Callable[[Build], str], tmp_path: Path
) -> None:
    folder = shutil.copytree(with_extra_token(bi_encoders.qwen3), tmp_path / "copy")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EXTRA}", special_tokens=[(EXTRA, tokenizer.token_to_id(EXTRA))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelLoadError, match="puts '<extra>' into every text, but the model has only"):
        await Engine(EngineConfig(model=str(folder))).start()


async def test_padding_without_an_embedding_is_no_reason(
    with_extra_token: Callable[[Build], str], tmp_path: Path
) -> None:
    folder = shutil.copytree(with_extra_token(bi_encoders.bge), tmp_path / "copy")
    path = str(Path(folder, "tokenizer.json"))
    tokenizer = Tokenizer.from_file(path)
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id(EXTRA), pad_token=EXTRA, length=16)
    tokenizer.save(path)
    async with Engine(EngineConfig(model=str(folder), dtype="float32")) as engine:
        assert len((await engine.score("a query", ["a document"])).scores) == 1


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (cross_encoders.qwen3, {"score_template": "{{ query }} " + EXTRA + " {{ document }}"}),
        (cross_encoders.bert, {"query_prompt": EXTRA}),
        (late_interaction.stanford, {"document_prompt": EXTRA}),
    ],
    ids=("template", "prompt of pairs", "marker"),
)
async def test_what_stands_around_texts_is_refused_at_load(
    with_extra_token: Callable[[Build], str], build: Build, options: dict[str, Any]
) -> None:
    folder = with_extra_token(build)
    with pytest.raises(ModelLoadError, match=f"puts around texts cannot be run: .*'{EXTRA}'"):
        await Engine(EngineConfig(model=folder, **options)).start()


async def test_an_instruction_with_such_a_token_is_refused(
    with_extra_token: Callable[[Build], str],
) -> None:
    folder = with_extra_token(language_models.qwen3_reranker)
    async with Engine(EngineConfig(model=folder, dtype="float32")) as engine:
        with pytest.raises(InvalidRequestError, match="instruction holds the token '<extra>'") as error:
            await engine.score("a query", ["a document"], instruction=f"find {EXTRA}")
    assert error.value.param == "instruction"


def test_a_backbone_that_does_not_say_has_no_known_number_of_rows() -> None:
    assert token_rows(object()) is None
