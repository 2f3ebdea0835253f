"""Checkpoints as GGUF files. Each function writes `model.gguf` into a folder, and beside it the folder
`plain`, the checkpoint in transformers' format with the weights that the file's blocks stand for."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from sentence_transformers.base.modules import Normalize
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3Model

from tests.checkpoints import gguf_files
from tests.checkpoints.bi_encoders import _saved
from tests.checkpoints.gguf_files import WIDE, Conversion, decoder_said, said_of_tokens, write_gguf
from tests.checkpoints.tokenizers import GEMMA, byte_level_bpe, unigram, wordpiece, xlm_roberta
from tests.checkpoints.weights import save_model, save_tensors


def qwen3(folder: Path, kind: str = "Q8_0", **said: Any) -> str:
    """A Qwen3-Reranker as an old conversion has it: a language model and no more."""
    source = gguf_files.qwen3(folder / "hf")
    config = _config(source)
    conversion = Conversion(
        gguf.MODEL_ARCH.QWEN3,
        decoder_said(config) | _qwen_tokens(source, add_bos_token=False) | said,
    )
    return _written(folder, source, conversion, Kind[kind])


def qwen3_reranker(folder: Path, kind: str = "Q8_0", tied: bool = True, **changed: Any) -> str:
    """A Qwen3-Reranker as ggml-org converts it: of the output layer the rows of yes and no, in their own
    tensor, which is all that is left of an output layer that is not tied to the embeddings."""
    source = gguf_files.qwen3(folder / "hf", tie_word_embeddings=tied)
    config = _config(source)
    tensors = load_file(Path(source) / "model.safetensors")
    output = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"].float()
    numbers = Tokenizer.from_file(f"{source}/tokenizer.json")
    answers = output[[numbers.token_to_id(word) for word in ("yes", "no")]]
    said = decoder_said(config) | {"pooling_type": 4, "classifier.output_labels": ["yes", "no"]} | changed
    conversion = Conversion(
        gguf.MODEL_ARCH.QWEN3,
        said | _qwen_tokens(source, add_bos_token=False),
        lambda name, tensor, config: None if name == "lm_head.weight" else tensor,
    )
    path = _written(folder, source, conversion, Kind[kind], {"cls.output.weight": answers})
    plain = folder / "plain"
    tensors = load_file(plain / "model.safetensors")
    rows = (tensors["model.embed_tokens.weight"] if tied else output).clone()
    stored = _stored(Path(path))["cls.output.weight"]
    for word, row in zip(("yes", "no"), stored, strict=True):
        rows[numbers.token_to_id(word)] = row
    save_tensors(tensors | {"lm_head.weight": rows}, plain)
    (plain / "config.json").write_text(json.dumps(_config(str(plain)) | {"tie_word_embeddings": False}))
    return path


def qwen3_embedding(folder: Path, kind: str = "Q8_0", **changed: Any) -> str:
    """A Qwen3-Embedding: the last token's state, which is that of an end-of-text token."""
    source = gguf_files.qwen3(folder / "hf" / "backbone", Qwen3Model, end=True)
    config = _config(source)
    said = {"pooling_type": 3} | decoder_said(config)
    tokens = _qwen_tokens(source, add_eos_token=True)
    conversion = Conversion(gguf.MODEL_ARCH.QWEN3, _without_none(said | tokens | changed))
    return _written(folder, source, conversion, Kind[kind], saved=("lasttoken", folder / "hf"))


def bge(folder: Path, kind: str = "F16", **changed: Any) -> str:
    """BAAI/bge-small-en-v1.5: a BERT, whose tokeniser is a list of words."""
    source = folder / "hf" / "backbone"
    tokenizer = _fewer_words(wordpiece())
    save_model(source, "bert", vocab_size=len(tokenizer), **WIDE)
    tokenizer.save_pretrained(source)
    config = _config(str(source))
    tokens = said_of_tokens(str(source), config["vocab_size"], model="bert", pre="jina-v2-en",
                            unknown_token_id=100, seperator_token_id=102, padding_token_id=0,
                            bos_token_id=101, eos_token_id=102, mask_token_id=103,
                            token_type_count=2)  # fmt: skip
    kinds = tokens["tokenizer.ggml.token_type"]
    tokens["tokenizer.ggml.tokens"] = [
        _phantom(token, kind) for token, kind in zip(tokens["tokenizer.ggml.tokens"], kinds, strict=True)
    ]
    said = {
        "pooling_type": 2,
        "attention.causal": False,
        "attention.layer_norm_epsilon": config["layer_norm_eps"],
    }
    conversion = Conversion(
        gguf.MODEL_ARCH.BERT,
        said | tokens | changed,
        lambda name, tensor, config: None if name.startswith("pooler.") else tensor,
    )
    return _written(folder, str(source), conversion, Kind[kind], saved=("cls", folder / "hf"))


