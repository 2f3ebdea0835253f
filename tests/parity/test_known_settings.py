"""Every key of a checkpoint's files is applied as the libraries apply it, changes nothing, or is refused.

The keys are collected from the installed libraries, and each is set to another value in a small checkpoint.
The whole walk (`-m exhaustive -s`) prints how many keys there are of each kind."""

import ast
import dataclasses
import inspect
import json
import os
import pkgutil
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.model import BaseModel
from sentence_transformers.base.modules import Transformer
from sentence_transformers.base.modules.module import Module
from sentence_transformers.multi_vector_encoder import model as multi_vector_model
from sentence_transformers.sentence_transformer.modules import pooling
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from maxsimd.engine import CUT_LONG, EngineConfig, InvalidRequestError, ModelLoadError, SyncEngine
from maxsimd.engine.checkpoint import known_settings, load_model
from maxsimd.engine.checkpoint.known_settings import COMMON, ENTRIES, FILES, MODULES, Known, declared_keys
from maxsimd.engine.inspection import inspect_model
from tests.checkpoints import bi_encoders, cross_encoders, language_models, late_interaction, sparse_encoders
from tests.checkpoints.shared import SharedCheckpoints
from tests.parity.changes import CPU, Build, Edit, settings
from tests.parity.conftest import Changed
from tests.parity.families import FAMILIES, FORMS, LISTWISE, Family
from tests.parity.selection import families

_OF_TEXTS, _OF_ALL = "sentence_bert_config.json", "config_sentence_transformers.json"
_TOKENIZER = "tokenizer_config.json"


def _named_in(function: Any, *variables: str) -> set[str]:
    """The keys by which code takes values out of variables, or asks whether they are there."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        match node:
            case ast.Subscript(of, ast.Constant(str(key))):
                pass
            case ast.Call(ast.Attribute(of, "get" | "pop" | "setdefault"), [ast.Constant(str(key)), *_]):
                pass
            case ast.Compare(ast.Constant(str(key)), [ast.In() | ast.NotIn()], [of]):
                pass
            case _:
                continue
        if ast.unparse(of) in variables:
            found.add(key)
    return found


def _parameters(function: Any) -> set[str]:
    """The names of a function's parameters that are not gathered, but for the first."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind in kinds and each.name != "self"}


def _modules() -> Iterator[type[Module]]:
    kinds = ("sentence_transformer", "sparse_encoder", "cross_encoder", "multi_vector_encoder")
    for package in ("base", *kinds):
        room = import_module(f"sentence_transformers.{package}.modules")
        for each in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            yield from (
                kind
                for kind in vars(import_module(each.name)).values()
                if inspect.isclass(kind) and issubclass(kind, Module) and kind.__module__ == each.name
            )


def _keys_of_module(kind: type[Module]) -> set[str]:
    renamed = set(getattr(kind, "config_key_renames", {}))
    # Not what a module takes from files of its own.
    taken = _parameters(inspect.unwrap(kind.__init__)) - {"tokenizer", "weight"}
    return {*kind.config_keys} | renamed | taken


def _written_by(function: Any) -> set[str]:
    tree = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))
    keys = [key for node in tree if isinstance(node, ast.Dict) for key in node.keys]
    return {key.value for key in keys if isinstance(key, ast.Constant)} | _named_in(function, "config")


