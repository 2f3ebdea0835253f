"""How many tokens a second the tokenizer makes, by threads, and how many threads keep a GPU busy."""

import math
import os
import random
import statistics
import string
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from maxsimd.bench.datasets import docstring_pairs
from maxsimd.engine.preprocess.tokenization import TextTokenizer

# As an H100 has run XLM-RoBERTa-large.
GPU_TOKENS_A_SECOND = 700_000
_LONGEST_PIECE = 8
_TEXTS = 400
_PARALLELISM = "TOKENIZERS_PARALLELISM"


def synthetic_unigram(entries: int, texts: Sequence[str]) -> Tokenizer:
    """A tokenizer as XLM-RoBERTa's, with the most frequent parts of the texts' words as pieces, and random
    pieces for the rest of its `entries`."""
    counts: Counter[str] = Counter()
    for text in texts:
        for word in text.split():
            marked = f"▁{word}"
            counts.update(
                marked[start:stop]
                for start in range(len(marked))
                for stop in range(start + 1, min(len(marked), start + _LONGEST_PIECE) + 1)
            )
    pieces = {"<s>": 0.0, "<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0}
    total = counts.total()
    frequent = counts.most_common(entries // 2)
    pieces |= {piece: math.log(count / total) for piece, count in frequent}
    draw = random.Random(0)
    least = math.log(1 / total)
    while len(pieces) < entries:
        length = draw.randint(3, _LONGEST_PIECE)
        pieces.setdefault("▁" + "".join(draw.choices(string.ascii_lowercase, k=length)), least)
    made = Tokenizer(models.Unigram(list(pieces.items()), unk_id=3))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" {2,}", " ")])
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
    in each, requests of one text follow each other. `batches_per_s` is one thread that is given all texts at
    once: the tokenizers library then takes as many cores as there are."""
    texts = [pair.document for pair in docstring_pairs()]
    texts = [texts[number % len(texts)] for number in range(_TEXTS)]
    backend: Any = synthetic_unigram(entries, texts) if path is None else Tokenizer.from_file(path)
    tokenizer = TextTokenizer(SimpleNamespace(backend_tokenizer=backend))
    num_tokens = sum(map(len, tokenizer.encode(texts, "text")))
    figures: dict[str, float] = {
        "entries": tokenizer.vocabulary_size,
        "characters_a_token": round(sum(map(len, texts)) / num_tokens, 2),
    }
    alone = 0.0
    for count in threads:
        taken = statistics.median(_seconds(tokenizer, texts, count) for _ in range(rounds))
        figures[f"tokens_per_s_{count}_threads"] = round(count * num_tokens / taken)
        if count == threads[0]:
            alone = num_tokens / taken
    started = time.perf_counter()
    for _ in range(rounds):
        tokenizer.encode(texts, "text")
    figures["batches_per_s"] = round(rounds * num_tokens / (time.perf_counter() - started))
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
