"""Checkpoints as llama.cpp converts them to GGUF; `plain` beside each has what its blocks stand for."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from sentence_transformers.base.modules import Normalize
from tokenizers import Tokenizer, processors

from tests.checkpoints.bi_encoders import saved_pooled
from tests.checkpoints.tokenizers import GEMMA, byte_level_bpe, merges_of, unigram, wordpiece, xlm_roberta
from tests.checkpoints.weights import SIZES, save_model, save_tensors, spread

WIDE = SIZES | {"hidden_size": 256, "intermediate_size": 512}
# How many words vocabularies have: in a GGUF file each is read by itself.
FEW = 600
Tensors = dict[str, torch.Tensor]
_CHAT = ["<|im_start|>", "<|im_end|>"]
_TYPED = ["<think>", "</think>"]


def _qwen_tokenizer(folder: Path, end: bool = False) -> int:
    """Qwen's, small; with `end` a token stands behind each text. Returns how many tokens it has."""
    vocabulary, merges = merges_of(("yes", "no", "Yes", "0", "1"), (), FEW)
    tokenizer = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=merges, model_max_length=4096)
    tokenizer.add_special_tokens({"additional_special_tokens": _CHAT})
    tokenizer.add_tokens(_TYPED)
    backend = tokenizer.backend_tokenizer
    if end:
        token = "<|endoftext|>"
        backend.post_processor = processors.TemplateProcessing(
            single=f"$A {token}", pair=f"$A $B {token}", special_tokens=[(token, backend.token_to_id(token))]
        )
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def _qwen3(
    folder: Path, kind: type = transformers.Qwen3ForCausalLM, end: bool = False, **settings: Any
) -> str:
    """A Qwen3 wide enough for blocks of 256, with Qwen's tokenizer."""
    size = _qwen_tokenizer(folder, end)
    config = transformers.Qwen3Config(
        vocab_size=size + 5, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
        **{"tie_word_embeddings": True, **WIDE, **settings},
    )  # fmt: skip
    spread(kind(config), weight=0.1, embedding=0.1).save_pretrained(folder)
    return str(folder)


@dataclass(frozen=True, slots=True)
class Conversion:
    """llama.cpp's number of an architecture, what is said about it, and what is done to its tensors."""

    arch: Any
    said: Mapping[str, Any]
    change: Callable[[str, torch.Tensor, dict[str, Any]], torch.Tensor | None] = field(
        default=lambda name, tensor, config: tensor
    )


def write_gguf(folder: str, path: Path, conversion: Conversion, kind: Kind, more: Tensors | None) -> Tensors:
    """Writes a checkpoint as one file, vectors in float32. Returns what its tensors stand for, by name."""
    config = json.loads(Path(folder, "config.json").read_text())
    name = gguf.MODEL_ARCH_NAMES[conversion.arch]
    writer = gguf.GGUFWriter(path, name)
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (_sizes(config) | dict(conversion.said)).items():
        whole = "." in key and not key.startswith(("attention.", "rope.", "classifier."))
        kinds.get(type(value), writer.add_array)(key if whole else f"{name}.{key}", value)
    table = gguf.get_tensor_name_map(conversion.arch, config["num_hidden_layers"])
    stored = {}
    for published, tensor in load_file(Path(folder) / "model.safetensors").items():
        changed = conversion.change(published, tensor.float(), config)
        if changed is not None:
            ours = table.get_name(published.removeprefix("roberta."), try_suffixes=(".weight", ".bias"))
            assert ours is not None, published
            stored[ours] = _add_tensor(writer, ours, changed.numpy(), kind)
    for ours, tensor in (more or {}).items():
        stored[ours] = _add_tensor(writer, ours, tensor.float().numpy(), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def said_of_tokens(folder: str, size: int, **said: Any) -> dict[str, Any]:
    """llama.cpp's description of a byte-level tokenizer, filled up to the size of the embeddings."""
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
    found = {"tokens": tokens, "token_type": kinds} | said | ({"merges": merges} if merges else {})
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
    }  # fmt: skip


def _add_tensor(writer: Any, name: str, values: Any, kind: Kind) -> torch.Tensor:
    if values.ndim == 1 or kind is Kind.F32:
        values = np.ascontiguousarray(values, dtype=np.float32)
        writer.add_tensor(name, values)
        return torch.from_numpy(values)
    kind = Kind.F16 if kind in _BLOCKS and values.shape[-1] % 256 else kind
    packed = in_blocks(values, kind)
    writer.add_tensor(name, packed, raw_dtype=kind)
    return torch.from_numpy(gguf.quants.dequantize(packed, kind).copy())


# Blocks of 256 values, which the package gguf only reads: where two bytes of their scale and of what is
# taken off are, and values of these with which random bytes become numbers of about 0.1.
_BLOCKS = {Kind.Q4_K: {0: 4e-4, 2: 7.5 * 4e-4}, Kind.Q5_K: {0: 2e-4, 2: 15.5 * 2e-4}, Kind.Q6_K: {208: 8e-5}}


