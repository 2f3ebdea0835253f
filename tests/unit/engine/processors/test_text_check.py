"""The check of preprocessing at load notices each fault, and its result is remembered."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder

from maxsimd.engine.checkpoint import LoadedModel, PairRules, load_model, recipe_store
from maxsimd.engine.checkpoint.recipe_store import texts_content
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.load import prepare
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution.runner import PackedRunner
from maxsimd.engine.processors import text_check
from maxsimd.engine.processors.processor import ProcessorContext
from maxsimd.engine.processors.text import tokenization
from maxsimd.engine.processors.text.tokenization import Template, TextTokenizer, Tokenizer
from maxsimd.engine.processors.text_check import check_texts, probe_sequences
from maxsimd.engine.requests import ScoreRequest
from tests.checkpoints import bi_encoders, cross_encoders, language_models, late_interaction
from tests.checkpoints.shared import Build, SharedCheckpoints

Patch = pytest.MonkeyPatch
# Puts a fault into the code by the patch, or into the rules of the model that it returns.
Fault = Callable[[Patch, LoadedModel], LoadedModel | None]
Models = Callable[[Build], LoadedModel]

CPU = torch.device("cpu")
BI, LATE = bi_encoders.without_prompt, late_interaction.stanford
PAIRS, ASKED = cross_encoders.bert, language_models.qwen3_reranker


def _rules(role: str, **changes: Any) -> Fault:
    def fault(patch: Patch, model: LoadedModel) -> LoadedModel:
        changed: Any = {role: replace(getattr(model, role), **changes)}
        return replace(model, **changed)

    return fault


def _expansion(**changes: Any) -> Fault:
    def fault(patch: Patch, model: LoadedModel) -> LoadedModel:
        assert model.query.expansion is not None
        return replace(model, query=replace(model.query, expansion=replace(model.query.expansion, **changes)))

    return fault


def _model(**changes: Any) -> Fault:
    return lambda patch, model: replace(model, **changes)


def _other_template(patch: Patch, model: LoadedModel) -> LoadedModel:
    template = model.pairs.template
    assert template is not None
    segments = tuple(segment.replace("<Document>: ", "<Document>:") for segment in template.segments)
    return replace(model, pairs=replace(model.pairs, template=replace(template, segments=segments)))


def _without_instruction(patch: Patch, model: LoadedModel) -> None:
    patch.setattr(ProcessorContext, "with_instruction", lambda _, request: replace(request, instruction=None))


def _stripped(patch: Patch, model: LoadedModel) -> None:
    as_asked = ProcessorContext.with_instruction

    def stripped(self: ProcessorContext, request: ScoreRequest) -> ScoreRequest:
        request = as_asked(self, request)
        return replace(request, documents=tuple(text.strip() for text in request.document_texts))

    patch.setattr(ProcessorContext, "with_instruction", stripped)


def _template(change: Callable[[Template], Template]) -> Fault:
    def fault(patch: Patch, model: LoadedModel) -> None:
        learn = tokenization._learn_template
        patch.setattr(tokenization, "_learn_template", lambda *given, **more: change(learn(*given, **more)))

    return fault


def _tokenizer(change: Callable[[Tokenizer], object]) -> Fault:
    def fault(patch: Patch, model: LoadedModel) -> None:
        class Changed:
            @staticmethod
            def from_str(description: str) -> Tokenizer:
                made = Tokenizer.from_str(description)
                change(made)
                return made

        patch.setattr(tokenization, "Tokenizer", Changed)
        patch.setattr(tokenization, "PlainTokenizer", Changed)  # so that it is copied

    return fault


_OF_WORDS = r"a (query|document|text) \(\d+ words\)"
_SPECIALS_READ = _tokenizer(lambda one: setattr(one, "encode_special_tokens", True))
_UNENDED = _template(lambda one: replace(one, ids=(*one.ids[:-1], one.ids[-1][:0])))
FAULTS: dict[str, tuple[Build, Fault, str]] = {
    "a prompt left out": (BI, _rules("query", prompt=""), r"a query \(a short text\)"),
    "the prompt pooled": (BI, _rules("document", pool_prompt=True), "a document .*tokens are pooled"),
    "the prompt of texts": (BI, _rules("text", prompt="passage: "), "a text "),
    "a limit off by one": (BI, lambda _, model: replace(model, max_tokens=model.max_tokens - 1), _OF_WORDS),
    "cut at the wrong end": (BI, _model(truncation_side="left"), r"words\)"),
    "case kept": (BI, _tokenizer(lambda one: setattr(one.normalizer, "lowercase", False)), "token .*UNK"),
    "special tokens as words": (BI, _SPECIALS_READ, "the token .* in it"),
    "no special token behind": (BI, _UNENDED, "a query .*it has"),
    "a marker left out": (LATE, _rules("document", prompt=""), r"a document \(a short text\).*token 1 is"),
    "expansion too short": (LATE, _expansion(length=31), r"a query .*it has 32 tokens, not 31"),
    "expansion by another token": (LATE, _expansion(token_id=0), "a query .*token"),
    "expansion attended": (LATE, _expansion(attended=True), "a query .*attended to"),
    "the skip list left out": (LATE, _rules("document", skipped_ids=None), "a document .*tokens are pooled"),
    "a length of its own": (LATE, _rules("document", max_tokens=40), r"a document \(.*token \d+ is"),
    "no types": (PAIRS, _template(partial(replace, text_types=(0, 0))), "a pair .*has type 0, not 1"),
    "the document cut alone": (PAIRS, _model(pairs=PairRules("only_second")), "a pair .* words"),
    "blanks left out": (ASKED, _stripped, "and blanks around"),
    "another template": (ASKED, _other_template, r"a pair \(a short text, and a sentence\)"),
    "an instruction left out": (ASKED, _without_instruction, r"a pair \(an instruction\)"),
}


def _config(path: str | Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(path), dtype="float32", **options)


def _checked(model: LoadedModel, config: EngineConfig) -> str | None:
    return check_texts(model, config, TextTokenizer(model.tokenizer, model.token_rows), None)


@pytest.fixture(scope="module")
def models(checkpoints: SharedCheckpoints) -> Models:
    """Models as their libraries have loaded them, by what builds their checkpoints."""
    loaded: dict[str, LoadedModel] = {}

    def load(build: Build) -> LoadedModel:
        path = checkpoints(build)
        if path not in loaded:
            loaded[path] = load_model(_config(path), CPU, recheck=True)
        return loaded[path]

    return load


@pytest.mark.parametrize(("build", "fault", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_off_is_told(build: Build, fault: Fault, message: str, models: Models, monkeypatch: Patch) -> None:
    model = models(build)
    model = fault(monkeypatch, model) or model
    with pytest.raises(ModelLoadError, match=message):
        _checked(model, _config(model.name))


@pytest.mark.parametrize("build", [BI, LATE, PAIRS, ASKED])
def test_what_is_right_is_served(build: Build, models: Models) -> None:
    model = models(build)
    said = _checked(model, _config(model.name))
    assert said is not None
    assert int(said.split()[0]) > 20


_INSTRUCT = {"prompts": {"query": "Instruct: find it\nQuery: "}, "default_prompt_name": "query"}
_NO_SYSTEM = (
    "{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('there is no system role') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("build", "settings", "template", "options"),
    [
        (PAIRS, {}, None, {"query_prompt": "find: "}),
        (PAIRS, _INSTRUCT, None, {}),
        pytest.param(PAIRS, _INSTRUCT, None, {"query_prompt": "find: "}, marks=pytest.mark.exhaustive),
        (cross_encoders.chatting, {}, None, {"query_prompt": "find: "}),
        (cross_encoders.chatting, {}, _NO_SYSTEM, {}),
    ],
    ids=["prompt", "instruction", "both", "prompt in a chat", "no system role"],
)
def test_prompts_of_pairs_are_read_as_the_library_does(
    build: Build, settings: Any, template: Any, options: Any, checkpoints: SharedCheckpoints, tmp_path: Path
) -> None:
    folder = checkpoints.copy(build, tmp_path / "copy")
    file = folder / "config_sentence_transformers.json"
    if not file.exists():
        CrossEncoder(str(folder), device="cpu").save_pretrained(str(folder))
    _change(file, **settings)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    config = _config(folder, **options)
    assert _checked(load_model(config, CPU, recheck=True), config) is not None


def test_a_model_cards_template_cuts_only_documents(checkpoints: SharedCheckpoints, tmp_path: Path) -> None:
    folder = checkpoints.copy(ASKED, tmp_path / "copy")
    _change(folder / "tokenizer_config.json", truncation_side="left", model_max_length=200)
    model = load_model(_config(folder), CPU, recheck=True)
    assert model.truncation_side == "right"
    assert _checked(model, _config(folder)) is not None


def test_documents_have_the_prompt_of_the_library(checkpoints: Any, tmp_path: Path, caplog: Any) -> None:
    folder = checkpoints.copy(BI, tmp_path / "copy")
    _change(
        folder / "config_sentence_transformers.json", prompts={"query": "query: ", "passage": "passage: "}
    )
    model = load_model(_config(folder), CPU, recheck=True)
    assert _checked(model, _config(folder)) is not None
    assert (model.document.prompt, "'passage'" in caplog.text) == ("", True), caplog.text


def _change(file: Path, **settings: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_positions_that_count_pads_are_noticed(checkpoints: SharedCheckpoints, monkeypatch: Patch) -> None:
    right = PackedRunner.inputs_of

    def without_pads(runner: PackedRunner, batch: Any) -> dict[str, torch.Tensor]:
        inputs = right(runner, batch)
        return inputs | {"position_ids": inputs["position_ids"] * (inputs["input_ids"] != 0)}

    model = load_model(_config(checkpoints(PAIRS)), CPU)
    probes = probe_sequences(model, TextTokenizer(model.tokenizer, model.token_rows))
    assert max(map(len, probes)) <= 512
    assert all((probe.tokens.ids[1:] == 0).any() for probe in probes)
    monkeypatch.setattr(PackedRunner, "inputs_of", without_pads)
    assert prepare(model, _config(model.name), CPU).execution == "packed"
    model = load_model(_config(model.name), CPU)
    assert prepare(model, _config(model.name), CPU, probes).execution == "padded"


def test_texts_are_compared_once(checkpoints: Any, models: Any, tmp_path: Path, monkeypatch: Any) -> None:
    folder, model = checkpoints.copy(PAIRS, tmp_path / "copy"), models(PAIRS)
    tokenizer = TextTokenizer(model.tokenizer, model.token_rows)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compared: list[object] = []
    monkeypatch.setattr(text_check._Check, "run", lambda check: compared.append(check) or 1)

    def times(**options: Any) -> int:
        before = len(compared)
        config = _config(folder, **options)
        check_texts(model, config, tokenizer, texts_content(config))
        return len(compared) - before

    assert [times(), times(), times(max_batch_tokens=64, threads=1)] == [1, 0, 0]
    assert [times(max_model_len=100), times(max_model_len=100), times()] == [1, 0, 0]
    assert [times(query_prompt="ask: "), times(document_prompt="")] == [1, 1]
    # `inspect --check` looks at nothing that is remembered.
    assert check_texts(model, _config(folder), tokenizer, None) is not None
    _change(folder / "tokenizer_config.json", unread=1)
    assert [times(), times()] == [1, 0]
    _change(folder / "config.json", auto_map={"AutoModel": "owner/code--modeling.Model"})
    assert [times(), times(trust_remote_code=True), times(trust_remote_code=True), times()] == [1, 1, 1, 0]
    kept = [*(tmp_path / "cache" / "maxsimd" / "recipes").glob("*.texts")]
    assert {file.stat().st_mode & 0o777 for file in kept} == {0o600}
    for file in kept:
        file.chmod(0o666)
    assert times() == 1
    monkeypatch.setattr(recipe_store, "own_sources", lambda: "other code")
    assert [times(), times()] == [1, 0]
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert [times(), times()] == [1, 1]


def test_a_failure_is_never_remembered(models: Models, tmp_path: Path, monkeypatch: Patch) -> None:
    model = models(BI)
    config, tokenizer = _config(model.name), TextTokenizer(model.tokenizer, model.token_rows)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    content = texts_content(config)
    wrong = replace(model, query=replace(model.query, prompt=""))
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="a query"):
            check_texts(wrong, config, tokenizer, content)
    reader = model.reader
    assert reader is not None
    read_text = reader.text

    def no_documents(text: str, role: Any, prompt: str | None, limit: int) -> Any:
        if role == "document":
            raise ValueError("it has no route")
        return read_text(text, role, prompt, limit)

    with monkeypatch.context() as patch:
        patch.setattr(reader, "text", no_documents)
        with pytest.raises(ModelLoadError, match="does not read a document: it has no route"):
            check_texts(model, config, tokenizer, content)
    assert check_texts(model, config, tokenizer, content) is not None
