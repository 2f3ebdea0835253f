"""The smallest launches of every variant of a kernel, compared with plain torch, some at a time, in processes
of their own."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from typing import Any

import click
import numpy as np
import torch

from maxsimd.bench.gpu.first_day.measure import INT8_VARIANTS, VARIANTS, Variant, name_of, tiled
from maxsimd.bench.gpu.first_day.processes import RIGHT, WRONG, Result, run_cases, show
from maxsimd.engine.execution.attention.backend import AttentionBackend, OneByOneBackend
from maxsimd.engine.execution.attention.gpu import TritonBackend
from maxsimd.engine.execution.layout import Group, Layout, PrefillChunk, PrefillKV, SharedGroup
from maxsimd.engine.ops import elementwise as fused
from maxsimd.engine.ops.qkv import KV, QKV
from maxsimd.engine.ops.triton.projection import Projection, project
from maxsimd.engine.scoring.maxsim import maxsim_reference
from maxsimd.engine.scoring.maxsim_triton import maxsim_triton
from maxsimd.pooling.ragged import Ragged

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_TOLERANCE = {"bf16": 3e-2, "fp16": 4e-3, "fp32": 1e-4}

# Tensor cores sum in float32 in an order of their own: this much for each query token.
_A_TOKEN = 2e-5


@dataclass(frozen=True, slots=True)
class Case:
    """A variant by `name`. Its `check` raises an AssertionError where results are wrong."""

    name: str
    check: Callable[[torch.device], None]


def _poison() -> None:
    """From here on, memory that a kernel is to write holds NaN, so that a gap shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


_LENGTHS = (0, 1, 128, 129, 64, 8192)


def maxsim_cases(
    dims: tuple[int, ...] = (48, 96, 128, 200, 256, 1024),
    dtypes: tuple[str, ...] = (*DTYPES, "int8"),
    splits: tuple[int, ...] = (1, 2, 64),
) -> Iterator[Case]:
    """All tiles, precisions, kinds of dimensions and numbers of splits; and the tiles that are timed."""
    for dtype, dim, query, split_k in product(dtypes, dims, (32, 33, 128, 1024), splits):
        name = f"maxsim {dtype}, dim {dim}, {query} query tokens, split_k {split_k}"
        yield Case(name, _Maxsim(dtype, dim, query, split_k, _LENGTHS))
    for dtype, variants in (("bf16", VARIANTS), ("int8", INT8_VARIANTS)):
        for variant in variants:
            for query, split_k in ((variant[0], 1), (variant[0] + 1, 2)):
                name = f"maxsim {dtype}, {query} query tokens, split_k {split_k}, {name_of(variant)}"
                yield Case(name, _Maxsim(dtype, 128, query, split_k, _LENGTHS, variant))


def small_maxsim_cases() -> Iterator[Case]:
    """A few, for an interpreter."""
    for dtype, dim, query, split_k in (("bf16", 48, 33, 2), ("int8", 16, 3, 1)):
        name = f"maxsim {dtype}, dim {dim}, {query} query tokens, split_k {split_k}"
        yield Case(name, _Maxsim(dtype, dim, query, split_k, (0, 1, 32, 33)))
    variant = (16, 32, 4, 2, 2)
    yield Case(f"maxsim int8, {name_of(variant)}", _Maxsim("int8", 64, 17, 2, (0, 1, 32, 33), variant))


@dataclass(frozen=True, slots=True)
class _Maxsim:
    dtype: str
    dim: int
    query: int
    split_k: int
    lengths: tuple[int, ...]
    tiles: Variant | None = None

    def __call__(self, device: torch.device) -> None:
        torch.manual_seed(self.dim)
        precision = DTYPES.get(self.dtype, torch.bfloat16)
        # A second query, so that tiles of the first one end where another's rows follow.
        queries = Ragged.from_lengths(
            _unit_rows(self.query + 5, self.dim, device).to(precision), (self.query, 5)
        )
        rows = _unit_rows(sum(self.lengths), self.dim, device)
        if self.dtype == "int8":
            scales = rows.abs().amax(dim=1) / 127
            rounded = (rows / scales[:, None]).round().to(torch.int8)
            documents = Ragged.from_lengths(rounded, self.lengths, scales)
        else:
            documents = Ragged.from_lengths(rows.to(precision), self.lengths)
        pairs = np.array([(q, d) for q in range(2) for d in range(len(self.lengths))])
        with nullcontext() if self.tiles is None else tiled(self.tiles):
            found = maxsim_triton(queries, documents, pairs, self.split_k)
        exact = maxsim_reference(queries.decoded(torch.float32), documents.decoded(torch.float32), pairs)
        compare(found, exact, _A_TOKEN * self.query)


