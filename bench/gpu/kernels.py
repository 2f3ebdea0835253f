"""MaxSim, attention and projection by themselves: ours, plain torch, and what packages offer."""

import importlib
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from maxsimd.bench.gpu.limits import copy_bandwidth, product_peak
from maxsimd.bench.timing import Run, medians
from maxsimd.engine.execution.attention.base import AttentionBackend
from maxsimd.engine.execution.attention.one_by_one import OneByOneBackend
from maxsimd.engine.execution.layout import Group, Layout
from maxsimd.engine.ops import triton as triton_ops
from maxsimd.engine.ops.qkv import QKV
from maxsimd.pooling.ragged import Ragged

Figures = dict[str, Any]
OURS = "maxsimd"


@dataclass(frozen=True, slots=True)
class MaxSimShape:
    """One query of `query` tokens, and `documents` whose lengths lie between the two numbers of `tokens`."""

    name: str
    query: int
    documents: int
    tokens: tuple[int, int]
    dim: int = 128


MAXSIM_SHAPES = (
    MaxSimShape("ColBERT, 10,000 documents of 180 tokens", 32, 10_000, (180, 180)),
    MaxSimShape("ColPali, 500 pages of 1,024 tokens", 1024, 500, (1024, 1024)),
    MaxSimShape("ragged, 1,000 documents of 20 to 340 tokens", 32, 1000, (20, 340)),
    MaxSimShape("one document of 8,192 tokens", 32, 1, (8192, 8192)),
)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """`sequences` of `tokens` tokens give or take a half, with `heads` heads of queries and `kv_heads` of
    keys and values."""

    name: str
    sequences: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool


ATTENTION_SHAPES = (
    AttentionShape("XLM-RoBERTa large, 8 x 2,048 tokens", 8, 2048, 16, 16, 64, False),
    AttentionShape("XLM-RoBERTa large, 128 x 128 tokens", 128, 128, 16, 16, 64, False),
    AttentionShape("Qwen3 0.6B, 16 x 1,024 tokens", 16, 1024, 16, 8, 128, True),
)


@torch.inference_mode()
def measure_kernels(
    device: torch.device,
    rounds: int,
    maxsim_shapes: tuple[MaxSimShape, ...] = MAXSIM_SHAPES,
    attention_shapes: tuple[AttentionShape, ...] = ATTENTION_SHAPES,
    rows: int = 32_768,
) -> Figures:
    """Milliseconds of all contenders that are installed, and our rate as a share of the device's limit."""
    peak, bandwidth = product_peak(device, torch.bfloat16), copy_bandwidth(device)
    limits = {"product_tflops": round(peak / 1e12, 1), "copy_tbytes_per_s": round(bandwidth / 1e12, 2)}
    figures: Figures = {"limits": limits}
    for shape in maxsim_shapes:
        contenders, tokens = _maxsim_contenders(shape, device)
        flops = 2.0 * shape.query * tokens * shape.dim
        floor = max(flops / peak, tokens * shape.dim * 2 / bandwidth)
        figures[f"MaxSim: {shape.name}"] = _compared(medians(contenders, device, rounds), floor)
    for case in attention_shapes:
        contenders, pairs = _attention_contenders(case, device)
        floor = 4.0 * pairs * case.heads * case.head_dim / peak
        figures[f"attention: {case.name}"] = _compared(medians(contenders, device, rounds), floor)
    contenders = _projection_contenders(rows, 1024, 128, device)
    floor = max(2.0 * rows * 1024 * 128 / peak, rows * 1024 * 2 / bandwidth)
    figures[f"projection: {rows:,} rows, 1,024 to 128"] = _compared(
        medians(contenders, device, rounds), floor
    )
    return figures


def _compared(seconds: dict[str, float], floor: float) -> Figures:
    figures: Figures = {f"{name}_ms": round(taken * 1e3, 4) for name, taken in seconds.items()}
    if OURS in seconds:
        figures["share_of_what_the_device_can"] = _digits(floor / seconds[OURS])
        others = [taken for name, taken in seconds.items() if name != OURS]
        figures["times_as_fast_as_the_best_other"] = _digits(min(others) / seconds[OURS])
    return figures


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