@cache
def _of_files() -> Mapping[str, set[str]]:
    """The keys that the installed libraries read of each file, config.json and those of modules apart."""
    of_all = _named_in(BaseModel._load_config_modules, "model_config")
    of_all |= _named_in(BaseModel._get_model_type, "config")
    for kind in (BaseModel, SentenceTransformer, CrossEncoder, SparseEncoder, MultiVectorEncoder):
        of_all |= _named_in(kind._parse_model_config, "model_config") | _written_by(kind._get_model_config)
    stash = multi_vector_model._LegacyStash._PYLATE_TRANSFORMER_KEYS
    of_texts = {*Transformer.config_keys} | _parameters(inspect.unwrap(Transformer.__init__))
    old = re.findall(r'"(\w+_args)": "\w+_kwargs"', inspect.getsource(Transformer._load_init_kwargs))
    of_tokenizers = set(PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES)
    base, fast = PreTrainedTokenizerBase, TokenizersBackend
    for function in (
        *(base.__init__, base._from_pretrained, base.save_pretrained),
        *(fast.__init__, fast.convert_to_native_format),
    ):
        read = inspect.unwrap(getattr(function, "__func__", function))
        of_tokenizers |= _named_in(read, "kwargs", "init_kwargs", "local_kwargs", "tokenizer_config")
    for kind in _tokenizers():
        init = inspect.unwrap(kind.__init__)
        of_tokenizers |= _parameters(init) | _named_in(init, "kwargs")
    return {
        _OF_ALL: (of_all | {*stash}) - {"transformers", "sentence_transformers", "pytorch"},  # versions
        _OF_TEXTS: (of_texts | {*old}) - {"model_name_or_path"},
        _TOKENIZER: {key for key in of_tokenizers if not key.startswith("_")} - _HANDED_OVER,
        "special_tokens_map.json": {*base.SPECIAL_TOKENS_ATTRIBUTES, "extra_special_tokens"},
        "artifact.metadata": _named_in(MultiVectorEncoder._maybe_load_stanford_metadata, "metadata"),
    }


# Values that transformers' functions hand to each other among the settings of a tokenizer.
_HANDED_OVER = {
    *("tokenizer_object", "gguf_file", "vocab", "merges", "post_processor", "tokenizer_padding"),
    *("tokenizer_truncation", "tokenizer", "save_jinja_files", "token", "revision", "cache_dir", "proxies"),
    *("subfolder", "push_to_hub", "commit_message", "repo_id", "args"),
}
_PROVEN = (
    *("bert", "roberta", "xlm-roberta", "distilbert", "electra", "modernbert", "deberta-v2", "mpnet", "t5"),
    *("mt5", "qwen2", "qwen3", "llama", "gemma", "gemma2", "gemma3_text", "gpt_neo", "lfm2", "eurobert"),
    *("gte", "nomic_bert", "jina_embeddings_v3", "granite"),
)


def _tokenizers() -> Iterator[type[Any]]:
    for kind in _PROVEN:
        found = transformers.TOKENIZER_MAPPING.get(CONFIG_MAPPING[kind], None)
        for each in found if isinstance(found, tuple) else (found,):
            if inspect.isclass(each) and issubclass(each, TokenizersBackend):
                yield each


def _keys_of_configs() -> set[str]:
    """The keys of config.json that transformers reads whatever the type of model."""
    fields = {each.name for each in dataclasses.fields(PreTrainedConfig)}
    read = inspect.unwrap(PreTrainedConfig.from_dict.__func__)
    popped = _named_in(PreTrainedConfig.__post_init__, "kwargs") | _named_in(read, "kwargs", "config_dict")
    return (fields | popped | {*GenerationConfig._get_default_generation_params()}) - {"return_unused_kwargs"}


def _unknown(keys: Iterable[str], known: Known) -> set[str]:
    return {key for key in keys if not known.use_of(key)}


def test_every_key_that_the_libraries_read_is_known() -> None:
    unknown = {name: _unknown(keys, FILES[name]) for name, keys in _of_files().items()}
    kinds = [kind for kind in _modules() if kind.__name__ in MODULES]
    unknown |= {kind.__name__: _unknown(_keys_of_module(kind), MODULES[kind.__name__]) for kind in kinds}
    legacy = _unknown(pooling._LEGACY_POOLING_MODE_KWARGS, MODULES["Pooling"])
    entries = _named_in(BaseModel._load_config_modules, "module_config")
    unknown["modules.json"] = legacy | _unknown(entries, ENTRIES)
    unknown["config.json"] = _unknown(_keys_of_configs(), COMMON)
    for name in ("bert", "roberta", "xlm-roberta"):
        applied = declared_keys(CONFIG_MAPPING[name]).applied
        unknown[name] = _unknown(applied, COMMON | known_settings.ENCODERS)
    assert {name: keys for name, keys in unknown.items() if keys} == {}


