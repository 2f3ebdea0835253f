"""Pairs of starts over one cache folder, for test_fingerprint: each differs in exactly one ingredient."""

import copy
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from maxsimd.engine.checkpoint import LoadedModel
from tests.checkpoints import bi_encoders, late_interaction, two_towers, vision_language, visual

Edit = Callable[[Path], None]
Alteration = Callable[[LoadedModel], LoadedModel]

BUILDERS: dict[str, Callable[[Path], str]] = {
    "colbert": late_interaction.stanford,
    "multi-vector": late_interaction.pooled,
    "bert": bi_encoders.gte,
    "instructor": bi_encoders.without_prompt,
    "qwen3": bi_encoders.qwen3,
    "gemma": bi_encoders.embeddinggemma,
    "colpali": visual.colpali,
    "colqwen3": vision_language.colqwen3,
    "siglip": two_towers.siglip,
}

# The files of a checkpoint.
CONFIG, WEIGHTS, MODULES = "config.json", "model.safetensors", "modules.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TRANSFORMER, PROMPTS = "sentence_bert_config.json", "config_sentence_transformers.json"
COLBERT, POOLING, DENSE = "artifact.metadata", "1_Pooling/config.json", "2_Dense/config.json"
PROCESSOR = "processor_config.json"
MASK, MERGING = "2_MultiVectorMask/config.json", "4_HierarchicalTokenPooling/config.json"


@dataclass(frozen=True)
class Pair:
    """Two starts. The second has an `edit`ed copy of the first one's checkpoint, other `options`, a model
    altered once it is loaded, or a machine where `patch` holds: what an attribute is there."""

    ingredient: str
    what: str
    checkpoint: str
    edit: Edit = lambda folder: None
    options: dict[str, Any] = field(default_factory=dict)
    options_of_both: dict[str, Any] = field(default_factory=dict)
    first: Alteration = lambda model: model
    second: Alteration = lambda model: model
    patch: tuple[str, Any] | None = None

    def __str__(self) -> str:
        return f"{self.ingredient}: {self.what} ({self.checkpoint})"


def json_edit(path: str, change: Callable[[Any], object]) -> Edit:
    """Lets `change` change a JSON file's content in place."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / path).read_text(encoding="utf-8"))
        change(content)
        (folder / path).write_text(json.dumps(content), encoding="utf-8")

    return edit


def keys(ingredient: str, checkpoint: str, path: str, **values: Any) -> Pair:
    """Some keys of a JSON file with other values."""
    edit = json_edit(path, lambda content: content.update(values))
    return Pair(ingredient, " and ".join(values), checkpoint, edit)


def number(ingredient: str, checkpoint: str, path: str, tensor: str) -> Pair:
    """One number of one tensor."""

    def edit(folder: Path) -> None:
        tensors = load_file(folder / path)
        tensors[tensor].view(-1)[-1] += 1
        save_file(tensors, folder / path, metadata={"format": "pt"})

    return Pair(ingredient, tensor, checkpoint, edit)


def option(ingredient: str, checkpoint: str, **options: Any) -> Pair:
    """An option of the engine."""
    return Pair(ingredient, " and ".join(options), checkpoint, options=options)


def machine(ingredient: str, attribute: str, value: Any) -> Pair:
    """The same files and options where an attribute has another value."""
    return Pair(ingredient, attribute, "bert", patch=(attribute, value))


def _two_words_swapped(tokenizer: Any) -> None:
    words = tokenizer["model"]["vocab"]
    words["file"], words["read"] = words["read"], words["file"]


def _only_the_text(tokenizer: Any) -> None:
    tokenizer["post_processor"]["single"] = [{"Sequence": {"id": "A", "type_id": 0}}]


def _document_prompt(settings: Any) -> None:
    settings["prompts"]["document"] = "Represent: "


def _last_two_in_the_other_order(modules: Any) -> None:
    for key in ("path", "type"):
        modules[-1][key], modules[-2][key] = modules[-2][key], modules[-1][key]


def _with_a_buffer(value: float) -> Alteration:
    """A backbone with a buffer that its checkpoint holds; none of transformers' text encoders has one."""

    def altered(model: LoadedModel) -> LoadedModel:
        backbone = copy.deepcopy(model.backbone)
        backbone.register_buffer("scale", torch.tensor(value))
        return dataclasses.replace(model, backbone=backbone)

    return altered


