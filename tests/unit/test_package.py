"""Where Hugging Face's `kernels` is installed, transformers finds it, and everything works as without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.exhaustive
def test_hugging_faces_kernels_are_found_from_the_checkout(tmp_path: Path) -> None:
    stand_in = kernels.write(tmp_path)
    paths = [str(stand_in), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in paths)}
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    shown = json.loads(ran.stdout.splitlines()[-1])
    assert shown["available"]
    assert shown["found"] == [str(stand_in / "kernels" / "__init__.py")] * 2
    bread, paris, lyon = shown["scores"]
    assert paris > lyon > bread