def test_every_module_is_known() -> None:
    kinds = {kind.__name__ for kind in _modules() if not inspect.isabstract(kind)}
    passed_on = {"Transformer", "MLMTransformer", "Router", "InputModule", "Module", "Asym"}
    assert kinds - passed_on - MODULES.keys() - known_settings.UNSUPPORTED_MODULES == set()


def test_keys_that_models_ask_for_are_known() -> None:
    unknown = {}
    for kind in _PROVEN:
        config = CONFIG_MAPPING[kind]
        source = inspect.getsource(import_module(config.__module__.replace("configuration_", "modeling_")))
        asked = {*re.findall(r'getattr\((?:self\.)?config, "(\w+)"', source)}
        asked |= _named_in(inspect.unwrap(config.__post_init__), "kwargs")
        known = COMMON | known_settings.UNDECLARED | declared_keys(config)
        unknown[kind] = _unknown([key for key in asked if not key.startswith("_")], known)
    assert {kind: keys for kind, keys in unknown.items() if keys} == {}


@pytest.mark.exhaustive
def test_no_key_of_a_config_of_transformers_is_unknown() -> None:
    for kind in CONFIG_MAPPING:
        try:
            said = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
        except Exception:  # one that needs other packages, or parts
            continue
        known = known_settings.known_keys_of(said | {"model_type": kind})
        assert known is None or list(known.examine(said)) == [], kind


@families([*FAMILIES, LISTWISE, *FORMS], {"ColBERT", "BERT", "LogitScore", "SPLADE", "MPNet"})
def test_no_key_of_a_family_is_unknown(family: Family, checkpoints: SharedCheckpoints) -> None:
    assert known_settings.check_settings(EngineConfig(model=checkpoints(family.build))) == ()


def test_unknown_keys_are_named_at_every_start(changed: Changed, caplog: pytest.LogCaptureFixture) -> None:
    path = changed(
        bi_encoders.gte,
        settings(new_norm=1, scale_logits=True),
        settings(_OF_ALL, whitening=True, query_expansion={"strategy": "min", "length": 4, "tail": 1}),
        settings("sentence_bert_config.json", max_seq_length=5000),
    )
    config = EngineConfig(model=path, dtype="float32")
    expected = ["config.json: new_norm, scale_logits", f"{_OF_ALL}: whitening, query_expansion.tail"]

    def named() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if "unknown keys in" in record.getMessage()]
        caplog.clear()
        return [re.sub(r".* unknown keys in (.*);.*", r"\1", line) for line in lines]

    load_model(config, CPU)
    assert re.search(r"sets max_seq_length to 5000, but its config.json has \d+", caplog.text)
    assert sorted(named()) == sorted(expected)
    assert load_model(config, CPU).compared, "the recipe is to be used"
    assert sorted(named()) == sorted(expected)
    assert sorted(inspect_model(config)["unknown keys"]) == sorted(expected)


_USES = ("unknown", "applied", "irrelevant", "refused")
_TEXTS = ("Where do SWALLOWS sleep?", [
    "in the reeds, by the thousand",
    "Zürich liegt am [SEP] Zu\u0308richsee <pad> </s>, where swallows sleep  ",
    "It is late in the year, and the swallows are gone; nobody knows where they sleep. " * 9,
])  # fmt: skip


@dataclass(frozen=True, eq=False)
class Base:
    """A checkpoint whose keys are changed in `files` (a pattern), and the class that reads it. One checkpoint
    shows for all which keys of config.json change nothing."""

    name: str
    build: Build
    kind: type[Any]
    files: str
    edits: tuple[Edit, ...] = ()


