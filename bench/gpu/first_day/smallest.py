"""Runs the smallest launches of a kernel's variants: `python -m maxsimd.bench.gpu.first_day.smallest KERNEL`,
some at a time, in processes of their own.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import click

from maxsimd.bench.gpu.first_day.found import show
from maxsimd.bench.gpu.first_day.supervised import RIGHT, WRONG, Result, run_cases

if TYPE_CHECKING:
    from maxsimd.bench.gpu.first_day.cases import Case

KERNELS = ("maxsim", "attention", "projection", "layers")


@click.command()
@click.argument("kernel", type=click.Choice(KERNELS))
@click.option("--dry", is_flag=True, help="A few cases on the CPU.")
@click.option("--processes", default=12, show_default=True, help="Cases that run at a time.")
@click.option("--cases", help="Run these in this process: indices, separated by commas.")
def main(kernel: str, dry: bool, processes: int, cases: str | None) -> None:
    """Compares each variant of KERNEL with plain torch. Exits with 1 where one is wrong."""
    if cases is None:
        _supervise(kernel, dry, 1 if dry else processes)
    else:
        _run_here(_cases(kernel, dry), [int(index) for index in cases.split(",")], dry)


def _supervise(kernel: str, dry: bool, processes: int) -> None:
    command = [sys.executable, "-m", "maxsimd.bench.gpu.first_day.smallest", kernel]
    command += ["--dry"] if dry else []
    indices = range(len(_cases(kernel, dry)))
    shares = [indices[i::processes] for i in range(processes)]

    def run(share: Sequence[int]) -> list[Result]:
        return list(run_cases(command, share))

    with ThreadPoolExecutor(processes) as pool:
        results = [result for of_share in pool.map(run, shares) for result in of_share]
    wrong = [result for result in results if result.failure is not None]
    for result in wrong:
        print(f"case {result.index} of {kernel}: {result.failure}", flush=True)
    show(f"{kernel}: cases", len(results))
    show(f"{kernel}: cases that failed", len(wrong))
    if wrong:
        raise SystemExit(1)


def _cases(kernel: str, dry: bool) -> "list[Case]":
    if kernel == "layers":
        from maxsimd.bench.gpu.first_day import layer_cases

        return list(layer_cases.small_layer_cases() if dry else layer_cases.layer_cases())
    from maxsimd.bench.gpu.first_day import cases

    of_kernel = {
        "maxsim": (cases.maxsim_cases, cases.small_maxsim_cases),
        "attention": (cases.attention_cases, cases.small_attention_cases),
        "projection": (cases.projection_cases, cases.small_projection_cases),
    }
    all_cases, small_cases = of_kernel[kernel]
    return list(small_cases() if dry else all_cases())


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
