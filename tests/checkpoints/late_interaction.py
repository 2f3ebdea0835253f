"""Late-interaction checkpoints, as they are published."""

import json
import string
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask
from transformers import AutoTokenizer

from tests.checkpoints import weights
from tests.checkpoints.cross_encoders import MODERNBERT
from tests.checkpoints.tokenizers import WORDS, wordpiece, xlm_roberta

_BERT = {"hidden_size": 64, "intermediate_size": 128}
OF_TOKENS: Any = {"activation_function": torch.nn.Identity(), "module_input_name": "token_embeddings"}


def stanford(folder: Path, attend: bool = False, dim: int = 32, heads: int = 4) -> str:
    """colbert-ir/colbertv2.0: HF_ColBERT, `linear.weight` beside the encoder, artifact.metadata."""
    model = weights.save_model(folder, "bert", vocab_size=WORDS, **_BERT | {"num_attention_heads": heads})
    weights.change_config(folder, architectures=["HF_ColBERT"])
    tensors = {f"bert.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors["linear.weight"] = torch.randn(dim, 64) * 0.2
    weights.save_tensors(tensors, folder)
    wordpiece().save_pretrained(folder)
    write_artifact(folder, "[unused0]", "[unused1]", attend, dim, query_maxlen=32, doc_maxlen=180)
    return str(folder)


def native(folder: Path, token_pooling: bool = False, heads: int = 4) -> str:
    """A multi-vector save with every knob turned: prompts, lengths, attended expansion, a skip list."""
    backbone = folder / "backbone"
    weights.save_model(backbone, "bert", vocab_size=WORDS, **_BERT | {"num_attention_heads": heads})
    wordpiece().save_pretrained(backbone)
    transformer = Transformer(
        str(backbone), query_length=48, document_length=128,
        query_expansion={"strategy": "min", "attend": True, "length": 24, "token": "[MASK]"},
    )  # fmt: skip
    projection = Dense(64, 48, **OF_TOKENS)
    mask = MultiVectorMask(skiplist_words=[",", ".", "the"], skiplist_tasks=["query", "document"])
    modules = [transformer, projection, mask, Normalize(module_input_name="token_embeddings")]
    if token_pooling:
        modules.append(HierarchicalTokenPooling(2.0))
    model = MultiVectorEncoder(
        modules=modules, prompts={"query": "search query: ", "document": "search document: "}, device="cpu"
    )
    return weights.save_own(model, folder / "saved")


def pylate_modernbert(folder: Path, model_type: str | None = None) -> str:
    """lightonai/GTE-ModernColBERT-v1: PyLate's first format, whose settings name no type of model.
    lightonai/LateOn has its later one, with the `model_type` ColBERT."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = wordpiece()
    tokenizer.add_tokens(["[Q] ", "[D] "])
    tokenizer.save_pretrained(folder)
    weights.save_model(folder, "modernbert", vocab_size=len(tokenizer), **MODERNBERT)
    return save_as_pylate(folder, model_type, 299, 150)


def save_as_pylate(folder: Path, model_type: str | None, longest: int, document_length: int) -> str:
    """Writes what PyLate does beside a transformer of 128 dimensions: a projection and its settings."""
    projection = folder / "1_Dense"
    projection.mkdir()
    Dense(128, 48, bias=False, activation_function=torch.nn.Identity()).save(str(projection))
    config = json.loads((projection / "config.json").read_text())
    for key in ("module_input_name", "module_output_name"):  # which an older library did not write
        config.pop(key, None)
    (projection / "config.json").write_text(json.dumps(config))
    kinds = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    weights.save_module_list(folder, kinds)
    longest_text = {"max_seq_length": longest, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(longest_text))
    settings = {
        "prompts": {}, "default_prompt_name": None, "similarity_fn_name": "MaxSim", "query_prefix": "[Q] ",
        "document_prefix": "[D] ", "query_length": 32, "document_length": document_length,
        "attend_to_expansion_tokens": False, "skiplist_words": list(".,;:!?()"),
    }  # fmt: skip
    named = {} if model_type is None else {"model_type": model_type}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings | named))
    return str(folder)


def jina_colbert_v2(folder: Path) -> str:
    """jinaai/jina-colbert-v2: HF_ColBERT on an XLM-RoBERTa with rotary positions, which its own code runs.

    `saved` beside it holds the same weights as a native save, in transformers' own terms."""
    folder.mkdir(parents=True, exist_ok=True)
    markers = ["[QueryMarker]", "[DocumentMarker]"]
    size, theta = xlm_roberta(folder, additional_special_tokens=markers), 10_000.0
    backbone = folder / "backbone"
    model = weights.save_model(
        backbone, "jina_embeddings_v3", options={"add_pooling_layer": False}, vocab_size=size,
        max_position_embeddings=514, type_vocab_size=1,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )  # fmt: skip
    projection = torch.randn(32, 128) * 0.2
    more = {"linear.weight": projection}
    weights.save_renamed(model, folder, _REMOTE_TERMS, "mixer.Wqkv", "roberta.", more)
    code = "jinaai/xlm-roberta-flash-implementation--"
    published = {
        "architectures": ["HF_ColBERT"],
        "auto_map": {
            "AutoConfig": f"{code}configuration_xlm_roberta.XLMRobertaFlashConfig",
            "AutoModel": f"{code}modeling_xlm_roberta.XLMRobertaModel",
        },
        "model_type": "xlm-roberta", "position_embedding_type": "rotary", "rotary_emb_base": theta,
        "use_flash_attn": True, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "max_position_embeddings": 514,
        "type_vocab_size": 1, "vocab_size": size, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(published | weights.SIZES))
    write_artifact(folder, *markers, attend=True, dim=32, query_maxlen=32, doc_maxlen=300)

    AutoTokenizer.from_pretrained(folder).save_pretrained(backbone)
    expansion = {"strategy": "fixed", "attend": True, "length": 32, "token": "<mask>"}
    transformer = Transformer(str(backbone), document_length=300, query_expansion=expansion)
    dense = Dense(128, 32, bias=False, init_weight=projection, **OF_TOKENS)
    mask = MultiVectorMask(skiplist_words=list(string.punctuation))
    reference = MultiVectorEncoder(
        modules=[transformer, dense, mask, Normalize(module_input_name="token_embeddings")],
        prompts={"query": "[QueryMarker] ", "document": "[DocumentMarker] "},
        device="cpu",
    )
    weights.save_own(reference, folder / "saved")
    return str(folder)


_REMOTE_TERMS = {
    "layers.": "encoder.layers.", "self_attn.o_proj": "mixer.out_proj", "embeddings.LayerNorm": "emb_ln",
    "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2",
}  # fmt: skip


def write_artifact(folder: Path, query: str, document: str, attend: bool, dim: int, **lengths: int) -> None:
    metadata: dict[str, Any] = {
        "query_token_id": query, "doc_token_id": document, "mask_punctuation": True,
        "attend_to_mask_tokens": attend, "dim": dim, "similarity": "cosine",
    }  # fmt: skip
    (folder / "artifact.metadata").write_text(json.dumps(metadata | lengths))
