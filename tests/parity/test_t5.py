"""T5: precisions, ways to run it, and what cannot be told from a checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from maxsimd.bench.datasets import Pair
from maxsimd.engine import Engine, EngineConfig, ModelLoadError
from tests.checkpoints import t5
from tests.checkpoints.shared import SharedCheckpoints
from tests.engines import Engines
from tests.parity import references
from tests.unit.engine.ops.test_kernels import needs_kernels

module_loop = pytest.mark.asyncio(loop_scope="module")


async def _refused(path: str, match: str, **settings: Any) -> None:
    with pytest.raises(ModelLoadError, match=match):
        async with Engine(EngineConfig(model=path, **settings)):
            pass


@pytest.mark.parametrize("build", [t5.sentence_t5, t5.monot5])
async def test_float16_is_refused_with_what_to_use_instead(
    build: Any, checkpoints: SharedCheckpoints
) -> None:
    match = r"leave the range of float16.*use bfloat16 or float32"
    await _refused(checkpoints(build), match, dtype="float16")


@module_loop
@pytest.mark.parametrize("settings", [{"packing": "off"}, {"kernels": "torch"}], ids=str)
async def test_monot5_scores_alike_however_it_is_run(
    settings: dict[str, Any], checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair]
) -> None:
    path = checkpoints(t5.monot5)
    config = EngineConfig(model=path, dtype="float32", **settings)
    engine = await engines(config)
    assert (engine.device_model.prepared.not_packed is None) == ("packing" not in settings)
    ours = await engines.scores(config, pairs[:20])
    texts = [pair.query for pair in pairs[:20]], [pair.document for pair in pairs[:20]]
    np.testing.assert_allclose(ours, references.monot5(path, *texts), atol=1e-4, rtol=0)


@needs_kernels
@module_loop
@pytest.mark.parametrize("build", [t5.monot5, t5.mt5])
async def test_int8_weights_rank_as_float32_does(
    build: Any, checkpoints: SharedCheckpoints, engines: Engines, pairs: list[Pair]
) -> None:
    path = checkpoints(build)
    exact = await engines.scores(EngineConfig(model=path, dtype="float32"), pairs[:100])
    rounded = await engines.scores(
        EngineConfig(model=path, dtype="bfloat16", quantization="int8"), pairs[:100]
    )
    assert spearmanr(exact, rounded).statistic >= 0.98


@module_loop
async def test_a_score_is_a_log_probability_and_its_logit_the_log_odds(
    checkpoints: SharedCheckpoints, engines: Engines
) -> None:
    engine = await engines(EngineConfig(model=checkpoints(t5.monot5), dtype="float32"))
    asked = "a query", ["some document"]
    odds = (await engine.score(*asked, use_activation=False)).scores[0]
    assert (await engine.score(*asked)).scores[0] == pytest.approx(-np.log1p(np.exp(-odds)), abs=1e-6)
    normalised = (await engine.score(*asked, normalize=True)).scores[0]
    assert normalised == pytest.approx(1 / (1 + np.exp(-odds)), abs=1e-6)


@module_loop
async def test_the_encoder_alone_is_a_choice(checkpoints: SharedCheckpoints, engines: Engines) -> None:
    config = EngineConfig(model=checkpoints(t5.monot5), dtype="float32", score_type="bi-encoder")
    engine = await engines(config)
    assert engine.device_model.prepared.not_packed is None
    ours = (await engine.embed(["some text"])).embeddings
    theirs = references.loaded(references.SentenceTransformer, config.model or "").encode(["some text"])
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4)


async def test_wide_mt5_which_answers_in_other_words_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(t5.SIZES, "d_model", 1152)
    await _refused(t5.mt5(tmp_path / "wide"), "answer with other words", dtype="float32")


async def test_a_tokeniser_without_the_words_is_refused(
    checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    path = checkpoints.copy(t5.mt5, tmp_path / "copy")
    tokenizer = path / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8")
    assert '"\u2581yes"' in text
    tokenizer.write_text(text.replace('"\u2581yes"', '"\u2581sim"'), encoding="utf-8")
    await _refused(str(path), "no token .\u2581yes.", dtype="float32")
