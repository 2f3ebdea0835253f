"""What must be settled before anything imports torch: no hub, and how many cores a process may use."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _WORKERS > 1:
    # A worker, and every process that it starts, computes on its share of the cores. OpenMP and the
    # tokenisers read this at import. Threads that wait sleep, since another worker may need the core.
    _SHARE = str(max(1, (os.cpu_count() or 1) // _WORKERS))
    for _name, _value in {
        "OMP_NUM_THREADS": _SHARE,
        "RAYON_NUM_THREADS": _SHARE,
        "OMP_WAIT_POLICY": "passive",
    }.items():
        os.environ.setdefault(_name, _value)
