"""What is cached belongs to what made it: where one ingredient alone differs, nothing cached is found."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from maxsimd.engine.cache.fingerprint import ingredients
from maxsimd.engine.checkpoint import LoadedModel, load_model
from tests.checkpoints import bi_encoders, late_interaction, visual
from tests.checkpoints.shared import SharedCheckpoints
from tests.unit.engine.cache.test_fingerprint_parts import CHANGES

Edit = Callable[[Path], None]

BUILDERS: dict[str, Callable[[Path], str]] = {
    "colbert": late_interaction.stanford,
    "bert": bi_encoders.gte,
    "colpali": visual.colpali,
}

# The files of a checkpoint.
CONFIG, WEIGHTS, MODULES = "config.json", "model.safetensors", "modules.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
PROMPTS, PROCESSOR = "config_sentence_transformers.json", "processor_config.json"
COLBERT, POOLING = "artifact.metadata", "1_Pooling/config.json"


@dataclass(frozen=True)
class Variant:
    """A copy of a checkpoint with edits, by the one ingredient that each changes. `options` of the engine
    change the ingredients in `by_options`."""

    checkpoint: str
    edits: dict[str, Edit] = field(default_factory=dict)
    by_options: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.checkpoint}: {', '.join([*self.edits, *self.by_options])}"


def json_edit(path: str, change: Callable[[Any], object]) -> Edit:
    """Lets `change` change a JSON file's content in place."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / path).read_text(encoding="utf-8"))
        change(content)
        (folder / path).write_text(json.dumps(content), encoding="utf-8")

    return edit


def keys(path: str, **values: Any) -> Edit:
    """Some keys of a JSON file with other values."""
    return json_edit(path, lambda content: content.update(values))


def number(path: str, tensor: str) -> Edit:
    """Another number at the end of one tensor."""

    def edit(folder: Path) -> None:
        tensors = load_file(folder / path)
        tensors[tensor].view(-1)[-1] += 1
        save_file(tensors, folder / path, metadata={"format": "pt"})

    return edit


def _two_words_swapped(tokenizer: Any) -> None:
    words = tokenizer["model"]["vocab"]
    words["file"], words["read"] = words["read"], words["file"]


def _other_tower_norms(config: Any) -> None:
    config["vlm_config"]["vision_config"]["layer_norm_eps"] = 1e-3


def _other_colours(settings: Any) -> None:
    settings["image_processor"]["image_mean"] = [0.4, 0.5, 0.6]


# A variant changes each ingredient at most once. test_fingerprint_parts covers the ingredients that come from
# loaded models and from the machine.
VARIANTS = [
    Variant(
        "colbert",
        {
            "weights": number(WEIGHTS, "bert.embeddings.LayerNorm.bias"),
            "head weights": number(WEIGHTS, "linear.weight"),
            "tokenizer": json_edit(TOKENIZER, _two_words_swapped),
            "document length": keys(COLBERT, doc_maxlen=100),
            "skip list": keys(COLBERT, mask_punctuation=False),
        },
        ("token pooling",),
        {"doc_token_pooling": 2.0},
    ),
    Variant(
        "bert",
        {
            "weights": number(WEIGHTS, "encoder.layer.2.output.dense.bias"),
            "settings": keys(CONFIG, layer_norm_eps=1e-3),
            "inputs": keys(TOKENIZER_CONFIG, model_input_names=["input_ids", "attention_mask"]),
            "model length": keys(TOKENIZER_CONFIG, model_max_length=100),
            "pooling": keys(POOLING, pooling_mode="cls"),
            "head": json_edit(MODULES, lambda modules: modules.pop()),
        },
    ),
    Variant(
        "bert",
        {"settings": keys(CONFIG, hidden_act="relu"), "pooling": keys(POOLING, pooling_mode="weightedmean")},
        ("prompt", "model length", "dimensions"),
        {"document_prompt": "passage: ", "max_model_len": 100, "dimensions": 16},
    ),
    Variant(
        "colpali",
        {
            "prompt": keys(PROCESSOR, query_prefix="Question: "),
            "pictures": json_edit(PROCESSOR, _other_colours),
            "tower settings": json_edit(CONFIG, _other_tower_norms),
            "tower weights": number(WEIGHTS, "vlm.multi_modal_projector.linear.bias"),
        },
    ),
]

# Queries and similarity depend on these; no document's embedding does.
OF_QUERIES = {
    "colbert": keys(COLBERT, query_maxlen=40, attend_to_mask_tokens=True),
    "bert": keys(PROMPTS, prompts={"query": "query: "}, similarity_fn_name="dot"),
}

# Options that leave a document's embedding as it is, with other values than the usual.
OF_NO_CONCERN: dict[str, Any] = {
    "query_prompt": "query: ",
    "window_overlap": 3,
    "max_batch_tokens": 999,
    "max_batch_sequences": 99,
    "max_queued_tokens": 99_999,
    "max_wait_seconds": 99.0,
    "step_timeout_seconds": 99.0,
    "max_request_tokens": 99_999,
    "steps_in_flight": 1,
    "maxsim": "reference",
    "cuda_graphs": "off",
    "prefix_sharing": "off",
    "threads": 1,
    "tokenizer_threads": 1,
    "calibration": "a file",
    "cache_mb": 1,
    "device_cache_mb": 1,
    "cache_disk_mb": 99,
    "allow_pickle": True,
    "trust_remote_code": True,
    "offline": True,
}
# Options that are ingredients themselves, as test_fingerprint_parts has them.
INGREDIENTS = {"dtype", "cache_precision", "quantization", "kernels", "attention", "packing"}
# Options whose effect shows in the loaded model, and those that only models without cached documents take.
SEEN_IN_THE_MODEL = {
    *("model", "revision", "score_type", "device", "instruction", "score_template", "cutoff_layer"),
    *("hybrid_weights", "compress_ratio", "compress_layers"),
}

