"""What the machine can do at best: what the shares in the report are shares of."""

import statistics
import time
from collections.abc import Callable

import torch

_ROWS, _WIDTH = 2048, 1024
_COPY_BYTES = 256 * 1024 * 1024


def product_peak(dtype: torch.dtype) -> float:
    """GFLOP/s (or int8 GOP/s) of one large matrix product, by the best library call that there is."""
    weight = torch.randn(_WIDTH, _WIDTH)
    x = torch.randn(_ROWS, _WIDTH)
    run: Callable[[], object]
    if dtype is torch.int8:
        run = _int8_product(x, weight)
    else:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), _ROWS)
        rows = x.to(dtype)
        run = lambda: torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")  # noqa: E731
    return 2 * _ROWS * _WIDTH * _WIDTH / _best_seconds(run) / 1e9


def copy_bandwidth() -> float:
    """GB/s read and written by a copy that no cache holds."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _best_seconds(lambda: target.copy_(source)) / 1e9


def _int8_product(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
    quantized = torch.ops.onednn.qlinear_prepack((weight * 10).round().to(torch.int8), list(x.shape))
    rows = (x * 10 + 128).clamp(0, 255).to(torch.uint8)
    scales, zeros = torch.ones(_WIDTH), torch.zeros(_WIDTH, dtype=torch.int64)
    return lambda: torch.ops.onednn.qlinear_pointwise(
        rows, 0.1, 128, quantized, scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""
    )


def _best_seconds(run: Callable[[], object], times: int = 25) -> float:
    """The lower quartile: a shared machine is slower now and then, never faster."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.quantiles(seconds, n=4)[0]
