"""Runs the smallest launches of kernels' variants, some at a time, in processes of their own."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import click

from maxsimd.bench.gpu.first_day.found import show
from maxsimd.bench.gpu.first_day.supervised import RIGHT, WRONG, Result, run_cases

if TYPE_CHECKING:
    from maxsimd.bench.gpu.first_day.cases import Case

KERNELS = ("maxsim", "attention", "projection", "layers")


@click.command()
@click.argument("kernels", type=click.Choice(KERNELS), nargs=-1, required=True)
@click.option("--dry", is_flag=True, help="A few cases on the CPU.")
@click.option("--processes", default=14, show_default=True, help="Cases that run at a time.")
@click.option("--cases", help="Run these in this process: indices, separated by commas.")
def main(kernels: tuple[str, ...], dry: bool, processes: int, cases: str | None) -> None:
    """Compares variants of KERNELS with plain torch. Exits with 1 where one is wrong."""
    all_cases = [case for kernel in kernels for case in _cases(kernel, dry)]
    if cases is None:
        _supervise(
            [*kernels, *(["--dry"] if dry else [])],
            [case.name for case in all_cases],
            1 if dry else processes,
        )
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


def _cases(kernel: str, dry: bool) -> "Iterator[Case]":
    from maxsimd.bench.gpu.first_day import cases, layer_cases

    makers: dict[str, tuple[Callable[[], Iterator[Case]], ...]] = {
        "maxsim": (
            partial(cases.maxsim_cases, (96, 128, 1024), ("bf16", "int8"), (1, 2)),
            cases.small_maxsim_cases,
        ),
        "attention": (
            partial(cases.attention_cases, (64, 128), ("bf16", "fp32")),
            cases.small_attention_cases,
        ),
        "projection": (
            partial(cases.projection_cases, (128,)),
            cases.small_projection_cases,
        ),
        "layers": (
            partial(layer_cases.layer_cases, (768, 1024), (64, 128)),
            layer_cases.small_layer_cases,
        ),
    }
    return makers[kernel][int(dry)]()


def _run_here(all_cases: "list[Case]", indices: Sequence[int], dry: bool) -> None:
    """Prints a line for each case. After an error of the device nothing that follows can be trusted, so that
    anything but a wrong result ends the process. Exits with 1 where a result was wrong."""
    import torch

    from maxsimd.bench.gpu.first_day.cases import poison

    poison()
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
