"""MaxSim over packed ragged embeddings, in several backends with one signature.

`reference` is the definition; the others must agree with it.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.ops import triton as triton_ops
from maxsimd.engine.scoring.maxsim import avx512
from maxsimd.engine.scoring.maxsim.avx512 import Rows, maxsim_apart_avx512, maxsim_avx512
from maxsimd.engine.scoring.maxsim.reference import maxsim_reference
from maxsimd.engine.scoring.maxsim.tiled import maxsim_tiled
from maxsimd.pooling.ragged import Ragged, Spans

log = logging.getLogger(__name__)

# (queries, documents, pairs [n, 2] of query index and document index) -> float32 scores [n]
MaxSim = Callable[[Ragged, Ragged, NDArray[np.int64]], torch.Tensor]
# The same for documents that do not lie end to end: anywhere in one tensor,
MaxSimSpans = Callable[[Ragged, Spans, NDArray[np.int64]], torch.Tensor]
# or each in a tensor of its own.
MaxSimApart = Callable[[Ragged, Sequence[Rows], NDArray[np.int64]], torch.Tensor]

__all__ = [
    "MaxSim",
    "MaxSimApart",
    "MaxSimSpans",
    "Rows",
    "choose_maxsim",
    "choose_maxsim_spans",
    "maxsim_apart_avx512",
    "maxsim_avx512",
    "maxsim_reference",
    "maxsim_tiled",
]


def choose_maxsim(name: str, device: torch.device, compiled_allowed: bool = True) -> tuple[str, MaxSim]:
    """The backend for a name (auto, reference, tiled, avx512, triton), with its own name.

    `auto` is Triton on a CUDA device that has it, elsewhere the AVX-512 kernel where it is allowed and runs,
    else `tiled`, which is plain torch and runs on any device. Raises ValueError where the named
    backend cannot run on the device.
    """
    if name == "reference":
        return "reference", maxsim_reference
    if avx512.runs_on(device) and (name == "avx512" or (name == "auto" and compiled_allowed)):
        return "avx512", maxsim_avx512
    if name == "tiled" or (name == "auto" and device.type != "cuda"):
        return "tiled", maxsim_tiled
    if name != "avx512" and triton_ops.runs_on(device):
        from maxsimd.engine.scoring.maxsim.triton import maxsim_triton

        return "triton", maxsim_triton
    is_missing = name != "avx512" and triton_ops.is_missing_on(device)
    if name == "auto":
        if is_missing:
            log.warning("plain torch runs in place of kernels for this GPU, because %s", triton_ops.MISSING)
        return "tiled", maxsim_tiled
    raise ValueError(
        f"the MaxSim backend {name!r} cannot run on this {device.type}; "
        + (triton_ops.MISSING if is_missing else 'use maxsim="auto", "tiled" or "reference"')
    )


def choose_maxsim_spans(name: str) -> MaxSimSpans | None:
    """The backend of that name for documents anywhere in one tensor; None where it needs them end to end."""
    if name != "triton":
        return None
    from maxsimd.engine.scoring.maxsim.triton import maxsim_spans_triton

    return maxsim_spans_triton
