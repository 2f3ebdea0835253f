"""Writes a stand-in for Hugging Face's `kernels` 0.18.2, which transformers uses wherever it is installed.

To run everything as if `kernels` were installed, from the root of the checkout:

    python -m tests.stand_ins.kernels /tmp/stand-ins
    PYTHONPATH=/tmp/stand-ins make test
"""

import sys
from pathlib import Path

VERSION = "0.18.2"

# The names that transformers imports, of which it calls the decorators while it is imported itself.
_MODULE = '''"""A stand-in for Hugging Face's `kernels`: its names, and decorators that change nothing."""

import enum
from contextlib import nullcontext

__version__ = "0.18.2"


class Mode(enum.Flag):
    FALLBACK = enum.auto()
    INFERENCE = enum.auto()
    TRAINING = enum.auto()
    TORCH_COMPILE = enum.auto()


class _Described:
    def __init__(self, *args, **kwargs):
        self.description = (args, kwargs)


class CUDAProperties(_Described): ...
class ROCMProperties(_Described): ...
class Device(_Described): ...
class KernelizeFallback(_Described): ...
class LayerRepository(_Described): ...
class LocalLayerRepository(_Described): ...


def _change_nothing(*given):
    return lambda decorated: decorated


def _do_nothing(*given, **options):
    return nullcontext()


use_kernel_forward_from_hub = use_kernelized_func = _change_nothing
replace_kernel_forward_from_hub = register_kernel_mapping = use_kernel_mapping = _do_nothing


def kernelize(model, **options):
    return model


def get_kernel(repository, **options):
    raise OSError("the stand-in for `kernels` has no kernels")
'''
_METADATA = f"Metadata-Version: 2.1\nName: kernels\nVersion: {VERSION}\n"


def write(folder: Path) -> Path:
    """Makes `folder` one that PYTHONPATH may name. Returns it."""
    (folder / "kernels").mkdir(parents=True, exist_ok=True)
    (folder / "kernels" / "__init__.py").write_text(_MODULE, encoding="utf-8")
    information = folder / f"kernels-{VERSION}.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text(_METADATA, encoding="utf-8")
    (information / "top_level.txt").write_text("kernels\n", encoding="utf-8")
    return folder


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
