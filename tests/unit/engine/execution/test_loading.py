"""Loading: what is refused, and with which words."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache

from maxsimd.engine import Engine, EngineConfig, ModelLoadError
from maxsimd.engine.checkpoint import LoadedModel, load_model
from maxsimd.engine.execution import prepare
from maxsimd.engine.execution.attention.interface import NAME, register
from maxsimd.engine.execution.attention.torch_grouped import GroupedBackend
from maxsimd.engine.execution.packed_runner import PackedRunner
from maxsimd.engine.execution.padded_runner import PaddedRunner
from maxsimd.engine.execution.selfcheck.proof import step_of
from maxsimd.engine.execution.selfcheck.sample_layers import sample_layers
from maxsimd.engine.execution.selfcheck.samples import random_sequences
from maxsimd.scheduler import Step
from tests.checkpoints import bi_encoders, cross_encoders, language_models, late_interaction, vision_language
from tests.checkpoints.architectures import Architecture, build

CPU = torch.device("cpu")


@pytest.fixture
def cross_encoder(tmp_path: Path) -> Path:
    return Path(cross_encoders.bert(tmp_path / "model"))


def _change(folder: Path, **settings: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def _pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def test_pickled_weights_are_refused_unless_they_are_allowed(cross_encoder: Path) -> None:
    _pickle(cross_encoder)
    with pytest.raises(ModelLoadError, match="allow_pickle=True"):
        load_model(EngineConfig(model=str(cross_encoder)), CPU)
    loaded = load_model(EngineConfig(model=str(cross_encoder), allow_pickle=True), CPU)
    assert loaded.labels == ("LABEL_0",)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "../model.safetensors", "folder/model.safetensors"])
def test_an_index_that_names_anything_but_safetensors_beside_it_is_refused(
    cross_encoder: Path, file: str
) -> None:
    tensors = load_file(cross_encoder / "model.safetensors")
    torch.save(tensors, cross_encoder / "pytorch_model.bin")
    (cross_encoder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file)}
    (cross_encoder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"index\.json .* names .* no safetensors file beside it"):
        load_model(EngineConfig(model=str(cross_encoder)), CPU)


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": 3}', "{}"])
def test_an_index_without_a_map_of_weights_is_refused(cross_encoder: Path, index: str) -> None:
    (cross_encoder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match="has no map of weights"):
        load_model(EngineConfig(model=str(cross_encoder)), CPU)


def _mapped() -> str:
    return Path("/proc/self/maps").read_text()


def _overwrite(file: Path) -> None:
    file.write_bytes(b"\xff" * (file.stat().st_size // 2))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux shows what is mapped")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_what_becomes_of_the_files_changes_nothing_once_they_are_read(
    cross_encoder: Path, dtype: Literal["float32", "bfloat16"]
) -> None:
    async with Engine(EngineConfig(model=str(cross_encoder), dtype=dtype)) as engine:
        before = await engine.score("a", ["b", "c"])
        assert str(cross_encoder) not in _mapped()
        _overwrite(cross_encoder / "model.safetensors")
        assert (await engine.score("a", ["b", "c"])).scores == before.scores


def test_a_pickled_module_of_a_save_is_refused_too(tmp_path: Path) -> None:
    folder = Path(bi_encoders.embeddinggemma(tmp_path))
    _pickle(folder / "2_Dense")
    with pytest.raises(ModelLoadError, match="2_Dense"):
        load_model(EngineConfig(model=str(folder)), CPU)


def test_an_architecture_that_transformers_lacks_is_refused_with_what_is_supported(
    cross_encoder: Path,
) -> None:
    _change(cross_encoder, model_type="newer", auto_map={"AutoModel": "modeling.NewModel"})
    with pytest.raises(ModelLoadError, match="trust_remote_code=True") as refused:
        load_model(EngineConfig(model=str(cross_encoder)), CPU)
    assert "'newer'" in str(refused.value)
    assert "*ForSequenceClassification" in str(refused.value)


def test_code_of_a_checkpoints_own_is_not_run(tmp_path: Path) -> None:
    """The published layout names code; it is translated, and none of it is even there."""
    folder = late_interaction.jina_colbert_v2(tmp_path)
    assert "auto_map" in json.loads((Path(folder) / "config.json").read_text())
    model = load_model(EngineConfig(model=folder), CPU)
    assert type(model.backbone).__name__ == "JinaEmbeddingsV3Model"


def test_adapters_woven_into_weights_are_refused(tmp_path: Path) -> None:
    folder = late_interaction.jina_colbert_v2(tmp_path)
    _change(Path(folder), lora_adaptations=["retrieval.query"])
    with pytest.raises(ModelLoadError, match="jina-embeddings-v3-hf"):
        load_model(EngineConfig(model=folder), CPU)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score_type": "cross-encoder"}, "no classifier"),
        ({"dimensions": 1000}, "dimensions=1000 is more"),
        ({"doc_token_pooling": 2.0, "score_type": "bi-encoder"}, "late interaction"),
        ({"score_template": "{{ query }} {{ document }}"}, "query and document together"),
        ({"model": "/no/such/folder"}, "no folder"),
    ],
)
def test_settings_that_a_model_cannot_take_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_model(EngineConfig(**settings), CPU)  # type: ignore[arg-type]


def test_a_proof_runs_one_layer_of_each_kind_and_the_last(tmp_path: Path) -> None:
    model = load_model(EngineConfig(model=bi_encoders.embeddinggemma(tmp_path)), CPU)
    layers = list(model.backbone.layers)
    with sample_layers(model.backbone):
        assert list(model.backbone.layers) == layers
    config = EngineConfig(model=cross_encoders.bert(tmp_path / "bert"))
    backbone = load_model(config, CPU).backbone
    whole = list(backbone.encoder.layer)
    with sample_layers(backbone):
        assert list(backbone.encoder.layer) == [whole[0], whole[-1]]
    assert list(backbone.encoder.layer) == whole


def test_a_sampled_tower_hands_on_the_outputs_of_the_layers_that_are_left(tmp_path: Path) -> None:
    model = load_model(EngineConfig(model=vision_language.colqwen3(tmp_path)), CPU)
    assert model.vision is not None
    tower: Any = model.vision.modules[0]
    assert (len(tower.blocks), tower.deepstack_visual_indexes) == (4, [0, 2])
    with sample_layers(tower):
        assert (len(tower.blocks), tower.deepstack_visual_indexes) == (2, [0, 1])
    assert (len(tower.blocks), tower.deepstack_visual_indexes) == (4, [0, 2])


async def test_a_query_prompt_of_ones_own_takes_the_place_of_the_checkpoints(tmp_path: Path) -> None:
    folder = bi_encoders.bge(tmp_path)
    async with Engine(EngineConfig(model=folder, dtype="float32", query_prompt="query: ")) as engine:
        ours = (await engine.embed(["why"], input_type="query")).embeddings
        written = (await engine.embed(["query: why"])).embeddings
    assert ours == pytest.approx(written, abs=1e-6)
    shutil.rmtree(folder)


async def test_an_instruction_fills_the_place_that_a_query_prompt_has_for_it(qwen3_embedding: str) -> None:
    async with Engine(EngineConfig(model=qwen3_embedding, dtype="float32")) as engine:
        told = await engine.score("why", ["because"], instruction="Find reasons")
        plain = await engine.score("why", ["because"])
    prompt = "Instruct: Find reasons\nQuery:"
    async with Engine(EngineConfig(model=qwen3_embedding, dtype="float32", query_prompt=prompt)) as engine:
        written = await engine.score("why", ["because"])
    assert told.scores == pytest.approx(written.scores, abs=1e-6)
    assert told.scores != pytest.approx(plain.scores, abs=1e-4)


def test_weights_that_are_quantised_by_others_are_refused_by_the_methods_name(cross_encoder: Path) -> None:
    _change(cross_encoder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelLoadError, match="quantised by gptq"):
        load_model(EngineConfig(model=str(cross_encoder)), CPU)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "config.json of {model!r} is not JSON: Expecting property name"),
        ("config.json", "[" * 100_000, "config.json of {model!r} is not JSON: maximum recursion depth"),
        ("config.json", "[1]", "config.json of {model!r} is no JSON object"),
        ("config.json", '{"architectures": 5}', "{model!r} is a unknown of type None"),
        (
            "config_sentence_transformers.json",
            '"x"',
            "config_sentence_transformers.json of {model!r} is no JSON",
        ),
        ("modules.json", "[3]", "modules.json of {model!r} is no list of modules"),
        ("modules.json", '{"0": {}}', "modules.json of {model!r} is no list of modules"),
    ],
)
def test_settings_that_are_not_what_they_should_be_are_refused_by_the_files_name(
    cross_encoder: Path, name: str, content: str, message: str
) -> None:
    (cross_encoder / name).write_text(content)
    with pytest.raises(ModelLoadError) as refused:
        load_model(EngineConfig(model=str(cross_encoder)), CPU)
    assert str(refused.value).startswith(message.format(model=str(cross_encoder)))


def test_a_tokeniser_without_words_is_refused(cross_encoder: Path) -> None:
    tokenizer = json.loads((cross_encoder / "tokenizer.json").read_text())
    specials = {token["content"]: i for i, token in enumerate(tokenizer["added_tokens"])}
    tokenizer["model"]["vocab"] = specials
    for i, token in enumerate(tokenizer["added_tokens"]):
        token["id"] = i
    (cross_encoder / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = load_model(EngineConfig(model=str(cross_encoder)), CPU)
    with pytest.raises(ModelLoadError, match="knows no words"):
        prepare(model, EngineConfig(dtype="float32"), CPU)


def test_a_bigbird_reads_no_further_than_where_its_attention_would_change(tmp_path: Path) -> None:
    """Beyond, what it makes of a text depends on the texts before it."""
    folder = build(Architecture("bi-encoder", "big_bird"), tmp_path)
    _change(Path(folder), block_size=4, num_random_blocks=1, attention_type="block_sparse")
    assert load_model(EngineConfig(model=folder), CPU).max_tokens == 7 * 4


def test_a_reformer_whose_first_text_would_decide_for_all_is_refused(tmp_path: Path) -> None:
    folder = build(Architecture("bi-encoder", "reformer"), tmp_path)
    _change(Path(folder), num_buckets=None)
    with pytest.raises(ModelLoadError, match="num_buckets"):
        load_model(EngineConfig(model=folder), CPU)


def test_no_second_cache_of_keys_and_values_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for packed steps nor for padded ones."""
    model = load_model(EngineConfig(model=language_models.qwen3_reranker(tmp_path)), CPU)

    def forbidden(*arguments: object, **options: object) -> None:
        raise AssertionError("a cache was built")

    monkeypatch.setattr(DynamicCache, "update", forbidden)
    step = step_of(random_sequences(model, "classify"))
    for runner in (PackedRunner, PaddedRunner):
        assert len(_states(runner, model, step)) >= step.num_tokens


def _states(runner: type[PackedRunner] | type[PaddedRunner], model: LoadedModel, step: Step) -> torch.Tensor:
    if runner is PaddedRunner:
        model.backbone.set_attn_implementation("sdpa")
        return PaddedRunner(model, CPU).forward(step)[0]
    register()
    model.backbone.set_attn_implementation(NAME)
    return PackedRunner(model, CPU, GroupedBackend()).forward(step)[0]
