"""Known settings: for each key of a checkpoint's configuration files, whether it is applied, cannot change
scores, or is refused.

A key is applied if our code reads it, or the code of transformers or sentence-transformers that makes the
model and reads its texts. A refused key may change scores and is not supported. All others are unknown: the
log and `maxsimd inspect` name them. Tests hold the tables against the keys that the libraries read.
"""

import dataclasses
import inspect
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from maxsimd.engine.checkpoint.files import (
    INSTRUCTORS,
    USAGE,
    json_of,
    local_folder,
    modules_in,
    names_of,
)
from maxsimd.engine.checkpoint.weights import some_of
from maxsimd.engine.config import EngineConfig
from maxsimd.engine.errors import ModelLoadError

# The most unknown keys of a file that are named.
_MOST_NAMED = 16
_NO: Mapping[str, Any] = MappingProxyType({})

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Known:
    """The known keys of an object: `applied`, `irrelevant` or `refused`. A refused key is allowed with one of
    the given values, which have no effect. Keys with one of the `endings` are applied. `inner` has the known
    keys of values that are objects, by key; "*" stands for all other keys."""

    applied: frozenset[str] = frozenset()
    irrelevant: frozenset[str] = frozenset()
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: _NO)
    endings: tuple[str, ...] = ()
    inner: Mapping[str, "Known"] = field(default_factory=lambda: _NO)

    def __or__(self, other: "Known") -> "Known":
        both = {name: self.inner[name] | other.inner[name] for name in self.inner.keys() & other.inner.keys()}
        return Known(
            self.applied | other.applied,
            self.irrelevant | other.irrelevant,
            {**self.refused, **other.refused},
            self.endings + other.endings,
            {**self.inner, **other.inner, **both},
        )

    def use_of(self, key: str) -> str | None:
        """The use of a key: applied, irrelevant or refused; None for an unknown one."""
        if key in self.applied:
            return "applied"
        if key in self.irrelevant:
            return "irrelevant"
        if key in self.refused:
            return "refused"
        return "applied" if self.endings and key.endswith(self.endings) else None

    def examine(self, said: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any, bool]]:
        """The keys of an object that are refused or unknown: the name, the value, and whether it is
        refused."""
        for key, value in said.items():
            name, use = f"{within}{key}", self.use_of(key)
            inner = self.inner.get(key) or self.inner.get("*")
            if use == "refused" and value not in self.refused[key]:
                yield name, value, True
            elif isinstance(value, dict) and inner is not None:
                yield from inner.examine(value, f"{name}.")
            elif use is None:
                yield name, value, False


def _known(
    applied: str = "",
    irrelevant: str = "",
    refused: Mapping[str, tuple[Any, ...]] = _NO,
    endings: tuple[str, ...] = (),
    **inner: Known,
) -> Known:
    return Known(frozenset(applied.split()), frozenset(irrelevant.split()), refused, endings, inner)


def _each(known: Known) -> Known:
    """An object whose keys are free names, and whose values have known keys."""
    return Known(inner={"*": known})


_OFF = (None, False)
_UNSET: tuple[Any, ...] = (None, {}, [])

