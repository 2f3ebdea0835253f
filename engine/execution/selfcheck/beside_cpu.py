"""The check of a device against the CPU: what a model's own library computes of random sequences on both. It
comes before the proof of packed execution, which compares one run on the device with another."""

from collections.abc import Sequence

import numpy as np
import torch

from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution.selfcheck.comparison import comparison
from maxsimd.engine.execution.selfcheck.samples import Sample

# How far results in float32 may be from the CPU's, as a share of the largest number: many times what another
# order of sums does, and less than what products of rounded numbers do.
_SHARE = 1e-3


def refuse_unlike_cpu(
    name: str, device: torch.device, found_there: Sequence[Sample], on_cpu: Sequence[Sample]
) -> None:
    """Raises ModelLoadError where the samples of a model differ between a device and the CPU."""
    if len(found_there) != len(on_cpu) or not all(map(_have_same_tokens, found_there, on_cpu)):
        raise ModelLoadError(
            f"{name!r} is not run right on {device}: its own library fails there on some random texts"
        )
    for task in dict.fromkeys(sample.sequence.payload.task for sample in on_cpu):
        found, expected = (
            [sample.expected.cpu() for sample in samples if sample.sequence.payload.task == task]
            for samples in (found_there, on_cpu)
        )
        compared = comparison(found, expected, rounding=0.0, share=_SHARE)
        if not compared.agrees:
            raise ModelLoadError(
                f"{name!r} is not run right on {device}: its own library gives other results there than on "
                f"the CPU: {compared}"
            )


def _have_same_tokens(first: Sample, second: Sample) -> bool:
    same_task = first.sequence.payload.task == second.sequence.payload.task
    return same_task and np.array_equal(first.sequence.tokens.ids, second.sequence.tokens.ids)