# Tokens before a chunk, or of a prefix.
_BEFORE = 70
_KINDS = ("whole", "causal", "window", "causal window", "prefix", "chunk")


def attention_cases(
    heads: tuple[int, ...] = (32, 64, 80, 128, 256),
    dtypes: tuple[str, ...] = (*DTYPES,),
    kinds: tuple[str, ...] = _KINDS,
    lengths: tuple[int, ...] = (1, 64, 128, 129, 300),
) -> Iterator[Case]:
    """All sizes of heads and kinds of sequences, with two heads of queries to one of keys."""
    for dtype, head_dim, kind in product(dtypes, heads, kinds):
        check = _Attention(dtype, head_dim, kind, lengths)
        yield Case(f"attention {dtype}, heads of {head_dim}, {kind}", check)


@dataclass(frozen=True, slots=True)
class _Attention:
    dtype: str
    head_dim: int
    kind: str
    lengths: tuple[int, ...]

    def __call__(self, device: torch.device) -> None:
        torch.manual_seed(self.head_dim)
        rows = sum(self.lengths)
        window = 40 if "window" in self.kind else None
        query, key, value = (self._heads(heads, rows, device) for heads in (4, 2, 2))
        qkv = QKV(query, key, value, self.head_dim**-0.5, window)
        earlier = [KV(self._heads(2, _BEFORE, device), self._heads(2, _BEFORE, device)) for _ in self.lengths]
        if self.kind == "prefix":
            earlier = [earlier[0]] * len(self.lengths)
        exact = self._attended(OneByOneBackend(), _wide(qkv), [KV(*map(_wide_on_cpu, kv)) for kv in earlier])
        found = self._attended(TritonBackend(), qkv, earlier)
        compare(found.cpu(), exact, _TOLERANCE[self.dtype])

    def _heads(self, count: int, rows: int, device: torch.device) -> torch.Tensor:
        """A view [heads, rows, head_dim] of rows with their heads side by side, like models'."""
        return torch.randn(rows, count, self.head_dim, device=device).to(DTYPES[self.dtype]).transpose(0, 1)

    def _attended(self, backend: AttentionBackend[Any], qkv: QKV, earlier: list[KV]) -> torch.Tensor:
        starts = [0, *accumulate(self.lengths)]
        of_each = list(zip(starts, self.lengths, strict=False))
        device, out = qkv.query.device, qkv.new_output()
        if self.kind == "prefix":
            prefix = PrefillKV()
            shared = tuple(SharedGroup(row, 1, n, prefix) for row, n in of_each)
            metadata = backend.prepare(Layout(True, shared_groups=shared), device)
            backend.shared_prefix(qkv, earlier, metadata, out)
            return out
        if self.kind == "chunk":
            chunks = tuple(PrefillChunk(row, _BEFORE, _BEFORE + n, PrefillKV(), True) for row, n in of_each)
            contexts = []
            for (row, n), kv in zip(of_each, earlier, strict=True):
                key = torch.cat([kv.key, qkv.key[:, row : row + n]], dim=1)
                contexts.append(KV(key, torch.cat([kv.value, qkv.value[:, row : row + n]], dim=1)))
            metadata = backend.prepare(Layout(True, prefill_chunks=chunks), device)
            backend.with_prefill_kv(qkv, contexts, metadata, out)
            return out
        groups = tuple(Group(row, 1, n, (n,)) for row, n in of_each)
        return backend.full(qkv, backend.prepare(Layout("causal" in self.kind, groups), device))


def projection_cases(dims: tuple[int, ...] = (16, 96, 128, 1024), width: int = 1024) -> Iterator[Case]:
    """All sizes of embeddings, with and without bias and normalization."""
    for dtype, dim, biased in product(DTYPES, dims, (True, False)):
        name = f"projection {dtype}, {width} to {dim}, {'with' if biased else 'without'} bias"
        yield Case(name, _Projected(dtype, dim, width, biased))


