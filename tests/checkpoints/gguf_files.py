"""GGUF files of checkpoints, with names, metadata and changed values as llama.cpp's conversion scripts write
them. The names of tensors come from the package gguf's own table."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tokenizers import Tokenizer, processors
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from tests.checkpoints.tokenizers import merges_of
from tests.checkpoints.weights import SIZES, spread

WIDE = SIZES | {"hidden_size": 256, "intermediate_size": 512}
_CHAT = ["<|im_start|>", "<|im_end|>"]
_TYPED = ["<think>", "</think>"]


def qwen_tokenizer(folder: Path, end: bool = False) -> int:
    """Qwen's, with a small vocabulary; with `end` it puts the end-of-text token behind each text, as
    Qwen3-Embedding's does. Returns how many tokens it has."""
    words = ("yes", "no", "Yes", "0", "1")
    vocabulary, merges = merges_of(words, ())
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=merges, model_max_length=4096)
    tokenizer.add_special_tokens({"additional_special_tokens": _CHAT})
    tokenizer.add_tokens(_TYPED)
    backend = tokenizer.backend_tokenizer
    if end:
        token = "<|endoftext|>"
        backend.post_processor = processors.TemplateProcessing(
            single=f"$A {token}",
            pair=f"$A $B {token}",
            special_tokens=[(token, backend.token_to_id(token))],
        )
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def qwen3(folder: Path, kind: type = Qwen3ForCausalLM, end: bool = False, **settings: Any) -> str:
    """A Qwen3 wide enough for blocks of 256, with Qwen's tokeniser."""
    size = qwen_tokenizer(folder, end)
    config = Qwen3Config(
        vocab_size=size + 5,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        **{"tie_word_embeddings": True, **WIDE, **settings},
    )
    spread(kind(config), weight=0.1, embedding=0.1).save_pretrained(folder)
    return str(folder)


def qwen3_embedding(folder: Path) -> str:
    return qwen3(folder, Qwen3Model, end=True)


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a checkpoint is written: llama.cpp's number of its architecture, what is said about it, and what
    is done to its tensors."""

    arch: Any
    said: Mapping[str, Any]
    change: Callable[[str, torch.Tensor, dict[str, Any]], torch.Tensor | None] = field(
        default=lambda name, tensor, config: tensor
    )


def write_gguf(
    folder: str,
    path: Path,
    conversion: Conversion,
    kind: Kind,
    more: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Writes the checkpoint of a folder as one file, matrices in one kind of blocks where they fit, vectors
    in float32."""
    config = json.loads(Path(folder, "config.json").read_text())
    name = gguf.MODEL_ARCH_NAMES[conversion.arch]
    writer = gguf.GGUFWriter(path, name)
    for key, value in (_sizes(config) | dict(conversion.said)).items():
        _add(writer, key if "." in key and not key.startswith(("attention.", "rope.", "classifier."))
             else f"{name}.{key}", value)  # fmt: skip
    table = gguf.get_tensor_name_map(conversion.arch, config["num_hidden_layers"])
    for published, tensor in load_file(Path(folder) / "model.safetensors").items():
        changed = conversion.change(published, tensor.float(), config)
        if changed is not None:
            ours = table.get_name(published.removeprefix("roberta."), try_suffixes=(".weight", ".bias"))
            assert ours is not None, published
            _add_tensor(writer, ours, changed.numpy(), kind)
    for ours, tensor in (more or {}).items():
        _add_tensor(writer, ours, tensor.float().numpy(), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def said_of_tokens(folder: str, size: int, **said: Any) -> dict[str, Any]:
    """What llama.cpp says of a byte-level tokeniser: its tokens by number and kind, filled up to the size of
    the embeddings, and its merges."""
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    stated = json.loads(Path(folder, "tokenizer.json").read_text())
    added = {token["id"]: token["special"] for token in stated["added_tokens"]}
    tokens, kinds = [], []
    for number in range(size):
        token = tokenizer.id_to_token(number)
        tokens.append(f"[PAD{number}]" if token is None else token)
        special = added.get(number)
        kinds.append(5 if token is None else 1 if special is None else 3 if special else 4)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in stated["model"].get("merges", [])]
    found = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    return (
        found
        | {f"tokenizer.ggml.{key}": value for key, value in said.items()}
        | ({"tokenizer.ggml.merges": merges} if merges else {})
    )


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
    }


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _add_tensor(writer: Any, name: str, values: Any, kind: Kind) -> None:
    if values.ndim == 1 or kind is Kind.F32:
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
        return
    if kind in _BLOCKS and values.shape[-1] % 256 == 0:
        packed = _random_blocks(values.shape, kind)
    else:
        kind = Kind.F16 if kind in _BLOCKS else kind
        packed = gguf.quants.quantize(values, kind)
    writer.add_tensor(name, packed, raw_dtype=kind)


# Of blocks of 256 values, which the package gguf only reads: where two bytes of their scale and of what is
# taken off are, and values of these with which random bytes become numbers of about 0.1.
_BLOCKS = {
    Kind.Q4_K: {0: 4e-4, 2: 7.5 * 4e-4},
    Kind.Q5_K: {0: 2e-4, 2: 15.5 * 2e-4},
    Kind.Q6_K: {208: 8e-5},
}


def _random_blocks(shape: tuple[int, ...], kind: Kind) -> Any:
    """Bytes of blocks in place of a matrix: what they stand for is another one."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (shape[0], shape[1] // 256, size), dtype=np.uint8)
    for start, scale in _BLOCKS[kind].items():
        blocks[..., start : start + 2] = np.float16([scale]).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def decoder_said(config: Mapping[str, Any], **said: Any) -> dict[str, Any]:
    """What llama.cpp says of decoders beside their sizes."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
    } | said
