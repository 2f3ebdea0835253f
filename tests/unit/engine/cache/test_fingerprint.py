"""Cached entries belong to what made them: none is found that another checkpoint or option made."""

import copy
import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers.models import Normalize
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from maxsimd.bench.datasets import Pair
from maxsimd.engine import CUT_LONG, Engine, EngineConfig
from maxsimd.engine.cache.fingerprint import fingerprint, ingredients
from maxsimd.engine.checkpoint import LoadedModel, load_model
from maxsimd.engine.checkpoint.heads import FirstColumns
from maxsimd.engine.checkpoint.model import Expansion
from tests.checkpoints import late_interaction, visual
from tests.checkpoints.shared import SharedCheckpoints

# Precisions are options like others here, not the machine's choice.
USUAL: dict[str, Any] = {"dtype": "float32", "cache_precision": "float32"}

# Options that each change an ingredient.
BY_OPTIONS: dict[str, Any] = {
    "doc_token_pooling": 2.0, "document_prompt": "passage: ", "max_model_len": 100, "dimensions": 16,
}  # fmt: skip
# Options that leave a document's embedding as it is, with other values than the usual.
OF_NO_CONCERN: dict[str, Any] = {
    "query_prompt": "query: ", "window_overlap": 3, "max_batch_tokens": 999, "max_batch_sequences": 99,
    "max_queued_tokens": 99_999, "max_wait_seconds": 99.0, "step_timeout_seconds": 99.0,
    "max_request_tokens": 99_999, "max_vectors": 99, "steps_in_flight": 1, "maxsim": "reference",
    "cuda_graphs": "off", "prefix_sharing": "off", "threads": 1, "tokenizer_threads": 1,
    "calibration": "a file", "rank_by": "pairwise", "cache_mb": 1, "cache_by_tenant": True,
    "device_cache_mb": 1, "cache_disk_mb": 99, "document_store_mb": 1, "allow_pickle": True,
    "trust_remote_code": True, "offline": True,
}  # fmt: skip
# Options that are ingredients themselves, as CHANGES has them.
INGREDIENTS = {"dtype", "cache_precision", "quantization", "kernels", "attention", "packing"}
# Options whose effect shows in the loaded model, and those that only models without cached documents take.
SEEN_IN_THE_MODEL = {
    *("model", "revision", "score_type", "device", "instruction", "score_template", "cutoff_layer"),
    *("hybrid_weights", "compress_ratio", "compress_layers", "score_label"),
}


def made_of(folder: Path | str, **options: Any) -> dict[str, bytes]:
    config = EngineConfig(model=str(folder), **(USUAL | options))
    return ingredients(load_model(config, torch.device("cpu")), config, torch.float32, "float32")


def changed(one: dict[str, bytes], other: dict[str, bytes]) -> set[str]:
    return {name for name in one if one[name] != other[name]}


