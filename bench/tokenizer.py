"""How many tokens a second the tokenizer makes, by threads, and how many threads keep a GPU busy."""

import math
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, count, islice
from pathlib import Path
from string import ascii_lowercase, digits, punctuation
from types import SimpleNamespace
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from maxsimd.bench.datasets import docstring_pairs
from maxsimd.engine.checkpoint.embedded import embedded_model_path
from maxsimd.engine.processors.text.tokenization import TextTokenizer

# About the speed of XLM-RoBERTa large on an H100.
GPU_TOKENS_A_SECOND = 700_000
_TEXTS = 400
_PARALLELISM = "TOKENIZERS_PARALLELISM"


def unigram_tokenizer(size: int) -> Tokenizer:
    """A tokenizer of `size` pieces that works as XLM-RoBERTa's: the default model's words, with and without a
    space before them, then random pieces, from likely to unlikely."""
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    known = Tokenizer.from_file(str(Path(embedded_model_path(), "tokenizer.json"))).get_vocab()
    words = [word for word in sorted(known, key=known.__getitem__) if word.isalpha()]
    draw = random.Random(0)
    drawn = ("".join(draw.choices(ascii_lowercase, k=draw.randint(2, 9))) for _ in count())
    pieces = chain(
        (*specials, *ascii_lowercase, *digits, *punctuation, "▁"),
        (f"▁{word}" for word in words),
        words,
        drawn,
    )
    ranked = list(islice(dict.fromkeys(islice(pieces, 2 * size + 100)), size))
    scores = [(piece, 0.0 if piece in specials else -math.log(rank + 2)) for rank, piece in enumerate(ranked)]
    made = Tokenizer(models.Unigram(scores, unk_id=specials.index("<unk>")))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return made


def measure_tokenizer(
    path: str | None, entries: int, threads: Sequence[int], rounds: int
) -> dict[str, float]:
    """Tokens a second of the tokenizer.json at `path`, or of a synthetic one, with these numbers of threads;
    in each, requests of one text follow each other. `batched_tokens_per_s` is of one thread that is given all
    texts at once: the tokenizers library then takes as many cores as there are."""
    texts = [pair.document for pair in docstring_pairs()]
    texts = [texts[number % len(texts)] for number in range(_TEXTS)]
    backend: Any = unigram_tokenizer(entries) if path is None else Tokenizer.from_file(path)
    tokenizer = TextTokenizer(SimpleNamespace(backend_tokenizer=backend))
    num_tokens = sum(map(len, tokenizer.encode(texts, "text")))
    figures: dict[str, float] = {
        "entries": tokenizer.vocabulary_size,
        "characters_a_token": round(sum(map(len, texts)) / num_tokens, 2),
    }
    alone = 0.0
    for number in threads:
        taken = statistics.median(_seconds(tokenizer, texts, number) for _ in range(rounds))
        figures[f"tokens_per_s_{number}_threads"] = round(number * num_tokens / taken)
        if number == threads[0]:
            alone = num_tokens / taken
    started = time.perf_counter()
    for _ in range(rounds):
        tokenizer.encode(texts, "text")
    figures["batched_tokens_per_s"] = round(rounds * num_tokens / (time.perf_counter() - started))
    figures["threads_for_a_gpu"] = math.ceil(GPU_TOKENS_A_SECOND / alone)
    return figures


def _seconds(tokenizer: TextTokenizer, texts: Sequence[str], threads: int) -> float:
    """Seconds in which each thread tokenizes all texts, one by one."""

    def run(_: int) -> None:
        for text in texts:
            tokenizer.encode([text], "text")

    with _one_core_each(), ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        list(pool.map(run, range(threads)))
        return time.perf_counter() - started


@contextmanager
def _one_core_each() -> Iterator[None]:
    """The tokenizers library divides no batch among threads of its own."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = before
