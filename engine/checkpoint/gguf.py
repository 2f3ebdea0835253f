"""GGUF files: a model's settings, its tokenizer and its weights in one file, most of them quantized. A file
becomes the folder that its model is published as; transformers is handed its weights.

Source: the specification of the format (github.com/ggml-org/ggml, docs/gguf.md) and llama.cpp's conversion
scripts, whose changes to names and weights are taken back here. The package gguf reads the file."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from maxsimd.engine.checkpoint.detect import says_both_ways
from maxsimd.engine.checkpoint.files import USAGE, CheckpointFiles, folder_for, read_files
from maxsimd.engine.checkpoint.translate import write_modules
from maxsimd.engine.checkpoint.weights import StoredWeights, some_of
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.ops.cpu.blocks import KINDS, BlockTensor, can_stay

log = logging.getLogger(__name__)

_ENDING = ".gguf"
_RANK = 4
# llama.cpp's ways of pooling by their numbers, in the words of sentence-transformers.
_POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}
_MODULES = "modules.json"
# A token of jina-reranker-v3, which ranks listwise.
_OF_JINA = "<|rerank_token|>"

_PLAIN = ("F32", "F16", "BF16")
# The kinds of blocks that tests prove to be read as llama.cpp's own definition has them.
PROVEN = (*_PLAIN, "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")


class GgufFile:
    """A file that is open for reading. Raises ModelLoadError where the package gguf is missing, and for a
    file that is none, or one of several parts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            import gguf
        except ImportError as error:
            raise ModelLoadError(
                f"{path} is a GGUF file, for which the package gguf is needed: pip install '.[gguf]'"
            ) from error
        try:
            self._reader = gguf.GGUFReader(path)
        except Exception as error:
            raise ModelLoadError(f"{path} cannot be read as a GGUF file: {error}") from error
        self._unread = set(self._reader.fields)
        tokens, kinds = (self.get(f"tokenizer.ggml.{key}") or () for key in ("tokens", "token_type"))
        # Each token and its kind, as llama.cpp numbers kinds; none if the file lacks either.
        self.tokens = list(zip(tokens, kinds, strict=True)) if len(tokens) == len(kinds) else []
        # The shape of each tensor by its name, in torch's order.
        self.shapes = {each.name: tuple(map(int, reversed(each.shape))) for each in self._reader.tensors}
        if int(self.get("split.count") or 1) > 1:
            raise ModelLoadError(f"{path} is one part of several; join them with llama-gguf-split --merge")

    def forget_tokenizer(self) -> None:
        """Frees what the reader holds of it, some hundred megabytes: all but `tokens`."""
        for key in [key for key in self._reader.fields if key.startswith("tokenizer.ggml.")]:
            del self._reader.fields[key]

    def close(self) -> None:
        del self._reader, self.tokens

    def get(self, key: str) -> Any:
        self._unread.discard(key)
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    @property
    def architecture(self) -> str:
        return str(self.get("general.architecture"))

    def setting(self, key: str) -> Any:
        return self.get(f"{self.architecture}.{key}")

    def number(self, key: str) -> Any:
        """A number about the architecture. Raises ModelLoadError where there is none, or one per layer."""
        value = self.setting(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"{self.path} has no number {self.architecture}.{key}, but {value!r}")
        return value

    def refuse_unread(self) -> None:
        """Raises ModelLoadError if a value about the architecture has not been asked for: it might change
        what the model computes."""
        unread = sorted(key for key in self._unread if key.startswith(f"{self.architecture}."))
        if unread:
            raise ModelLoadError(f"{self.path} sets {', '.join(unread)}, which is not supported")

    @property
    def form(self) -> str:
        kinds = sorted({tensor.tensor_type.name for tensor in self._reader.tensors})
        return f"GGUF: {', '.join(kinds)}"

    def tensors(self, in_blocks: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor by its name, as float32: with `in_blocks` quantized matrices stay in their blocks where
        our kernels multiply them so. Raises ModelLoadError for a kind of blocks that is not proven."""
        from gguf.quants import dequantize

        for tensor in self._reader.tensors:
            kind = tensor.tensor_type
            if kind.name not in PROVEN:
                raise ModelLoadError(
                    f"{self.path} stores {tensor.name} as {kind.name}; name a version whose weights are "
                    + ", ".join(PROVEN)
                )
            shape = self.shapes[tensor.name]
            is_quantized = kind.name not in _PLAIN and len(shape) == 2
            if in_blocks and is_quantized and can_stay(kind.name, shape[1]) and _is_unpacked_alike(kind.name):
                yield tensor.name, BlockTensor.of(kind.name, self._bytes_of(tensor, shape[0]))
                continue
            values = torch.from_numpy(dequantize(tensor.data, kind).astype("float32"))
            yield tensor.name, values.reshape(self.shapes[tensor.name])

    def _bytes_of(self, tensor: Any, rows: int) -> torch.Tensor:
        """The blocks of a matrix [rows, bytes], read into memory of our own: a mapped file would count twice,
        and others can change it."""
        stored = np.fromfile(self.path, np.uint8, count=tensor.n_bytes, offset=tensor.data_offset)
        if len(stored) != tensor.n_bytes:
            raise ModelLoadError(f"{self.path} ends within its tensor {tensor.name}; download it again")
        return torch.from_numpy(stored).view(rows, -1)


@cache
def _is_unpacked_alike(kind: str) -> bool:
    """Whether our kernel takes random blocks apart as the package gguf does, to the last bit."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    number, values, size = KINDS[kind]
    spans = max(1, 256 // values)
    stored = np.random.default_rng(0).integers(0, 256, (64, spans * size), np.uint8)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(dequantize(stored, GGMLQuantizationType(number)))
    found = BlockTensor.of(kind, torch.from_numpy(stored)).numbers()
    alike = torch.equal(found.nan_to_num(nan=0.5), expected.nan_to_num(nan=0.5))
    if not alike:
        log.warning("weights in %s are expanded: our kernel reads them in another way than gguf", kind)
    return alike


Config = dict[str, Any]
Undo = Callable[[str, torch.Tensor, Config], torch.Tensor]

# The rows of the answers of a reranker, which the loader puts back into its output layer.
ANSWERS = "cls.output.weight"
# The key of a config that says that other rows of the output layer were left out.
ANSWERS_ALONE = "answers_alone"


@dataclass(frozen=True, slots=True)
class Family:
    """`backbone` is transformers' class without a head, and `whole` the one with a head. With `answers` a
    file may have the rows of a reranker's answers."""

    backbone: str
    whole: str
    config: Callable[[GgufFile], Config]
    undo: Undo = lambda name, tensor, config: tensor
    answers: bool = False

    @property
    def is_causal(self) -> bool:
        return self.whole.endswith("ForCausalLM")


def _common(file: GgufFile) -> Config:
    """The settings that all configs share. Raises ModelLoadError for positions that are scaled."""
    scaling = file.setting("rope.scaling.type")
    if scaling not in (None, "none"):
        raise ModelLoadError(f"{file.path} scales positions by {scaling!r}, which is not supported")
    file.setting("vocab_size")  # the rows of the embeddings say the same, and are what is read
    return {
        "hidden_size": file.number("embedding_length"),
        "num_hidden_layers": file.number("block_count"),
        "intermediate_size": file.number("feed_forward_length"),
        "num_attention_heads": file.number("attention.head_count"),
        "max_position_embeddings": file.number("context_length"),
        "vocab_size": file.shapes["token_embd.weight"][0],
        "dtype": "float32",
    }


def _decoder(file: GgufFile, kind: str) -> Config:
    if file.setting("attention.causal") is False:
        raise ModelLoadError(f"{file.path} is a {kind} that attends both ways, which is not supported")
    common = _common(file)
    head = file.setting("attention.key_length") or common["hidden_size"] // common["num_attention_heads"]
    for key in ("attention.value_length", "rope.dimension_count"):
        if (file.setting(key) or head) != head:
            raise ModelLoadError(f"{file.path} has another {file.architecture}.{key} than its heads are wide")
    theta = file.setting("rope.freq_base")
    return common | {
        "model_type": kind,
        "num_key_value_heads": file.setting("attention.head_count_kv") or common["num_attention_heads"],
        "head_dim": head,
        "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0 if theta is None else theta},
        "tie_word_embeddings": "output.weight" not in file.shapes,
    }


def _qwen2(file: GgufFile) -> Config:
    config = _decoder(file, "qwen2")
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise ModelLoadError(f"{file.path} is a Qwen2 whose heads are not as wide as its states together")
    return config


def _llama(file: GgufFile) -> Config:
    """Llama's. The factors by which Llama 3.1 and later divide frequencies are a tensor in the file."""
    if "rope_freqs.weight" in file.shapes:
        raise ModelLoadError(
            f"{file.path} scales positions as Llama 3.1 does, which a GGUF file says by its result alone; "
            "name the checkpoint that it was made from"
        )
    return _decoder(file, "llama") | {"attention_bias": "blk.0.attn_q.bias" in file.shapes}


def _gemma(file: GgufFile) -> Config:
    return _decoder(file, "gemma") | {"hidden_act": "gelu_pytorch_tanh"}


def _bert(file: GgufFile) -> Config:
    if "token_types.weight" not in file.shapes:
        raise ModelLoadError(f"{file.path} is a 'bert' without types of tokens; name what it was made from")
    if file.setting("attention.causal") is not False:
        raise ModelLoadError(f"{file.path} is a 'bert' that is not said to attend both ways")
    return _common(file) | {
        "model_type": "bert",
        "layer_norm_eps": file.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu",
        "type_vocab_size": file.shapes["token_types.weight"][0],
    }


def _xlm_roberta(file: GgufFile) -> Config:
    """XLM-RoBERTa's: the positions of its padding, which no text has, are cut off its embeddings."""
    config = _bert(file)
    return config | {
        "model_type": "xlm-roberta",
        "max_position_embeddings": file.shapes["position_embd.weight"][0] + _PADDING_ROWS,
        "pad_token_id": _PADDING_ROWS - 1,
    }


# RoBERTa counts positions from behind its padding's id, 1.
_PADDING_ROWS = 2


def _in_halves(name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    """Rows of queries and keys as transformers has them: the first coordinates of all pairs that are rotated,
    then the second ones; llama.cpp has them in turn."""
    if ".attn_q." not in name and ".attn_k." not in name:
        return tensor
    heads = config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]
    return tensor[torch.arange(len(tensor)).view(heads, -1, 2).transpose(1, 2).reshape(-1)]


def _around_zero(name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    """Gemma's norms multiply by one more than their weight, which the conversion has added."""
    return tensor - 1 if name.endswith("norm.weight") else tensor


def _with_padding(name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    if name != "position_embd.weight":
        return tensor
    return torch.cat([tensor.new_zeros(_PADDING_ROWS, tensor.shape[1]), tensor])


_XLM_ROBERTA = Family("XLMRobertaModel", "XLMRobertaForSequenceClassification", _xlm_roberta, _with_padding)
_FAMILIES = {
    "bert": Family("BertModel", "", _bert),
    "gemma": Family("GemmaModel", "GemmaForCausalLM", _gemma, _around_zero),
    "llama": Family("LlamaModel", "LlamaForCausalLM", _llama, _in_halves),
    "qwen2": Family("Qwen2Model", "Qwen2ForCausalLM", _qwen2),
    "qwen3": Family("Qwen3Model", "Qwen3ForCausalLM", partial(_decoder, kind="qwen3"), answers=True),
}


def _published_names(file: GgufFile, family: Family, config: Config) -> dict[str, str]:
    """The published name of each tensor, by llama.cpp's. Raises ModelLoadError for a tensor that the model
    does not have."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    with torch.device("meta"):
        settings = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
        model = getattr(transformers, family.whole or family.backbone)(settings)
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    table, endings = get_tensor_name_map(arch, config["num_hidden_layers"]), (".weight", ".bias")
    names = {ANSWERS: ANSWERS} if family.answers else {}
    for name in model.state_dict():
        inner = name.removeprefix(f"{model.base_model_prefix}.")
        if (stored := table.get_name(name, endings) or table.get_name(inner, endings)) is not None:
            names[stored] = name
    unnamed = sorted(file.shapes.keys() - names.keys())
    if unnamed:
        raise ModelLoadError(
            f"{file.path} has tensors that a {file.architecture} is not read with here: {some_of(unnamed)}; "
            "name the checkpoint that it was made from"
        )
    return names


def read_tensors(
    file: GgufFile, family: Family, config: Config, names: Mapping[str, str], in_blocks: bool
) -> dict[str, torch.Tensor]:
    """All tensors by their published `names`, float32, as they were before the conversion; with `in_blocks`
    those of a decoder as `GgufFile.tensors` keeps them. Raises ModelLoadError for what that does not read."""
    stored = file.tensors(in_blocks and family.is_causal)
    tensors = {names[name]: family.undo(name, each, config).contiguous() for name, each in stored}
    if (answers := tensors.pop(ANSWERS, None)) is None:
        return tensors
    labels = file.setting("classifier.output_labels")
    if labels != ["yes", "no"] or len(answers) != len(labels):
        raise ModelLoadError(f"{file.path} answers with {labels}; a reranker that answers yes or no is read")
    words = [token for token, _ in file.tokens]
    # Nothing reads the rows of other words, which are the embeddings where these are tied.
    rows = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    if isinstance(rows, BlockTensor) and not isinstance(answers, BlockTensor):
        answers = BlockTensor.of("F32", answers.contiguous().view(torch.uint8))
    order = torch.arange(len(rows))
    order[[words.index(label) for label in labels]] = len(rows) + torch.arange(len(labels))
    return tensors | {"lm_head.weight": torch.cat([rows, answers])[order]}


@contextmanager
def from_gguf(model: str, in_blocks: bool) -> Iterator[tuple[str, StoredWeights | None]]:
    """The path to load a checkpoint from: its own, or for a GGUF file, or a folder that has one and no other
    weights, a temporary folder; and then the weights, `in_blocks` as `read_tensors` says. Raises
    ModelLoadError for a file that is not read."""
    path = _file_of(model)
    if path is None:
        yield model, None
        return
    file = GgufFile(path)
    with folder_for(model) as folder:
        stored = _lay_out(file, Path(folder), in_blocks)
        file.forget_tokenizer()
        try:
            yield folder, stored
        finally:
            file.close()


def _file_of(model: str) -> Path | None:
    path = Path(model)
    if path.suffix == _ENDING:
        if not path.is_file():
            raise ModelLoadError(f"there is no file {model!r}")
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return None
    found = sorted(path.glob(f"*{_ENDING}"))
    if len(found) > 1:
        names = some_of([each.name for each in found])
        raise ModelLoadError(f"{model!r} has {len(found)} GGUF files ({names}); name one of them")
    return found[0] if found else None


def _lay_out(file: GgufFile, folder: Path, in_blocks: bool) -> StoredWeights:
    family = _FAMILIES.get(file.architecture)
    if family is None:
        raise ModelLoadError(
            f"{file.path} is a {file.architecture!r}; of GGUF files {', '.join(sorted(_FAMILIES))} can be "
            "served: name the checkpoint that it was made from"
        )
    if file.architecture == "bert" and file.get("tokenizer.ggml.model") == "t5":
        family = _XLM_ROBERTA
    pooling = file.setting("pooling_type")
    used_as_beside = (file.path.parent / _MODULES).is_file()
    # An encoder has its states alone; a decoder has an output layer, if only its embeddings.
    embeds = used_as_beside or pooling in _POOLING
    config = _config(file, family, pooling, embeds)
    beside = _read_beside(file)
    names = _published_names(file, family, config)
    file.refuse_unread()
    write_tokenizer(file, folder, needs_end=pooling == 3 and not used_as_beside)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if used_as_beside:
        source, paths = file.path.parent, [module["path"] for module in beside.modules] if beside else []
        if not paths or paths[0] or any("/" in path for path in paths):
            raise ModelLoadError(
                f"{source / _MODULES} has its transformer, or another module, in another folder"
            )
        _link(source, folder, (*USAGE, *filter(None, paths)))
    elif embeds:
        method = _POOLING[pooling]
        write_modules(folder, config["hidden_size"], method)
        log.info("%s pools %s and names no prompts: give query_prompt if there is one", file.path, method)
    return StoredWeights(partial(read_tensors, file, family, config, names, in_blocks), file.form)


def _read_beside(file: GgufFile) -> CheckpointFiles | None:
    """The config.json and the modules.json beside the file, if there is one. Raises ModelLoadError if they
    say what a GGUF file cannot say."""
    folder = file.path.parent
    if not any((folder / name).is_file() for name in ("config.json", _MODULES)):
        return None
    beside = read_files(str(folder), None)
    if says_both_ways(beside.config):
        raise ModelLoadError(
            f"the config.json beside {file.path} says that the model reads in both directions, which is not "
            "supported for GGUF files; name the model in safetensors"
        )
    return beside


def _config(file: GgufFile, family: Family, pooling: Any, embeds: bool) -> Config:
    config = family.config(file)
    for role, name in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        number = file.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None and number < config["vocab_size"]:
            config.setdefault(f"{role}_token_id", number)
    labels = file.setting("classifier.output_labels")
    if embeds:
        return config | {"architectures": [family.backbone]}
    if family.is_causal:
        if any(token == _OF_JINA for token, _ in file.tokens):
            raise ModelLoadError(
                f"{file.path} is a jina-reranker-v3, whose projection a GGUF file does not have; name "
                "jinaai/jina-reranker-v3"
            )
        return config | {
            "architectures": [family.whole],
            # The embeddings may be the output layer, too. The rows of a reranker's answers are its own.
            "tie_word_embeddings": config["tie_word_embeddings"] and ANSWERS not in file.shapes,
            ANSWERS_ALONE: ANSWERS in file.shapes and "output.weight" not in file.shapes,
            "_name_or_path": f"{file.get('general.name')} {file.get('general.basename')}",
        }
    if pooling != _RANK:
        raise ModelLoadError(
            f"{file.path} does not say how it pools (pooling_type is {pooling}); put the {_MODULES} of the "
            "model that it was made from beside it, with the folders that it names"
        )
    answers = file.shapes.get(ANSWERS)
    if not family.whole or answers is None:
        raise ModelLoadError(
            f"{file.path} is a reranker, but the conversion has left out a part of its classifier; name the "
            "checkpoint that it was made from"
        )
    names = labels if labels and len(labels) == answers[0] else [f"LABEL_{i}" for i in range(answers[0])]
    return config | {
        "architectures": [family.whole],
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
    }


def _link(source: Path, folder: Path, names: Iterable[str]) -> None:
    """Links to files and folders of these names, as far as they are there."""
    for name in names:
        if (source / name).exists():
            (folder / name).symlink_to((source / name).resolve())


# The tokenizer.

_TOKENIZER, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
# Kinds of tokens, as llama.cpp numbers them.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
# In front of words that begin one, where BERT has "##" in front of those that do not.
_WORD = "\u2581"
# Pattern by which Qwen's tokenizers split a text before their merges, from their tokenizer.json.
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}


def write_tokenizer(file: GgufFile, folder: Path, needs_end: bool) -> None:
    """Writes a file's tokenizer into a folder. With `needs_end` it must be said whether a token ends texts.
    Raises ModelLoadError where the tokenizer cannot be made without a tokenizer.json beside the file."""
    beside = file.path.parent / _TOKENIZER
    if beside.is_file():
        tokenizer = Tokenizer.from_file(str(beside))
        _refuse_other_tokens(file, tokenizer)
        _link(file.path.parent, folder, ("special_tokens_map.json", "chat_template.jinja"))
        if (file.path.parent / _SETTINGS).is_file():
            _link(file.path.parent, folder, (_TOKENIZER, _SETTINGS))
            return
    else:
        tokenizer = _built(file, needs_end)
    specials = {f"{role}_token": token for role, token in _specials(file).items()}
    names_of_inputs = ["input_ids", "attention_mask"]
    if file.architecture == "bert" and file.get("tokenizer.ggml.model") == "bert":
        names_of_inputs.insert(1, "token_type_ids")
        specials |= {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=file.number("context_length"),
        model_input_names=names_of_inputs,
        clean_up_tokenization_spaces=False,
        **specials,
    )
    fast.save_pretrained(folder)


def _built(file: GgufFile, needs_end: bool) -> Tokenizer:
    model, way = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")
    build = _BUILDERS.get((model, way if model == "gpt2" else None))
    if build is None:
        raise _to_be_put_beside(file, f"its tokenizer, {model!r} with {way!r}, is not made from a GGUF file")
    ends = file.get("tokenizer.ggml.add_eos_token")
    if needs_end and ends is None and model == "gpt2":
        raise _to_be_put_beside(file, "it does not say whether a token ends texts, whose state is pooled")
    kinds = dict(file.tokens)
    if not kinds:
        raise _to_be_put_beside(file, "it has no tokens, or does not say of what kind they are")
    if len(kinds) != len(file.tokens):
        raise _to_be_put_beside(file, "it has the same token twice")
    tokenizer = build(file, kinds)
    for token, kind in kinds.items():
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    return tokenizer


def _qwen(file: GgufFile, kinds: Mapping[str, int]) -> Tokenizer:
    """Byte-level BPE, as Qwen2 and Qwen3 have it. Texts are composed (NFC) first, which llama.cpp leaves
    out."""
    vocabulary = {token: i for i, (token, kind) in enumerate(kinds.items()) if kind != _UNUSED}
    merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges") or ()]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    first, last = _added(file, "bos"), _added(file, "eos")
    if first or last:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", "$B", *last],
            special_tokens=[(token, vocabulary[token]) for token in {*first, *last}],
        )
    return tokenizer


def _wordpiece(file: GgufFile, kinds: Mapping[str, int]) -> Tokenizer:
    """BERT's WordPiece. Whether letters are made small follows from the vocabulary, every token of which must
    be what the tokenizer would make of it."""
    vocabulary = {}
    for i, (token, kind) in enumerate(kinds.items()):
        if kind == _UNUSED:
            continue
        is_word = kind == _CONTROL or token.startswith(_WORD)
        vocabulary[token.removeprefix(_WORD) if is_word else f"##{token}"] = i
    lacking = [token for token in ("[UNK]", "[CLS]", "[SEP]") if token not in vocabulary]
    if lacking:
        raise _to_be_put_beside(file, f"its vocabulary lacks {', '.join(lacking)}")
    special = {token for token, kind in kinds.items() if kind == _CONTROL}
    words = [token.removeprefix("##") for token in vocabulary if token not in special]
    cased = any(word != word.lower() for word in words if not word.startswith("["))
    normalizer = normalizers.BertNormalizer(lowercase=not cased)
    changed = [word for word in words if normalizer.normalize_str(word).strip() != word]
    if changed:
        raise _to_be_put_beside(
            file, f"its vocabulary has {changed[0]!r}, which BERT's tokenizer never makes"
        )
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


# By llama.cpp's name of the tokenizer, and of how it parts texts where that is not one way for all.
_BUILDERS: dict[tuple[Any, Any], Callable[[GgufFile, Mapping[str, int]], Tokenizer]] = {
    ("gpt2", "qwen2"): _qwen,
    ("bert", None): _wordpiece,
}


def _added(file: GgufFile, role: str) -> list[str]:
    """The token that is put at an end of every text, if one is."""
    if not file.get(f"tokenizer.ggml.add_{role}_token"):
        return []
    token = _specials(file).get(role)
    if token is None:
        raise _to_be_put_beside(file, f"it adds a token for {role!r} to texts, but does not say which")
    return [token]


def _specials(file: GgufFile) -> dict[str, str]:
    """The tokens that have a role, by it. A usual token that is said to have one may stand in texts, too."""
    found = {role: file.get(f"tokenizer.ggml.{name}_token_id") for role, name in _ROLES.items()}
    named = {role: file.tokens[i] for role, i in found.items() if i is not None and 0 <= i < len(file.tokens)}
    return {role: token for role, (token, kind) in named.items() if kind not in (_NORMAL, _UNUSED)}


def _refuse_other_tokens(file: GgufFile, tokenizer: Tokenizer) -> None:
    """Raises ModelLoadError for a tokenizer.json of another model: each usual token of the file must be the
    one of the same number."""
    phantom = file.get("tokenizer.ggml.model") == "bert"
    by_number = {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    for i, (token, kind) in enumerate(file.tokens):
        own = by_number.get(i)
        if phantom and own is not None:
            own = own.removeprefix("##") if own.startswith("##") else f"{_WORD}{own}"
        if kind == _NORMAL and own != token:
            raise ModelLoadError(
                f"the {_TOKENIZER} beside {file.path} is another model's: its token {i} is {own!r}, not "
                f"{token!r}"
            )


def _to_be_put_beside(file: GgufFile, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"{file.path} has no tokenizer that is proven right: {reason}; put the {_TOKENIZER} and the "
        f"{_SETTINGS} of the model that it was made from beside it"
    )
