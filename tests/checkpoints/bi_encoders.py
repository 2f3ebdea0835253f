"""Bi-encoders, as they are published."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling
from transformers import GPTNeoConfig, GPTNeoModel, MPNetTokenizerFast
from transformers.activations import GELUActivation

from tests.checkpoints.tokenizers import GEMMA, WORDS, byte_level_bpe, unigram, wordpiece, xlm_roberta
from tests.checkpoints.weights import save_model, save_own, save_renamed, spread

INSTRUCTION = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"


def saved_pooled(folder: Path, pooling: Any, *after: Any, include_prompt: bool = True, **options: Any) -> str:
    """A SentenceTransformer save of the backbone in `folder`/backbone, with modules behind its pooling."""
    transformer = Transformer(str(folder / "backbone"))
    dim = transformer.get_embedding_dimension()
    pool = Pooling(dim, pooling_mode=pooling, include_prompt=include_prompt)
    model = SentenceTransformer(modules=[transformer, pool, *after], device="cpu", **options)
    return save_own(model, folder / "saved")


def _bert(folder: Path) -> Path:
    save_model(folder / "backbone", "bert", vocab_size=WORDS)
    wordpiece().save_pretrained(folder / "backbone")
    return folder


def bge(folder: Path) -> str:
    """BAAI/bge-base-en-v1.5: the first token, normalized; an instruction in front of queries."""
    prompts = {"query": "Represent this sentence for searching relevant passages: "}
    return saved_pooled(_bert(folder), "cls", Normalize(), prompts=prompts)


def gte(folder: Path) -> str:
    """thenlper/gte-base: the mean, normalized, without prompts, as intfloat/e5-base-v2's files say."""
    return saved_pooled(_bert(folder), "mean", Normalize())


def without_prompt(folder: Path) -> str:
    """As hkunlp/instructor: the prompt's tokens take no part in the mean."""
    prompts = {"query": "Represent the question: ", "document": "Represent the document: "}
    return saved_pooled(_bert(folder), "mean", Normalize(), prompts=prompts, include_prompt=False)


def bge_m3(folder: Path) -> str:
    """BAAI/bge-m3: the first token, normalized, and two layers in pickles for weights and vectors."""
    save_model(
        folder / "backbone", "xlm-roberta", options={"add_pooling_layer": False},
        vocab_size=xlm_roberta(folder / "backbone"), max_position_embeddings=514, type_vocab_size=1,
    )  # fmt: skip
    saved = saved_pooled(folder, "cls", Normalize())
    random = torch.Generator().manual_seed(3)
    for name, rows in (("sparse_linear", 1), ("colbert_linear", 128)):
        weight = torch.randn(rows, 128, generator=random) * 0.03
        bias = torch.full((rows,), 1.0) if rows == 1 else torch.randn(rows, generator=random) * 0.05
        torch.save({"weight": weight, "bias": bias}, Path(saved) / f"{name}.pt")
    return saved


