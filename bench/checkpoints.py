"""Checkpoints with random weights, as wide as published ones: for speed, not for quality."""

import json
import math
import random
from collections.abc import Callable
from itertools import chain, count, islice
from pathlib import Path
from string import ascii_lowercase, digits, punctuation
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_COLBERT_DIM = 128
# The words of page models' vocabularies: embeddings are looked up, so their number takes no time.
_WORDS = 4096
_VOCABULARY = {"vocab_size": 30522}  # MiniLM's, whose tokenizer all models of text have

# Models that people rerank with, of their published widths: `save_reranker` saves one.
RERANKERS = {
    "minilm-l6": "MiniLM-L6 cross-encoder (22M)",
    "colbert": "ColBERT, BERT-base (110M)",
    "xlm-r-large": "bge-reranker-v2-m3, XLM-R large (568M)",
    "modernbert-base": "gte-reranker-modernbert-base (149M)",
    "qwen3-0.6b": "Qwen3-Reranker-0.6B as a classifier",
}

# Models that run packed here and padded elsewhere.
TEXT_SHAPES = (
    "deberta-v3-base", "mpnet-base", "t5-base", "gte-multilingual-base", "jina-v2-base", "nomic-v2-moe",
    "modernbert-base", "lfm2-350m",
)  # fmt: skip