@dataclass(frozen=True, slots=True)
class _Projected:
    dtype: str
    dim: int
    width: int
    biased: bool

    def __call__(self, device: torch.device) -> None:
        torch.manual_seed(self.dim)
        hidden = torch.randn(300, self.width, device=device).to(DTYPES[self.dtype])
        weight = (torch.randn(self.dim, self.width, device=device) * self.width**-0.5).to(DTYPES[self.dtype])
        bias = torch.randn(self.dim, device=device) if self.biased else None
        pooled = torch.randint(300, (131,), device=device)
        exact = torch.nn.functional.linear(hidden[pooled].float(), weight.float(), bias)
        plain = project(hidden, pooled, Projection(weight, bias, None), torch.float32)
        compare(plain, exact, 1e-4 * float(exact.abs().max()))
        normalized = project(hidden, pooled, Projection(weight, bias, 1e-12), torch.float32)
        compare(normalized, torch.nn.functional.normalize(exact, dim=-1), 1e-4)


def _wide(qkv: QKV) -> QKV:
    query, key, value = (_wide_on_cpu(x) for x in (qkv.query, qkv.key, qkv.value))
    return QKV(query, key, value, qkv.scaling, qkv.window)


def _wide_on_cpu(values: torch.Tensor) -> torch.Tensor:
    """A GPU may multiply float32 numbers with fewer bits; a CPU does not."""
    return values.float().cpu()


def _unit_rows(rows: int, dim: int, device: torch.device) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(rows, dim, device=device), dim=-1)


def compare(found: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    """Raises an AssertionError where numbers differ by more, or `found` has a NaN."""
    missing = int(found.isnan().sum())
    assert missing == 0, f"{missing} of {found.numel()} numbers are NaN"
    worst = float((found.float() - exact.float()).abs().max())
    assert worst <= tolerance, f"differs by {worst:.2g}, and may by {tolerance:.2g}"


# A share of the largest number: both sides round once, perhaps to neighbors.
_LAYER_TOLERANCE = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 2e-5}
_ROWS = 33


def layer_cases(
    widths: tuple[int, ...] = (100, 384, 1024, 4096), heads: tuple[int, ...] = (32, 64, 80, 128, 256)
) -> Iterator[Case]:
    """All kernels in all precisions, with rows of these widths and heads of these sizes."""
    kernels = ("layer norm", "add and layer norm", "RMS norm", "add and RMS norm", "gated")
    for dtype, width, name in product(DTYPES, widths, kernels):
        yield Case(f"{name} {dtype}, {width} wide", partial(_check_layers, name, dtype, width))
    for dtype, head_dim, normed in product(DTYPES, heads, (True, False)):
        name = f"rotary {dtype}, heads of {head_dim}, {'with' if normed else 'without'} norm"
        yield Case(name, partial(_check_rotary, dtype, head_dim, normed))


def _check_layers(name: str, dtype: str, width: int, device: torch.device) -> None:
    for found, exact in _layer_results(name, dtype, width, device):
        _compare_rounded(found, exact, dtype)