_QUERY_EXPANSION = _known("strategy attend length token")
_OF_SENTENCE_TRANSFORMERS = _known(
    # of all models, and of one kind each
    "model_type prompts default_prompt_name similarity_fn_name requirements "
    "truncate_dim max_active_dims activation_fn "
    # PyLate's
    "query_prefix document_prefix query_length document_length do_query_expansion query_expansion "
    "attend_to_expansion_tokens attend_to_mask_tokens skiplist_words",
    "__version__ keep_in_fp32_modules",
    query_expansion=_QUERY_EXPANSION,
)
# Arguments of transformers' loading functions. maxsimd itself sets the source of the files, the precision
# and the device.
_LOADING = (
    "trust_remote_code subfolder token cache_dir revision local_files_only force_download proxies "
    "dtype torch_dtype device_map low_cpu_mem_usage use_safetensors attn_implementation use_cache verbose "
    "_from_auto offload_folder offload_state_dict max_memory use_fast"
)
_PROCESSING = _known(
    "text common image chat_template",
    "audio video",
    chat_template=_known(
        irrelevant="tokenize return_dict return_tensors padding",
        refused=dict.fromkeys(
            ("continue_final_message", "sanitize_control_tokens", "return_assistant_tokens_mask"), _OFF
        )
        | dict.fromkeys(("tools", "documents"), _UNSET),
        endings=("",),  # others are variables of the template
    ),
)
# All arguments of a tokenizer, except those that its file may not set.
_ARGUMENTS_OF_TOKENIZERS = Known(refused={"split_special_tokens": _OFF}, endings=("",))
_OF_TRANSFORMERS_MODULE = _known(
    "max_seq_length do_lower_case transformer_task modality_config module_output_name processing_kwargs "
    "query_length document_length query_expansion "
    "processor_kwargs tokenizer_args config_kwargs config_args model_kwargs model_args",
    "unpad_inputs backend",
    # A change of the files there would go unnoticed.
    {"tokenizer_name_or_path": (None,)},
    query_expansion=_QUERY_EXPANSION,
    modality_config=_each(_known("method method_output_name format")),
    processing_kwargs=_PROCESSING,
) | Known(
    inner=dict.fromkeys(("model_kwargs", "model_args"), _known(irrelevant=_LOADING))
    | dict.fromkeys(("processor_kwargs", "tokenizer_args"), _ARGUMENTS_OF_TOKENIZERS)
    | dict.fromkeys(("config_kwargs", "config_args"), Known(endings=("",)))
)


