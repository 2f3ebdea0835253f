"""Vision-language models as sentence-transformers saves them, with chat templates."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling

from maxsimd.engine.checkpoint.visual_loaders import for_pictures_alone, without_videos
from tests.checkpoints import visual
from tests.checkpoints.late_interaction import OF_TOKENS
from tests.checkpoints.tokenizers import byte_level_bpe
from tests.checkpoints.visual import TILE, colqwen2, qwen2_vl, qwen_tokenizer, with_biases
from tests.checkpoints.weights import SIZES, change_config, save_own, save_tensors, spread

_WIDTHS = {"hidden_size": 64, "out_hidden_size": SIZES["hidden_size"], "intermediate_size": 96}
_TOWER = visual.QWEN_TOWER | _WIDTHS
_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
# The parts of a message: a picture or a text at a time.
_PARTS = (
    "{%- macro parts(message) -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}" + _PICTURE + "{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endmacro -%}"
)
# As ColQwen2 was trained: queries with ten tokens behind them, pages with a request.
COLQWEN_TEMPLATE = (
    _PARTS + "{%- if task is defined and task == 'query' -%}"
    "{%- for message in messages -%}{{ parts(message) }}{%- endfor -%}{{ '<|endoftext|>' * 10 }}"
    "{%- else -%}<|im_start|>user\n"
    "{% for message in messages -%}{{ parts(message) }}"
    "{%- if message.content[-1].type == 'image' -%}Describe the image.{%- endif -%}{%- endfor -%}"
    "<|im_end|><|endoftext|>{%- endif -%}"
)
COLSMOL_TEMPLATE = (
    COLQWEN_TEMPLATE.replace(_PICTURE, "<image>")
    .replace("<|endoftext|>' * 10", "<end_of_utterance>' * 10")
    .replace("<|im_start|>user\n", "<|im_start|>User:")
    .replace("<|im_end|><|endoftext|>", "<end_of_utterance>\nAssistant:")
)
# As Qwen3-VL-Embedding has it: a prompt is a system's message.
EMBEDDING_TEMPLATE = (
    _PARTS + "<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content[0].text }}"
    "{% else %}Represent the user's input.{% endif %}<|im_end|>\n"
    "{% for message in messages %}{% if message.role != 'system' -%}"
    "<|im_start|>user\n{{ parts(message) }}<|im_end|>\n{%- endif %}{% endfor -%}"
    "<|im_start|>assistant\n{{ '' }}"
)


def colqwen2_merged(folder: Path) -> str:
    """vidore/colqwen2-v1.0-merged: the weights of `colqwen2`, whose projection the modules have too."""
    twin = transformers.ColQwen2ForRetrieval.from_pretrained(colqwen2(folder / "twin"))
    shutil.rmtree(folder / "twin")
    qwen_tokenizer(folder)
    twin.vlm.save_pretrained(folder)
    transformer = _transformer(folder, twin.vlm.config, COLQWEN_TEMPLATE)
    _late_interaction(folder, transformer, twin.embedding_proj_layer)
    tensors = {_old_name(name): tensor for name, tensor in twin.vlm.state_dict().items()}
    projection = twin.embedding_proj_layer.state_dict()
    tensors |= {f"custom_text_proj.{name}": each for name, each in projection.items()}
    save_tensors(tensors, folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"Qwen2VLModel"', '"ColQwen2"'))
    return str(folder)


def colqwen2_5(folder: Path) -> str:
    """A ColQwen2.5, merged: its tower attends within windows in all layers but one."""
    vision = {**_TOWER, "window_size": 56, "fullatt_block_indexes": [1]}
    config = _qwen2_vl(folder)
    text = config.text_config.to_dict() | {"model_type": "qwen2_5_vl_text"}
    token = config.image_token_id
    config = transformers.Qwen2_5_VLConfig(image_token_id=token, text_config=text, vision_config=vision)
    return _colqwen(folder, transformers.Qwen2_5_VLModel(config), dim=48)


def colqwen3(folder: Path) -> str:
    """A ColQwen3 of 80 dimensions: DeepStack, interleaved positions."""
    return _colqwen(folder, transformers.Qwen3VLModel(_qwen3_vl(folder)), dim=80)


def colqwen3_of_pictures(folder: Path) -> str:
    """One that scores pages by the tokens of their pictures alone."""
    return _colqwen(folder, transformers.Qwen3VLModel(_qwen3_vl(folder)), dim=32, only_pictures=True)


def colsmol(folder: Path) -> str:
    """vidore/colSmol-256M, merged: an Idefics3, whose pages are tiles with markers between them."""
    byte_level_bpe(
        folder, {"bos_token": "<|im_start|>", "eos_token": "<end_of_utterance>", "pad_token": "<|im_end|>"},
        "$A", "$A $B", model_max_length=4096,
        additional_special_tokens=[*visual.TILE_MARKERS, "<fake_token_around_image>", "<image>"],
    )  # fmt: skip
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    image_processor = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 3 * TILE}, max_image_size={"longest_edge": TILE}
    )
    processor = transformers.Idefics3Processor(image_processor, tokenizer, image_seq_len=4)
    vision = {**visual.TOWER, "num_hidden_layers": 3, "image_size": TILE, "patch_size": 8}
    text = {
        **SIZES, "model_type": "llama", "vocab_size": len(tokenizer), "num_key_value_heads": 2,
        "max_position_embeddings": 4096, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    config = transformers.Idefics3Config(
        text_config=text, vision_config=vision, image_token_id=processor.image_token_id, scale_factor=4
    )
    with_biases(spread(transformers.Idefics3Model(config))).save_pretrained(folder)
    processor.chat_template = COLSMOL_TEMPLATE
    processor.save_pretrained(folder)
    transformer = Transformer(str(folder), processor_kwargs={"backend": "pil"})
    projection = with_biases(spread(torch.nn.Linear(SIZES["hidden_size"], 48)))
    return _late_interaction(folder, transformer, projection)


def qwen3_vl_embedding(folder: Path) -> str:
    """Qwen/Qwen3-VL-Embedding-2B: the state of the last token."""
    config = _qwen3_vl(folder)
    with_biases(spread(transformers.Qwen3VLModel(config))).save_pretrained(folder)
    transformer = _transformer(folder, config, EMBEDDING_TEMPLATE)
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode="lasttoken")
    prompts = {"query": "Retrieve images or text relevant to the user's query."}
    return save_own(SentenceTransformer(modules=[transformer, pooling, Normalize()], prompts=prompts), folder)


# As Qwen3-VL-Reranker has it: a template for conversations, and one of its own for pairs.
RERANKER_TEMPLATE = (
    _PARTS + "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "{% set ns = namespace(instruct='Given a search query, retrieve relevant candidates that answer the "
    "query.') -%}"
    "{%- for message in messages if message.role == 'system' -%}"
    "{%- set ns.instruct = message.content[0].text -%}{%- endfor -%}"
    "<Instruct>: {{ ns.instruct }}"
    "{%- for message in messages if message.role == 'query' -%}<Query>:{{ parts(message) }}{%- endfor -%}"
    "{{ '\n' }}"
    "{%- for message in messages if message.role == 'document' -%}<Document>:{{ parts(message) }}"
    "{%- endfor -%}<|im_end|>\n<|im_start|>assistant\n{{ '' }}"
)


def qwen3_vl_reranker(folder: Path) -> str:
    """Qwen/Qwen3-VL-Reranker-2B: the logits of yes and no, with a template of its own name for pairs."""
    config = _qwen3_vl(folder)
    with_biases(spread(transformers.Qwen3VLForConditionalGeneration(config))).save_pretrained(folder)
    (folder / "additional_chat_templates").mkdir()
    named = folder / "additional_chat_templates" / "reranker.jinja"
    named.write_text(RERANKER_TEMPLATE, encoding="utf-8")
    transformer = _transformer(
        folder, config, EMBEDDING_TEMPLATE, transformer_task="any-to-any",
        processing_kwargs={"chat_template": {"chat_template": "reranker"}},
    )  # fmt: skip
    yes, no = (transformer.tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    head = LogitScore(true_token_id=yes, false_token_id=no)
    return save_own(CrossEncoder(modules=[transformer, head], activation_fn=torch.nn.Sigmoid()), folder)


def jina_reranker_m0(folder: Path) -> str:
    """jinaai/jina-reranker-m0: two layers on the last state, under names of its own code's."""
    model = with_biases(spread(transformers.Qwen2VLModel(_qwen2_vl(folder))))
    model.save_pretrained(folder)
    hidden = SIZES["hidden_size"]
    layers = [torch.nn.Linear(hidden, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1)]
    score = with_biases(spread(torch.nn.Sequential(*layers)))
    tensors = {_old_name(name): tensor for name, tensor in model.state_dict().items()}
    save_tensors(tensors | {f"score.{name}": each for name, each in score.state_dict().items()}, folder)
    own_code = dict.fromkeys(("AutoModel", "AutoModelForSequenceClassification"), "modeling.JinaVLForRanking")
    change_config(folder, architectures=["JinaVLForRanking"], auto_map=own_code)
    visual.qwen_image_processor().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(COLQWEN_TEMPLATE, encoding="utf-8")
    return str(folder)


