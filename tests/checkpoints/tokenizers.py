"""Small tokenizers of the kinds that published models have. Their vocabularies come from docstrings."""

import functools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from maxsimd.bench.datasets import docstring_pairs
from maxsimd.engine.checkpoint.files import embedded_model_path

Words = tuple[str, ...]
Specials = dict[str, str]
XLM_R = {
    "bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>",
    "unk_token": "<unk>", "mask_token": "<mask>",
}  # fmt: skip
GEMMA = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
# Templates of XLM-RoBERTa and RoBERTa for a text and a pair.
ENDS = "<s> $A </s>", "<s> $A </s> </s> $B </s>"

# How many words and pieces of BERT's the checkpoints have.
WORDS = 8000
# Words that tests take for one token each.
_TOKENS = ("poison", "query", "zebra")


def wordpiece(size: int = WORDS) -> Any:
    """BERT's, as the embedded model has it, with its first words and those that tests read."""
    whole, described, ordered = _bert_tokenizer()
    words = {word: number for number, word in enumerate(ordered[:size])}
    fewer = described | {"model": described["model"] | {"vocab": words}}
    backend = Tokenizer.from_str(json.dumps(fewer))
    return type(whole)(tokenizer_object=backend, model_max_length=whole.model_max_length)


@functools.cache
def _bert_tokenizer() -> tuple[Any, dict[str, Any], list[str]]:
    """The embedded model's tokenizer, what its file says, and its words, the most frequent ones first."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = described["model"]["vocab"]
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    read = (text for pair in docstring_pairs()[:200] for text in (pair.query, pair.document))
    used = [piece for text in read for piece in tokenizer.tokenize(text)]
    return tokenizer, described, list(dict.fromkeys([*words[: WORDS * 3 // 4], *_TOKENS, *used, *words]))


def xlm_roberta(folder: Path, **options: Any) -> int:
    """XLM-RoBERTa's; returns its size."""
    return unigram(folder, XLM_R, *ENDS, **options)


def unigram(
    folder: Path, specials: Specials, single: str, pair: str, words: Words = (), **options: Any
) -> int:
    """A SentencePiece unigram tokenizer with `most` frequent pieces and `words`; returns its size."""
    ordered = list(dict.fromkeys(specials.values()))
    pieces = pieces_of(ordered, options.pop("most", 3000))
    present = {piece for piece, _ in pieces}
    pieces += [(word, -8.0) for word in words if word not in present]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=ordered.index(specials["unk_token"])))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    _set_template(tokenizer, single, pair, ordered)
    return _save(folder, tokenizer, specials, options)


def byte_level_bpe(
    folder: Path, specials: Specials, single: str, pair: str, words: Words = (), **options: Any
) -> int:
    """A byte-level BPE tokenizer with at most `most` tokens, `words` among them; returns its size."""
    ordered = list(dict.fromkeys(specials.values()))
    vocabulary, merges = merges_of(words, tuple(ordered), options.pop("most", 4000))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*ordered, *options.get("additional_special_tokens", [])])
    _set_template(tokenizer, single, pair, ordered)
    return _save(folder, tokenizer, specials, options)


@functools.cache
def merges_of(words: Words, specials: Words, size: int = 4000) -> tuple[dict[str, int], list[Any]]:
    """A vocabulary and its merges, counted: the trainer gives another one each time."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    counts = Counter(word for pair in docstring_pairs()[:200] for word, _ in split(pair.document))
    ranked = [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = []
    for word in [*words, *ranked]:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary and len(vocabulary) < size:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    return vocabulary, merges


def pieces_of(specials: list[str], size: int = 3000) -> list[tuple[str, float]]:
    """The special tokens, then frequent words and all characters with their log frequencies."""
    return [(token, 0.0) for token in [*specials, "\u2581"]] + _pieces(size)


@functools.cache
def _pieces(size: int) -> list[tuple[str, float]]:
    words = Counter(word for pair in docstring_pairs() for word in pair.document.split())
    characters = Counter("".join(words.elements()))
    pieces = Counter({f"\u2581{word}": count for word, count in words.most_common(size)}) + characters
    pieces.update({"\u2581Yes": 5, "\u2581No": 5, "Yes": 5, "No": 5, "\n": 50})
    total = pieces.total()
    ranked = sorted(pieces.items(), key=lambda item: (-item[1], item[0]))
    return [(piece, math.log(count / total)) for piece, count in ranked]


def _set_template(tokenizer: Tokenizer, single: str, pair: str, specials: list[str]) -> None:
    named = [(token, tokenizer.token_to_id(token)) for token in specials if token in f"{single} {pair}"]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=named)


def _save(folder: Path, tokenizer: Tokenizer, specials: dict[str, str], options: dict[str, Any]) -> int:
    settings = {"model_max_length": 512, "model_input_names": ["input_ids", "attention_mask"]} | options
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials, **settings)
    fast.save_pretrained(folder)
    return len(fast)