def _maxsim_contenders(shape: MaxSimShape, device: torch.device) -> tuple[dict[str, Run], int]:
    low, high = shape.tokens
    lengths = np.random.default_rng(0).integers(low, high + 1, shape.documents).tolist()
    rows, query = (
        torch.nn.functional.normalize(torch.randn(count, shape.dim, device=device), dim=-1).bfloat16()
        for count in (sum(lengths), shape.query)
    )
    documents = Ragged.from_lengths(rows, lengths)
    padded = torch.nn.utils.rnn.pad_sequence(list(documents), batch_first=True)
    hidden = torch.arange(padded.shape[1], device=device) >= torch.tensor(lengths, device=device)[:, None]

    def plain() -> torch.Tensor:
        similarity = padded @ query.T  # [documents, tokens, query]
        return similarity.masked_fill_(hidden[:, :, None], -torch.inf).amax(dim=1).float().sum(dim=1)

    contenders: dict[str, Run] = {"padded torch": plain}
    # The kernels get their indices on the device, as those of the packages do.
    offsets, one = (
        torch.tensor(bounds, dtype=torch.int32, device=device)
        for bounds in (documents.offsets, (0, shape.query))
    )
    if triton_ops.runs_on(device):
        from maxsimd.engine.ops.triton.maxsim import PackedTokens, Pairs, maxsim

        first, every = torch.zeros_like(offsets[:-1]), torch.arange(shape.documents, device=device).int()
        queries = PackedTokens(query, one[:1], one[1:], shape.query)
        packed = PackedTokens(rows, offsets[:-1], offsets[1:], max(lengths))
        contenders[OURS] = lambda: maxsim(queries, packed, Pairs(first, every), -1e9)
    if device.type == "cuda":
        if (flash := _package("flash_maxsim")) is not None:
            contenders["flash-maxsim"] = lambda: flash.flash_maxsim_packed(query, rows, offsets, max(lengths))
        if (late := _package("late_interaction_kernels")) is not None:
            contenders["late-interaction-kernels"] = lambda: late.maxsim_varlen(
                query, rows, one, offsets, shape.query, max(lengths)
            )
    return contenders, sum(lengths)


def _attention_contenders(shape: AttentionShape, device: torch.device) -> tuple[dict[str, Run], int]:
    from maxsimd.engine.execution.attention.select import candidates

    draw = np.random.default_rng(0)
    lengths = draw.integers(shape.tokens // 2, shape.tokens * 3 // 2 + 1, shape.sequences).tolist()
    starts = [0, *accumulate(lengths)]
    q, k, v = (
        torch.randn(sum(lengths), heads, shape.head_dim, device=device).bfloat16().transpose(0, 1)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    groups = tuple(Group(start, 1, n, (n,)) for start, n in zip(starts, lengths, strict=False))
    qkv = QKV(q, k, v, shape.head_dim**-0.5)
    pairs = sum(n * (n + 1) // 2 if shape.causal else n * n for n in lengths)

    def by(backend: AttentionBackend[Any]) -> Run:
        metadata = backend.prepare(Layout(shape.causal, groups), device)
        return lambda: backend.full(qkv, metadata)

    found = {name: by(make()) for name, make in candidates(device, torch.bfloat16).items()}
    contenders: dict[str, Run] = {"one by one": by(OneByOneBackend())}
    contenders |= {OURS if name == "triton" else name: run for name, run in found.items()}
    return contenders, pairs


def _projection_contenders(rows: int, width: int, dim: int, device: torch.device) -> dict[str, Run]:
    hidden = torch.randn(rows, width, device=device).bfloat16()
    weight = (torch.randn(dim, width, device=device) * width**-0.5).bfloat16()
    pooled = torch.arange(0, rows, 1, device=device)

    def plain() -> torch.Tensor:
        return torch.nn.functional.normalize((hidden[pooled] @ weight.T).float(), dim=-1).bfloat16()

    contenders: dict[str, Run] = {"torch": plain}
    if triton_ops.runs_on(device):
        from maxsimd.engine.ops.triton.projection import Projection, project

        projection = Projection(weight, None, 1e-12)
        contenders[OURS] = lambda: project(hidden, pooled, projection, torch.bfloat16)
    return contenders


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