_OF_ADDED_TOKENS = _known("content lstrip rstrip normalized single_word special id __type")
_TOKENS = ("_token",)
_OF_TOKENIZERS = _known(
    "add_bos_token add_eos_token add_prefix_space added_tokens_decoder additional_special_tokens "
    "extra_special_tokens model_specific_special_tokens auto_map chat_template do_lower_case strip_accents "
    "tokenize_chinese_chars model_input_names model_max_length max_len tokenizer_class truncation_side "
    "padding_side legacy fix_mistral_regex trim_offsets unk_id init_inputs extra_ids "
    "split_by_punct",
    # how texts are padded, or token ids decoded
    "max_length padding pad_to_multiple_of pad_token_type_id stride truncation truncation_strategy "
    "clean_up_tokenization_spaces clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output "
    "spaces_between_special_tokens errors "
    # names, places, and what is for answers of chats
    "name_or_path processor_class verbose backend files_loaded is_local local_files_only device_map "
    "special_tokens_map_file tokenizer_file vocab_file merges_file response_template response_schema "
    "chat_control_tokens use_default_system_prompt "
    # of tokenizers in Python, which are not used
    "do_basic_tokenize never_split slow_tokenizer_class sp_model_kwargs keep_accents remove_space "
    "do_normalize tokenizer_type",
    {"split_special_tokens": _OFF},
    endings=_TOKENS,
    added_tokens_decoder=_each(_OF_ADDED_TOKENS),
)
_OF_SPECIAL_TOKENS = _known(
    "additional_special_tokens extra_special_tokens model_specific_special_tokens", endings=_TOKENS
) | _each(_OF_ADDED_TOKENS)
_OF_COLBERT = _known(
    "query_token_id doc_token_id doc_maxlen query_maxlen attend_to_mask_tokens mask_punctuation dim",
    # names of markers, which are read by their ids
    "query_token doc_token "
    # training, indexing, search, and the folders of these
    "overwrite root experiment index_root name rank nranks amp total_visible_gpus gpus "
    "avoid_fork_if_possible checkpoint triples collection queries index_name bsize accumsteps lr maxsteps "
    "save_every resume warmup warmup_bert nway use_ib_negatives reranker distillation_alpha ignore_scores "
    "model_name schedule index_path index_bsize nbits kmeans_niters pool_factor clustering_mode "
    "protected_tokens ncells centroid_score_threshold ndocs load_index_with_mmap rerank partitions "
    "meta version",
    {"similarity": (None, "cosine"), "interaction": (None, "colbert"), "relu": _OFF},
)
# Settings of adapters that are read or harmless; `adapters.py` refuses all others that are on.
OF_ADAPTERS = _known(
    "peft_type base_model_name_or_path revision task_type r lora_alpha use_rslora init_lora_weights bias "
    "rank_pattern alpha_pattern modules_to_save use_dora",
    # Tensors are there for the layers that these name; which way round a weight lies its layer says.
    "target_modules exclude_modules layers_to_transform layers_pattern fan_in_fan_out "
    "inference_mode auto_mapping lora_dropout peft_version megatron_core qalora_group_size "
    "ensure_weight_tying runtime_config ephemeral_gpu_offload",
)
_OF_ROUTERS = _known(
    "types parameters", "structure", parameters=_known("default_route route_mappings allow_empty_key")
)
# Entries of modules.json. `kwargs` names extra arguments of custom modules; no supported module takes any.
ENTRIES = _known("type path", "idx name", {"kwargs": _UNSET})
# sentence-transformers' modules, by the name of the class. PyLate's have the same names.
MODULES: Mapping[str, Known] = {
    "Pooling": _known(
        "pooling_mode include_prompt pooling_mode_cls_token pooling_mode_mean_tokens pooling_mode_max_tokens "
        "pooling_mode_mean_sqrt_len_tokens pooling_mode_weightedmean_tokens pooling_mode_lasttoken",
        "embedding_dimension word_embedding_dimension",  # that of the hidden states
    ),
    "Dense": _known(
        "in_features out_features bias activation_function module_input_name module_output_name use_residual",
        refused={"init_weight": (None,), "init_bias": (None,)},
    ),
    "Normalize": _known("module_input_name module_output_name"),
    "LayerNorm": _known("dimension"),
    "Dropout": _known(irrelevant="dropout"),
    "LogitScore": _known("true_token_id false_token_id module_input_name"),
    "SpladePooling": _known(
        "pooling_strategy activation_function", "embedding_dimension word_embedding_dimension chunk_size"
    ),
    "SparseStaticEmbedding": _known(irrelevant="frozen"),
    "MultiVectorMask": _known("skiplist_words skiplist_tasks keep_only_token_ids"),
    "HierarchicalTokenPooling": _known("pool_factor num_protected_tokens normalize_embeddings tasks"),
}
# Modules that no model is loaded with, whatever they say.
UNSUPPORTED_MODULES = frozenset(
    {
        *("BoW", "CLIPModel", "CNN", "LSTM", "StaticEmbedding", "WeightedLayerPooling", "WordEmbeddings"),
        *("WordWeights", "SparseAutoEncoder", "LambdaTokenPooling"),
    }
)
# Files by their names, config.json and modules.json apart.
FILES: Mapping[str, Known] = {
    "config_sentence_transformers.json": _OF_SENTENCE_TRANSFORMERS,
    **{
        f"sentence_{kind}_config.json": _OF_TRANSFORMERS_MODULE
        for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
    },
    "tokenizer_config.json": _OF_TOKENIZERS,
    "special_tokens_map.json": _OF_SPECIAL_TOKENS,
    "artifact.metadata": _OF_COLBERT,
    "router_config.json": _OF_ROUTERS,
}

