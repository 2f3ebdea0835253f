"""Benchmarks of single methods: products and MaxSim on the CPU, all-token pooling, cached documents, and
tokenization."""

import importlib
import math
import os
import random
import statistics
import time
import timeit
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from maxsimd.bench.checkpoints import unigram_tokenizer
from maxsimd.bench.datasets import docstring_pairs
from maxsimd.bench.report import Figures
from maxsimd.bench.turns import take_turns
from maxsimd.engine.cache import CachedEmbedding, EmbeddingCache
from maxsimd.engine.cache.slab import EmbeddingSlab
from maxsimd.engine.cache.store import MemoryStore
from maxsimd.engine.execution import choose_device
from maxsimd.engine.ops.cpu.library import is_available
from maxsimd.engine.ops.cpu.linear import (
    Norm,
    Product,
    Weights,
    gated_order,
    pack_bfloat16,
    pack_int8,
    product_peak,
)
from maxsimd.engine.processors.dual_encoder import IN_SLAB, ON_HOST, BatchLimits, in_batches
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.engine.scoring.maxsim import choose_maxsim, maxsim_reference
from maxsimd.engine.scoring.scorer import CachedDocument, DocumentScorer, ScoringPrice
from maxsimd.pooling.methods import AllPool, PoolingCursor
from maxsimd.pooling.ragged import Ragged, Spans, to_device
from maxsimd.scheduler import Chunk, ResultSlot, Tokens, TokenSequence

PEER = "maxsim-cpu"
_PEER_FLOAT32 = f"{PEER} float32"


def maxsim_cpu() -> Callable[..., Any] | None:
    """The function of the package maxsim-cpu that scores ragged documents; None if it is not installed."""
    with suppress(ImportError):
        scores: Callable[..., Any] = importlib.import_module("maxsim_cpu").maxsim_scores_variable
        return scores
    return None


async def time_maxsim(documents: int, dim: int, rounds: int) -> dict[str, Any]:
    """One query of 32 tokens against ragged documents of 20 to 340; medians of `rounds` turns, and of the
    ratios to maxsim-cpu turn by turn."""
    torch.manual_seed(0)
    lengths = np.random.default_rng(0).integers(20, 341, documents).tolist()
    rows = torch.nn.functional.normalize(torch.randn(sum(lengths), dim), dim=-1)
    query = torch.nn.functional.normalize(torch.randn(32, dim), dim=-1)
    pairs = np.column_stack([np.zeros(documents, dtype=np.int64), np.arange(documents)])
    exact = maxsim_reference(Ragged(query, (0, 32)), Ragged.from_lengths(rows, lengths), pairs)

    def ours(dtype: torch.dtype) -> Callable[[], Awaitable[Any]]:
        _, maxsim = choose_maxsim("auto", torch.device("cpu"))
        queries = Ragged(query.to(dtype), (0, 32))
        packed = Ragged.from_lengths(rows.to(dtype), lengths)

        async def run() -> Any:
            return maxsim(queries, packed, pairs)

        return run

    contenders = {"maxsimd bfloat16": ours(torch.bfloat16), "maxsimd float32": ours(torch.float32)}
    if (peer := maxsim_cpu()) is not None:
        separate, plain = [part.numpy() for part in rows.split(lengths)], query.numpy()

        async def theirs() -> Any:
            return peer(plain, separate)

        contenders[_PEER_FLOAT32] = theirs
    turns = await take_turns(contenders, rounds)
    figures = {
        name: {
            "ms": turns.median_ms(name, 2),
            "largest_error": float(np.abs(np.asarray(scores) - exact.numpy()).max()),
        }
        for name, (*_, scores) in turns.results.items()
    }
    beside = () if peer is None else ("maxsimd bfloat16", "maxsimd float32")
    ratios = {name: turns.ratio(_PEER_FLOAT32, name) for name in beside}
    return {"tokens": sum(lengths), "contenders": figures, "ratios": ratios}


def _encoder_products(hidden: int, wide: int) -> list[tuple[int, int, str]]:
    """The inputs and columns of each product in a layer of BERT, and what follows it."""
    return [
        *[(hidden, hidden, "plain")] * 3,
        (hidden, hidden, "norm"),
        (hidden, wide, "gelu"),
        (wide, hidden, "norm"),
    ]


_PRODUCTS = {
    "MiniLM-L6": _encoder_products(384, 1536),
    "BERT-base": _encoder_products(768, 3072),
    "XLM-R large": _encoder_products(1024, 4096),
    "ModernBERT-base": [
        (768, 2304, "plain"),
        (768, 768, "sum"),
        (768, 2304, "gelu gate"),
        (1152, 768, "sum"),
    ],
    "Qwen3-0.6B": [
        (1024, 4096, "plain"),
        (2048, 1024, "sum"),
        (1024, 6144, "silu gate"),
        (3072, 1024, "sum"),
    ],
}