def save_text_model(shape: str, folder: Path, layers: int) -> str:
    """Saves a model of one of `TEXT_SHAPES`."""
    import torch
    import transformers as hf

    from maxsimd.engine.models import jina_bert, registered

    torch.manual_seed(0)
    model: Any
    common: dict[str, Any] = _VOCABULARY | {"num_hidden_layers": layers}
    match shape:
        case "deberta-v3-base":  # mixedbread-ai/mxbai-rerank-base-v1
            common |= {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
            common |= {"max_position_embeddings": 512, "type_vocab_size": 0, "num_labels": 1}
            common |= {"relative_attention": True, "position_buckets": 256, "pos_att_type": ["p2c", "c2p"]}
            common |= {"position_biased_input": False, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
            model = hf.DebertaV2ForSequenceClassification(hf.DebertaV2Config(**common))
        case "mpnet-base":  # sentence-transformers/all-mpnet-base-v2
            config = hf.MPNetConfig(num_hidden_layers=layers, max_position_embeddings=514)
            model = hf.MPNetModel(config)
        case "t5-base":  # the encoder of sentence-transformers/sentence-t5-base and gtr-t5-base
            sizes: dict[str, Any] = {"d_model": 768, "d_ff": 3072, "num_heads": 12, "num_layers": layers}
            model = hf.T5EncoderModel(hf.T5Config(**_VOCABULARY, **sizes))
        case "gte-multilingual-base":  # Alibaba-NLP/gte-multilingual-base, by transformers' class
            model = hf.GteModel(hf.GteConfig(**common, pad_token_id=0))
        case "jina-v2-base":  # jinaai/jina-embeddings-v2-base-en, by our class
            jina = jina_bert.JinaBertConfig(num_hidden_layers=layers, max_position_embeddings=8192)
            model = jina_bert.JinaBertModel(jina)
        case "nomic-v2-moe":  # nomic-ai/nomic-embed-text-v2-moe, likewise; every second layer has experts
            common |= {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
            common |= {"max_position_embeddings": 2048, "pad_token_id": 0}
            model = registered.NomicMoeModel(registered.NomicMoeConfig(**common))
        case "modernbert-base":  # answerdotai/ModernBERT-base: windows of 128 tokens but in every third layer
            special = ("pad_token_id", "bos_token_id", "cls_token_id", "sep_token_id", "eos_token_id")
            model = hf.ModernBertModel(hf.ModernBertConfig(**common, **dict.fromkeys(special, 0)))
        case _:  # lfm2-350m, LiquidAI/LFM2-350M: short convolutions, and attention in two of five layers
            common |= {"hidden_size": 1024, "intermediate_size": 6656, "max_position_embeddings": 2048}
            common |= {"num_attention_heads": 16, "num_key_value_heads": 8}
            kinds = ["full_attention" if i % 5 in (1, 3) else "conv" for i in range(layers)]
            model = hf.Lfm2Model(hf.Lfm2Config(**common, layer_types=kinds))
    for name, weight in model.named_parameters():
        if ".experts." in name:  # which no class of transformers fills
            torch.nn.init.normal_(weight, std=0.02)
    model.save_pretrained(folder)
    return _with_tokenizer(folder)


def save_reranker(shape: str, folder: Path) -> str:
    """Saves a model of one of `RERANKERS`, with all of its layers, or a small causal one. All have MiniLM's
    vocabulary."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    model: Any
    common: dict[str, Any] = _VOCABULARY | {"num_labels": 1, "pad_token_id": 0}
    match shape:
        case "minilm-l6":
            return save_cross_encoder(folder)
        case "colbert":
            return save_colbert(folder)
        case "xlm-r-large":  # BAAI/bge-reranker-v2-m3
            common |= {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
            common |= {"intermediate_size": 4096, "max_position_embeddings": 8194, "type_vocab_size": 1}
            model = hf.XLMRobertaForSequenceClassification(hf.XLMRobertaConfig(**common))
        case "modernbert-base":  # Alibaba-NLP/gte-reranker-modernbert-base
            special = ("bos_token_id", "cls_token_id", "sep_token_id", "eos_token_id")
            common |= dict.fromkeys(special, 0) | {"classifier_pooling": "mean"}
            model = hf.ModernBertForSequenceClassification(hf.ModernBertConfig(**common))
        case "small causal":
            common |= {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536}
            common |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
            common |= {"max_position_embeddings": 1024}
            model = hf.Qwen3ForSequenceClassification(hf.Qwen3Config(**common))
        case _:  # qwen3-0.6b, Qwen/Qwen3-Reranker-0.6B, converted into a classifier
            common |= {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072}
            common |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
            # 40,960 published: vLLM refuses to start without room for the keys and values of one such text.
            common |= {"max_position_embeddings": 8192}
            model = hf.Qwen3ForSequenceClassification(hf.Qwen3Config(**common))
    model.to(torch.bfloat16).save_pretrained(folder)
    return _with_tokenizer(folder, token_types=False)


def gflop_a_token(checkpoint: str) -> float:
    """GFLOP for a token in the linear layers of a saved model, two operations a weight. Attention, embeddings
    and heads are not counted."""
    import torch
    from transformers import AutoConfig, AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(checkpoint))
    blocks = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    linear = {layer for block in blocks for layer in block.modules() if isinstance(layer, torch.nn.Linear)}
    return 2 * sum(layer.weight.numel() for layer in linear) / 1e9


def save_cross_encoder(folder: Path) -> str:
    """Saves a cross-encoder of MiniLM-L6 shape: 6 layers, 384 wide."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig.from_pretrained(_embedded_path(), num_labels=1)
    BertForSequenceClassification(config).save_pretrained(folder)
    return _with_tokenizer(folder)


def save_colbert(folder: Path) -> str:
    """Saves a ColBERT of BERT-base shape with 128 dimensions, in the format of colbert-ir/colbertv2.0."""
    import torch
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config: Any = BertConfig(**_VOCABULARY)
    config.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    (folder / "config.json").write_text(json.dumps(saved))
    weights = {f"bert.{name}": tensor for name, tensor in BertModel(config).state_dict().items()}
    weights["linear.weight"] = torch.randn(_COLBERT_DIM, config.hidden_size) * config.hidden_size**-0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    metadata = {"dim": _COLBERT_DIM, "query_token_id": "[unused0]", "doc_token_id": "[unused1]"}
    metadata |= {"query_maxlen": 32, "doc_maxlen": 512, "attend_to_mask_tokens": False}
    metadata |= {"mask_punctuation": True, "similarity": "cosine"}
    (folder / "artifact.metadata").write_text(json.dumps(metadata))
    return _with_tokenizer(folder)


def _embedded_path() -> str:
    from maxsimd.engine.checkpoint.files import embedded_model_path  # loads torch

    return embedded_model_path()


def _with_tokenizer(folder: Path, token_types: bool = True) -> str:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer: Any = AutoTokenizer.from_pretrained(_embedded_path(), model_max_length=512)
    if not token_types:
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer,
            model_input_names=["input_ids", "attention_mask"],
            model_max_length=512,
            **special,
        )
    tokenizer.save_pretrained(folder)
    return str(folder)


def unigram_tokenizer(size: int) -> "Tokenizer":
    """A tokenizer of `size` pieces that works like XLM-RoBERTa's: the default model's words, with and without
    a space before them, then random pieces, from likely to unlikely."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    known = Tokenizer.from_file(str(Path(_embedded_path(), "tokenizer.json"))).get_vocab()
    words = [word for word in sorted(known, key=known.__getitem__) if word.isalpha()]
    draw = random.Random(0)
    drawn = ("".join(draw.choices(ascii_lowercase, k=draw.randint(2, 9))) for _ in count())
    characters = (*specials, *ascii_lowercase, *digits, *punctuation, "▁")
    pieces = chain(characters, (f"▁{word}" for word in words), words, drawn)
    ranked = list(islice(dict.fromkeys(islice(pieces, 2 * size + 100)), size))
    scores = [(piece, 0.0 if piece in specials else -math.log(rank + 2)) for rank, piece in enumerate(ranked)]
    made = Tokenizer(models.Unigram(scores, unk_id=specials.index("<unk>")))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return made


def clip_b32(folder: Path, layers: int) -> str:
    """openai/clip-vit-base-patch32."""
    import transformers as hf

    tokenizer = _tokenizer("<|startoftext|> $A <|endoftext|>", "<|startoftext|>", "<|endoftext|>", 77)
    common = {"num_hidden_layers": layers}
    text = {**common, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    text |= {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = hf.CLIPConfig(text_config=text, vision_config=common | {"patch_size": 32})
    return _saved(folder, hf.CLIPModel(config), hf.CLIPProcessor(hf.CLIPImageProcessorPil(), tokenizer))


def colmodernvbert(folder: Path, layers: int) -> str:
    """ModernVBERT/colmodernvbert: SigLIP2-base at 512 pixels, and a ModernBERT of 768."""
    import transformers as hf

    markers = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    images = ["<global-img>", *markers, "<fake_token_around_image>", "<image>"]
    tokenizer = _tokenizer("[CLS] $A [SEP]", "[CLS]", "[SEP]", 8192, images)
    image_processor = hf.Idefics3ImageProcessorPil(
        size={"longest_edge": 2048}, max_image_size={"longest_edge": 512}
    )
    processor = hf.ColModernVBertProcessor(image_processor, tokenizer, image_seq_len=64)
    text = {"model_type": "modernbert", "vocab_size": len(tokenizer), "num_hidden_layers": layers}
    text |= {"hidden_size": 768, "intermediate_size": 1152, "num_attention_heads": 12}
    text |= {"pad_token_id": tokenizer.pad_token_id}
    vision = _siglip(768, 12, 3072, layers) | {"image_size": 512, "patch_size": 16}
    token = processor.image_token_id
    vlm = hf.ModernVBertConfig(text_config=text, vision_config=vision, image_token_id=token)
    return _saved(folder, hf.ColModernVBertForRetrieval(hf.ColModernVBertConfig(vlm_config=vlm)), processor)


def colpali(folder: Path, layers: int) -> str:
    """vidore/colpali-v1.3-hf: SigLIP-so400m at 448 pixels, and Gemma 2B."""
    import transformers as hf

    tokenizer = _tokenizer("$A", "<bos>", "<eos>", 8192, ["<image>"])
    tokenizer.image_token, tokenizer.image_token_id = "<image>", tokenizer.convert_tokens_to_ids("<image>")
    image_processor = hf.SiglipImageProcessorPil(size={"height": 448, "width": 448})
    image_processor.image_seq_length = 1024
    processor = hf.ColPaliProcessor(image_processor, tokenizer, query_prefix="Query: ")
    text = {"model_type": "gemma", "vocab_size": len(tokenizer), "num_hidden_layers": layers}
    text |= {"hidden_size": 2048, "intermediate_size": 16384, "num_attention_heads": 8}
    text |= {"num_key_value_heads": 1, "head_dim": 256}
    vision = _siglip(1152, 16, 4304, layers) | {"image_size": 448, "patch_size": 14, "projection_dim": 2048}
    token = processor.image_token_id
    vlm = hf.PaliGemmaConfig(
        image_token_index=token, text_config=text, vision_config=vision, projection_dim=2048
    )
    return _saved(folder, hf.ColPaliForRetrieval(hf.ColPaliConfig(vlm_config=vlm)), processor)


def colqwen2(folder: Path, layers: int) -> str:
    """vidore/colqwen2-v1.0-hf: Qwen2-VL 2B, pages of up to 768 tokens."""
    import transformers as hf

    pictures = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = _tokenizer("$A", "<|im_start|>", "<|im_end|>", 8192, [*pictures, "<|endoftext|>"])
    size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 768 * 28 * 28}
    processor = hf.ColQwen2Processor(hf.Qwen2VLImageProcessorPil(size=size), tokenizer)
    text: dict[str, Any] = {"vocab_size": len(tokenizer), "num_hidden_layers": layers, "hidden_size": 1536}
    text |= {"intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
    vision = {"depth": layers, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16, "mlp_ratio": 4}
    config = hf.Qwen2VLConfig(image_token_id=processor.image_token_id, text_config=text, vision_config=vision)
    return _saved(folder, hf.ColQwen2ForRetrieval(hf.ColQwen2Config(vlm_config=config)), processor)


# By name: what saves a model of that shape with so many layers in a folder, and returns its path.
PAGE_SHAPES: dict[str, Callable[[Path, int], str]] = {
    "clip-b32": clip_b32,
    "colmodernvbert": colmodernvbert,
    "colpali": colpali,
    "colqwen2": colqwen2,
}


def _siglip(hidden: int, heads: int, inner: int, layers: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": inner}
    sizes |= {"num_hidden_layers": layers}
    return {"model_type": "siglip_vision_model", "vision_use_head": False, **sizes}


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