_USE = f"{_OF_ALL}|{_OF_TEXTS}|modules.json|artifact.metadata|.*_.*/config.json"
BASES = {
    base.name: base
    for base in (
        Base("bi-encoder", partial(bi_encoders.bert, behind="a residual",
                                   prompts={"query": "ask: ", "no": "x "}), SentenceTransformer, ".*"),
        Base("classifier", cross_encoders.bert, CrossEncoder, f"config.json|{_TOKENIZER}",
             (settings(_TOKENIZER, model_max_length=100),)),
        Base("RoBERTa", cross_encoders.roberta, CrossEncoder, f"config.json|{_TOKENIZER}"),
        Base("modules", cross_encoders.scored_by_modules, CrossEncoder, _USE),
        Base("ModernBERT", cross_encoders.modernbert, CrossEncoder, "config.json"),
        Base("in chat", cross_encoders.qwen3_in_chat, CrossEncoder, _TOKENIZER),
        Base("words", language_models.zerank_2, CrossEncoder, _USE),
        Base("SPLADE", sparse_encoders.splade, SparseEncoder, _USE),
        Base("late", partial(late_interaction.native, token_pooling=True), MultiVectorEncoder, _USE),
        Base("PyLate", partial(late_interaction.pylate_modernbert, model_type="ColBERT"), MultiVectorEncoder,
             _USE),
        Base("ColBERT", late_interaction.stanford, MultiVectorEncoder, _USE),
        Base("Qwen3", bi_encoders.qwen3, SentenceTransformer, "config.json"),
        Base("EmbeddingGemma", bi_encoders.embeddinggemma, SentenceTransformer, "config.json"),
    )
}  # fmt: skip