_ROPE = _known(
    "rope_type type rope_theta factor original_max_position_embeddings attention_factor beta_fast beta_slow "
    "mscale mscale_all_dim truncate short_factor long_factor low_freq_factor high_freq_factor "
    "partial_rotary_factor mrope_section mrope_interleaved llama_4_scaling_beta",
)
_OF_ROPE = _ROPE | Known(inner={"*": _ROPE})  # by types of layers
# Keys of all families.
COMMON = _known(
    "model_type architectures auto_map id2label label2id num_labels problem_type dtype torch_dtype "
    "tokenizer_class quantization_config compression_config sentence_transformers "
    "sbert_ce_default_activation_function is_causal use_bidirectional_attention per_layer_config "
    "is_encoder_decoder tie_word_embeddings",
    # names and versions
    "_name_or_path name_or_path _commit_hash transformers_version adapter_transformers_version model_name "
    "finetuning_task task_specific_params language languages license tags "
    # what is returned beside the states, and how they are computed
    "output_hidden_states output_attentions return_dict use_cache tie_last_hidden_states attn_implementation "
    "_attn_implementation _attn_implementation_autoset experts_implementation _experts_implementation "
    "torchscript use_bfloat16 tf_legacy_loss use_flash_attn use_return_dict "
    # training
    "gradient_checkpointing initializer_range initializer_factor hidden_dropout_prob hidden_dropout "
    "attention_probs_dropout_prob attention_dropout classifier_dropout classifier_dropout_prob dropout "
    "embedding_dropout resid_pdrop embd_pdrop attn_pdrop layerdrop "
    # generation
    "max_length min_length do_sample early_stopping num_beams temperature top_k top_p typical_p "
    "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
    "epsilon_cutoff eta_cutoff encoder_repetition_penalty num_assistant_tokens num_assistant_tokens_schedule "
    "assistant_confidence_threshold assistant_lookbehind target_lookbehind num_beam_groups diversity_penalty "
    "prefix bos_token_id eos_token_id sep_token_id decoder_start_token_id cache_implementation",
    {
        # Classes of this version implement these only if they declare the key.
        "position_embedding_type": (None, "absolute"),
        "pruned_heads": _UNSET,
        "is_decoder": _OFF,
        "add_cross_attention": _OFF,
        "cross_attention_hidden_size": (None,),
        "tie_encoder_decoder": _OFF,
        # transformers fails on texts whose length is not a multiple of it.
        "chunk_size_feed_forward": (None, 0, 1),
        "rope_scaling": (None,),
        "rope_theta": (None,),
    },
    sentence_transformers=_known("activation_fn", "version"),
)
# The families of maxsimd.engine.models.bert.
ENCODERS = _known(
    "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act "
    "max_position_embeddings type_vocab_size layer_norm_eps pad_token_id is_decoder add_cross_attention",
    # of BERT as Google and Facebook trained it
    "directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head "
    "pooler_type output_past",
)
# Keys that the code of other families reads although their configuration class does not declare them.
UNDECLARED = _known(
    "head_dim rope_local_base_freq sliding_window sliding_window_pattern _sliding_window_pattern "
    "global_rope_theta local_rope_theta share_att_key norm_rel_ebd embedding_size conv_kernel_size conv_act "
    "conv_groups attention_head_size position_buckets pooler_hidden_size dense_act_fn is_gated_act "
    "scale_decoder_outputs attention_layers global_attn_every_n_layers block_ff_dim tie_embedding "
    "vision_config text_config image_token_id mm_tokens_per_image",
    "cls_dropout summary_proj_to_labels summary_first_dropout summary_type summary_activation "
    "summary_last_dropout summary_use_proj qa_dropout seq_classif_dropout generator_size n_ctx output_past "
    "n_positions net_structure_type gap_size num_memory_blocks down_scale_factor pretraining_tp "
    "deterministic_flash_attn reference_compile repad_logits_with_grad max_window_layers",
    {"use_mrope": _OFF, "talking_head": _OFF},
    # DBRX reads its value, but computes positions by rope_parameters.
    attn_config=_known(irrelevant="rope_theta"),
)
# For checkpoints with code of their own, which is not run: the keys that the translation of their config
# reads, and the keys of that code that change nothing.
PUBLISHED = _known(
    "rope_theta rope_scaling layer_norm_type pack_qkv logn_attention_scale position_embedding_type "
    "feed_forward_type is_decoder pad_vocab_size_multiple rotary_emb_base lora_adaptations "
    "activation_function causal expert_choice_router ffn_div layer_norm_epsilon mlp_fc1_bias mlp_fc2_bias "
    "moe_every_n_layers moe_normalize_expert_weights moe_top_k n_embd n_head n_inner n_layer n_positions "
    "num_experts num_shared_experts parallel_block prenorm qkv_proj_bias rotary_emb_fraction "
    "rotary_emb_interleaved rotary_emb_scale_base rotary_scaling_factor use_rms_norm "
    "pooling temperature head_type head_multi scale_emb scale_depth start_layer layer_wise layer_sep "
    "conv_zero_padding task_names",
    "logn_attention_clip1 unpad_inputs use_memory_efficient_attention emb_pooler model_max_length "
    "load_trained_adapters lora_rank lora_alpha lora_dropout_p lora_main_params_trainable "
    "add_pooling_layer dense_seq_output fused_bias_fc fused_dropout_add_ln max_trained_positions moe_impl "
    "moe_resid_pdrop use_xentropy dim_model_base matryoshka_dimensions output_past "
    "summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj "
    "reorder_and_upcast_attn parallel_block_tied_norm",
    {
        "scale_attn_weights": (None, True),
        "scale_attn_by_inverse_layer_idx": _OFF,
        "truncate_dim": (None,),
    },
)