def in_blocks(values: Any, kind: Kind) -> Any:
    """The bytes of a matrix in blocks; those of 256 values are random, and stand for another one."""
    if kind not in _BLOCKS:
        return gguf.quants.quantize(values, kind)
    shape, (_, size) = values.shape, gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (shape[0], shape[1] // 256, size), dtype=np.uint8)
    for start, scale in _BLOCKS[kind].items():
        blocks[..., start : start + 2] = np.float16([scale]).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def decoder_said(config: Mapping[str, Any], **said: Any) -> dict[str, Any]:
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {
        "attention.head_count_kv": config["num_key_value_heads"], "attention.key_length": head,
        "attention.value_length": head, "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
    } | said  # fmt: skip


def qwen3(folder: Path, kind: str = "Q8_0", **said: Any) -> str:
    """A Qwen3-Reranker as an old conversion has it: a language model and no more."""
    source = _qwen3(folder / "hf")
    config = _config(source)
    conversion = Conversion(
        gguf.MODEL_ARCH.QWEN3, decoder_said(config) | _qwen_tokens(source, add_bos_token=False) | said
    )
    return _written(folder, source, conversion, kind, said)[0]


def qwen3_reranker(folder: Path, kind: str = "Q8_0", tied: bool = True, **changed: Any) -> str:
    """A Qwen3-Reranker as ggml-org converts it: of the output layer only the rows of yes and no are left."""
    source = _qwen3(folder / "hf", tie_word_embeddings=tied)
    config = _config(source)
    tensors = load_file(Path(source) / "model.safetensors")
    output = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"].float()
    numbers = Tokenizer.from_file(f"{source}/tokenizer.json")
    answers = output[[numbers.token_to_id(word) for word in ("yes", "no")]]
    said = decoder_said(config) | {"pooling_type": 4, "classifier.output_labels": ["yes", "no"]} | changed
    conversion = Conversion(
        gguf.MODEL_ARCH.QWEN3, said | _qwen_tokens(source, add_bos_token=False),
        lambda name, tensor, config: None if name == "lm_head.weight" else tensor,
    )  # fmt: skip
    more = {"cls.output.weight": answers}
    path, stored = _written(folder, source, conversion, kind, changed, more=more)
    if changed:
        return path
    plain = folder / "plain"
    tensors = load_file(plain / "model.safetensors")
    rows = (tensors["model.embed_tokens.weight"] if tied else output).clone()
    for word, row in zip(("yes", "no"), stored["cls.output.weight"], strict=True):
        rows[numbers.token_to_id(word)] = row
    save_tensors(tensors | {"lm_head.weight": rows}, plain)
    (plain / "config.json").write_text(json.dumps(_config(str(plain)) | {"tie_word_embeddings": False}))
    return path


def qwen3_embedding(folder: Path, kind: str = "Q8_0", **changed: Any) -> str:
    """A Qwen3-Embedding: the last token's state, which is that of an end-of-text token."""
    source = _qwen3(folder / "hf" / "backbone", transformers.Qwen3Model, end=True)
    said = {"pooling_type": 3} | decoder_said(_config(source))
    tokens = _qwen_tokens(source, add_eos_token=True)
    conversion = Conversion(gguf.MODEL_ARCH.QWEN3, _without_none(said | tokens | changed))
    return _written(folder, source, conversion, kind, changed, "lasttoken")[0]


def bge(folder: Path, kind: str = "F16", **changed: Any) -> str:
    """BAAI/bge-small-en-v1.5: a BERT, whose tokenizer is a list of words."""
    source = folder / "hf" / "backbone"
    tokenizer = wordpiece(2100)
    save_model(source, "bert", vocab_size=len(tokenizer), **WIDE)
    tokenizer.save_pretrained(source)
    config = _config(str(source))
    tokens = said_of_tokens(str(source), config["vocab_size"], model="bert", pre="jina-v2-en",
                            unknown_token_id=100, seperator_token_id=102, padding_token_id=0,
                            bos_token_id=101, eos_token_id=102, mask_token_id=103,
                            token_type_count=2)  # fmt: skip
    kinds, words = tokens["tokenizer.ggml.token_type"], tokens["tokenizer.ggml.tokens"]
    tokens["tokenizer.ggml.tokens"] = list(map(_phantom, words, kinds))
    epsilon = config["layer_norm_eps"]
    said = {"pooling_type": 2, "attention.causal": False, "attention.layer_norm_epsilon": epsilon}
    conversion = Conversion(
        gguf.MODEL_ARCH.BERT, said | tokens | changed,
        lambda name, tensor, config: None if name.startswith("pooler.") else tensor,
    )  # fmt: skip
    return _written(folder, str(source), conversion, kind, changed, "cls")[0]


def bge_reranker(folder: Path, kind: str = "F16") -> str:
    """BAAI/bge-reranker-v2-m3: an XLM-RoBERTa with a classifier of two layers, its tokenizer.json beside."""
    source = folder / "hf"
    size = xlm_roberta(source, most=FEW)
    save_model(
        source, "xlm-roberta", transformers.AutoModelForSequenceClassification, vocab_size=size,
        max_position_embeddings=514, type_vocab_size=1, num_labels=1, layer_norm_eps=1e-5, **WIDE,
    )  # fmt: skip
    said = {
        "pooling_type": 4, "attention.causal": False, "attention.layer_norm_epsilon": 1e-5,
        "context_length": 512,
    }  # fmt: skip
    tokens = said_of_tokens(str(source), size, model="t5", pre="default", bos_token_id=0, eos_token_id=2,
                            padding_token_id=1)  # fmt: skip

    def change(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
        return tensor[2:] if "position_embeddings" in name else tensor

    conversion = Conversion(gguf.MODEL_ARCH.BERT, said | tokens, change)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    return _written(folder, str(source), conversion, kind, {})[0]


def llama(folder: Path, more: Tensors | None = None, stored: str = "F32", **changed: Any) -> str:
    """A Llama, its rows of queries and keys in llama.cpp's order."""
    source = folder / "hf"
    specials = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    size = byte_level_bpe(source, specials, "<s> $A", "<s> $A $B", ("yes", "no"), most=FEW)

    def change(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
        if ".q_proj." not in name and ".k_proj." not in name:
            return tensor
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, -1)
        return halves.swapaxes(1, 2).reshape(tensor.shape)

    return _decoder(folder, "llama", size, change, changed, more, stored)


def qwen2(folder: Path, **changed: Any) -> str:
    return _decoder(folder, "qwen2", _qwen_tokenizer(folder / "hf"), None, changed)


def gemma(folder: Path, **changed: Any) -> str:
    """bge-reranker-v2-gemma: norms with one added to their weights."""
    size = unigram(folder / "hf", GEMMA, "<bos> $A", "<bos> $A $B", model_max_length=4096, most=FEW)

    def change(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
        return tensor + 1 if name.endswith("norm.weight") else tensor

    return _decoder(folder, "gemma", size, change, changed, num_key_value_heads=1, head_dim=64)


def _qwen_tokens(source: str, **said: Any) -> dict[str, Any]:
    end = Tokenizer.from_file(f"{source}/tokenizer.json").token_to_id("<|endoftext|>")
    more = {"model": "gpt2", "pre": "qwen2", "eos_token_id": end, "padding_token_id": end}
    return said_of_tokens(source, _config(source)["vocab_size"], **more, **said)


def _decoder(
    folder: Path, kind: str, size: int, change: Any, changed: Any, more: Tensors | None = None,
    stored: str = "F32", **settings: Any,
) -> str:  # fmt: skip
    """A decoder, its tokenizer beside; `hf` has the same weights."""
    source, arch = folder / "hf", gguf.MODEL_ARCH[kind.upper()]
    sizes = {"vocab_size": size, "num_key_value_heads": 2, "max_position_embeddings": 4096} | WIDE | settings
    save_model(source, kind, transformers.AutoModelForCausalLM, **sizes)
    config = _config(str(source))
    said = decoder_said(config) | said_of_tokens(str(source), config["vocab_size"], model="other") | changed
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    conversion = Conversion(arch, _without_none(said), change) if change else Conversion(arch, said)
    write_gguf(str(source), folder / "model.gguf", conversion, Kind[stored], more)
    return str(folder / "model.gguf")


def _written(
    folder: Path, source: str, conversion: Conversion, kind: str, changed: Any, pooling: str | None = None,
    more: Tensors | None = None,
) -> tuple[str, Tensors]:  # fmt: skip
    """Writes the file and, unless it is `changed`, the plain checkpoint beside it: with a `pooling` as
    sentence-transformers saves it. Returns the path and what the file's tensors stand for."""
    path = folder / "model.gguf"
    stored = write_gguf(source, path, conversion, Kind[kind], more)
    if changed:
        return str(path), stored
    table = gguf.get_tensor_name_map(conversion.arch, _config(source)["num_hidden_layers"])
    tensors = {}
    for name, tensor in load_file(Path(source) / "model.safetensors").items():
        ours = table.get_name(name.removeprefix("roberta."), try_suffixes=(".weight", ".bias"))
        if ours not in stored:
            continue
        tensors[name] = stored[ours]
        if tensors[name].shape != tensor.shape:  # positions of padding, which no text has
            tensors[name] = torch.cat([tensor[: len(tensor) - len(stored[ours])], stored[ours]])
    plain = folder / "plain"
    if pooling is None:
        shutil.copytree(source, plain)
        save_tensors(tensors, plain)
    else:
        save_tensors(tensors, Path(source))
        shutil.move(saved_pooled(folder / "hf", pooling, Normalize()), plain)
    return str(path), stored


def _phantom(token: str, kind: int) -> str:
    if kind == 3:
        return token
    return token[2:] if token.startswith("##") else f"\u2581{token}"


def _config(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "config.json").read_text())
    return found


def _without_none(said: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in said.items() if value is not None}