# Other values of keys, where the type of the present one does not tell; several where one might mean nothing.
_VALUES: Mapping[str, tuple[Any, ...]] = {
    "similarity_fn_name": ("dot", "euclidean", "meanmaxsim"),
    "activation_function": ("torch.nn.modules.activation.Sigmoid",),
    "default_prompt_name": ("no",),
    "prompts": ({"query": "find: ", "document": "text: ", "no": "none "},),
    "truncate_dim": (16,), "max_active_dims": (8,), "requirements": ({"transformers": ">=99"},),
    "query_length": (30,), "document_length": (12,),
    "query_expansion": ({"strategy": "fixed", "attend": True, "length": 40}, None),
    "skiplist_words": (["swallows", "the"],), "skiplist_tasks": (["query"],),
    "keep_only_token_ids": ([1996, 2003, 1999],), "query_prefix": ("sleep ",), "document_prefix": ("the ",),
    "query_token_id": ("[unused3]",), "doc_token_id": ("[unused4]",), "transformer_task": ("fill-mask",),
    "modality_config": tuple({"text": {"method": "forward", "method_output_name": name}}
                             for name in (["hidden_states", 1], "pooler_output")),
    "module_output_name": ("sentence_embedding", "token_embeddings", "scores"),
    "module_input_name": ("token_embeddings", "sentence_embedding"),
    "processing_kwargs": ({"text": {"max_length": 60}}, {"common": {"add_special_tokens": False}},
                          {"chat_template": {"continue_final_message": True}},
                          {"chat_template": {"sanitize_control_tokens": True}}),
    "tokenizer_name_or_path": ("elsewhere",),
    "processor_kwargs": ({"model_max_length": 60}, {"truncation_side": "left", "model_max_length": 60},
                         {"split_special_tokens": True}),
    "tokenizer_args": ({"model_max_length": 60}, {"do_lower_case": False}),
    "config_kwargs": ({"hidden_act": "relu"}, {"num_hidden_layers": 1}, {"is_decoder": True}),
    "config_args": ({"layer_norm_eps": 0.1},),
    "model_kwargs": ({"attn_implementation": "eager"}, {"torch_dtype": "bfloat16"},
                     {"key_mapping": {"a": "b"}}),
    "model_args": ({"num_labels": 3},), "pooling_mode": ("cls", "lasttoken", ["mean", "max"]),
    "pooling_strategy": ("sum",), "tasks": (["query", "document"],), "bias": (False,),
    "model_input_names": (["input_ids", "attention_mask"], ["input_ids", "token_type_ids", "attention_mask"]),
    "chat_template": ("{% for m in messages %}{{ m.content }}[SEP]{% endfor %}",),
    "added_tokens_decoder": ({"1996": {"content": "the", "lstrip": True, "rstrip": True, "normalized": False,
                                       "single_word": False, "special": True}},),
    "additional_special_tokens": (["sleep", "the"],),
    "extra_special_tokens": (["sleep", "the"], {"my_token": "sleep"}),
    "model_specific_special_tokens": ({"my_token": "sleep"},),
    "tokenizer_class": ("PreTrainedTokenizerFast", "BertTokenizer", "XLMRobertaTokenizer"),
    "auto_map": ({"AutoTokenizer": ["mine.Tokenizer", None]},), "init_inputs": ([],),
    "chat_control_tokens": (["the"],), "architectures": (["BertForMaskedLM"], None), "dtype": ("float16",),
    "torch_dtype": ("bfloat16",), "id2label": ({"0": "relevant"}, {"1": "b", "0": "a"}),
    "label2id": ({"relevant": 0}, {"a": 1, "b": 0}), "num_labels": (1, 3),
    "problem_type": ("regression", "multi_label_classification"),
    "hidden_activation": ("relu", "gelu_pytorch_tanh"), "classifier_pooling": ("cls", "mean"),
    "pad_token_id": (5, None), "position_embedding_type": ("relative_key_query",),
    "pruned_heads": ({"0": [1]},), "attn_implementation": ("eager", "sdpa"),
    "experts_implementation": ("eager",), "per_layer_config": ({"0": {"layer_norm_eps": 0.3}},),
    "sentence_transformers": ({"activation_fn": "torch.nn.modules.linear.Identity"},),
    "quantization_config": ({"quant_method": "gptq", "bits": 4},),
    "compression_config": ({"quant_method": "compressed-tensors", "format": "pack-quantized"},),
    "rope_scaling": ({"type": "linear", "factor": 4.0},),
    "rope_parameters": ({"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},),
    "rope_theta": (500.0,),
    **dict.fromkeys(("activation_fn", "sbert_ce_default_activation_function"),
                    ("torch.nn.modules.activation.Tanh",)),
    **dict.fromkeys(("normalize_embeddings", "is_causal", "use_bidirectional_attention"), (True, False)),
    **dict.fromkeys(("hidden_act", "classifier_activation"), ("relu",)),
    **dict.fromkeys(("query_pre_attn_scalar", "unk_id"), (3,)),
    "similarity": ("l2",), "interaction": ("flipr",), "kwargs": (["task"],), "name": ("another",),
    "__version__": ({"sentence_transformers": "9.9"},), "keep_in_fp32_modules": (["classifier"],),
    "sp_model_kwargs": ({"nbest_size": -1},), "tie_encoder_decoder": (True,),
    **dict.fromkeys(("layer_norm_eps", "norm_eps", "rms_norm_eps"), (0.5,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0.5,)),
    **dict.fromkeys(("max_seq_length", "model_max_length", "max_len"), (60,)),
    **dict.fromkeys(("model_type", "layer_types", "type", "path", "text_config", "vision_config"), ()),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "idx", "chunk_size_feed_forward"), (7,)),
    **dict.fromkeys(("sliding_window", "local_attention"), (4,)),
    **dict.fromkeys(("truncation_side", "padding_side"), ("left",)),
}  # fmt: skip
_SPECIAL = re.compile(r"_token$")


