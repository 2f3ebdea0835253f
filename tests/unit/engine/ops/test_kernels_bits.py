"""What the compiled kernels give for a row or a query is the same to the last bit, whatever is computed
beside it, wherever it stands, and on however many threads."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maxsimd.engine.execution.attention.cpu_kernel import CompiledBackend
from maxsimd.engine.execution.layout import Group, Layout
from maxsimd.engine.ops.cpu.linear import (
    Norm,
    Weights,
    linear,
    linear_norm,
    pack_bfloat16,
    pack_float32,
    pack_int8,
    use_amx,
)
from maxsimd.engine.ops.qkv import QKV
from tests.unit.engine.execution.test_packed import full
from tests.unit.engine.ops.test_kernels import amx, needs_kernels

ATTENTION = CompiledBackend()

pytestmark = pytest.mark.usefixtures("two_threads")

# float32, and bfloat16 and int8 with and without AMX tiles
WAYS = [
    pytest.param(pack_float32, False, id="float32"),
    *(
        pytest.param(pack, tiles, id=f"{name}-{'amx' if tiles else 'vectors'}")
        for name, pack in (("bfloat16", pack_bfloat16), ("int8", pack_int8))
        for tiles in (False, True)
    ),
]
# inputs and columns: whole tiles and such as leave something over, and rows that lie at distances of 2 KiB
LAYERS = [(64, 96), (384, 160), (130, 33), (45, 7), (1100, 64), (1024, 40)]
Layer = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def products(tiles: bool) -> Iterator[None]:
    if tiles and not use_amx(True):
        pytest.skip("this processor has no AMX")
    with amx(tiles):
        yield


def make_layer(pack: Callable[[torch.Tensor], Weights], inputs: int, columns: int, ending: str) -> Layer:
    """A random layer, that ends in nothing more, in GELU, or in a layer norm of the sum with its inputs."""
    random = torch.Generator().manual_seed(inputs + columns)
    weights = pack(torch.randn(columns, inputs, generator=random) * inputs**-0.5)
    bias, scale, shift = torch.randn(3, columns, generator=random)
    if ending == "norm":
        norm = Norm(scale, shift, 1e-12)
        return lambda x: linear_norm(x, x.repeat(1, columns)[:, :columns], weights, bias, norm)
    return lambda x: linear(x, weights, bias, gelu=ending == "gelu")


def random_rows(pack: Callable[[torch.Tensor], Weights], rows: int, inputs: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(rows)
    return torch.randn(rows, inputs, generator=random).to(pack(torch.zeros(1, 1)).dtype)


@needs_kernels
@pytest.mark.parametrize("ending", ["plain", "gelu", "norm"])
@pytest.mark.parametrize(("inputs", "columns"), LAYERS)
@pytest.mark.parametrize(("pack", "tiles"), WAYS)
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    pack: Callable[[torch.Tensor], Weights], tiles: bool, inputs: int, columns: int, ending: str
) -> None:
    """On any number of threads."""
    layer = make_layer(pack, inputs, columns, ending)
    x = random_rows(pack, 700, inputs)
    with products(tiles):
        everything = layer(x)
        for count in (1, 2, 7, 12, 13, 16, 17, 31, 33, 48, 65, 200, 511):
            assert torch.equal(layer(x[:count]), everything[:count]), count
        for number, count in itertools.product((1, 3), (1, 5, 64, 700)):
            with threads(number):
                assert torch.equal(layer(x[:count]), everything[:count]), (number, count)


# lengths of sequences, heads of keys and how often they are shared, and the size of heads
CROWDS = st.tuples(
    st.lists(st.integers(1, 80), min_size=2, max_size=6),
    st.sampled_from([(1, 1), (2, 1), (1, 3)]),
    st.sampled_from([16, 24, 64]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
WINDOWS = st.none() | st.integers(2, 30)
Crowd = tuple[list[int], tuple[int, int], int, torch.dtype]


def qkv_of(crowd: Crowd, rows: int, window: int | None = None) -> QKV:
    _, (kv_heads, repeats), head_dim, dtype = crowd
    random = torch.Generator().manual_seed(rows)
    q, k, v = (
        torch.randn(rows, heads, head_dim, generator=random).to(dtype).transpose(0, 1)
        for heads in (kv_heads * repeats, kv_heads, kv_heads)
    )
    return QKV(q, k, v, 0.2, window)


def side_by_side(lengths: list[int], causal: bool) -> Layout:
    """Sequences end to end, the last key of each longer one unseen unless it is causal."""
    groups, row = [], 0
    for length in lengths:
        groups.append(Group(row, 1, length, (length if causal or length < 3 else length - 1,)))
        row += length
    return Layout(causal, tuple(groups))


@needs_kernels
@given(CROWDS, st.booleans(), WINDOWS)
@settings(deadline=None)
def test_a_sequence_attends_to_the_same_bits_in_a_crowd(
    crowd: Crowd, causal: bool, window: int | None
) -> None:
    lengths = crowd[0]
    qkv = qkv_of(crowd, sum(lengths), window)
    everything = full(ATTENTION, qkv, side_by_side(lengths, causal))
    with threads(1):
        assert torch.equal(full(ATTENTION, qkv, side_by_side(lengths, causal)), everything)
    for group in side_by_side(lengths, causal).groups:
        layout = side_by_side([group.length], causal)
        assert torch.equal(full(ATTENTION, qkv.of_rows(group.rows), layout), everything[group.rows])
