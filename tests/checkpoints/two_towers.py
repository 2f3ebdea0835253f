"""CLIP and SigLIP, as they are published: a tower for texts and one for pictures."""

from pathlib import Path

import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer

from tests.checkpoints.tokenizers import byte_level_bpe, unigram
from tests.checkpoints.visual import saved
from tests.checkpoints.weights import save_own

_TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
_PICTURE = _TEXT | {"hidden_size": 96, "image_size": 64, "patch_size": 16}


def clip(folder: Path) -> str:
    """openai/clip-vit-base-patch32: a causal text model, pooled at the end of the text."""
    end = "<|endoftext|>"
    specials = {"bos_token": "<|startoftext|>", "eos_token": end, "pad_token": end, "unk_token": end}
    single, pair = f"<|startoftext|> $A {end}", f"<|startoftext|> $A {end} $B {end}"
    byte_level_bpe(folder, specials, single, pair, model_max_length=77)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = {**_TEXT, **ids, "vocab_size": len(tokenizer), "max_position_embeddings": 77}
    model = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=_PICTURE, projection_dim=48)
    )
    image_processor = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64}
    )
    return saved(folder, model, transformers.CLIPProcessor(image_processor, tokenizer))


def clip_saved(folder: Path) -> str:
    """sentence-transformers/clip-ViT-B-32 as it is saved today, with normalized embeddings."""
    transformer = Transformer(clip(folder / "plain"), processor_kwargs={"backend": "pil"})
    return save_own(SentenceTransformer(modules=[transformer, Normalize()]), folder / "saved")


def siglip(folder: Path) -> str:
    """google/siglip-base-patch16-224: texts filled up to one length, pooled at the last place of it."""
    specials = {"eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    unigram(folder, specials, "$A </s>", "$A </s> $B </s>", model_max_length=24)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.model_input_names = ["input_ids"]
    text = {**_TEXT, "vocab_size": len(tokenizer), "max_position_embeddings": 24, "projection_size": 96}
    model = transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=_PICTURE))
    image_processor = transformers.SiglipImageProcessorPil(
        size={"height": 64, "width": 64}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return saved(folder, model, transformers.SiglipProcessor(image_processor, tokenizer))