def edit(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def add_to(folder: Path, tensor: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor].view(-1)[-1] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_options_change_their_ingredient_or_none(stanford_colbert: str) -> None:
    """A new option needs an entry in a table above, and a new ingredient one in CHANGES."""
    usual = made_of(stanford_colbert)
    differs = changed(usual, made_of(stanford_colbert, **BY_OPTIONS))
    assert differs >= {"token pooling", "prompt", "model length", "dimensions"}
    assert changed(usual, made_of(stanford_colbert, **OF_NO_CONCERN)) == set()
    options = {field.name for field in dataclasses.fields(EngineConfig)}
    in_tables = BY_OPTIONS.keys() | OF_NO_CONCERN.keys() | INGREDIENTS | SEEN_IN_THE_MODEL
    assert options == in_tables | {"cache_dir"}
    of_pictures = {"pictures", "tower settings", "tower weights"}
    assert set(usual) == {name for name, *_ in CHANGES} | of_pictures | {"device", "versions"}


def test_how_pictures_are_read_counts(checkpoints: SharedCheckpoints, tmp_path: Path) -> None:
    usual = made_of(checkpoints(visual.colpali))
    folder = checkpoints.copy(visual.colpali, tmp_path / "copy")
    edit(folder / "processor_config.json", lambda one: one["image_processor"].update(image_mean=[0.4] * 3))
    edit(folder / "config.json", lambda one: one["vlm_config"]["vision_config"].update(layer_norm_eps=1e-3))
    add_to(folder, "vlm.multi_modal_projector.linear.bias")
    assert changed(usual, made_of(folder)) == {"pictures", "tower settings", "tower weights"}


def test_each_tensor_block_counts(gte: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxsimd.engine.cache.fingerprint._BLOCK", 20_000)
    config = EngineConfig(model=gte, dtype="float32")
    model = load_model(config, torch.device("cpu"))
    weight = model.backbone.get_parameter("encoder.layer.0.output.dense.weight").data.view(-1)
    found = set()
    for place in range(0, len(weight), len(weight) // 3):
        found.add(ingredients(model, config, torch.float32, "float32")["weights"])
        weight[place] += 1
    assert len(found) == 4


async def test_copies_find_the_same_cache(stanford_colbert: str, tmp_path: Path, pairs: list[Pair]) -> None:
    documents = [pair.document[:60] for pair in pairs[:5]]

    async def run(checkpoint: Path | str) -> tuple[int, np.ndarray]:
        """How many documents were found, and their scores, which are those of documents just encoded."""
        config = EngineConfig(model=str(checkpoint), cache_dir=str(tmp_path / "cache"), **USUAL)
        async with Engine(config) as engine:
            result = await engine.score("how is a file read", documents, truncation=CUT_LONG)
            new = await engine.score("how is a file read", documents, truncation=CUT_LONG, cache="bypass")
        np.testing.assert_allclose(result.scores, new.scores, atol=1e-5)
        return result.usage.cached_documents, np.array(result.scores)

    def expand_more(settings: Any) -> None:
        settings |= {"query_maxlen": 40, "attend_to_mask_tokens": True}

    original = Path(stanford_colbert)
    another, expanding = (Path(shutil.copytree(original, tmp_path / f"copy {i}")) for i in range(2))
    add_to(another, "bert.embeddings.LayerNorm.bias")
    edit(expanding / "artifact.metadata", expand_more)
    hits, scores = await run(original)
    assert hits == 0
    hits, others = await run(another)
    assert hits == 0
    assert np.abs(others - scores).max() > 1e-4, "it makes no difference"
    # The same documents' embeddings: query expansion is a matter of queries.
    hits, _ = await run(expanding)
    assert hits == len(documents)


# The ingredients of one loaded model that is altered in memory: what each follows, and what none does


@dataclasses.dataclass(frozen=True)
class Given:
    model: LoadedModel
    config: EngineConfig
    dtype: torch.dtype = torch.float32
    stored: Any = "float32"

    def ingredients(self) -> dict[str, bytes]:
        return ingredients(self.model, self.config, self.dtype, self.stored)

    @functools.cached_property
    def known(self) -> dict[str, bytes]:
        return self.ingredients()

    def but(self, **changes: Any) -> "Given":
        return dataclasses.replace(self, model=dataclasses.replace(self.model, **changes))

    def changed(self, other: "Given") -> list[str]:
        one, two = self.known, other.known
        assert list(one) == list(two)
        return [name for name in one if one[name] != two[name]]


@pytest.fixture(scope="module")
def loaded(checkpoints: SharedCheckpoints) -> Given:
    """A model with a head of weights, a skip list and token merging, but few words, since all are read."""
    pooled = functools.partial(late_interaction.native, token_pooling=True)
    config = EngineConfig(model=checkpoints(pooled), dtype="float32")
    model = load_model(config, torch.device("cpu"))
    backbone: Any = model.backbone
    backbone.embeddings.word_embeddings = torch.nn.Embedding(2, 64)
    words = Tokenizer(WordLevel({"[UNK]": 0, "a": 1}, "[UNK]"))
    words.post_processor = TemplateProcessing("a $A", None, [("a", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[UNK]")
    return Given(dataclasses.replace(model, tokenizer=tokenizer), config)


@pytest.fixture
def plain(loaded: Given, monkeypatch: pytest.MonkeyPatch) -> Given:
    """With kernels, so that it makes a difference on any processor to do without them."""
    monkeypatch.setattr("maxsimd.engine.ops.cpu.is_available", lambda: True)
    return loaded


Change = Callable[[Given], Given]


def _part(name: str) -> Callable[[Callable[[Any], object]], Change]:
    """Changes of a copy of one of the model's parts."""

    def changing(change: Callable[[Any], object]) -> Change:
        def changed(given: Given) -> Given:
            part = copy.deepcopy(getattr(given.model, name))
            change(part)
            return given.but(**{name: part})

        return changed

    return changing


_backbone, _tokenizer, _token_pooling = map(_part, ("backbone", "tokenizer", "token_pooling"))


def _weight(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def changed(backbone: Any) -> None:
        norm = backbone.embeddings.LayerNorm
        norm.weight = torch.nn.Parameter(change(norm.weight.detach()))

    return _backbone(changed)


def _renamed_weight(backbone: Any) -> None:
    norm = backbone.embeddings.LayerNorm
    norm.another = norm.weight
    del norm.weight


def _buffer(value: float, name: str = "scale", persistent: bool = True) -> Change:
    return _backbone(lambda one: one.register_buffer(name, torch.tensor(value), persistent=persistent))


def _config(**settings: Any) -> Change:
    return _backbone(lambda backbone: backbone.config.update(settings))


def _option(**options: Any) -> Change:
    return lambda given: dataclasses.replace(given, config=dataclasses.replace(given.config, **options))


def _rules(**rules: Any) -> Change:
    return lambda given: given.but(document=dataclasses.replace(given.model.document, **rules))


def _task(**changes: Any) -> Change:
    def changed(given: Given) -> Given:
        name = given.model.score_task
        task = dataclasses.replace(given.model.tasks[name], **changes)
        return given.but(tasks={**given.model.tasks, name: task})

    return changed


def _head(change: Callable[[Any], Any]) -> Change:
    def changed(given: Given) -> Given:
        return _task(head=change(copy.deepcopy(given.model.tasks[given.model.score_task].head)))(given)

    return changed


def _first(dimensions: int, normalized: bool) -> Change:
    return _head(lambda head: FirstColumns(head, dimensions, normalized))


def _dense(change: Callable[[Any], object]) -> Change:
    def changed(head: Any) -> Any:
        change(head.modules[0])
        return head

    return _head(changed)


def _of_another_class(thing: Any) -> None:
    """Makes it one of a subclass that differs in nothing but its name."""
    thing.__class__ = type("Another", (type(thing),), {})


# Alterations, by the one ingredient that each changes.
CHANGES: list[tuple[str, str, Change]] = [
    ("weights", "a number", _weight(lambda weight: weight + torch.eye(len(weight))[-1])),
    ("weights", "a shape", _weight(lambda weight: weight[None])),
    ("weights", "a name", _backbone(_renamed_weight)),
    ("buffers", "one that is saved", _buffer(1.0)),
    ("head weights", "a number", _dense(lambda dense: dense.linear.bias.data[-1].add_(1))),
    ("head", "a module", _head(lambda head: head.modules.append(Normalize()) or head)),
    ("head", "an activation", _dense(lambda dense: setattr(dense, "activation_function", torch.nn.Tanh()))),
    ("architecture", "a class", _backbone(lambda one: _of_another_class(one))),
    ("head", "a class", _dense(lambda dense: _of_another_class(dense))),
    ("settings", "a number", _config(layer_norm_eps=0.25)),
    ("settings", "attention", _config(_attn_implementation="eager")),
    ("template", "none", _tokenizer(lambda one: setattr(one.backend_tokenizer, "post_processor", None))),
    ("tokenizer", "a word", _tokenizer(lambda one: one.add_tokens(["maxsimd"]))),
    ("inputs", "fewer", _tokenizer(lambda one: setattr(one, "model_input_names", ["input_ids"]))),
    ("prompt", "another", _rules(prompt="passage: ")),
    ("prompt pooled", "not", _rules(pool_prompt=False)),
    ("special tokens pooled", "not", _rules(pool_specials=False)),
    ("fixed tokens", "in front", _rules(leading_ids=np.array([7], dtype=np.int32))),
    ("fixed tokens", "behind", _rules(trailing_ids=np.array([7], dtype=np.int32))),
    ("expansion", "some", _rules(expansion=Expansion(9, 1, True, True))),
    ("chat template", "some", _rules(chat=SimpleNamespace(signature="a template"))),
    ("document length", "another", _rules(max_tokens=17)),
    ("truncation side", "left", lambda given: given.but(truncation_side="left")),
    ("skip list", "none", _rules(skipped_ids=None)),
    ("model length", "another", lambda given: given.but(max_tokens=17)),
    ("pooling", "another", _task(pooling="mean")),
    ("dimensions", "fewer", _first(8, True)),
    ("token pooling", "none", lambda given: given.but(token_pooling=None)),
    ("token pooling", "more", _token_pooling(lambda one: setattr(one.method, "pool_factor", 3.0))),
    ("precision", "half", lambda given: dataclasses.replace(given, dtype=torch.bfloat16)),
    ("stored precision", "int8", lambda given: dataclasses.replace(given, stored="int8")),
    ("quantization", "int8", _option(quantization="int8")),
    ("kernels", "torch's", _option(kernels="torch")),
    ("attention", "torch's", _option(attention="torch")),
    ("packing", "off", _option(packing="off")),
    ("fused head", "triton's", _option(maxsim="triton")),
]


@pytest.mark.parametrize(("ingredient", "what", "change"), CHANGES, ids=lambda value: str(value)[:20])
def test_each_change_changes_one_ingredient(plain: Given, ingredient: str, what: str, change: Change) -> None:
    assert plain.changed(change(plain)) == [ingredient], what


def _one_after_the_other(*changes: Change) -> Change:
    return lambda given: functools.reduce(lambda changed, change: change(changed), changes, given)


_A_TANH = _dense(lambda dense: setattr(dense, "activation_function", torch.nn.Tanh()))
_TWO_BUFFERS = (_buffer(1.0, "scale"), _buffer(2.0, "bias"))


def test_parts_of_some_models_count(plain: Given) -> None:
    for one, other, changed in (
        (_buffer(1.0), _buffer(2.0), ["buffers"]),
        (_buffer(1.0, "scale"), _buffer(1.0, "bias"), ["buffers"]),
        # Their order does not matter.
        (_one_after_the_other(*_TWO_BUFFERS), _one_after_the_other(*reversed(_TWO_BUFFERS)), []),
        (_first(8, True), _first(16, True), ["dimensions"]),
        (_first(8, True), _first(8, False), ["dimensions"]),
        # A head that is cut short is described like the whole.
        (_first(8, True), _one_after_the_other(_A_TANH, _first(8, True)), ["head"]),
    ):
        assert one(plain).changed(other(plain)) == changed


def test_what_no_embedding_depends_on_is_no_ingredient(plain: Given) -> None:
    for change in (
        # No checkpoint holds it: it follows from what else is told.
        _buffer(7.0, persistent=False),
        _config(_name_or_path="/other", transformers_version="9", architectures=["Other"], model_type="x"),
        _config(id2label={0: "one"}, label2id={"one": 0}, problem_type="regression"),
        _tokenizer(lambda one: one("a b c", truncation=True, max_length=3, padding="max_length")),
        _option(maxsim="reference", query_prompt="query: ", threads=1),
        lambda given: given.but(name="another", query=dataclasses.replace(given.model.query, prompt="q: ")),
    ):
        assert plain.changed(change(plain)) == []


def test_kernels_and_processor_tell_machines_apart(plain: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxsimd.engine.ops.cpu.int8_linear.is_available", lambda: True)
    for what, other, ingredient in (
        ("torch.backends.cpu.get_cpu_capability", "another", "device"),
        ("torch.cpu._is_amx_tile_supported", "another", "device"),
        ("maxsimd.engine.ops.cpu.int8_linear.is_available", False, "kernels"),
        ("maxsimd.engine.ops.cpu.is_available", False, "kernels"),
    ):
        here = plain.ingredients()
        monkeypatch.setattr(what, lambda other=other: other)
        there = plain.ingredients()
        assert [name for name in there if there[name] != here[name]] == [ingredient], what
    assert _option(kernels="torch")(plain).ingredients() == there, "which it does without anyway"


def test_every_library_is_told_apart_by_its_version(plain: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    def versions(newer: str) -> bytes:
        new = {newer: "2"}
        monkeypatch.setattr("maxsimd.engine.versions.version", lambda library: new.get(library, "1"))
        return plain.ingredients()["versions"]

    libraries = ("maxsimd", "torch", "transformers", "sentence-transformers", "tokenizers", "none")
    assert len({versions(library) for library in libraries}) == len(libraries)


def test_a_gpu_counts_by_name_and_may_fuse_the_head(plain: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_a_gpu(backbone: Any) -> None:
        gpu = SimpleNamespace(device=torch.device("cuda", 1))
        backbone.parameters = lambda: iter([gpu])

    one = _backbone(on_a_gpu)(plain)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"one as {device}")
    first = one.known
    assert plain.changed(one) == ["fused head", "device"]
    assert one.changed(_option(maxsim="reference")(one)) == ["fused head"]
    assert b"one as cuda:1" in first["device"]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert one.ingredients() == first, "the processor does not matter there"


def test_names_and_values_of_ingredients_matter_not_order() -> None:
    parts = {"a": b"1", "b": b"2"}
    assert fingerprint(parts) == fingerprint(dict(reversed(parts.items())))
    assert len(fingerprint(parts)) == 32
    others: list[dict[str, bytes]] = [
        {}, parts, {"a": b"2", "b": b"1"}, {"a": b"1"}, {"a": b"1", "c": b"2"}, {"a1": b"", "b": b"2"},
        {"a": b"1b", "": b"2"},
    ]  # fmt: skip
    assert len({fingerprint(other) for other in others}) == len(others)
