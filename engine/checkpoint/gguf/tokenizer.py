"""The tokeniser of a GGUF file: built from its metadata where those say all that it takes, else from the
tokenizer.json beside it, which must have the same tokens."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from maxsimd.engine.checkpoint.gguf.container import GgufFile
from maxsimd.engine.errors import ModelLoadError

BESIDE = "tokenizer.json"
# Kinds of tokens, as llama.cpp numbers them.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
# In front of words that begin one, where BERT has "##" in front of those that do not.
_WORD = "\u2581"
# How Qwen's tokenisers part a text before their merges: published in their tokenizer.json.
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}


def write_tokenizer(file: GgufFile, folder: Path, needs_end: bool) -> None:
    """Writes a file's tokeniser into a folder. With `needs_end` it must be said whether a token ends texts.
    Raises ModelLoadError where the tokeniser cannot be made without a tokenizer.json beside the file."""
    beside = file.path.parent / BESIDE
    if beside.is_file():
        tokenizer = Tokenizer.from_file(str(beside))
        _refuse_other_tokens(file, tokenizer)
        names = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
        for name in (BESIDE, *names):
            if (file.path.parent / name).is_file():
                (folder / name).symlink_to((file.path.parent / name).resolve())
        if (folder / names[0]).is_symlink():
            return
        (folder / BESIDE).unlink()
    else:
        tokenizer = _built(file, needs_end)
    specials = {f"{role}_token": token for role, token in _specials(file).items()}
    names_of_inputs = ["input_ids", "attention_mask"]
    if file.architecture == "bert" and file.get("tokenizer.ggml.model") == "bert":
        names_of_inputs.insert(1, "token_type_ids")
        specials |= {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    fast = PreTrainedTokenizerFast(
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
        raise _to_be_put_beside(file, f"its tokeniser, {model!r} with {way!r}, is not made from a GGUF file")
    ends = file.get("tokenizer.ggml.add_eos_token")
    if needs_end and ends is None and model == "gpt2":
        raise _to_be_put_beside(file, "it does not say whether a token ends texts, whose state is pooled")
    tokens, kinds = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
    if not tokens or kinds is None or len(tokens) != len(kinds):
        raise _to_be_put_beside(file, "it has no tokens, or does not say of what kind they are")
    if len(set(tokens)) != len(tokens):
        raise _to_be_put_beside(file, "it has the same token twice")
    tokenizer = build(file, dict(zip(tokens, kinds, strict=True)))
    for token, kind in zip(tokens, kinds, strict=True):
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
    first = _added(file, "bos", kinds)
    last = _added(file, "eos", kinds)
    if first or last:
        single = [*first, "$A", *last]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single,
            pair=[*first, "$A", "$B", *last],
            special_tokens=[(token, vocabulary[token]) for token in {*first, *last}],
        )
    return tokenizer


def _wordpiece(file: GgufFile, kinds: Mapping[str, int]) -> Tokenizer:
    """BERT's WordPiece. Whether letters are made small follows from the vocabulary, every token of which must
    be what the tokeniser would make of it."""
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
            file, f"its vocabulary has {changed[0]!r}, which BERT's tokeniser never makes"
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


# By llama.cpp's name of the tokeniser, and of how it parts texts where that is not one way for all.
_BUILDERS: dict[tuple[Any, Any], Callable[[GgufFile, Mapping[str, int]], Tokenizer]] = {
    ("gpt2", "qwen2"): _qwen,
    ("bert", None): _wordpiece,
}


def _added(file: GgufFile, role: str, kinds: Mapping[str, int]) -> list[str]:
    """The token that is put at an end of every text, if one is."""
    if not file.get(f"tokenizer.ggml.add_{role}_token"):
        return []
    token = _specials(file).get(role)
    if token is None:
        raise _to_be_put_beside(file, f"it adds a token for {role!r} to texts, but does not say which")
    return [token]


def _specials(file: GgufFile) -> dict[str, str]:
    """The tokens that have a role, by it. A usual token that is said to have one may stand in texts, too."""
    tokens, kinds = file.get("tokenizer.ggml.tokens") or [], file.get("tokenizer.ggml.token_type") or []
    found = {role: file.get(f"tokenizer.ggml.{name}_token_id") for role, name in _ROLES.items()}
    return {
        role: tokens[i]
        for role, i in found.items()
        if i is not None and 0 <= i < len(kinds) and kinds[i] not in (_NORMAL, _UNUSED)
    }


def _refuse_other_tokens(file: GgufFile, tokenizer: Tokenizer) -> None:
    """Raises ModelLoadError for a tokenizer.json of another model: each usual token of the file must be the
    one of the same number."""
    tokens, kinds = file.get("tokenizer.ggml.tokens") or [], file.get("tokenizer.ggml.token_type") or []
    phantom = file.get("tokenizer.ggml.model") == "bert"
    by_number = {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
        own = by_number.get(i)
        if phantom and own is not None:
            own = own.removeprefix("##") if own.startswith("##") else f"{_WORD}{own}"
        if kind == _NORMAL and own != token:
            raise ModelLoadError(
                f"the {BESIDE} beside {file.path} is another model's: its token {i} is {own!r}, not {token!r}"
            )


def _to_be_put_beside(file: GgufFile, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"{file.path} has no tokeniser that is proven right: {reason}; put the {BESIDE} and the "
        "tokenizer_config.json of the model that it was made from beside it"
    )