def _others(key: str, value: Any) -> tuple[Any, ...]:
    if key in _VALUES:
        return tuple(each for each in _VALUES[key] if each != value)
    if _SPECIAL.search(key):
        return ("sleep",)
    match value:
        case bool():
            return (not value,)
        case int():
            return (value // 2 or value + 1,)
        case float():
            return (value * 3 or 0.5,)
        case str():
            return (value + "x",)
        case list() | dict():
            return (value * 0 if isinstance(value, list) else {},)
    return (True,)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether a key was applied, irrelevant or refused, and changed the reference's scores."""

    use: str
    changes: bool


class Walk:
    """Copies of a checkpoint, each with one key changed, scored here and by the reference."""

    def __init__(self, base: Base, checkpoints: SharedCheckpoints, folder: Path) -> None:
        self._base, self._folder, self._source = base, folder / "copy", folder / "source"
        shutil.copytree(checkpoints(base.build), self._source, symlinks=False)
        for edit in base.edits:
            edit(self._source)
        self._before = self._reference(self._source)

    def rows(self) -> Iterator[tuple[str, str, Known]]:
        for name, key, known in self._all_rows():
            of_all = name.endswith("config.json") and known.use_of(key) == "irrelevant"
            if re.fullmatch(self._base.files, name) and (not of_all or self._base.files == ".*"):
                yield name, key, known

    def _all_rows(self) -> Iterator[tuple[str, str, Known]]:
        for path in sorted(self._source.rglob("*")):
            name = path.relative_to(self._source).as_posix()
            if name in FILES and path.is_file():
                keys = _of_files().get(name, set()) | set(json.loads(path.read_text()))
                for key in sorted(keys | FILES[name].refused.keys()):
                    yield name, key, FILES[name]
            elif name == "config.json" and (config := json.loads(path.read_text())).get("model_type"):
                declared = declared_keys(CONFIG_MAPPING[config["model_type"]]).applied
                known = known_settings.known_keys_of(config)
                assert known is not None
                keys = declared | _keys_of_configs() | known.refused.keys() | config.keys()
                for key in sorted(keys - {"self", "kwargs"}):
                    yield name, key, known
            elif name == "modules.json":
                for key in sorted(ENTRIES.applied | ENTRIES.irrelevant | ENTRIES.refused.keys()):
                    yield name, key, ENTRIES
        modules = self._source / "modules.json"
        for module in json.loads(modules.read_text()) if modules.exists() else ():
            kind = module["type"].rpartition(".")[2]
            path = f"{module['path']}/config.json"
            if kind in MODULES and (self._source / path).exists():
                found = next(each for each in _modules() if each.__name__ == kind)
                said = json.loads((self._source / path).read_text())
                for key in sorted(_keys_of_module(found) | said.keys()):
                    yield path, key, MODULES[kind]

    def outcomes(self, file: str, key: str, known: Known) -> Iterator[tuple[Any, Outcome | str]]:
        said = json.loads((self._source / file).read_text())
        present = said[0].get(key) if isinstance(said, list) else said.get(key)
        for value in _others(key, present):
            yield value, self._outcome(self._changed(file, key, value), key, known.use_of(key))

    def _changed(self, file: str, key: str, value: Any) -> Path:
        shutil.rmtree(self._folder, ignore_errors=True)
        link = lambda path, to: (os.link if path.endswith(".safetensors") else shutil.copy2)(path, to)  # noqa: E731
        shutil.copytree(self._source, self._folder, copy_function=link)
        said = json.loads((self._folder / file).read_text())
        if isinstance(said, list):
            for i, each in enumerate(said):
                each[key] = f"{i}{value}" if key == "name" else value
        else:
            said[key] = value
        (self._folder / file).write_text(json.dumps(said))
        return self._folder

    def _outcome(self, folder: Path, key: str, use: str | None) -> Outcome | str:
        expected: Any = None
        try:
            expected = self._reference(folder)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        try:
            ours = _ours(folder)
        except ModelLoadError as error:
            if expected is None:
                return Outcome("refused", changes=False)
            # A key that asks for other tensors has these named.
            is_named = re.search(rf"\b{re.escape(key)}\b|do not fit|misfit", str(error)) is not None
            if use == "irrelevant" or not is_named:
                return f"is {use}, and the refusal is: {error}"
            return Outcome("refused", not _same(expected, self._before))
        except Exception as error:
            if expected is None and isinstance(error, InvalidRequestError):  # a token without an embedding
                return Outcome("refused", changes=False)
            return f"ends in {type(error).__name__}: {error}"
        if expected is None:
            return f"the reference fails ({' '.join(why.split())[:150]}), and here there are scores: {ours}"
        if not _same(ours, expected):
            return f"the scores are {ours}, the reference's {expected}, and before {self._before}"
        changes = not _same(expected, self._before)
        if use == "irrelevant" and changes:
            return f"is irrelevant, and the scores were {self._before} and are {expected}"
        if use == "refused":
            return "is to be refused, and there are scores"
        return Outcome(use or "unknown", changes)

    def _reference(self, path: Path) -> list[float]:
        """One by one, so that nothing is padded."""
        # Our scores are those of the weights as they are stored, computed in float32.
        model = self._base.kind(str(path), device="cpu", model_kwargs={"dtype": "auto"}).float()
        query, documents = _TEXTS
        if self._base.kind is CrossEncoder:
            scores = model.predict([(query, each) for each in documents], batch_size=1)
            return [float(score) for score in np.ravel(scores)]
        queries, encoded = model.encode_query([query]), model.encode_document(documents, batch_size=1)
        return [float(score) for score in model.similarity(queries, encoded)[0]]


def _ours(path: Path) -> list[float]:
    query, documents = _TEXTS
    config = EngineConfig(model=str(path), dtype="float32", device="cpu", threads=1)
    with SyncEngine(config, progress=False) as engine:
        return engine.score(query, documents, truncation=CUT_LONG).scores


def _same(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and np.allclose(one, other, rtol=1e-5, atol=1e-5)


# Keys that `make test` tries: one of each use, of several files.
_FEW = (
    ("config.json", "layer_norm_eps"), ("config.json", "hidden_dropout_prob"),
    ("config.json", "pruned_heads"), (_OF_TEXTS, "max_seq_length"), ("modules.json", "kwargs"),
)  # fmt: skip


def test_some_keys_do_what_they_do_in_libraries(checkpoints: SharedCheckpoints, tmp_path: Path) -> None:
    walk = Walk(BASES["bi-encoder"], checkpoints, tmp_path)
    known = {(file, key): each for file, key, each in walk.rows() if (file, key) in _FEW}
    found = [outcome for (file, key), each in known.items() for _, outcome in walk.outcomes(file, key, each)]
    assert Counter(found) == {
        Outcome("applied", True): 2, Outcome("irrelevant", False): 1, Outcome("refused", False): 2,
    }  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", BASES)
def test_every_key_has_the_effect_that_it_has_in_the_libraries(
    name: str, checkpoints: SharedCheckpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    walk, wrong, counted = Walk(BASES[name], checkpoints, tmp_path), [], Counter[str]()
    for file, key, known in walk.rows():
        found = [*walk.outcomes(file, key, known)]
        wrong += [f"{file}: {key}={value!r} {each}" for value, each in found if isinstance(each, str)]
        uses = [each.use for _, each in found if isinstance(each, Outcome)]
        # A key of which some values are refused is applied.
        counted.update(sorted(uses, key=_USES.index)[:1])
    with capsys.disabled():
        print(f"\n{name}: " + ", ".join(f"{counted[use]} {use}" for use in _USES))
    assert wrong == [], "\n" + "\n".join(wrong)
    assert counted["unknown"] == 0