def _fewer_words(tokenizer: Any, size: int = 5000) -> Any:
    """A WordPiece tokenizer with the first of its words: of a GGUF file each is read by itself."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    words = described["model"]["vocab"]
    described["model"]["vocab"] = {word: number for word, number in words.items() if number < size}
    fewer = Tokenizer.from_str(json.dumps(described))
    return type(tokenizer)(tokenizer_object=fewer, model_max_length=tokenizer.model_max_length)


def bge_reranker(folder: Path, kind: str = "F16", **changed: Any) -> str:
    """BAAI/bge-reranker-v2-m3: an XLM-RoBERTa with a classifier of two layers, its tokenizer.json beside."""
    source = folder / "hf"
    size = xlm_roberta(source)
    save_model(
        source,
        "xlm-roberta",
        AutoModelForSequenceClassification,
        vocab_size=size,
        max_position_embeddings=514,
        type_vocab_size=1,
        num_labels=1,
        layer_norm_eps=1e-5,
        **WIDE,
    )
    said = {
        "pooling_type": 4,
        "attention.causal": False,
        "attention.layer_norm_epsilon": 1e-5,
        "context_length": 512,
    }
    tokens = said_of_tokens(str(source), size, model="t5", pre="default", bos_token_id=0, eos_token_id=2,
                            padding_token_id=1)  # fmt: skip

    def change(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
        return tensor[2:] if "position_embeddings" in name else tensor

    conversion = Conversion(gguf.MODEL_ARCH.BERT, said | tokens | changed, change)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    return _written(folder, str(source), conversion, Kind[kind])


def llama(folder: Path, more: dict[str, torch.Tensor] | None = None, **changed: Any) -> str:
    """A Llama in float32, its rows of queries and keys in llama.cpp's order."""
    source = folder / "hf"
    specials = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    size = byte_level_bpe(source, specials, "<s> $A", "<s> $A $B", words=("yes", "no"))

    def change(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
        if ".q_proj." not in name and ".k_proj." not in name:
            return tensor
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, -1)
        return halves.swapaxes(1, 2).reshape(tensor.shape)

    return _decoder(folder, "llama", size, gguf.MODEL_ARCH.LLAMA, change, changed, more)


def qwen2(folder: Path, **changed: Any) -> str:
    source = folder / "hf"
    size = gguf_files.qwen_tokenizer(source)
    return _decoder(folder, "qwen2", size, gguf.MODEL_ARCH.QWEN2, None, changed)


def gemma(folder: Path, **changed: Any) -> str:
    """bge-reranker-v2-gemma: norms with one added to their weights."""
    source = folder / "hf"
    size = unigram(source, GEMMA, "<bos> $A", "<bos> $A $B", model_max_length=4096)

    def change(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
        return tensor + 1 if name.endswith("norm.weight") else tensor

    return _decoder(
        folder, "gemma", size, gguf.MODEL_ARCH.GEMMA, change, changed, num_key_value_heads=1, head_dim=64
    )


def _qwen_tokens(source: str, **said: Any) -> dict[str, Any]:
    end = Tokenizer.from_file(f"{source}/tokenizer.json").token_to_id("<|endoftext|>")
    more = {"model": "gpt2", "pre": "qwen2", "eos_token_id": end, "padding_token_id": end}
    return said_of_tokens(source, _config(source)["vocab_size"], **more, **said)


def _decoder(
    folder: Path,
    kind: str,
    size: int,
    arch: Any,
    change: Any,
    changed: dict[str, Any],
    more: dict[str, torch.Tensor] | None = None,
    **settings: Any,
) -> str:
    """A decoder in float32, its tokeniser beside; `hf` has the same weights."""
    source = folder / "hf"
    sizes = {
        "vocab_size": size,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        **WIDE,
        **settings,
    }
    save_model(source, kind, AutoModelForCausalLM, **sizes)
    config = _config(str(source))
    said = decoder_said(config) | said_of_tokens(str(source), config["vocab_size"], model="other") | changed
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    conversion = Conversion(arch, _without_none(said), change) if change else Conversion(arch, said)
    return str(write_gguf(str(source), folder / "model.gguf", conversion, Kind.F32, more))


def _written(
    folder: Path,
    source: str,
    conversion: Conversion,
    kind: Kind,
    more: dict[str, torch.Tensor] | None = None,
    saved: tuple[str, Path] | None = None,
) -> str:
    """Writes the file and the plain checkpoint beside it; with `saved` that one as sentence-transformers
    saves it, pooled in a way, from a folder that has its backbone."""
    path = write_gguf(source, folder / "model.gguf", conversion, kind, more or {})
    table = gguf.get_tensor_name_map(conversion.arch, _config(source)["num_hidden_layers"])
    stored = _stored(path)
    tensors = {}
    for name, tensor in load_file(Path(source) / "model.safetensors").items():
        ours = table.get_name(name.removeprefix("roberta."), try_suffixes=(".weight", ".bias"))
        if ours not in stored:
            continue
        tensors[name] = stored[ours]
        if tensors[name].shape != tensor.shape:  # positions of padding, which no text has
            tensors[name] = torch.cat([tensor[: len(tensor) - len(stored[ours])], stored[ours]])
    plain = folder / "plain"
    if saved is None:
        shutil.copytree(source, plain)
        save_tensors(tensors, plain)
    else:
        save_tensors(tensors, Path(source))
        shutil.move(_saved(saved[1], saved[0], Normalize()), plain)
    return str(path)


def _stored(path: Path) -> dict[str, torch.Tensor]:
    """What the blocks of a file stand for, by its names."""
    return {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(path).tensors
    }


def _phantom(token: str, kind: int) -> str:
    if kind == 3:
        return token
    return token[2:] if token.startswith("##") else f"\u2581{token}"


def _config(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "config.json").read_text())
    return found


def _without_none(said: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in said.items() if value is not None}
