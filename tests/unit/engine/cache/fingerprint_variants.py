"""Copies of checkpoints for test_fingerprint, which differ in what some ingredients are made of."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.checkpoints import bi_encoders, late_interaction, vision_language, visual

Edit = Callable[[Path], None]

BUILDERS: dict[str, Callable[[Path], str]] = {
    "colbert": late_interaction.stanford,
    "multi-vector": late_interaction.pooled,
    "bert": bi_encoders.gte,
    "instructor": bi_encoders.without_prompt,
    "qwen3": bi_encoders.qwen3,
    "gemma": bi_encoders.embeddinggemma,
    "colpali": visual.colpali,
    "colqwen3": vision_language.colqwen3,
}

# The files of a checkpoint.
CONFIG, WEIGHTS, MODULES = "config.json", "model.safetensors", "modules.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TRANSFORMER, PROMPTS = "sentence_bert_config.json", "config_sentence_transformers.json"
COLBERT, POOLING, DENSE = "artifact.metadata", "1_Pooling/config.json", "2_Dense/config.json"
PROCESSOR = "processor_config.json"
MASK, MERGING = "2_MultiVectorMask/config.json", "4_HierarchicalTokenPooling/config.json"


@dataclass(frozen=True)
class Variant:
    """A copy of a checkpoint with edits, by the one ingredient that each changes. `options` of the engine
    change the ingredients in `by_options`; those of `both` are the first start's, too."""

    checkpoint: str
    edits: dict[str, Edit] = field(default_factory=dict)
    by_options: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    both: dict[str, Any] = field(default_factory=dict)

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


def _only_the_text(tokenizer: Any) -> None:
    tokenizer["post_processor"]["single"] = [{"Sequence": {"id": "A", "type_id": 0}}]


def _document_prompt(settings: Any) -> None:
    settings["prompts"]["document"] = "Represent: "


def _other_tower_norms(config: Any) -> None:
    config["vlm_config"]["vision_config"]["layer_norm_eps"] = 1e-3


def _other_colours(settings: Any) -> None:
    settings["image_processor"]["image_mean"] = [0.4, 0.5, 0.6]


def _another_request(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text(
        template.read_text(encoding="utf-8").replace("Describe the", "Show the"), encoding="utf-8"
    )


_TANH = "torch.nn.modules.activation.Tanh"
_ROPE = {"rope_type": "default", "rope_theta": 20_000.0}

# Each ingredient at most once in a variant. What only loaded models and the machine differ in is tried by
# test_fingerprint_parts.
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
    Variant("bert", {"settings": keys(TRANSFORMER, model_args={"attn_implementation": "eager"})}),
    # RoBERTa's tensors have the same names; its positions begin elsewhere, so it takes fewer tokens.
    Variant(
        "bert",
        {"architecture": keys(CONFIG, model_type="roberta", architectures=["RobertaModel"])},
        both={"max_model_len": 64},
    ),
    Variant(
        "gemma",
        {
            "head weights": number("2_Dense/model.safetensors", "linear.weight"),
            "settings": keys(CONFIG, sliding_window=8),
            "head": keys(DENSE, activation_function=_TANH),
        },
    ),
    Variant(
        "qwen3",
        {
            "settings": keys(CONFIG, rope_parameters=_ROPE),
            "tokenizer": keys(TRANSFORMER, do_lower_case=True),
            "template": json_edit(TOKENIZER, _only_the_text),
        },
    ),
    Variant(
        "multi-vector",
        {
            "prompt": json_edit(PROMPTS, _document_prompt),
            "document length": keys(TRANSFORMER, document_length=64),
            "skip list": keys(MASK, skiplist_words=[",", "."]),
            "token pooling": keys(MERGING, pool_factor=3.0),
        },
    ),
    Variant(
        "multi-vector",
        {"skip list": keys(MASK, skiplist_tasks=["query"]), "token pooling": keys(MERGING, tasks=["query"])},
    ),
    Variant(
        "instructor",
        {
            "prompt": json_edit(PROMPTS, _document_prompt),
            "prompt pooled": keys(POOLING, include_prompt=True),
        },
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
    Variant("colqwen3", {"chat template": _another_request}),
]

# Every kind of checkpoint once. The others try the same ingredients with other files and settings.
FIRST = [
    next(each for each in VARIANTS if each.checkpoint == name) for name in ("colbert", "bert", "colpali")
]

# What queries and their comparison with documents depend on, and no document's embedding does.
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
