"""What must be settled before anything imports torch: no hub, and how many cores a process may use."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def share_cores(workers: int) -> None:
    """Has this process, and every process that it starts, compute on its share of the cores. OpenMP and the
    tokenisers read this at import. Threads that wait sleep, since another worker may need the core."""
    share = str(max(1, (os.cpu_count() or 1) // workers))
    for name, value in {
        "OMP_NUM_THREADS": share,
        "RAYON_NUM_THREADS": share,
        "OMP_WAIT_POLICY": "passive",
    }.items():
        os.environ.setdefault(name, value)


if (_workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
    share_cores(_workers)