def _layer_results(
    name: str, dtype: str, width: int, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The results of a kernel beside its reference's."""
    gate_up = torch.randn(_ROWS, 2 * width, device=device).to(DTYPES[dtype])
    x, residual = gate_up.chunk(2, dim=1)
    x, residual = x.contiguous(), residual.contiguous()
    weight, some_bias = torch.randn(2, width, device=device).to(DTYPES[dtype])
    match name:
        case "layer norm":
            for bias in (some_bias, None):
                yield (
                    fused.layer_norm(x, weight, bias, 1e-5),
                    fused.layer_norm_reference(x, weight, bias, 1e-5),
                )
                both = fused.sum_and_layer_norm_reference(x, residual, weight, bias, 1e-5)
                yield from zip(fused.sum_and_layer_norm(x, residual, weight, bias, 1e-5), both, strict=True)
        case "add and layer norm":
            exact = fused.layer_norm_reference(x, weight, some_bias, 1e-5, residual)
            yield fused.layer_norm(x, weight, some_bias, 1e-5, residual), exact
        case "RMS norm":
            yield fused.rms_norm(x, weight, 1e-6), fused.rms_norm_reference(x, weight, 1e-6)
        case "add and RMS norm":
            both = fused.sum_and_rms_norm_reference(x, residual, weight, 1e-6)
            yield from zip(fused.sum_and_rms_norm(x, residual, weight, 1e-6), both, strict=True)
        case "gated":
            for activation in fused.ACTIVATIONS:
                yield fused.gated(gate_up, activation), fused.gated_reference(gate_up, activation)


def _check_rotary(dtype: str, head_dim: int, normed: bool, device: torch.device) -> None:
    heads = (6, 3)
    qkv = torch.randn(_ROWS, heads[0] + 2 * heads[1], head_dim, device=device).to(DTYPES[dtype])
    cos, sin = torch.randn(2, _ROWS, head_dim, device=device).to(DTYPES[dtype])
    weights = torch.randn(2, head_dim, device=device).to(DTYPES[dtype])
    norms = fused.HeadNorms(weights[0], weights[1], 1e-6) if normed else None
    exact = fused.norm_rotary_reference(qkv, cos, sin, heads, norms)
    fused.norm_rotary_(qkv, cos, sin, heads, norms)
    _compare_rounded(qkv, exact, dtype)


def _compare_rounded(found: torch.Tensor, exact: torch.Tensor, dtype: str) -> None:
    assert found.dtype is exact.dtype, f"{found.dtype} is not {exact.dtype}"
    compare(found, exact, _LAYER_TOLERANCE[dtype] * float(exact.abs().max()))


# By kernel, the cases on a GPU, and a few for an interpreter.
_CASES: dict[str, tuple[Callable[[], Iterator[Case]], Callable[[], Iterator[Case]]]] = {
    "maxsim": (partial(maxsim_cases, (96, 128, 1024), ("bf16", "int8"), (1, 2)), small_maxsim_cases),
    "attention": (
        partial(attention_cases, (64, 128), ("bf16", "fp32")),
        partial(attention_cases, (32,), ("bf16",), ("causal", "prefix"), (1, 17)),
    ),
    "projection": (partial(projection_cases, (128,)), partial(projection_cases, (16,), 48)),
    "layers": (
        partial(layer_cases, (768, 1024), (64, 128)),
        lambda: (case for case in layer_cases((48,), (32,)) if " bf16" in case.name),
    ),
}


@click.command()
@click.option("--dry", is_flag=True, help="A few cases on the CPU.")
@click.option("--processes", default=14, show_default=True, help="Cases that run at a time.")
@click.option("--cases", help="Run these in this process: indices, separated by commas.")
def main(dry: bool, processes: int, cases: str | None) -> None:
    """Compares variants of kernels with plain torch. Exits with 1 where one is wrong."""
    all_cases = [case for makers in _CASES.values() for case in makers[int(dry)]()]
    if cases is None:
        _supervise(["--dry"] if dry else [], [case.name for case in all_cases], 1 if dry else processes)
    else:
        _run_here(all_cases, [int(index) for index in cases.split(",")], dry)


def _supervise(arguments: list[str], names: list[str], processes: int) -> None:
    command = [sys.executable, "-m", "maxsimd.bench.gpu.first_day.smallest", *arguments]
    indices = range(len(names))
    shares = [indices[i::processes] for i in range(processes)]

    def run(share: Sequence[int]) -> list[Result]:
        return list(run_cases(command, share))

    with ThreadPoolExecutor(processes) as pool:
        results = [result for of_share in pool.map(run, shares) for result in of_share]
    wrong = [result for result in results if result.failure is not None]
    for result in wrong:
        print(f"{names[result.index]}: {result.failure}", flush=True)
    show("kernels: cases", len(results))
    show("kernels: cases that failed", len(wrong))
    if wrong:
        raise SystemExit(1)


def _run_here(all_cases: list[Case], indices: Sequence[int], dry: bool) -> None:
    """Prints a line for each case. An error other than a wrong result ends the process: nothing that follows
    an error of the device can be trusted. Exits with 1 where a result was wrong."""
    _poison()
    device = torch.device("cpu" if dry else "cuda")
    status = 0
    for index in indices:
        case = all_cases[index]
        try:
            with torch.inference_mode():
                case.check(device)
        except AssertionError as error:
            status = 1
            print(f"{WRONG}{case.name}: {error}", flush=True)
        except Exception:
            print(f"in {case.name}:", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # what torch does at exit may hang on a broken device
        else:
            print(f"{RIGHT}{case.name}", flush=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
