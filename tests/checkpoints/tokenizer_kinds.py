"""Tokenizers with the steps and patterns of published models, over small vocabularies."""

import json
import struct
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from maxsimd.engine.checkpoint.files import embedded_model_path
from tests.checkpoints.tokenizers import merges_of, pieces_of

Kind = Callable[[], Tokenizer]

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
LLAMA_3 = QWEN.replace(r"\p{N}| ", r"\p{N}{1,3}| ")
_LARGE, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT_OSS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LARGE}*{_SMALL}+{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{_LARGE}+{_SMALL}*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
_MASK = AddedToken("<mask>", lstrip=True, normalized=False)


def bert() -> Tokenizer:
    """MiniLM and most of the older encoders."""
    tokenizer = Tokenizer.from_file(f"{embedded_model_path()}/tokenizer.json")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def bert_cased() -> Tokenizer:
    """As multilingual BERT has it."""
    tokenizer = bert()
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    return tokenizer


def byte_level(
    pattern: str | None = None, normalizer: Any = None, added: tuple[Any, ...] = (), **options: bool
) -> Tokenizer:
    """Byte-level BPE with a pattern of its own, or GPT-2's."""
    tokenizer = Tokenizer(models.BPE(*merges_of((), _SPECIALS)))
    level = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, "use_regex": pattern is None, **options})
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, level]) if split else level
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([*_SPECIALS])
    tokenizer.add_tokens([*added])
    return tokenizer


def roberta() -> Tokenizer:
    return byte_level(added=(_MASK,), add_prefix_space=True)


def modernbert() -> Tokenizer:
    """Runs of spaces are tokens of their own, found in the text as it is normalized."""
    spaces = tuple(AddedToken(" " * length, normalized=True) for length in (2, 3, 4, 8))
    return byte_level(None, normalizers.NFC(), (*spaces, "|||IP_ADDRESS|||", _MASK))


def qwen() -> Tokenizer:
    markers = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
    return byte_level(QWEN, normalizers.NFC(), tuple(AddedToken(each, normalized=False) for each in markers))


def llama_3() -> Tokenizer:
    return byte_level(LLAMA_3, added=(AddedToken("<|eot_id|>", normalized=False),))


def gpt_oss() -> Tokenizer:
    return byte_level(GPT_OSS, added=(AddedToken("<|start|>", normalized=False),))


def smollm() -> Tokenizer:
    """Each digit is a word."""
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def sentencepiece(normalizer: Any, pre_tokenizer: Any, mask: AddedToken = _MASK) -> Tokenizer:
    """SentencePiece's unigram model."""
    tokenizer = Tokenizer(models.Unigram(pieces_of([*_SPECIALS]), unk_id=3))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_special_tokens([*_SPECIALS, mask])
    return tokenizer


def xlm_roberta() -> Tokenizer:
    words = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    return sentencepiece(charsmap(), words)


def bge_m3() -> Tokenizer:
    one_space = normalizers.Replace(Regex(" {2,}"), " ")
    return sentencepiece(normalizers.Sequence([charsmap(), one_space]), pre_tokenizers.Metaspace())


def t5() -> Tokenizer:
    words = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="first")]
    )
    return sentencepiece(charsmap(), words)


def deberta() -> Tokenizer:
    """Texts lose the spaces around them, and each begins with one in the end."""
    steps = [normalizers.Strip(), charsmap(), normalizers.Replace(Regex(" {2,}"), " ")]
    mask = AddedToken("[MASK]", normalized=False)
    return sentencepiece(normalizers.Sequence(steps), pre_tokenizers.Metaspace(), mask)


def albert() -> Tokenizer:
    quotes = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    steps = [*quotes, normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(), charsmap()]
    words = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    return sentencepiece(normalizers.Sequence(steps), words)


def gemma() -> Tokenizer:
    """A whole text is one word, in which no merge has a space behind a letter."""
    described = json.loads(sentencepiece(charsmap(), pre_tokenizers.Metaspace()).to_str())
    tokens = [token for token, _ in described["model"]["vocab"]]
    vocabulary = {token: i for i, token in enumerate([*tokens, *(f"<0x{byte:02X}>" for byte in range(256))])}
    merges = [
        (token[:end], token[end:])
        for token in tokens
        for end in range(1, len(token))
        if token[:end] in vocabulary and token[end:] in vocabulary
    ]
    model = models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.add_special_tokens([*_SPECIALS])
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("\n\n\n", normalized=False)])
    return tokenizer


def llama_2() -> Tokenizer:
    """Every text gets a space in front, also a piece of one."""
    tokenizer = gemma()
    steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def one_word() -> Tokenizer:
    """A whole text is one word of a unigram model."""
    return sentencepiece(charsmap(), pre_tokenizers.Metaspace(split=False))


# Those whose long texts can be cut, and those of which it is not known.
CUT: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        *(bert, bert_cased, roberta, modernbert, qwen, llama_3, gpt_oss, smollm),
        *(xlm_roberta, bge_m3, t5, deberta, albert, gemma),
    )
}
WHOLE: dict[str, Kind] = {kind.__name__: kind for kind in (llama_2, one_word)}

# Some of what SentencePiece's nmt_nfkc does.
_REPLACED = {
    **dict.fromkeys("\n\t\r\u00a0\u3000\u2028\u200b\ufeff", " "),
    **dict.fromkeys("\x00\x07\x1b", ""),
    **{"\ufb01": "fi", "\uff0c": ",", "\uff01": "!", "\u2026": "...", "\u00bd": "1/2", "\uff76": "\u30ab"},
    "e\u0301": "\u00e9",
}


def charsmap() -> Any:
    """SentencePiece's normaliser: a trie in a double array, with a block for the children of each node."""
    texts, values = b"", {}
    for old, new in _REPLACED.items():
        values[old.encode()] = len(texts)
        texts += new.encode() + b"\0"
    nodes = sorted({key[:length] for key in values for length in range(len(key) + 1)})
    block = {node: 256 * (i + 1) for i, node in enumerate(nodes)}
    units = [0] * (256 * (len(nodes) + 1))
    for node in nodes:
        unit = block[node[:-1]] + node[-1] if node else 0
        units[unit] = (unit ^ block[node]) << 10 | (node in values) << 8 | (node[-1] if node else 0)
        if node in values:
            units[block[node]] = values[node] | 1 << 31
    trie = struct.pack(f"<{len(units)}I", *units)
    return normalizers.Precompiled(struct.pack("<I", len(trie)) + trie + texts)
