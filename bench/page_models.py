"""Models that read pages, as wide as those that are published, with random weights and few layers: for speed,
not for quality."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

# The words of the small vocabularies: embeddings are looked up, so that their number takes no time.
_WORDS = 4096


def clip_b32(folder: Path, layers: int) -> str:
    """openai/clip-vit-base-patch32."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor

    tokenizer = _tokenizer("<|startoftext|> $A <|endoftext|>", "<|startoftext|>", "<|endoftext|>", 77)
    common = {"num_hidden_layers": layers}
    text = {**common, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    text |= {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = CLIPConfig(text_config=text, vision_config=common | {"patch_size": 32})
    return _saved(folder, CLIPModel(config), CLIPProcessor(CLIPImageProcessorPil(), tokenizer))


def colmodernvbert(folder: Path, layers: int) -> str:
    """ModernVBERT/colmodernvbert: SigLIP2-base at 512 pixels, and a ModernBERT of 768."""
    from transformers import (
        ColModernVBertConfig,
        ColModernVBertForRetrieval,
        ColModernVBertProcessor,
        Idefics3ImageProcessorPil,
        ModernVBertConfig,
    )

    markers = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = _tokenizer(
        "[CLS] $A [SEP]",
        "[CLS]",
        "[SEP]",
        8192,
        ["<global-img>", *markers, "<fake_token_around_image>", "<image>"],
    )
    image_processor = Idefics3ImageProcessorPil(
        size={"longest_edge": 2048}, max_image_size={"longest_edge": 512}
    )
    processor = ColModernVBertProcessor(image_processor, tokenizer, image_seq_len=64)
    text = {"model_type": "modernbert", "vocab_size": len(tokenizer), "num_hidden_layers": layers}
    text |= {"hidden_size": 768, "intermediate_size": 1152, "num_attention_heads": 12}
    text |= {"pad_token_id": tokenizer.pad_token_id}
    vision = _siglip(768, 12, 3072, layers) | {"image_size": 512, "patch_size": 16}
    vlm = ModernVBertConfig(text_config=text, vision_config=vision, image_token_id=processor.image_token_id)
    return _saved(folder, ColModernVBertForRetrieval(ColModernVBertConfig(vlm_config=vlm)), processor)


def colpali(folder: Path, layers: int) -> str:
    """vidore/colpali-v1.3-hf: SigLIP-so400m at 448 pixels, and Gemma 2B."""
    from transformers import (
        ColPaliConfig,
        ColPaliForRetrieval,
        ColPaliProcessor,
        PaliGemmaConfig,
        SiglipImageProcessorPil,
    )

    tokenizer = _tokenizer("$A", "<bos>", "<eos>", 8192, ["<image>"])
    tokenizer.image_token, tokenizer.image_token_id = "<image>", tokenizer.convert_tokens_to_ids("<image>")
    image_processor = SiglipImageProcessorPil(size={"height": 448, "width": 448})
    image_processor.image_seq_length = 1024
    processor = ColPaliProcessor(image_processor, tokenizer, query_prefix="Query: ")
    text = {"model_type": "gemma", "vocab_size": len(tokenizer), "num_hidden_layers": layers}
    text |= {"hidden_size": 2048, "intermediate_size": 16384, "num_attention_heads": 8}
    text |= {"num_key_value_heads": 1, "head_dim": 256}
    vision = _siglip(1152, 16, 4304, layers) | {"image_size": 448, "patch_size": 14, "projection_dim": 2048}
    vlm = PaliGemmaConfig(
        image_token_index=processor.image_token_id,
        text_config=text,
        vision_config=vision,
        projection_dim=2048,
    )
    return _saved(folder, ColPaliForRetrieval(ColPaliConfig(vlm_config=vlm)), processor)


def colqwen2(folder: Path, layers: int) -> str:
    """vidore/colqwen2-v1.0-hf: Qwen2-VL 2B, pages of up to 768 tokens."""
    from transformers import (
        ColQwen2Config,
        ColQwen2ForRetrieval,
        ColQwen2Processor,
        Qwen2VLConfig,
        Qwen2VLImageProcessorPil,
    )

    pictures = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = _tokenizer("$A", "<|im_start|>", "<|im_end|>", 8192, [*pictures, "<|endoftext|>"])
    size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 768 * 28 * 28}
    processor = ColQwen2Processor(Qwen2VLImageProcessorPil(size=size), tokenizer)
    text: dict[str, Any] = {"vocab_size": len(tokenizer), "num_hidden_layers": layers, "hidden_size": 1536}
    text |= {"intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
    vision = {"depth": layers, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16, "mlp_ratio": 4}
    config = Qwen2VLConfig(image_token_id=processor.image_token_id, text_config=text, vision_config=vision)
    return _saved(folder, ColQwen2ForRetrieval(ColQwen2Config(vlm_config=config)), processor)


SHAPES: dict[str, Callable[[Path, int], str]] = {
    "clip-b32": clip_b32,
    "colmodernvbert": colmodernvbert,
    "colpali": colpali,
    "colqwen2": colqwen2,
}


def _siglip(hidden: int, heads: int, inner: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "vision_use_head": False,
    }


def _tokenizer(template: str, begin: str, end: str, longest: int, others: list[str] | None = None) -> Any:
    """Words of numbers, a token each: enough for texts that nobody reads."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = [begin, end, "[PAD]", "[UNK]", *(others or [])]
    words = [*special, *(f"w{number}" for number in range(_WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(begin, 0), (end, 1)]
    )
    names = {"bos_token": begin, "eos_token": end, "pad_token": "[PAD]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=longest, **names)


def _saved(folder: Path, model: Any, processor: Any) -> str:
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)