# Precisions are options like others here, not the machine's choice.
USUAL: dict[str, Any] = {"dtype": "float32", "cache_precision": "float32"}


@dataclass(frozen=True)
class Start:
    """What a start of the engine knows when it opens its cache."""

    model: LoadedModel
    config: EngineConfig

    def ingredients(self) -> dict[str, bytes]:
        stored: Any = self.config.cache_precision
        return ingredients(self.model, self.config, getattr(torch, self.config.dtype), stored)

    def changed(self, other: "Start") -> set[str]:
        one, two = self.ingredients(), other.ingredients()
        return {name for name in one if one[name] != two[name]}


def start(folder: Path, **options: Any) -> Start:
    config = EngineConfig(model=str(folder), **(USUAL | options))
    return Start(load_model(config, torch.device("cpu")), config)


@pytest.fixture(scope="module")
def usual(checkpoints: SharedCheckpoints) -> Callable[..., Start]:
    """A start with a checkpoint as it was built."""

    @functools.cache
    def started(name: str) -> Start:
        return start(Path(checkpoints(BUILDERS[name])))

    return started


def edited(one: Start, folder: Path, *edits: Callable[[Path], None]) -> Path:
    """A copy of a start's checkpoint with edits."""
    copied = Path(shutil.copytree(one.config.model, folder))
    for edit in edits:
        edit(copied)
    return copied


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_each_edit_of_a_checkpoint_changes_its_one_ingredient(
    variant: Variant, usual: Callable[..., Start], tmp_path: Path
) -> None:
    one = usual(variant.checkpoint)
    copied = edited(one, tmp_path / "another folder", *variant.edits.values())
    other = start(copied, **variant.options)
    assert one.changed(other) == {*variant.edits, *variant.by_options}


@pytest.mark.parametrize("name", OF_QUERIES)
def test_settings_of_queries_are_no_ingredient(
    name: str, usual: Callable[..., Start], tmp_path: Path
) -> None:
    one = usual(name)
    options = OF_NO_CONCERN if name == "colbert" else {}
    assert one.changed(start(edited(one, tmp_path / "copy", OF_QUERIES[name]), **options)) == set()


def test_every_ingredient_and_option_is_tried(usual: Callable[..., Start]) -> None:
    """A new one needs a variant, a change in test_fingerprint_parts, or a reason for having none."""
    in_variants = {name for variant in VARIANTS for name in (*variant.edits, *variant.by_options)}
    in_parts = {name for name, *_ in CHANGES} | {"device", "versions"}
    assert set(usual("bert").ingredients()) == in_variants | in_parts
    with_a_variant = {name for variant in VARIANTS for name in variant.options}
    options = {field.name for field in dataclasses.fields(EngineConfig)}
    tried = with_a_variant | INGREDIENTS | OF_NO_CONCERN.keys() | SEEN_IN_THE_MODEL
    assert options == tried | {"cache_dir"}


def test_each_block_of_a_tensor_counts(
    checkpoints: SharedCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maxsimd.engine.cache.fingerprint._BLOCK", 20_000)
    one = start(Path(checkpoints(BUILDERS["bert"])))
    weight = one.model.backbone.get_parameter("encoder.layer.0.output.dense.weight").data.view(-1)
    found = {one.ingredients()["weights"]}
    for place in range(0, len(weight), len(weight) // 7):
        weight[place] += 1
        found.add(one.ingredients()["weights"])
    assert len(found) == 9


async def test_an_engine_finds_what_a_copy_of_its_checkpoint_cached(
    usual: Callable[..., Start], tmp_path: Path, pairs: list[Pair]
) -> None:
    """And nothing of another."""
    documents = [pair.document for pair in pairs[:12]]
    colbert = usual("colbert")

    async def run(checkpoint: str | Path) -> tuple[int, np.ndarray]:
        """How many documents were found, and their scores, which are those of documents just encoded."""
        config = EngineConfig(model=str(checkpoint), cache_dir=str(tmp_path / "cache"), **USUAL)
        async with Engine(config) as engine:
            result = await engine.score("how is a file read", documents, truncation=CUT_LONG)
            new = await engine.score("how is a file read", documents, truncation=CUT_LONG, cache="bypass")
        np.testing.assert_allclose(result.scores, new.scores, atol=1e-5)
        return result.usage.cached_documents, np.array(result.scores)

    hits, scores = await run(colbert.config.model)
    assert hits == 0
    for name, edit in VARIANTS[0].edits.items():
        if name in ("weights", "tokenizer"):
            hits, others = await run(edited(colbert, tmp_path / name, edit))
            assert hits == 0, name
            assert np.abs(others - scores).max() > 1e-4, f"{name} makes no difference"
    # The same documents' embeddings: query expansion is a matter of queries.
    hits, _ = await run(edited(colbert, tmp_path / "queries", OF_QUERIES["colbert"]))
    assert hits == len(documents)
    hits, again = await run(edited(colbert, tmp_path / "a copy"))
    assert hits == len(documents)
    np.testing.assert_array_equal(again, scores)
