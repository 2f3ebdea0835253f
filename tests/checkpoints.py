"""Small random-weight checkpoints in the formats in which real ones are published."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

from maxsimd.bench.datasets import docstring_pairs
from maxsimd.engine.checkpoint.embedded import embedded_model_path


def bert_config(**changes: Any) -> BertConfig:
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    return BertConfig(**(sizes | {"vocab_size": 30522, "max_position_embeddings": 512} | changes))


def _spread(model: torch.nn.Module) -> torch.nn.Module:
    """Larger weights than a fresh model has, so that different inputs give clearly different outputs."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                attends = any(part in name for part in ("query", "key", "q_proj", "k_proj"))
                parameter.normal_(0, 0.5 if "embed" in name else 0.12 if attends else 0.2)
    return model.eval()


def minilm_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded_model_path())


def bert_cross_encoder(folder: Path, labels: int = 1) -> str:
    config = bert_config(num_labels=labels, hidden_size=128, intermediate_size=256)
    model = _spread(BertForSequenceClassification(config))
    model.save_pretrained(folder)
    minilm_tokenizer().save_pretrained(folder)
    return str(folder)


def _unigram_vocabulary(size: int = 3000) -> list[tuple[str, float]]:
    """Frequent words and all characters with their log frequencies, after XLM-R's special tokens. Counted,
    not trained, because the trainer gives another vocabulary each time."""
    words = Counter(word for pair in docstring_pairs() for word in pair.document.split())
    characters = Counter("".join(words.elements()))
    pieces = Counter({f"\u2581{word}": count for word, count in words.most_common(size)}) + characters
    total = pieces.total()
    specials = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "\u2581")]
    ranked = sorted(pieces.items(), key=lambda item: (-item[1], item[0]))
    return specials + [(piece, math.log(count / total)) for piece, count in ranked]


def xlm_roberta_cross_encoder(folder: Path) -> str:
    """As bge-reranker-v2-m3 is published: positions from 2 on, two separators between the texts."""
    tokenizer = Tokenizer(models.Unigram(_unigram_vocabulary(), unk_id=3, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=512,
        model_input_names=["input_ids", "attention_mask"],
    )
    fast.save_pretrained(folder)
    config = XLMRobertaConfig(
        vocab_size=len(fast),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=514,
        type_vocab_size=1,
        num_labels=1,
    )
    _spread(XLMRobertaForSequenceClassification(config)).save_pretrained(folder)
    return str(folder)


def stanford_colbert(folder: Path, attend: bool = False) -> str:
    """As colbertv2.0 is published: HF_ColBERT, `linear.weight` beside the encoder, artifact.metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    config = bert_config(architectures=["HF_ColBERT"])
    config.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    (folder / "config.json").write_text(json.dumps(saved))
    weights = {f"bert.{name}": tensor for name, tensor in _spread(BertModel(config)).state_dict().items()}
    weights["linear.weight"] = torch.randn(32, 64) * 0.2
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    minilm_tokenizer().save_pretrained(folder)
    metadata = {
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "query_maxlen": 32,
        "doc_maxlen": 180,
        "mask_punctuation": True,
        "attend_to_mask_tokens": attend,
        "dim": 32,
        "similarity": "cosine",
    }
    (folder / "artifact.metadata").write_text(json.dumps(metadata))
    return str(folder)


def _bert_backbone(folder: Path) -> str:
    _spread(BertModel(bert_config())).save_pretrained(folder)
    minilm_tokenizer().save_pretrained(folder)
    return str(folder)


def native_multi_vector(folder: Path) -> str:
    """A sentence-transformers multi-vector save with every knob turned: prompts, lengths, expansion that
    never cuts and is attended, a skip list for both sides."""
    transformer = Transformer(
        _bert_backbone(folder / "backbone"),
        query_length=48,
        document_length=128,
        query_expansion={"strategy": "min", "attend": True, "length": 24, "token": "[MASK]"},
    )
    projection = Dense(
        64, 48, bias=True, activation_function=torch.nn.Identity(), module_input_name="token_embeddings"
    )
    mask = MultiVectorMask(skiplist_words=[",", ".", "the"], skiplist_tasks=["query", "document"])
    model = MultiVectorEncoder(
        modules=[transformer, projection, mask, Normalize(module_input_name="token_embeddings")],
        prompts={"query": "search query: ", "document": "search document: "},
        device="cpu",
    )
    model.save_pretrained(str(folder / "saved"))
    return str(folder / "saved")


def qwen3_embedding(folder: Path) -> str:
    """As Qwen3-Embedding is published: causal, an end-of-text token after each text, last-token pooling."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((pair.document for pair in docstring_pairs()[:200]), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", pair="$A $B <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    backbone = folder / "backbone"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_max_length=1024,
    )
    fast.save_pretrained(backbone)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=1024,
    )
    _spread(Qwen3Model(config)).save_pretrained(backbone)
    transformer = Transformer(str(backbone))
    model = SentenceTransformer(
        modules=[transformer, Pooling(64, pooling_mode="lasttoken"), Normalize()],
        prompts={"query": "Instruct: find the document\nQuery: ", "document": ""},
        device="cpu",
    )
    model.save_pretrained(str(folder / "saved"))
    return str(folder / "saved")
