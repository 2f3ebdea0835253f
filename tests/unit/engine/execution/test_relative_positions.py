"""Attention with relative positions: what distances add, by every backend, against a sum written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine.execution.attention.base import AttentionBackend
from maxsimd.engine.execution.attention.cpu_kernel import CompiledBackend
from maxsimd.engine.execution.attention.one_by_one import OneByOneBackend
from maxsimd.engine.execution.attention.torch_grouped import GroupedBackend
from maxsimd.engine.execution.lay_out import lay_out
from maxsimd.engine.execution.layout import Layout, PackedBatch
from maxsimd.engine.ops.qkv import QKV
from maxsimd.engine.ops.relative import PositionBias, PositionContent, RelativePositions
from tests.unit.engine.execution.test_packed import CPU, make_step
from tests.unit.engine.ops.test_kernels import needs_kernels

BACKENDS = [
    OneByOneBackend(),
    GroupedBackend(),
    pytest.param(CompiledBackend(), marks=needs_kernels, id="compiled"),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
HEADS, HEAD_DIM = 2, 24
LENGTHS = st.lists(
    st.tuples(st.sampled_from([1, 2, 12, 13, 31, 33, 70, 130]), st.integers(0, 3)), min_size=1, max_size=5
)


def drawn(kind: str, reach: int, dtype: torch.dtype, seed: int) -> RelativePositions:
    random = torch.Generator().manual_seed(seed)
    if kind == "bias":
        return PositionBias(torch.randn(HEADS, 2 * reach + 1, generator=random))
    keys, queries = (
        torch.randn(HEADS, 2 * reach + 1, HEAD_DIM, generator=random).to(dtype) for _ in range(2)
    )
    return PositionContent(keys, queries)


def drawn_qkv(rows: int, relative: RelativePositions | None, dtype: torch.dtype) -> QKV:
    random = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn(HEADS, rows, HEAD_DIM, generator=random).to(dtype) for _ in range(3))
    return QKV(q, k, v, HEAD_DIM**-0.5, None, relative)


def laid_out(lengths: list[tuple[int, int]], backend: AttentionBackend[Layout]) -> PackedBatch:
    """Sequences of these lengths, of which the last so many keys are not attended to."""
    attended = [max(1, length - hidden) for length, hidden in lengths]
    step = make_step([length for length, _ in lengths], attended)
    return lay_out(step, {}, causal=False, arrangement=backend.arrangement, position_offset=0)


def written_out(qkv: QKV, layout: Layout) -> torch.Tensor:
    """[rows, heads, head_dim], one product after the other."""
    out = torch.zeros(qkv.query.shape[1], HEADS, HEAD_DIM)
    for first, length, keys in layout.whole_sequences.tolist():
        q, k, v = (x[:, first : first + length].float() for x in (qkv.query, qkv.key, qkv.value))
        products = q @ k[:, :keys].transpose(1, 2)
        apart = torch.arange(keys)[None] - torch.arange(length)[:, None]
        match qkv.relative:
            case PositionBias() as bias:
                products = products * qkv.scaling + bias.by_distance[:, apart + bias.reach]
            case PositionContent() as content:
                near_keys, near_queries = (
                    table.float()[:, apart + content.reach] for table in (content.keys, content.queries)
                )
                products = products + torch.einsum("hqd,hqkd->hqk", q, near_keys)
                products = products + torch.einsum("hkd,hqkd->hqk", k[:, :keys], near_queries)
                products = products * qkv.scaling
        out[first : first + length] = (products.softmax(-1) @ v[:, :keys]).transpose(0, 1)
    return out


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("kind", ["bias", "content"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@given(lengths=LENGTHS, spare=st.integers(0, 70))
@settings(deadline=None, max_examples=6)
def test_distances_add_to_products_as_written_out(
    backend: AttentionBackend[Layout],
    kind: str,
    dtype: torch.dtype,
    lengths: list[tuple[int, int]],
    spare: int,
) -> None:
    batch = laid_out(lengths, backend)
    reach = batch.layout.longest - 1 + spare
    qkv = drawn_qkv(len(batch.input_ids), drawn(kind, reach, dtype, spare), dtype)
    exact = written_out(qkv, batch.layout)
    rows = torch.cat(
        [
            torch.arange(first, first + len(chunk))
            for chunk, first in zip(batch.cursor.chunks, batch.cursor.starts, strict=True)
        ]
    )
    metadata = backend.prepare(batch.layout, CPU)
    ours = backend.full(qkv, metadata).float()
    torch.testing.assert_close(ours[rows], exact[rows], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    first = list(batch.cursor.starts)
    ours = backend.first_rows(qkv, metadata).float()
    torch.testing.assert_close(ours[first], exact[first], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
