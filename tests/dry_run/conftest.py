"""These tests need Triton and no GPU: where there is one, `make test-gpu` shows more."""

from importlib.util import find_spec

import torch

collect_ignore_glob = ["test_*.py"] if find_spec("triton") is None or torch.cuda.is_available() else []
