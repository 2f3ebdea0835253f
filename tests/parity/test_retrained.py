"""Language models that were made into encoders and rerankers: options, what their files may say, and what
is refused."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig, ModelLoadError
from maxsimd.engine.checkpoint import load_model
from maxsimd.engine.execution.selfcheck.rules import why_not_packed
from tests.checkpoints import bi_encoders, cross_encoders, language_models, retrained
from tests.checkpoints.shared import SharedCheckpoints
from tests.parity import retrained_references as references
from tests.parity.selection import with_default

CPU = torch.device("cpu")
Build = Callable[[Path], str]


@pytest.fixture
def changed(checkpoints: SharedCheckpoints, tmp_path: Path) -> Callable[..., str]:
    """A copy of a checkpoint with settings of its config.json changed."""

    def change(build: Build, **settings: Any) -> str:
        folder = checkpoints.copy(build, tmp_path / "copy" / "checkpoint")
        path = next(iter([*folder.glob("config.json"), *folder.glob("0_*/config.json")]))
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        return str(folder)

    return change


async def _scores(path: str, pairs: list[Pair], **settings: Any) -> np.ndarray:
    queries, documents = [pair.query for pair in pairs], [pair.document for pair in pairs]
    async with Engine(EngineConfig(model=path, dtype="float32", **settings)) as engine:
        return np.array((await engine.score(queries, documents, truncation=CUT_LONG)).scores)


def _texts(pairs: list[Pair]) -> tuple[list[str], list[str]]:
    return [pair.query for pair in pairs], [pair.document for pair in pairs]


_CUT_OFF = [
    (build, reference, layer)
    for build, reference in (
        (retrained.bge_minicpm, references.bge_minicpm),
        (retrained.bge_gemma2, references.bge_gemma2),
    )
    for layer in (2, 3, 4)
]


@pytest.mark.parametrize(
    ("build", "reference", "layer"), with_default(_CUT_OFF, [_CUT_OFF[0], _CUT_OFF[1], _CUT_OFF[4]])
)
async def test_a_reranker_may_be_cut_off_behind_a_layer(
    build: Build, reference: Any, layer: int, checkpoints: SharedCheckpoints, pairs: list[Pair]
) -> None:
    path = checkpoints(build)
    ours = await _scores(path, pairs[:6], cutoff_layer=layer)
    np.testing.assert_allclose(ours, reference(path, *_texts(pairs[:6]), layer=layer), atol=1e-4)


@pytest.mark.parametrize("layer", [1, 5])
def test_a_layer_without_a_score_is_refused(layer: int, checkpoints: SharedCheckpoints) -> None:
    path = checkpoints(retrained.bge_minicpm)
    with pytest.raises(ModelLoadError, match="scores behind the layers 2 to 4"):
        load_model(EngineConfig(model=path, cutoff_layer=layer), CPU)


def test_cutoff_layer_is_for_models_with_such_scores(checkpoints: SharedCheckpoints) -> None:
    with pytest.raises(ModelLoadError, match="cutoff_layer is for"):
        load_model(EngineConfig(model=checkpoints(cross_encoders.bert), cutoff_layer=2), CPU)


@pytest.mark.parametrize("score_type", ["bi-encoder", "late-interaction"])
def test_rerankers_with_scores_of_their_own_are_nothing_else(
    score_type: Any, checkpoints: SharedCheckpoints
) -> None:
    for build in (retrained.bge_minicpm, retrained.nemotron_rerank):
        config = EngineConfig(model=checkpoints(build), score_type=score_type)
        with pytest.raises(ModelLoadError, match="can be a cross-encoder alone"):
            load_model(config, CPU)


def test_a_projection_that_nothing_reads_is_refused(checkpoints: SharedCheckpoints, tmp_path: Path) -> None:
    """With the transformer's files in a folder of their own nothing takes it from there."""
    folder = checkpoints.copy(retrained.voyage_4_nano, tmp_path / "model")
    inside = folder / "0_Transformer"
    inside.mkdir()
    apart = {"modules.json", "config_sentence_transformers.json"}
    for file in [each for each in folder.iterdir() if each.is_file() and each.name not in apart]:
        file.rename(inside / file.name)
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    modules[0]["path"] = inside.name
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"linear\.weight"):
        load_model(EngineConfig(model=str(folder)), CPU)


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (retrained.bge_minicpm, {"head_type": "complex"}, "a simple head"),
        (retrained.bge_minicpm, {"head_multi": False}, "a simple head"),
        (retrained.bge_minicpm, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary"),
        (retrained.bge_minicpm, {"start_layer": 1}, r"other scores.*lm_head\.3"),
        (retrained.bge_gemma2, {"layer_wise": False}, "a head for each layer"),
        (retrained.bge_gemma2, {"layer_sep": 2}, r"other scores.*lm_head\.2"),
        (retrained.nemotron_rerank, {"pooling": "weighted_avg"}, "pools by weighted_avg"),
        (retrained.nemotron_rerank, {"sbert_ce_default_activation_function": "torch.nn.Tanh"}, "Tanh"),
        (retrained.voyage_4_nano, {"num_labels": 64}, r"linear\.weight is \[192, 128\]"),
        (retrained.gte_qwen2, {"is_causal": True}, None),
        (bi_encoders.sgpt, {"is_causal": False}, "both directions"),
        (bi_encoders.mpnet, {"is_causal": True}, "says that it is causal"),
        (language_models.qwen3_reranker, {"is_causal": False}, "no next word"),
    ],
)
def test_what_is_not_read_so_is_refused(
    build: Build, settings: dict[str, Any], message: str | None, changed: Callable[..., str]
) -> None:
    config = EngineConfig(model=changed(build, **settings))
    if message is None:
        assert load_model(config, CPU).causal
        return
    with pytest.raises(ModelLoadError, match=message):
        load_model(config, CPU)