def mpnet(folder: Path) -> str:
    """sentence-transformers/all-mpnet-base-v2: relative positions, no attention interface."""
    specials = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    words = [token for token, _ in sorted(wordpiece().get_vocab().items(), key=lambda item: item[1])]
    vocabulary = specials | {word: i + 4 for i, word in enumerate(words) if word not in specials}
    vocabulary["<mask>"] = len(vocabulary)
    (folder / "backbone").mkdir(parents=True)
    (folder / "backbone" / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    tokenizer = MPNetTokenizerFast(str(folder / "backbone" / "vocab.txt"), model_max_length=512)
    tokenizer.save_pretrained(folder / "backbone")
    save_model(folder / "backbone", "mpnet", vocab_size=len(tokenizer), max_position_embeddings=514)
    return saved_pooled(folder, "mean", Normalize())


def nomic(folder: Path) -> str:
    """nomic-ai/nomic-embed-text-v1.5: code of its own, GPT-2's names in its config, prefixes for each task.

    `own` beside it holds the same weights in transformers' own terms."""
    own, published = folder / "own", folder / "published"
    model = save_model(
        own / "backbone", "nomic_bert", options={"add_pooling_layer": False}, vocab_size=WORDS,
        max_position_embeddings=2048, rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )  # fmt: skip
    prompts = {"query": "search_query: ", "document": "search_document: ", "clustering": "clustering: "}
    wordpiece().save_pretrained(own / "backbone")
    saved_pooled(own, "mean", Normalize(), prompts=prompts)

    wordpiece().save_pretrained(published)
    save_renamed(model, published, _NOMIC_TERMS, fused="attn.Wqkv")
    settings = {
        "architectures": ["NomicBertModel"],
        "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
        "model_type": "nomic_bert", "activation_function": "swiglu", "n_embd": 128, "n_layer": 3, "n_head": 4,
        "n_inner": 256, "n_positions": 2048, "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "rotary_scaling_factor": None, "prenorm": False, "qkv_proj_bias": False,
        "mlp_fc1_bias": False, "mlp_fc2_bias": False, "type_vocab_size": 2, "vocab_size": WORDS,
    }  # fmt: skip
    (published / "config.json").write_text(json.dumps(settings))
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (published / name).write_bytes((own / "saved" / name).read_bytes())
    for module in ("1_Pooling", "2_Normalize"):
        if (own / "saved" / module).is_dir():
            (published / module).symlink_to(own / "saved" / module)
    return str(published)


_NOMIC_TERMS = {
    "layers.": "encoder.layers.", "self_attn.o_proj": "attn.out_proj", "embeddings.LayerNorm": "emb_ln",
    "up_proj": "fc11", "gate_proj": "fc12", "down_proj": "fc2", "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}  # fmt: skip


def qwen3(folder: Path) -> str:
    """Qwen/Qwen3-Embedding-0.6B: causal, the state of an end token; queries behind an instruction."""
    return _qwen3(folder, "lasttoken")


def qwen3_mean(folder: Path) -> str:
    """A causal Qwen3 that is pooled by the mean of its tokens."""
    return _qwen3(folder, "mean")


def qwen3_wide(folder: Path) -> str:
    """A small Qwen3 with vectors of 4,096 numbers, as those of Qwen3-Embedding-8B have."""
    return _qwen3(folder, "lasttoken", Dense(128, 4096, activation_function=torch.nn.Identity()))


def _qwen3(folder: Path, pooling: str, *behind: Any, prompt: str = INSTRUCTION, **options: Any) -> str:
    end = "<|endoftext|>"
    options = {"padding_side": "left", "model_max_length": 1024} | options
    specials = {"eos_token": end, "pad_token": end}
    size = byte_level_bpe(folder / "backbone", specials, f"$A {end}", f"$A $B {end}", **options)
    sizes = {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024}
    save_model(folder / "backbone", "qwen3", vocab_size=size, **sizes)
    return saved_pooled(folder, pooling, *behind, Normalize(), prompts={"query": prompt, "document": ""})


def embeddinggemma(folder: Path) -> str:
    """google/embeddinggemma-300m: a Gemma3 that looks both ways, windows in part, two dense layers."""
    size = unigram(folder / "backbone", GEMMA, "<bos> $A <eos>", "<bos> $A $B <eos>")
    save_model(
        folder / "backbone", "gemma3_text", vocab_size=size, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=512, sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        use_bidirectional_attention=True, query_pre_attn_scalar=32,
    )  # fmt: skip
    dense = {"bias": False, "activation_function": torch.nn.Identity()}
    torch.manual_seed(2)
    behind = Dense(128, 512, **dense), Dense(512, 128, **dense), Normalize()
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    prompts["clustering"] = "task: clustering | query: "
    return saved_pooled(folder, "mean", *behind, prompts=prompts)


def jina_v3(folder: Path) -> str:
    """jinaai/jina-embeddings-v3-hf: XLM-RoBERTa with rotary positions, its adapters apart."""
    save_model(
        folder / "backbone", "jina_embeddings_v3", vocab_size=xlm_roberta(folder / "backbone"),
        max_position_embeddings=514, type_vocab_size=1,
        rope_parameters={"rope_type": "default", "rope_theta": 20_000.0},
    )  # fmt: skip
    prompts = {
        "query": "Represent the query for retrieving evidence documents: ",
        "document": "Represent the document for retrieval: ",
    }
    return saved_pooled(folder, "mean", Normalize(), prompts=prompts)


def sgpt(folder: Path) -> str:
    """Muennighoff/SGPT-125M: the mean weighted by position, over a causal GPT-Neo."""
    specials = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    size = byte_level_bpe(folder / "backbone", specials, "$A", "$A $B")
    config = GPTNeoConfig(
        vocab_size=size, hidden_size=128, num_layers=2, num_heads=4, intermediate_size=256, window_size=16,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=512,
    )  # fmt: skip
    spread(GPTNeoModel(config)).save_pretrained(folder / "backbone")
    return saved_pooled(folder, "weightedmean")


# Modules behind pooling, by name; made anew for each save.
BEHIND_POOLING: dict[str, Callable[[], list[Any]]] = {
    "nothing": list,
    "a residual": lambda: [Dense(128, 128, use_residual=True)],
    "residuals": lambda: [Dense(128, 128, use_residual=True), Dense(128, 48, use_residual=True), Normalize()],
    "dropout": lambda: [
        *(Dropout(0.5), Dense(128, 128, activation_function=GELUActivation()), Normalize(), Dropout(0.5))
    ],
    "dense behind normalize": lambda: [Normalize(), Dense(128, 48, activation_function=torch.nn.Identity())],
    "a layer norm": lambda: [LayerNorm(128), Normalize()],
    "dense of concatenated rows": lambda: [Dense(384, 48), Normalize()],
}


def bert(folder: Path, pooling: str = "mean", behind: str = "nothing", **options: Any) -> str:
    """A BERT with a pooling mode, or several joined by "+", and one of `BEHIND_POOLING`."""
    _bert(folder)
    torch.manual_seed(4)
    return saved_pooled(folder, tuple(pooling.split("+")), *BEHIND_POOLING[behind](), **options)


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


def qwen3_in_chat(folder: Path) -> str:
    """A causal Qwen3 whose texts are written by its tokenizer's chat template."""
    (folder / "backbone").mkdir(parents=True)
    (folder / "backbone" / "chat_template.jinja").write_text(CHATML)
    markers = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "model_max_length": 512}
    return _qwen3(folder, "lasttoken", prompt="Find it.", **markers)