def check_settings(config: EngineConfig) -> tuple[str, ...]:
    """Returns the unknown keys of a checkpoint's files on this machine, in a line for each file that has
    some. Raises ModelLoadError for a key that is refused. Warns of a length beyond the model's positions, and
    of an Instructor that pools prompts."""
    model, lines = config.model, []
    longest = positions = base = pools_prompts = None
    if model is None:
        return ()
    for name, said, known in _files_with_known_keys(model, config.revision, config.trust_remote_code):
        unknown = []
        for key, value, is_refused in known.examine(said):
            if is_refused:
                raise ModelLoadError(
                    f"{name} of {model!r} sets {key} to {json.dumps(value)[:60]}, which is not supported; "
                    "leave it out if the model was not trained with it"
                )
            unknown.append(key)
        if unknown:
            lines.append(f"{name}: {some_of(unknown, _MOST_NAMED)}")
        if known is MODULES["Pooling"] and "include_prompt" not in said:
            pools_prompts = name
        base = said.get("_name_or_path", base)
        longest = said.get("max_seq_length", longest)
        positions = said.get("max_position_embeddings", positions)
    if isinstance(longest, int) and isinstance(positions, int) and 0 < positions < longest:
        log.warning(
            "%s sets max_seq_length to %d, but its config.json has %d positions: longer texts are truncated "
            "to these; raise max_position_embeddings if the model was trained on longer ones",
            *(model, longest, positions),
        )
    if pools_prompts and model not in INSTRUCTORS and "instructor" in names_of(model, base):
        log.warning(
            "%s is an Instructor by its name, which leaves prompts out of pooling: add"
            ' "include_prompt": false to its %s, or true if it was trained otherwise',
            *(model, pools_prompts),
        )
    return tuple(lines)


def _files_with_known_keys(
    model: str, revision: str | None, trust_remote_code: bool
) -> Iterator[tuple[str, Mapping[str, Any], Known]]:
    """The files of a checkpoint that are on this machine, each by its name: what it says, and its known
    keys."""
    folder = local_folder(model, revision)
    if folder is None:
        return
    yield from _files_of_base(folder, trust_remote_code)
    modules = json_of(folder / "modules.json")
    for i, each in enumerate(modules if isinstance(modules, list) else []):
        if isinstance(each, dict) and "sentence_transformers." in str(each.get("type")):
            yield f"modules.json (module {i})", each, ENTRIES
    named = [(path, kind.rpartition(".")[2]) for path, kind in modules_in(folder)]
    is_gguf = Path(model).is_file() or (not any(folder.glob("*.safetensors")) and any(folder.glob("*.gguf")))
    # The transformer's files are at the root or in the folder of a module.
    roots = dict.fromkeys(["", *(path for path, kind in named if kind not in MODULES)])
    for root in roots:
        for name, known in FILES.items():
            if isinstance(said := json_of(folder / root / name), dict):
                yield str(Path(root) / name), said, known
        config = None if is_gguf else json_of(folder / root / "config.json")
        # jina-reranker-v2's has no type, and is read by its other keys.
        if not isinstance(config, dict) or {"model_type", "architectures"}.isdisjoint(config):
            continue
        if (known_of_config := known_keys_of(config, trust_remote_code)) is not None:
            yield str(Path(root) / "config.json"), config, known_of_config
    for path, kind in named:
        if kind in MODULES and path and isinstance(said := json_of(folder / path / "config.json"), dict):
            yield f"{path}/config.json", said, MODULES[kind]