def _one_token_less(model: LoadedModel) -> LoadedModel:
    assert model.document.trailing_ids is not None
    rules = dataclasses.replace(model.document, trailing_ids=model.document.trailing_ids[1:])
    return dataclasses.replace(model, document=rules)


def _other_tower_norms(config: Any) -> None:
    config["vlm_config"]["vision_config"]["layer_norm_eps"] = 1e-3


def _other_colours(settings: Any) -> None:
    settings["image_processor"]["image_mean"] = [0.4, 0.5, 0.6]


def _without_the_first(model: LoadedModel) -> LoadedModel:
    return dataclasses.replace(model, document=dataclasses.replace(model.document, pool_first=False))


def _filled_up_less(model: LoadedModel) -> LoadedModel:
    expansion = model.document.expansion
    assert expansion is not None
    less = dataclasses.replace(expansion, length=expansion.length - 1)
    return dataclasses.replace(model, document=dataclasses.replace(model.document, expansion=less))


def _another_request(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text(
        template.read_text(encoding="utf-8").replace("Describe the", "Show the"), encoding="utf-8"
    )


def _columns_not_normalised(model: LoadedModel) -> LoadedModel:
    task = model.tasks[model.score_task]
    head: Any = task.head
    other = dataclasses.replace(task, head=type(head)(head.inner, head.dimensions, normalised=False))
    return dataclasses.replace(model, tasks={model.score_task: other})


_TANH = "torch.nn.modules.activation.Tanh"
_ROPE = {"rope_type": "default", "rope_theta": 20_000.0}

PAIRS = [
    number("weights", "colbert", WEIGHTS, "bert.embeddings.LayerNorm.bias"),
    number("weights", "bert", WEIGHTS, "encoder.layer.2.output.dense.bias"),
    Pair("buffers", "scale", "bert", first=_with_a_buffer(1.0), second=_with_a_buffer(2.0)),
    number("head weights", "colbert", WEIGHTS, "linear.weight"),
    number("head weights", "gemma", "2_Dense/model.safetensors", "linear.weight"),
    # RoBERTa's tensors have the same names; its positions begin elsewhere, so it takes fewer tokens.
    dataclasses.replace(
        keys("architecture", "bert", CONFIG, model_type="roberta", architectures=["RobertaModel"]),
        options_of_both={"max_model_len": 64},
    ),
    keys("settings", "bert", CONFIG, layer_norm_eps=1e-3),
    keys("settings", "bert", CONFIG, hidden_act="relu"),
    keys("settings", "bert", CONFIG, num_attention_heads=2),
    keys("settings", "bert", CONFIG, position_embedding_type="relative_key"),
    keys("settings", "gemma", CONFIG, sliding_window=8),
    keys("settings", "gemma", CONFIG, query_pre_attn_scalar=64),
    keys("settings", "qwen3", CONFIG, rope_parameters=_ROPE),
    keys("settings", "bert", TRANSFORMER, model_args={"attn_implementation": "eager"}),
    Pair("tokenizer", "two words", "colbert", json_edit(TOKENIZER, _two_words_swapped)),
    keys("tokenizer", "qwen3", TRANSFORMER, do_lower_case=True),
    Pair("template", "no special tokens", "qwen3", json_edit(TOKENIZER, _only_the_text)),
    keys("inputs", "bert", TOKENIZER_CONFIG, model_input_names=["input_ids", "attention_mask"]),
    Pair("prompt", "prompts", "multi-vector", json_edit(PROMPTS, _document_prompt)),
    Pair("prompt", "prompts", "instructor", json_edit(PROMPTS, _document_prompt)),
    option("prompt", "bert", document_prompt="passage: "),
    keys("prompt", "colpali", PROCESSOR, query_prefix="Question: "),
    Pair("fixed tokens", "one less behind", "colpali", second=_one_token_less),
    Pair("special tokens pooled", "all but the first", "bert", second=_without_the_first),
    Pair("expansion", "one less", "siglip", second=_filled_up_less),
    Pair("chat template", "another request", "colqwen3", _another_request),
    Pair("pictures", "colours", "colpali", json_edit(PROCESSOR, _other_colours)),
    Pair("tower settings", "of norms", "colpali", json_edit(CONFIG, _other_tower_norms)),
    number("tower weights", "colpali", WEIGHTS, "vlm.multi_modal_projector.linear.bias"),
    keys("prompt pooled", "instructor", POOLING, include_prompt=True),
    keys("document length", "colbert", COLBERT, doc_maxlen=100),
    keys("document length", "multi-vector", TRANSFORMER, document_length=64),
    keys("model length", "bert", TOKENIZER_CONFIG, model_max_length=100),
    option("model length", "bert", max_model_len=100),
    keys("skip list", "colbert", COLBERT, mask_punctuation=False),
    keys("skip list", "multi-vector", MASK, skiplist_words=[",", "."]),
    keys("skip list", "multi-vector", MASK, skiplist_tasks=["query"]),
    keys("pooling", "bert", POOLING, pooling_mode="cls"),
    keys("pooling", "bert", POOLING, pooling_mode="weightedmean"),
    Pair("head", "no Normalize", "bert", json_edit(MODULES, lambda modules: modules.pop())),
    keys("head", "gemma", DENSE, activation_function=_TANH),
    Pair("head", "order", "gemma", json_edit(MODULES, _last_two_in_the_other_order)),
    option("dimensions", "bert", dimensions=16),
    Pair("dimensions", "8, not 16", "bert", options={"dimensions": 8}, options_of_both={"dimensions": 16}),
    Pair(
        "dimensions",
        "not normalised again",
        "bert",
        options_of_both={"dimensions": 16},
        second=_columns_not_normalised,
    ),
    option("token pooling", "colbert", doc_token_pooling=2.0),
    keys("token pooling", "multi-vector", MERGING, pool_factor=3.0),
    keys("token pooling", "multi-vector", MERGING, tasks=["query"]),
    keys("token pooling", "multi-vector", MERGING, normalize_embeddings=False),
    option("precision", "bert", dtype="bfloat16"),
    option("stored precision", "bert", cache_precision="int8"),
    option("quantization", "bert", quantization="int8"),
    option("kernels", "bert", kernels="torch"),
    machine("kernels", "maxsimd.engine.ops.cpu.is_available", lambda: False),
    option("attention", "bert", attention="torch"),
    option("packing", "bert", packing="off"),
    option("fused head", "colbert", maxsim="triton"),
    machine("device", "torch.backends.cpu.get_cpu_capability", lambda: "another"),
    machine("device", "torch.cpu._is_amx_tile_supported", lambda: "another"),
    machine("versions", "maxsimd.engine.cache.fingerprint.version", lambda library: "another"),
]

# What queries and their comparison with documents depend on, and no document's embedding does.
OF_QUERIES = [
    keys("none", "colbert", COLBERT, query_maxlen=40),
    keys("none", "colbert", COLBERT, attend_to_mask_tokens=True),
    keys("none", "bert", PROMPTS, prompts={"query": "query: "}),
    keys("none", "bert", PROMPTS, similarity_fn_name="dot"),
]

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
# Options whose effect shows in the loaded model, and those that only models without cached documents take.
SEEN_IN_THE_MODEL = {
    *("model", "revision", "score_type", "device", "instruction", "score_template", "cutoff_layer"),
    *("hybrid_weights", "compress_ratio", "compress_layers"),
}
