"""Loading: what is refused, and with which words."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from maxsimd.engine import Engine, EngineConfig, ModelLoadError
from maxsimd.engine.checkpoint import LoadedModel, load_model
from maxsimd.engine.execution import prepare
from tests.checkpoints import bi_encoders, cross_encoders, late_interaction
from tests.checkpoints.architectures import Architecture, build
from tests.checkpoints.shared import SharedCheckpoints

CPU = torch.device("cpu")


@pytest.fixture
def cross_encoder(tmp_path: Path, checkpoints: SharedCheckpoints) -> Path:
    return checkpoints.copy(cross_encoders.bert, tmp_path / "model")


def _change(folder: Path, **settings: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def _load(folder: Path | str, **options: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), **options), CPU)


def _pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def test_pickled_weights_are_refused_unless_they_are_allowed(
    cross_encoder: Path, tmp_path: Path, checkpoints: SharedCheckpoints
) -> None:
    _pickle(cross_encoder)
    with pytest.raises(ModelLoadError, match="allow_pickle=True"):
        _load(cross_encoder)
    assert _load(cross_encoder, allow_pickle=True).labels == ("LABEL_0",)
    folder = checkpoints.copy(bi_encoders.embeddinggemma, tmp_path / "gemma")
    _pickle(folder / "2_Dense")
    with pytest.raises(ModelLoadError, match="2_Dense"):
        _load(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        *((index, "has no map of weights") for index in ("[]", "{", '{"weight_map": 3}', "{}")),
        *(
            (f'{{"weight_map": {{"a": "{file}"}}}}', r"index\.json .* names .* no safetensors file beside it")
            for file in ("pytorch_model.bin", "../model.safetensors", "folder/model.safetensors")
        ),
    ],
)
def test_an_index_of_anything_but_safetensors_is_refused(
    cross_encoder: Path, index: str, message: str
) -> None:
    (cross_encoder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match=message):
        _load(cross_encoder)


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model_type": "newer", "auto_map": {"AutoModel": "modeling.NewModel"}},
            r"(?s)(?=.*trust_remote_code=True)(?=.*'newer')(?=.*\*ForSequenceClassification)",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised by gptq"),
    ],
)
def test_an_unknown_architecture_or_quantization_is_refused(
    cross_encoder: Path, settings: dict[str, Any], message: str
) -> None:
    _change(cross_encoder, **settings)
    with pytest.raises(ModelLoadError, match=message):
        _load(cross_encoder)


def test_code_of_a_checkpoints_own_is_not_run(tmp_path: Path, checkpoints: SharedCheckpoints) -> None:
    """The published layout names code; it is translated, and none of it is even there."""
    folder = checkpoints.copy(late_interaction.jina_colbert_v2, tmp_path / "model")
    assert "auto_map" in json.loads((folder / "config.json").read_text())
    assert type(_load(folder).backbone).__name__ == "JinaEmbeddingsV3Model"
    _change(folder, lora_adaptations=["retrieval.query"])
    with pytest.raises(ModelLoadError, match="jina-embeddings-v3-hf"):  # adapters are woven into its weights
        _load(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"score_type": "cross-encoder"}, "no classifier"),
        ({"dimensions": 1000}, "dimensions=1000 is more"),
        ({"doc_token_pooling": 2.0, "score_type": "bi-encoder"}, "late interaction"),
        ({"score_template": "{{ query }} {{ document }}"}, "query and document together"),
        ({"folder": "/no/such/folder"}, "no folder"),
    ],
)
def test_settings_that_a_model_cannot_take_are_refused(
    settings: dict[str, Any], message: str, checkpoints: SharedCheckpoints
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        _load(**{"folder": checkpoints(bi_encoders.gte)} | settings)


async def test_the_query_prompt_replaces_the_checkpoints(checkpoints: SharedCheckpoints) -> None:
    model = checkpoints(bi_encoders.bge)
    async with Engine(EngineConfig(model=model, dtype="float32", query_prompt="query: ")) as engine:
        ours = (await engine.embed(["why"], input_type="query")).embeddings
        written = (await engine.embed(["query: why"])).embeddings
    assert ours == pytest.approx(written, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "config.json of {model!r} is not JSON: Expecting property name"),
        ("config.json", "[" * 100_000, "config.json of {model!r} is not JSON: maximum recursion depth"),
        ("config.json", "[1]", "config.json of {model!r} is no JSON object"),
        ("config.json", '{"architectures": 5}', "config.json of {model!r} has no model_type"),
        ("config_sentence_transformers.json", '"x"', "config_sentence_transformers.json of {model!r} is no"),
        ("modules.json", "[3]", "modules.json of {model!r} is no list of modules"),
        ("modules.json", '{"0": {}}', "modules.json of {model!r} is no list of modules"),
    ],
)
def test_damaged_settings_are_refused_by_the_files_name(
    cross_encoder: Path, name: str, content: str, message: str
) -> None:
    (cross_encoder / name).write_text(content)
    with pytest.raises(ModelLoadError) as refused:
        _load(cross_encoder)
    assert str(refused.value).startswith(message.format(model=str(cross_encoder)))


def test_a_tokeniser_without_words_is_refused(cross_encoder: Path) -> None:
    tokenizer = json.loads((cross_encoder / "tokenizer.json").read_text())
    specials = {token["content"]: i for i, token in enumerate(tokenizer["added_tokens"])}
    tokenizer["model"]["vocab"] = specials
    for i, token in enumerate(tokenizer["added_tokens"]):
        token["id"] = i
    (cross_encoder / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = _load(cross_encoder)
    with pytest.raises(ModelLoadError, match="knows no words"):
        prepare(model, EngineConfig(dtype="float32"), CPU)


def test_a_bigbird_reads_to_where_its_attention_would_change(tmp_path: Path) -> None:
    """Beyond, what it makes of a text depends on the texts before it."""
    folder = build(Architecture("bi-encoder", "big_bird"), tmp_path)
    _change(Path(folder), block_size=4, num_random_blocks=1, attention_type="block_sparse")
    assert _load(folder).max_tokens == 7 * 4


def test_a_reformer_that_its_first_text_would_set_is_refused(tmp_path: Path) -> None:
    folder = Path(build(Architecture("bi-encoder", "reformer"), tmp_path))
    _change(folder, num_buckets=None)
    with pytest.raises(ModelLoadError, match="num_buckets"):
        _load(folder)