def _files_of_base(folder: Path, trust_remote_code: bool) -> Iterator[tuple[str, Mapping[str, Any], Known]]:
    """The files of the base of an adapter, without those that the adapter has too."""
    adapter = json_of(folder / "adapter_config.json")
    base = adapter.get("base_model_name_or_path") if isinstance(adapter, dict) else None
    if not isinstance(base, str) or any(folder.glob("model*.safetensors*")):
        return
    try:
        for name, said, known in _files_with_known_keys(base, adapter.get("revision"), trust_remote_code):
            # An adapter with a modules.json says how the model is used.
            of_modules = name.startswith(USAGE) or name.endswith("/config.json")
            if not (folder / name).exists() and not (of_modules and (folder / "modules.json").exists()):
                yield f"{name} of its base", said, known
    except ModelLoadError:  # the reader of adapters says best why there is no such base
        return


def known_keys_of(config: Mapping[str, Any], trust_remote_code: bool = False) -> Known | None:
    """Returns the known keys of a config.json; None if they cannot be listed, because transformers lacks the
    type of model or the checkpoint's own code reads the file."""
    if trust_remote_code and "auto_map" in config:
        return None
    kind = config.get("model_type")
    is_translated = config.get("position_embedding_type") in ("alibi", "rotary")
    is_translated |= "XLMRobertaFlashConfig" in str(config.get("auto_map"))
    if kind in ("bert", "roberta", "xlm-roberta") and not is_translated:
        return COMMON | ENCODERS
    # Such checkpoints are read with transformers at every start.
    from transformers import CONFIG_MAPPING

    from maxsimd.engine.checkpoint.translate import translated_type
    from maxsimd.engine.models import registered  # noqa: F401 (transformers learns of our architectures)

    read_as, has_translation = translated_type(dict(config))
    if not isinstance(read_as, str) or read_as not in CONFIG_MAPPING:
        return None
    known = COMMON | UNDECLARED | declared_keys(CONFIG_MAPPING[read_as])
    for name in CONFIG_MAPPING[read_as].sub_configs:
        # A part may be of another type than the class has by default.
        part = known_keys_of(said) if isinstance(said := config.get(name), dict) else None
        if part is not None:
            known |= Known(inner={name: part})
    return known | PUBLISHED if has_translation else known


@cache
def declared_keys(kind: Any) -> Known:
    """The keys that a configuration class of transformers declares, or writes of its own accord, and those of
    its parts."""
    try:
        written = kind().to_dict()
    except Exception:  # it has no defaults, or needs another package
        written = {}
    names = {each.name for each in dataclasses.fields(kind)} | {*kind.attribute_map} | written.keys()
    names |= inspect.signature(kind.__init__).parameters.keys() - {"self", "args", "kwargs"}
    names.discard("chunk_size_feed_forward")
    inner = {
        name: COMMON | declared_keys(part)
        for name, part in kind.sub_configs.items()
        if hasattr(part, "__dataclass_fields__")
    }
    if "rope_parameters" in names:
        names |= {"rope_theta", "rope_scaling", "partial_rotary_factor"}  # of earlier versions, still read
        inner |= dict.fromkeys(("rope_parameters", "rope_scaling"), _OF_ROPE)
    # Classes set keys of their parts, which those of the parts do not declare.
    return Known(frozenset(names), inner=inner) | Known(inner=_parts_of(written))


def _parts_of(said: Mapping[str, Any]) -> Mapping[str, Known]:
    """All keys of a config's parts, as applied."""
    return {
        name: Known(frozenset(value), inner=_parts_of(value))
        for name, value in said.items()
        if isinstance(value, dict) and ("model_type" in value or name == "rope_parameters")
    }