@pytest.mark.parametrize("damage", ["missing", "NaN"])
@pytest.mark.parametrize(
    ("build", "name"),
    [
        (retrained.voyage_4_nano, "linear.weight"),
        (retrained.bge_minicpm, "lm_head.1.linear_head.weight"),
        (retrained.nemotron_rerank, "score.weight"),
    ],
)
def test_a_head_that_is_damaged_is_named(
    build: Build, name: str, damage: str, changed: Callable[..., str]
) -> None:
    path = changed(build)
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    if damage == "missing":
        del tensors[name]
    else:
        tensors[name][0, 0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
        load_model(EngineConfig(model=path), CPU)


@pytest.mark.parametrize("pooling", ["cls", "last"])
async def test_a_llama_reranker_pools_as_its_config_says(
    pooling: str, changed: Callable[..., str], pairs: list[Pair]
) -> None:
    path = changed(retrained.nemotron_rerank, pooling=pooling)
    reference = references.nemotron_rerank(path, *_texts(pairs[:6]))
    np.testing.assert_allclose(await _scores(path, pairs[:6]), reference, atol=1e-4)


async def test_a_llama_reranker_activates_as_its_config_says(
    changed: Callable[..., str], pairs: list[Pair]
) -> None:
    path = changed(retrained.nemotron_rerank, sentence_transformers={"activation_fn": "torch.nn.Sigmoid"})
    reference = references.nemotron_rerank(path, *_texts(pairs[:6]))
    np.testing.assert_allclose(await _scores(path, pairs[:6]), 1 / (1 + np.exp(-reference)), atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "said"),
    with_default(
        [
            *((kind, "is_causal") for kind in ("llama", "mistral", "ministral3", "qwen2", "qwen3", "gemma")),
            *(("qwen3", said) for said in ("field", "class", "code")),
        ],
        [("llama", "is_causal"), ("gemma", "is_causal"), *(("qwen3", x) for x in ("field", "class", "code"))],
    ),
)
async def test_a_model_that_says_it_is_not_causal_reads_both_ways(
    kind: str, said: str, checkpoints: SharedCheckpoints, pairs: list[Pair]
) -> None:
    path = checkpoints(partial(retrained.both_ways, kind=kind, said=said))
    reference = references.cosines(path, *_texts(pairs[:6]), references.mean_of_both_ways)
    async with Engine(EngineConfig(model=path, dtype="float32")) as engine:
        assert engine.device_model.prepared.not_packed is None
        queries, documents = _texts(pairs[:6])
        ours = (await engine.score(queries, documents, truncation=CUT_LONG)).scores
    np.testing.assert_allclose(ours, reference, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "execution", "reference"),
    [
        (retrained.nemotron_rerank, "padded", references.nemotron_rerank),
        (
            retrained.lfm2_5_embedding,
            "padded",
            partial(references.cosines, model=references.lfm2_5_embedding),
        ),
        (retrained.lfm2_5_colbert, "one by one", references.maxsims),
    ],
)
async def test_they_run_without_packing_too(
    build: Build, execution: str, reference: Any, checkpoints: SharedCheckpoints, pairs: list[Pair]
) -> None:
    path = checkpoints(build)
    async with Engine(EngineConfig(model=path, dtype="float32", packing="off")) as engine:
        assert engine.device_model.prepared.execution == execution
        queries, documents = _texts(pairs[:6])
        ours = (await engine.score(queries, documents, truncation=CUT_LONG)).scores
    np.testing.assert_allclose(ours, reference(path, *_texts(pairs[:6])), atol=1e-4)