def colqwen2_5_adapter(folder: Path) -> str:
    """vidore/colqwen2.5-v0.2: LoRA matrices for `base`; `merged` has what comes of both."""
    base, merged = folder / "base", folder / "merged"
    colqwen2_5(base)
    shutil.copytree(base, merged)
    tensors, lora, random = load_file(base / "model.safetensors"), {}, torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if layer.startswith("language_model.layers.") and layer.endswith(("q_proj", "v_proj", "down_proj")):
            first = torch.randn(4, tensor.shape[1], generator=random) * 0.3
            second = torch.randn(tensor.shape[0], 4, generator=random) * 0.3
            tensors[name] = tensor + second @ first * (8 / 4)
            # As peft named them when the language model was the model.
            peft_name = f"base_model.model.{layer.replace('language_model.', 'model.')}"
            lora |= {f"{peft_name}.lora_A.weight": first, f"{peft_name}.lora_B.weight": second}
    save_tensors(tensors, merged)
    lora["base_model.model.custom_text_proj.lora_A.weight"] = torch.zeros(4, SIZES["hidden_size"])
    lora["base_model.model.custom_text_proj.lora_B.weight"] = torch.zeros(48, 4)
    save_file(lora, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 4, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    for entry in base.iterdir():
        if entry.name not in ("model.safetensors", "config.json"):
            (shutil.copytree if entry.is_dir() else shutil.copy)(entry, folder / entry.name)
    return str(folder)


def _colqwen(folder: Path, model: Any, dim: int, only_pictures: bool = False) -> str:
    with_biases(spread(model)).save_pretrained(folder)
    transformer = _transformer(folder, model.config, COLQWEN_TEMPLATE)
    projection = with_biases(spread(torch.nn.Linear(SIZES["hidden_size"], dim)))
    return _late_interaction(folder, transformer, projection, only_pictures)


def _late_interaction(folder: Path, transformer: Any, projection: Any, only_pictures: bool = False) -> str:
    dense = Dense(projection.in_features, projection.out_features, **OF_TOKENS)
    dense.linear = projection
    token = transformer.processor.image_token_id
    mask = MultiVectorMask(keep_only_token_ids=[token] if only_pictures else None)
    modules = [transformer, dense, mask, Normalize("token_embeddings")]
    return save_own(MultiVectorEncoder(modules=modules), folder)


def _transformer(folder: Path, config: Any, template: str, **options: Any) -> Any:
    """sentence-transformers' first module for a model that is in the folder, with its tokenizer."""
    visual.qwen_image_processor(config.vision_config.patch_size).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    with without_videos():
        transformer = Transformer(str(folder), processor_kwargs={"backend": "pil"}, **options)
    for_pictures_alone(transformer.processor)
    return transformer


def _qwen2_vl(folder: Path) -> Any:
    tokenizer = qwen_tokenizer(folder)
    return qwen2_vl(len(tokenizer), tokenizer.convert_tokens_to_ids("<|image_pad|>"))


def _qwen3_vl(folder: Path) -> transformers.Qwen3VLConfig:
    tokenizer = qwen_tokenizer(folder)
    names = ("image_pad", "video_pad", "vision_start", "vision_end")
    ids = {f"{name.removesuffix('_pad')}_token_id": tokenizer.vocab[f"<|{name}|>"] for name in names}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5]}
    rope["mrope_interleaved"] = True
    return transformers.Qwen3VLConfig(
        **ids,
        text_config=SIZES | {
            "vocab_size": len(tokenizer), "num_key_value_heads": 2, "head_dim": 32,
            "max_position_embeddings": 4096, "pad_token_id": tokenizer.pad_token_id, "rope_parameters": rope,
        },
        vision_config=_TOWER | {
            "depth": 4, "patch_size": 16, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2],
        },
    )  # fmt: skip


def _old_name(name: str) -> str:
    """A tensor's name as colpali-engine's class had it, which was the whole model."""
    return name.replace("language_model.", "model.", 1)
