"""Runs the tests that a processor's instructions matter to under each cap of `bench instruction-sets`.

Each cap has processes of its own. Fails where a test did. With a number it takes that cap alone, from 0."""

import os
import subprocess
import sys

from maxsimd.bench.beside_library import WHOLE, caps

# Kernels, linear layers and attention in each precision, MaxSim, all layers in one call, and a server.
_FILES = (
    "tests/unit/engine/execution/test_int8_layers.py", "tests/unit/engine/ops/test_kernels.py",
    "tests/unit/engine/scoring/test_maxsim.py", "tests/unit/engine/execution/test_packed.py",
    "tests/unit/engine/execution/test_one_call.py", "tests/parity/test_batch_invariance.py",
    "tests/parity/test_execution.py", "tests/server/test_smoke.py",
)  # fmt: skip
# A few of each kind of score: absolute and relative positions, windows, a decoder, all that bge-m3 gives.
_FAMILIES = (
    "answerai-colbert-small", "GTE-ModernColBERT", "ELECTRA", "DeBERTa-v2", "Qwen3-Reranker", "E5", "MPNet",
    "SPLADE", "bge-m3", "jina-reranker-v3",
)  # fmt: skip
_RUNS = (
    ["-m", "not exhaustive", *_FILES],
    ["-m", "not exhaustive", "-k", " or ".join(_FAMILIES), "tests/parity/test_families.py"],
)


def main() -> int:
    chosen = caps() if len(sys.argv) == 1 else [caps()[int(sys.argv[1])]]
    failed = False
    for cap in chosen:
        title, environment = (WHOLE, {}) if cap is None else (cap.title, cap.environment)
        print(f"{title}:", flush=True)
        for arguments in _RUNS:
            command = [sys.executable, "-m", "pytest", "-q", *arguments]
            failed |= subprocess.run(command, env=os.environ | environment).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