def measure_products(rows: int, rounds: int) -> Figures:
    """The products of a layer of some models, with what follows each, in bfloat16 and int8: medians of the
    operations a second of all and of each, as shares of `product_peak` in the same round."""
    if not is_available():
        return {}
    figures: Figures = {}
    for model, shapes in _PRODUCTS.items():
        for kind, pack in (("bfloat16", pack_bfloat16), ("int8", pack_int8)):
            layer = [(*shape, _product(*shape, pack, rows)) for shape in shapes]
            number = pack(torch.zeros(1, 1)).kind
            shares: list[list[float]] = []
            for turn in range(rounds + 1):
                peak = product_peak(number)
                seconds = [_seconds(run) for *_, run in layer]
                operations = [2 * rows * inputs * columns for inputs, columns, *_ in layer]
                each = [done / taken / peak for done, taken in zip(operations, seconds, strict=True)]
                if turn:
                    shares.append([peak / 1e9, sum(operations) / sum(seconds) / peak, *each])
            peak, together, *each = (
                round(statistics.median(column), 3) for column in zip(*shares, strict=True)
            )
            names = [f"{inputs} > {columns}, {ending}" for inputs, columns, ending, _ in layer]
            figures[f"{model}, {kind}"] = {
                "peak_gflops": peak,
                "share_of_peak": together,
                "products": dict(zip(names, each, strict=True)),
            }
    return figures


