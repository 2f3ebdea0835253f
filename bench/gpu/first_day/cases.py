"""The smallest launches of every variant of a kernel, each compared with plain torch: `maxsim_cases` and
others list them, and a case runs itself on a device.

Memory that a kernel is to write is filled with NaN beforehand, so that what it leaves out is seen.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import numpy as np
import torch

from maxsimd.bench.gpu.first_day.tiles import INT8_VARIANTS, VARIANTS, Variant, name_of, tiled
from maxsimd.engine.execution.attention.backend import AttentionBackend, OneByOneBackend
from maxsimd.engine.execution.attention.gpu import TritonBackend
from maxsimd.engine.execution.layout import Group, Layout, PrefillChunk, PrefillKV, SharedGroup
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


def poison() -> None:
    """From here on, memory that is allocated without contents holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


_LENGTHS = (0, 1, 128, 129, 64, 8192)


def maxsim_cases(
    dims: tuple[int, ...] = (48, 96, 128, 200, 256, 1024),
    dtypes: tuple[str, ...] = (*DTYPES, "int8"),
    splits: tuple[int, ...] = (1, 2, 64),
) -> Iterator[Case]:
    """All tiles, precisions, kinds of dimensions, and numbers of splits; and the tiles that others are timed
    against."""
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
    heads: tuple[int, ...] = (32, 64, 80, 128, 256), dtypes: tuple[str, ...] = (*DTYPES,)
) -> Iterator[Case]:
    """All sizes of heads and kinds of sequences, with two heads of queries to one of keys."""
    for dtype, head_dim, kind in product(dtypes, heads, _KINDS):
        check = _Attention(dtype, head_dim, kind, (1, 64, 128, 129, 300))
        yield Case(f"attention {dtype}, heads of {head_dim}, {kind}", check)


def small_attention_cases() -> Iterator[Case]:
    """A few, for an interpreter."""
    for kind in ("causal", "prefix"):
        yield Case(f"attention bf16, heads of 32, {kind}", _Attention("bf16", 32, kind, (1, 17)))


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
        qkv = QKV(
            self._heads(4, rows, device), self._heads(2, rows, device), self._heads(2, rows, device),
            self.head_dim**-0.5, window,
        )  # fmt: skip
        earlier = [KV(self._heads(2, _BEFORE, device), self._heads(2, _BEFORE, device)) for _ in self.lengths]
        if self.kind == "prefix":
            earlier = [earlier[0]] * len(self.lengths)
        exact = self._attended(OneByOneBackend(), _wide(qkv), [KV(*map(_wide_on_cpu, kv)) for kv in earlier])
        found = self._attended(TritonBackend(), qkv, earlier)
        compare(found.cpu(), exact, _TOLERANCE[self.dtype])

    def _heads(self, count: int, rows: int, device: torch.device) -> torch.Tensor:
        """As models hand them on: a view [heads, rows, head_dim] of rows with their heads side by side."""
        return torch.randn(rows, count, self.head_dim, device=device).to(DTYPES[self.dtype]).transpose(0, 1)

    def _attended(self, backend: AttentionBackend[Any], qkv: QKV, earlier: list[KV]) -> torch.Tensor:
        starts = [0, *accumulate(self.lengths)]
        of_each = list(zip(starts, self.lengths, strict=False))
        device, out = qkv.query.device, qkv.new_output()
        if self.kind == "prefix":
            prefix = PrefillKV()
            shared = tuple(SharedGroup(row, 1, n, prefix) for row, n in of_each)
            backend.shared_prefix(
                qkv, earlier, backend.prepare(Layout(True, shared_groups=shared), device), out
            )
            return out
        if self.kind == "chunk":
            chunks = tuple(PrefillChunk(row, _BEFORE, _BEFORE + n, PrefillKV(), True) for row, n in of_each)
            contexts = [
                KV(
                    torch.cat([kv.key, qkv.key[:, row : row + n]], dim=1),
                    torch.cat([kv.value, qkv.value[:, row : row + n]], dim=1),
                )
                for (row, n), kv in zip(of_each, earlier, strict=True)
            ]
            metadata = backend.prepare(Layout(True, prefill_chunks=chunks), device)
            backend.with_prefill_kv(qkv, contexts, metadata, out)
            return out
        groups = tuple(Group(row, 1, n, (n,)) for row, n in of_each)
        return backend.full(qkv, backend.prepare(Layout("causal" in self.kind, groups), device))


def projection_cases(dims: tuple[int, ...] = (16, 96, 128, 1024), width: int = 1024) -> Iterator[Case]:
    """All sizes of embeddings, with and without bias and normalisation."""
    for dtype, dim, biased in product(DTYPES, dims, (True, False)):
        name = f"projection {dtype}, {width} to {dim}, {'with' if biased else 'without'} bias"
        yield Case(name, _Projected(dtype, dim, width, biased))


def small_projection_cases() -> Iterator[Case]:
    """A few, for an interpreter."""
    return projection_cases((16,), 48)


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
    """Raises an AssertionError where numbers differ by more, or `found` holds a NaN: then the kernel did not
    write there, or wrote that."""
    missing = int(found.isnan().sum())
    assert missing == 0, f"{missing} of {found.numel()} numbers are NaN"
    worst = float((found.float() - exact.float()).abs().max())
    assert worst <= tolerance, f"differs by {worst:.2g}, and may by {tolerance:.2g}"
