"""Scores and projects rows that lie behind the 2^31st number of a tensor, once: offsets of 32 bits would
wrap."""

import click
import numpy as np
import torch

from maxsimd.bench.gpu.first_day.cases import poison
from maxsimd.bench.gpu.first_day.found import show
from maxsimd.engine.ops.triton.projection import Projection, project
from maxsimd.engine.scoring.maxsim import maxsim_reference
from maxsimd.engine.scoring.maxsim.triton import maxsim_spans_triton
from maxsimd.pooling.ragged import Ragged
from maxsimd.pooling.spans import Spans

_DIM, _WIDTH = 128, 1024
# 2.56e9 int8 numbers, and 2.25e9 of hidden states.
_ROWS, _STATES = 20_000_000, 2_200_000
_DRY = 3000
_LENGTH = 300


@click.command()
@click.option("--dry", is_flag=True, help="Few rows, on the CPU.")
@torch.inference_mode()
def main(dry: bool) -> None:
    """Documents at the start, across the boundary and at the end; and rows to project from there."""
    poison()
    device = torch.device("cpu" if dry else "cuda")
    rows, states = (_DRY, _DRY) if dry else (_ROWS, _STATES)
    show("numbers in documents", rows * _DIM)
    worst = _maxsim(rows, device)
    show("worst score, of rows far behind", worst)
    wrong = not worst <= 1e-3
    worst = _projection(states, device)
    show("worst projection, of rows far behind", worst)
    if wrong or not worst <= 1e-3:
        raise SystemExit(1)


def _maxsim(rows: int, device: torch.device) -> float:
    values = torch.randint(-127, 128, (rows, _DIM), dtype=torch.int8, device=device)
    scales = torch.full((rows,), 1 / (127 * _DIM**0.5), device=device)
    boundary = min((1 << 31) // _DIM, rows // 2)
    starts = (0, boundary - _LENGTH // 2, rows - _LENGTH)
    stops = tuple(start + _LENGTH for start in starts)
    documents = Spans(values, np.array(starts), np.array(stops), scales)
    query = Ragged(torch.nn.functional.normalize(torch.randn(32, _DIM, device=device), dim=-1), (0, 32))
    pairs = np.array([(0, document) for document in range(len(starts))])
    found = maxsim_spans_triton(query, documents, pairs)
    exact = maxsim_reference(query, documents.gathered().decoded(torch.float32), pairs)
    return _worst(found, exact)


def _projection(states: int, device: torch.device) -> float:
    hidden = torch.randn(states, _WIDTH, dtype=torch.bfloat16, device=device)
    weight = (torch.randn(_DIM, _WIDTH, device=device) * _WIDTH**-0.5).bfloat16()
    pooled = torch.cat([torch.arange(100), torch.arange(states - 100, states)]).to(device)
    found = project(hidden, pooled, Projection(weight, None, 1e-12), torch.float32)
    exact = torch.nn.functional.linear(hidden[pooled].float(), weight.float())
    return _worst(found, torch.nn.functional.normalize(exact, dim=-1))


def _worst(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference; NaN where a number is missing."""
    return float((found - exact).abs().max())


if __name__ == "__main__":
    main()
