"""Late-interaction checkpoints that read pages as pictures, as they are published."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.checkpoints.tokenizers import byte_level_bpe, merges_of
from tests.checkpoints.weights import SIZES, spread

TILE = 64
# Side of a page and of a patch in pixels: 4 x 4 patches.
SIDE, PATCH = 56, 14
# Sizes of towers that are Idefics' or SigLIP's, and Qwen's, and the tokens before tiles.
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN_TOWER = {"depth": 3, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
TILE_MARKERS = ["<global-img>", *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7))]


def colpali(folder: Path) -> str:
    """vidore/colpali-v1.3-hf: ColPaliForRetrieval, a SigLIP tower and a Gemma, with its processor."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<image>"]
    vocabulary, merges = merges_of((), (*specials, "\u2581", "\n"))
    extra = {"image_token": "<image>"}
    tokenizer = transformers.GemmaTokenizer(vocab=vocabulary, merges=merges, extra_special_tokens=extra)
    image_processor = transformers.SiglipImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    image_processor.image_seq_length = (SIDE // PATCH) ** 2
    processor = transformers.ColPaliProcessor(image_processor, tokenizer, query_prefix="Query: ")
    gemma = {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 32}
    siglip = {
        "model_type": "siglip_vision_model", "image_size": SIDE, "patch_size": PATCH,
        "projection_dim": SIZES["hidden_size"], "vision_use_head": False,
    }  # fmt: skip
    vlm = transformers.PaliGemmaConfig(
        image_token_index=processor.image_token_id, projection_dim=SIZES["hidden_size"],
        text_config=SIZES | gemma | {"vocab_size": len(tokenizer)}, vision_config=TOWER | siglip,
    )  # fmt: skip
    config = transformers.ColPaliConfig(vlm_config=vlm, embedding_dim=48)
    return saved(folder, transformers.ColPaliForRetrieval(config), processor)


def colqwen2(folder: Path) -> str:
    """vidore/colqwen2-v1.0-hf: ColQwen2ForRetrieval, a Qwen2-VL whose positions are those of plain text."""
    tokenizer = qwen_tokenizer(folder)
    processor = transformers.ColQwen2Processor(qwen_image_processor(), tokenizer)
    vlm = qwen2_vl(len(tokenizer), processor.image_token_id)
    config = transformers.ColQwen2Config(vlm_config=vlm, embedding_dim=48)
    return saved(folder, transformers.ColQwen2ForRetrieval(config), processor)


def colmodernvbert(folder: Path) -> str:
    """ModernVBERT/colmodernvbert: tiles of a page for SigLIP, and a ModernBERT."""
    specials = {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "pad", "unk")}
    markers = [*TILE_MARKERS, "<fake_token_around_image>", "<image>", "<end_of_utterance>"]
    byte_level_bpe(
        folder, specials, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", additional_special_tokens=markers,
        model_max_length=1024,
    )  # fmt: skip
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    image_processor = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 4 * TILE}, max_image_size={"longest_edge": TILE}
    )
    processor = transformers.ColModernVBertProcessor(image_processor, tokenizer, image_seq_len=4)
    text = {
        **SIZES,
        "model_type": "modernbert", "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id,
        "max_position_embeddings": 1024, "local_attention": 16, "global_attn_every_n_layers": 2,
    }  # fmt: skip
    vision = {
        **TOWER, "model_type": "siglip_vision_model", "image_size": TILE, "patch_size": 8,
        "vision_use_head": False,
    }  # fmt: skip
    vlm = transformers.ModernVBertConfig(
        text_config=text, vision_config=vision, image_token_id=processor.image_token_id,
        pixel_shuffle_factor=4,
    )  # fmt: skip
    config = transformers.ColModernVBertConfig(vlm_config=vlm, embedding_dim=48)
    return saved(folder, transformers.ColModernVBertForRetrieval(config), processor)


def qwen_image_processor(patch: int = 14) -> transformers.Qwen2VLImageProcessorPil:
    """From 1 to 24 tokens of two by two patches each."""
    token = (2 * patch) ** 2
    size = {"shortest_edge": token, "longest_edge": 24 * token}
    return transformers.Qwen2VLImageProcessorPil(size=size, patch_size=patch)


def qwen2_vl(vocabulary: int, image_token_id: int) -> transformers.Qwen2VLConfig:
    return transformers.Qwen2VLConfig(
        image_token_id=image_token_id,
        text_config=SIZES | {
            "vocab_size": vocabulary, "num_key_value_heads": 2, "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
        },
        vision_config={**QWEN_TOWER, "embed_dim": 64, "hidden_size": SIZES["hidden_size"], "mlp_ratio": 2},
    )  # fmt: skip


def qwen_tokenizer(folder: Path) -> transformers.PreTrainedTokenizerFast:
    extra = ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    byte_level_bpe(
        folder, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, "$A", "$A $B", words=("yes", "no"),
        additional_special_tokens=extra, model_max_length=4096,
    )  # fmt: skip
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def saved(folder: Path, model: Any, processor: Any) -> str:
    with_biases(spread(model)).save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def with_biases(model: Any) -> Any:
    """With biases and norms that are not zero or one, so that leaving one out is seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