def _product(
    inputs: int, columns: int, ending: str, pack: Callable[[torch.Tensor], Weights], rows: int
) -> Callable[[], torch.Tensor]:
    weight, is_gate = torch.randn(columns, inputs) * inputs**-0.5, ending.endswith(" gate")
    product = Product(pack(weight[gated_order(columns // 2)] if is_gate else weight), torch.zeros(columns))
    # Rows of 2 KiB and multiples have some more between them, as between the layers of a model.
    x = torch.randn(rows, inputs + 160).bfloat16()[:, :inputs]
    residual = torch.randn(rows, columns).bfloat16()
    norm = Norm(torch.ones(columns), torch.zeros(columns), 1e-5)
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "plain": lambda: product.linear(x),
        "gelu": lambda: product.linear(x, gelu=True),
        "norm": lambda: product.linear_norm(x, residual, norm),
        "sum": lambda: product.added(x, residual),
        "gelu gate": lambda: product.gated(x, "gelu"),
        "silu gate": lambda: product.gated(x, "silu"),
    }
    return runs[ending]


def _seconds(run: Callable[[], object]) -> float:
    """The least of five times."""
    return min(timeit.repeat(run, number=1, repeat=5))


def measure_allpool(sequences: int, tokens: int, hidden: int, device: str, rounds: int) -> Figures:
    """Medians of all-token pooling over one step, with a projection to 128 and normalization: by one
    slice and one split, and sequence by sequence."""
    from maxsimd.bench.gpu.kernels import medians

    chosen = choose_device(device)
    draw = random.Random(0)
    lengths = [draw.randint(max(1, tokens // 2), tokens * 3 // 2) for _ in range(sequences)]
    zeros = [Tokens(np.zeros(length, dtype=np.int32)) for length in lengths]
    texts = [TokenSequence.text(i, ResultSlot(0, i), "all", tokens) for i, tokens in enumerate(zeros)]
    chunks = tuple(Chunk(text, 0, length) for text, length in zip(texts, lengths, strict=True))
    starts = tuple(int(start) for start in np.cumsum([0, *lengths[:-1]]))
    cursor = PoolingCursor(chunks, starts)
    states = torch.randn(sum(lengths), hidden).bfloat16().to(chosen)
    projection = torch.nn.Linear(hidden, 128, bias=False).to(chosen)

    def head(rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(projection(rows), dim=-1)

    pool = AllPool(head)

    def together() -> list[torch.Tensor]:
        return list(pool.pool(states, cursor))

    def one_by_one() -> list[torch.Tensor]:
        return [
            head(states[start : start + len(chunk)].float())
            for chunk, start in zip(chunks, starts, strict=True)
        ]

    with torch.inference_mode():
        for ours, plain in zip(together(), one_by_one(), strict=True):
            torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
        seconds = medians({"together": together, "apart": one_by_one}, chosen, rounds)
    together_s, apart_s = seconds["together"], seconds["apart"]
    return {
        "tokens": sum(lengths),
        "device": str(chosen),
        "one_slice_and_one_split_ms": round(together_s * 1e3, 3),
        "sequence_by_sequence_ms": round(apart_s * 1e3, 3),
        "times_as_long": round(apart_s / together_s, 2),
    }


_QUERY, _QUERY_TOKENS, _REQUEST = 1, 32, 7
# Batches that a step scores together.
_TOGETHER = 4


def measure_slab(documents: int, tokens: int, dim: int, rounds: int) -> dict[str, float]:
    """Medians of `rounds` turns of the host's work on cached documents in bfloat16, before MaxSim is launched
    and with its scores. MaxSim itself is left out. Without a GPU, documents are copied in memory."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = torch.randn(tokens, dim).bfloat16()
    draw = np.random.default_rng(0)
    found = [
        CachedDocument(ResultSlot(_REQUEST, i), CachedEmbedding(rows, None, tokens, False, draw.bytes(32)))
        for i in range(documents)
    ]
    slab = EmbeddingSlab(2 * documents * tokens, dim, torch.bfloat16, device)
    figures: dict[str, float] = {"documents": documents, "tokens": tokens, "dim": dim}
    for name, limits, used in (("copied", ON_HOST, None), ("in_slab", IN_SLAB, slab)):
        launch, results = _slab_seconds(found, limits, used, device, rounds)
        figures |= {f"{name}_launch_ms": _ms(launch[1:]), f"{name}_results_ms": _ms(results[1:])}
        if used is not None:
            figures["copied_into_slab_ms"] = _ms(launch[:1])
    return figures


def _slab_seconds(
    found: list[CachedDocument],
    limits: BatchLimits,
    slab: EmbeddingSlab | None,
    device: torch.device,
    rounds: int,
) -> tuple[list[float], list[float]]:
    """Seconds to launch, and to make results, turn by turn."""
    cache = EmbeddingCache(b"", "bfloat16", MemoryStore(1), None)
    cache.slab = slab
    scorer = DocumentScorer(
        "maxsim", _zeros, device, torch.bfloat16, takes_int8=True, maxsim_spans=_zeros_of_spans, cache=cache
    )
    tokens = Tokens(np.zeros(3, dtype=np.int32))
    query = TokenSequence.query(_QUERY, _REQUEST, "token_embed", tokens, 1 << 30)
    embedding = torch.randn(_QUERY_TOKENS, found[0].embedding.rows.shape[1]).bfloat16()
    scorer.queries.put(query, embedding.to(device))
    batches = list(in_batches(found, _QUERY, _QUERY_TOKENS, ScoringPrice(_QUERY_TOKENS), limits=limits))
    steps = [batches[i : i + _TOGETHER] for i in range(0, len(batches), _TOGETHER)]
    launch, results = [], []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        with torch.inference_mode():
            made = [scorer.score([], [], step) for step in steps]
        launch.append(time.perf_counter() - started)
        for one in made:
            one.send_to_host(device)
            if one.arrival is not None:
                one.arrival.synchronize()
            started = time.perf_counter()
            one.results()
            results.append(time.perf_counter() - started)
    cache.close()
    per_turn = [sum(results[i : i + len(steps)]) for i in range(0, len(results), len(steps))]
    return launch, per_turn


def _zeros(queries: Ragged, documents: Ragged, pairs: NDArray[np.int64]) -> torch.Tensor:
    return _zeros_of_spans(queries, Spans.of(documents), pairs)


def _zeros_of_spans(queries: Ragged, documents: Spans, pairs: NDArray[np.int64]) -> torch.Tensor:
    """Copies to the device what MaxSim by Triton copies."""
    from maxsimd.engine.scoring.maxsim_triton import bounds_of  # loads Triton

    to_device(bounds_of(queries, documents, pairs).reshape(-1), documents.values.device)
    return torch.zeros(len(pairs), device=documents.values.device)


def _ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 2)


# About the speed of XLM-RoBERTa large on an H100.
GPU_TOKENS_A_SECOND = 700_000
_TEXTS = 400


def measure_tokenizer(path: str | None, entries: int, threads: str, rounds: int) -> dict[str, float]:
    """Tokens a second of the tokenizer.json at `path`, or of a synthetic one, by numbers of threads, such as
    1,2,4, that tokenize text by text. `batched_tokens_per_s` is of one thread with all texts at once: the
    tokenizers library then takes all cores."""
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
    numbers = [int(number) for number in threads.split(",")]
    for number in numbers:
        taken = statistics.median(_tokenizing_seconds(tokenizer, texts, number) for _ in range(rounds))
        figures[f"tokens_per_s_{number}_threads"] = round(number * num_tokens / taken)
        if number == numbers[0]:
            alone = num_tokens / taken
    started = time.perf_counter()
    for _ in range(rounds):
        tokenizer.encode(texts, "text")
    figures["batched_tokens_per_s"] = round(rounds * num_tokens / (time.perf_counter() - started))
    figures["threads_for_a_gpu"] = math.ceil(GPU_TOKENS_A_SECOND / alone)
    return figures


def _tokenizing_seconds(tokenizer: TextTokenizer, texts: Sequence[str], threads: int) -> float:
    """Seconds in which each thread tokenizes all texts, one by one."""

    def run(_: int) -> None:
        for text in texts:
            tokenizer.encode([text], "text")

    # The tokenizers library then divides no batch among threads of its own.
    environment = patch.dict(os.environ, {"TOKENIZERS_PARALLELISM": "false"})
    with environment, ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        list(pool.map(run, range(threads)))
        return time.perf_counter() - started
