"""The ingredients of one loaded model that is altered in memory: what each follows, and what none does.

That what changes an embedding changes an ingredient is test_fingerprint's business, with checkpoints."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers.models import Normalize
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from maxsimd.engine import EngineConfig
from maxsimd.engine.cache.fingerprint import fingerprint, ingredients
from maxsimd.engine.checkpoint import LoadedModel, load_model
from maxsimd.engine.checkpoint.heads import FirstColumns
from maxsimd.engine.checkpoint.model import Expansion
from tests.checkpoints import late_interaction
from tests.checkpoints.shared import SharedCheckpoints


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
def plain(checkpoints: SharedCheckpoints) -> Given:
    """With a head of weights, a skip list and a merging of tokens, but of few words, since all are read for
    each change. Its alterations leave it as it is."""
    config = EngineConfig(model=checkpoints(late_interaction.pooled), dtype="float32")
    model = load_model(config, torch.device("cpu"))
    backbone: Any = model.backbone
    backbone.embeddings.word_embeddings = torch.nn.Embedding(2, 64)
    words = Tokenizer(WordLevel({"[UNK]": 0, "a": 1}, "[UNK]"))
    words.post_processor = TemplateProcessing("a $A", None, [("a", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[UNK]")
    return Given(dataclasses.replace(model, tokenizer=tokenizer), config)


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it makes a difference on any processor to do without them."""
    monkeypatch.setattr("maxsimd.engine.ops.cpu.is_available", lambda: True)


Change = Callable[[Given], Given]


def _backbone(change: Callable[[Any], object]) -> Change:
    def changed(given: Given) -> Given:
        backbone = copy.deepcopy(given.model.backbone)
        change(backbone)
        return given.but(backbone=backbone)

    return changed


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


def _first(dimensions: int, normalised: bool) -> Change:
    return _head(lambda head: FirstColumns(head, dimensions, normalised))


def _with_one_more_module(head: Any) -> Any:
    head.modules.append(Normalize())
    return head


def _dense(change: Callable[[Any], object]) -> Change:
    def changed(head: Any) -> Any:
        change(head.modules[0])
        return head

    return _head(changed)


def _tokenizer(change: Callable[[Any], object]) -> Change:
    def changed(given: Given) -> Given:
        tokenizer = copy.deepcopy(given.model.tokenizer)
        change(tokenizer)
        return given.but(tokenizer=tokenizer)

    return changed


def _more_merging(given: Given) -> Given:
    pooling: Any = copy.deepcopy(given.model.token_pooling)
    pooling.method.pool_factor = 3.0
    return given.but(token_pooling=pooling)


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
    ("head", "a module", _head(_with_one_more_module)),
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
    ("token pooling", "more", _more_merging),
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
        _config(
            _name_or_path="/elsewhere", transformers_version="9", architectures=["Other"], model_type="x"
        ),
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
        {},
        parts,
        {"a": b"2", "b": b"1"},
        {"a": b"1"},
        {"a": b"1", "c": b"2"},
        {"a1": b"", "b": b"2"},
        {"a": b"1b", "": b"2"},
    ]
    assert len({fingerprint(other) for other in others}) == len(others)
