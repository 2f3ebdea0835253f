"""Where Hugging Face's `kernels` is installed, transformers finds it, and everything works as without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.stand_ins import kernels

ROOT = Path(__file__).parents[2]

# What a program in the root of a checkout may do. Says where transformers took `kernels` from, and a ranking.
_PROGRAM = """
import inspect, json
import transformers.integrations.hub_kernels as hub
import maxsimd

assert maxsimd.Engine.__name__ == "Engine"
with maxsimd.SyncEngine(maxsimd.EngineConfig(dtype="float32")) as engine:
    scores = engine.score(
        "What is the capital of France?",
        ["Bread needs flour and water.", "Paris is the capital of France.", "Lyon is a city in France."],
    ).scores
found = [inspect.getfile(name) for name in (hub.LayerRepository, hub._kernels_use_kernel_forward_from_hub)]
print(json.dumps({"available": hub.is_kernels_available(), "found": found, "scores": list(scores)}))
"""


def _run(checkout: Path, stand_in: Path) -> subprocess.CompletedProcess[str]:
    paths = [str(stand_in), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in paths)}
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def _checkout_with_a_folder_kernels(folder: Path) -> Path:
    """A copy of the checkout, by links, with one folder more."""
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text('"""Our own kernels."""\n', encoding="utf-8")
    return folder


def test_kernels_of_hugging_face_is_found_from_the_root_of_the_checkout(tmp_path: Path) -> None:
    stand_in = kernels.write(tmp_path)
    ran = _run(ROOT, stand_in)
    assert ran.returncode == 0, ran.stderr
    shown = json.loads(ran.stdout.splitlines()[-1])
    assert shown["available"]
    assert shown["found"] == [str(stand_in / "kernels" / "__init__.py")] * 2
    bread, paris, lyon = shown["scores"]
    assert paris > lyon > bread


def test_a_folder_of_ours_with_that_name_would_be_noticed(tmp_path: Path) -> None:
    stand_in = kernels.write(tmp_path / "stand-in")
    (tmp_path / "checkout").mkdir()
    ran = _run(_checkout_with_a_folder_kernels(tmp_path / "checkout"), stand_in)
    assert ran.returncode != 0
    assert "cannot import name 'CUDAProperties' from 'kernels'" in ran.stderr