async def test_a_classifier_reading_both_ways_takes_the_last_token(
    changed: Callable[..., str], pairs: list[Pair]
) -> None:
    path = changed(cross_encoders.qwen2, is_causal=False)
    async with Engine(EngineConfig(model=path, dtype="float32")) as engine:
        assert not engine.model.causal
        assert engine.device_model.prepared.not_packed is None
        assert engine.model.tasks["classify"].pooling == "last"


def test_code_that_might_read_otherwise_is_mentioned(
    changed: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    path = changed(bi_encoders.qwen3, auto_map={"AutoModel": "modeling_qwen.Qwen3Model"})
    assert load_model(EngineConfig(model=path), CPU).causal
    assert "code of its own, which is not run" in caplog.text


@pytest.mark.parametrize("build", [retrained.gte_qwen2, retrained.voyage_4_nano, retrained.lfm2_5_colbert])
def test_nothing_is_mentioned_where_it_is_read_as_its_code_does(
    build: Build, checkpoints: SharedCheckpoints, caplog: pytest.LogCaptureFixture
) -> None:
    assert not load_model(EngineConfig(model=checkpoints(build)), CPU).causal
    assert not caplog.records


def test_texts_of_gte_qwen2_end_with_the_end_of_text_token(checkpoints: SharedCheckpoints) -> None:
    model = load_model(EngineConfig(model=checkpoints(retrained.gte_qwen2)), CPU)
    assert model.tokenizer("a b")["input_ids"][-1] == model.tokenizer.eos_token_id
    assert model.tokenizer.backend_tokenizer.encode("a b").ids[-1] == model.tokenizer.eos_token_id


async def test_another_adapter_of_jina_v5_is_named_by_its_folder(
    checkpoints: SharedCheckpoints, pairs: list[Pair]
) -> None:
    path = checkpoints(retrained.jina_v5_small)
    adapter = str(Path(path) / "adapters" / "text-matching")
    texts = [pair.document for pair in pairs[:5]]
    async with Engine(EngineConfig(model=adapter, dtype="float32")) as engine:
        ours = (await engine.embed(texts)).embeddings
    expected = references.jina_v5(path, "text-matching").encode_document(texts)
    np.testing.assert_allclose(ours, np.stack(expected), atol=1e-5)
    other = references.jina_v5(path, "retrieval").encode_document(texts)
    assert np.abs(np.stack(other) - np.stack(expected)).max() > 0.01


def test_jina_v5_without_its_adapter_is_refused(checkpoints: SharedCheckpoints, tmp_path: Path) -> None:
    folder = checkpoints.copy(retrained.jina_v5_small, tmp_path / "copy" / "checkpoint")
    shutil.rmtree(folder / "adapters" / "retrieval")
    with pytest.raises(ModelLoadError, match="without adapters/retrieval/"):
        load_model(EngineConfig(model=str(folder)), CPU)


async def test_convolutions_are_alike_packed_and_padded(
    changed: Callable[..., str], pairs: list[Pair]
) -> None:
    """Configs for later versions of transformers say which."""
    path = changed(retrained.lfm2_5_colbert, conv_zero_padding=True, model_type="lfm2_bidirectional")
    scores = {}
    for packing, execution in (("auto", "packed"), ("off", "padded")):
        async with Engine(EngineConfig(model=path, dtype="float32", packing=packing)) as engine:
            assert engine.device_model.prepared.execution == execution
            scores[execution] = (await engine.score(*_texts(pairs[:6]), truncation=CUT_LONG)).scores
    np.testing.assert_allclose(scores["packed"], scores["padded"], atol=1e-4)


def test_a_causal_lfm2_is_packed_if_attention_leaves_ends_out(
    checkpoints: SharedCheckpoints,
) -> None:
    model = load_model(EngineConfig(model=checkpoints(retrained.lfm2_colbert)), CPU)
    assert "cannot leave out" in (why_not_packed(model, {None}, causal_ends=False) or "")
    assert why_not_packed(model, {None}, causal_ends=True) is None


async def test_a_causal_lfm2_that_attends_to_all_tokens_is_packed(
    checkpoints: SharedCheckpoints, tmp_path: Path, pairs: list[Pair]
) -> None:
    folder = checkpoints.copy(retrained.lfm2_colbert, tmp_path / "copy" / "checkpoint")
    path = folder / "config_sentence_transformers.json"
    settings = json.loads(path.read_text()) | {"attend_to_expansion_tokens": True}
    path.write_text(json.dumps(settings))
    async with Engine(EngineConfig(model=str(folder), dtype="float32")) as engine:
        assert engine.device_model.prepared.not_packed is None
        assert not engine.device_model.prepared.runner.chunked
        ours = (await engine.score(*_texts(pairs[:6]), truncation=CUT_LONG)).scores
    reference = references.plain_maxsims(str(folder), *_texts(pairs[:6]))
    np.testing.assert_allclose(ours, reference, atol=1e-4)
