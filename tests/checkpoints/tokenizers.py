"""Small tokenisers of the kinds that published models have. Their vocabularies come from docstrings."""

import functools
import math
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from maxsimd.bench.datasets import docstring_pairs
from maxsimd.engine.checkpoint.embedded import embedded_model_path


def wordpiece() -> Any:
    """BERT's, as the embedded model has it."""
    return AutoTokenizer.from_pretrained(embedded_model_path())


def unigram(folder: Path, specials: dict[str, str], single: str, pair: str, **options: Any) -> int:
    """A SentencePiece unigram tokeniser (XLM-RoBERTa, DeBERTa-v2, Gemma); returns its size.

    `specials` are the tokens in front of the vocabulary by their roles; `single` and `pair` the templates."""
    ordered = list(dict.fromkeys(specials.values()))
    tokenizer = Tokenizer(models.Unigram(_pieces(ordered), unk_id=ordered.index(specials["unk_token"])))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    _set_template(tokenizer, single, pair, ordered)
    return _save(folder, tokenizer, specials, options)


def byte_level_bpe(
    folder: Path,
    specials: dict[str, str],
    single: str,
    pair: str,
    words: tuple[str, ...] = (),
    **options: Any,
) -> int:
    """A byte-level BPE tokeniser (RoBERTa, Qwen, Llama); returns its size. `words` are tokens of their own in
    its vocabulary, as common ones are in a large one."""
    tokenizer = Tokenizer.from_str(_trained_bpe(words, tuple(dict.fromkeys(specials.values()))))
    ordered = list(dict.fromkeys(specials.values()))
    extra = options.pop("additional_special_tokens", [])
    tokenizer.add_special_tokens([*ordered, *extra])
    _set_template(tokenizer, single, pair, ordered)
    return _save(
        folder, tokenizer, specials, options | ({"additional_special_tokens": extra} if extra else {})
    )


@functools.cache
def _trained_bpe(words: tuple[str, ...], specials: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [pair.document for pair in docstring_pairs()[:200]]
    tokenizer.train_from_iterator([*texts, *(f"{word}\n" * 500 for word in words)], trainer)
    return str(tokenizer.to_str())


def _pieces(specials: list[str], size: int = 3000) -> list[tuple[str, float]]:
    """Frequent words and all characters with their log frequencies, after the special tokens. Counted, not
    trained, because the trainer gives another vocabulary each time."""
    words = Counter(word for pair in docstring_pairs() for word in pair.document.split())
    characters = Counter("".join(words.elements()))
    pieces = Counter({f"\u2581{word}": count for word, count in words.most_common(size)}) + characters
    pieces.update({"\u2581Yes": 5, "\u2581No": 5, "Yes": 5, "No": 5, "\n": 50})
    total = pieces.total()
    ranked = sorted(pieces.items(), key=lambda item: (-item[1], item[0]))
    return [(token, 0.0) for token in [*specials, "\u2581"]] + [
        (piece, math.log(count / total)) for piece, count in ranked
    ]


def _set_template(tokenizer: Tokenizer, single: str, pair: str, specials: list[str]) -> None:
    named = [(token, tokenizer.token_to_id(token)) for token in specials if token in f"{single} {pair}"]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=named)


def _save(folder: Path, tokenizer: Tokenizer, specials: dict[str, str], options: dict[str, Any]) -> int:
    settings = {"model_max_length": 512, "model_input_names": ["input_ids", "attention_mask"]} | options
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials, **settings)
    fast.save_pretrained(folder)
    return len(fast)
