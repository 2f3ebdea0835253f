"""Settings that must be made before anything imports torch: no hub, and how many cores a process may use."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def share_cores(workers: int) -> None:
    """Gives this process and its children their share of the cores; threads that wait sleep."""
    share = str(max(1, (os.cpu_count() or 1) // workers))
    for name, value in {
        "OMP_NUM_THREADS": share,
        "RAYON_NUM_THREADS": share,
        "OMP_WAIT_POLICY": "passive",
    }.items():
        os.environ.setdefault(name, value)


if (_workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
    share_cores(_workers)
