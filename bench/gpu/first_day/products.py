"""Times the linear layers of an encoder of XLM-RoBERTa large's size by themselves: with GELU as a pass of its
own and as part of the product, and in fp8."""

from collections.abc import Callable, Iterator

import click
import torch
from torch.nn import functional

from maxsimd.bench.gpu.first_day.found import show
from maxsimd.bench.gpu.limits import copies_beyond_cache
from maxsimd.bench.timing import Run, medians, one_after_another

_ROWS = (16_384, 4096, 512)
# The inputs and outputs of a layer's products; GELU follows the first.
_SIZES = ((1024, 4096), (4096, 1024), (1024, 3072), (1024, 1024))
_LARGEST = torch.finfo(torch.float8_e4m3fn).max

Made = tuple[Run, torch.Tensor]
Maker = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Run]


@click.command()
@click.option("--rounds", default=15, show_default=True)
@click.option("--dry", is_flag=True, help="Small, on the CPU.")
@torch.inference_mode()
def main(rounds: int, dry: bool) -> None:
    """Prints milliseconds of each way, and by how much its results differ from those in float32: the root of
    the mean square, as a part of the results'."""
    device = torch.device("cpu" if dry else "cuda")
    for inputs, outputs in ((16, 32),) if dry else _SIZES:
        for rows in (16,) if dry else _ROWS:
            _compare(rows, inputs, outputs, device, rounds)


def _compare(rows: int, inputs: int, outputs: int, device: torch.device, rounds: int) -> None:
    name = f"product, {rows:,} rows, {inputs:,} to {outputs:,}"
    is_first = outputs == 4 * inputs or rows == outputs // 2
    copies = min(8, copies_beyond_cache(2 * rows * (inputs + outputs), device))
    xs = [torch.randn(rows, inputs, device=device).bfloat16() for _ in range(copies)]
    weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).bfloat16()
    bias = (torch.randn(outputs, device=device) * 0.1).bfloat16()
    exact = functional.linear(xs[0].float(), weight.float(), bias.float())
    runs = {}
    for way, maker in _ways(is_first):
        try:
            made = [maker(x, weight, bias) for x in xs]
            found = made[0]()
        except Exception as error:
            show(f"{name}, {way}", f"{type(error).__name__}: {error}"[:200])
            continue
        assert isinstance(found, torch.Tensor)
        wanted = functional.gelu(exact) if "GELU" in way else exact
        show(
            f"{name}, {way}: rms",
            float((found.float() - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()),
        )
        runs[way] = one_after_another(made)
    for way, seconds in medians(runs, device, rounds).items():
        show(f"{name}, {way}: ms", round(seconds * 1e3, 4))
        show(f"{name}, {way}: tflops", round(2 * rows * inputs * outputs / seconds / 1e12, 1))


def _ways(with_gelu: bool) -> Iterator[tuple[str, Maker]]:
    yield "linear", lambda x, weight, bias: lambda: functional.linear(x, weight, bias)
    if with_gelu:
        yield (
            "linear, then GELU",
            lambda x, weight, bias: lambda: functional.gelu(functional.linear(x, weight, bias)),
        )
        yield (
            "with GELU",
            lambda x, weight, bias: lambda: torch._addmm_activation(bias, x, weight.t(), use_gelu=True),
        )
    yield "fp8 by rows", _fp8_by_rows
    yield "fp8", _fp8
    yield "fp8 by rows, rounded first", _fp8_rounded_first


def _by_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in fp8, and float32 scales [rows, 1]."""
    scales = x.abs().amax(dim=1, keepdim=True).float() / _LARGEST
    return (x / scales).to(torch.float8_e4m3fn), scales


def _fp8_by_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Run:
    (x8, of_x), (w8, of_w) = _by_rows(x), _by_rows(weight)
    return lambda: torch._scaled_mm(
        x8, w8.t(), of_x, of_w.t().contiguous(), bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _fp8_rounded_first(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Run:
    """With rounding to fp8 inside the timed run, in plain torch, which takes several passes."""
    w8, of_w = _by_rows(weight)
    of_w = of_w.t().contiguous()

    def run() -> torch.Tensor:
        x8, of_x = _by_rows(x)
        return torch._scaled_mm(x8, w8.t(), of_x, of_w, bias, out_dtype=torch.bfloat16, use_fast_accum=True)

    return run


def _fp8(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Run:
    of_x, of_w = (each.abs().max().float() / _LARGEST for each in (x, weight))
    x8, w8 = (x / of_x).to(torch.float8_e4m3fn), (weight / of_w).to(torch.float8_e4m3fn)
    return lambda: torch._scaled_mm(
        x8, w8.t(), of_x, of_w, bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )


if __name__ == "__main__":
    main()
