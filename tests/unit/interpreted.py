"""Runs a check in a process of its own in which Triton interprets its kernels: it decides at import."""

import os
import subprocess
import sys
from collections.abc import Callable


def run_interpreted(check: Callable[..., None], *arguments: str) -> None:
    """Fails with what the check printed if it fails there."""
    given = ", ".join(map(repr, arguments))
    script = f"import {check.__module__} as m; m.{check.__name__}({given}); print('ran to its end')"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "ran to its end" in done.stdout
