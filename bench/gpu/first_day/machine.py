"""Says what this machine has of all that decides which kernels run and how fast."""

import importlib.metadata
import shutil
from collections.abc import Callable
from functools import partial

import click
import torch

from maxsimd.bench.gpu.first_day.found import Value, show
from maxsimd.bench.report import machine

_PACKAGES = (
    "torch", "triton", "transformers", "sentence-transformers", "aiohttp", "msgspec", "flash-maxsim",
    "late-interaction-kernels", "flash-attn",
)  # fmt: skip
_PROGRAMS = ("nvidia-smi", "gcc")


@click.command()
@click.option("--dry", is_flag=True, help="Without a GPU.")
def main(dry: bool) -> None:
    """Prints facts, each of which may fail to be found out."""
    for name, value in machine().items():
        show(name, value)
    for package in _PACKAGES:
        _fact(package, partial(importlib.metadata.version, package))
    for program in _PROGRAMS:
        show(program, shutil.which(program))
    if dry:
        return
    properties = torch.cuda.get_device_properties(0)
    for name in (
        "multi_processor_count", "L2_cache_size", "shared_memory_per_block_optin",
        "shared_memory_per_multiprocessor", "regs_per_multiprocessor", "total_memory", "clock_rate",
    ):  # fmt: skip
        show(name, getattr(properties, name, None))


def _fact(name: str, find: Callable[[], Value]) -> None:
    try:
        show(name, find())
    except Exception as error:
        show(name, f"none: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
