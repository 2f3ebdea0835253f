"""The results of all comparisons at load, in words: for the log, the model card and `inspect --check`."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from maxsimd.engine.checkpoint import LoadedModel
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution.modes import Packed, Padded
from maxsimd.engine.execution.packed_runner import ModelRunner
from maxsimd.engine.execution.precision import dtype_name
from maxsimd.engine.execution.selfcheck.comparison import Comparison
from maxsimd.engine.execution.selfcheck.proof import (
    compare,
    compare_bits,
    compare_in_parts,
    free_images,
    pooler_for,
)
from maxsimd.engine.execution.selfcheck.samples import Sample

log = logging.getLogger(__name__)

# How far the numbers of a lower precision may be from those of float32, as a share of the largest: a warning
# is logged beyond the first limit, and the model is refused beyond the second.
_FAR, _WRONG = 0.15, 0.5


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that was compared at load, and the result."""

    subject: str
    result: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.result}"


def findings_of(
    model: LoadedModel,
    execution: Packed | Padded,
    dtype: torch.dtype,
    runner: ModelRunner,
    samples: Sequence[Sample],
    rounded: bool,
) -> tuple[Finding, ...]:
    """The comparison in float32, and those of the model as it runs now, on the samples; `rounded` says that
    its weights are int8.

    Raises ModelLoadError if its results are not finite, or wrong."""
    precision = dtype_name(dtype) + (" with int8 weights" if rounded else "")
    exact = dtype is torch.float32 and not rounded
    name = "packed" if isinstance(execution, Packed) else "padded"
    own = f"as the model's own library one by one: {execution.comparison}"
    findings = [Finding(f"{name}, in float32", own)]
    pooler = pooler_for(model.tasks)
    whole = compare(runner, pooler, samples)
    _refuse_wrong(model.name, whole, exact, precision)
    findings.append(Finding(f"as it is run, in {precision}", f"beside float32: {whole}"))
    if runner.chunked:
        longest = max(samples, key=lambda sample: len(sample.sequence))
        parts = compare_in_parts(runner, pooler, longest)
        _refuse_wrong(model.name, parts, exact, precision)
        findings.append(Finding("in chunks and behind a prefix", f"beside float32: {parts}"))
    bits = compare_bits(runner, pooler, samples)
    same = f"the same to the last bit: {bits.sequences} sequences"
    but_for_rounding = f"the same but for rounding: {bits}"
    findings.append(Finding("alone and together", same if bits.difference == 0 else but_for_rounding))
    free_images(runner, [sample.sequence for sample in samples])
    for finding in findings:
        log.debug("checked %s", finding)
    return tuple(findings)


def _refuse_wrong(name: str, found: Comparison, exact: bool, precision: str) -> None:
    if not math.isfinite(found.difference):
        raise ModelLoadError(f"{name!r} gives numbers that are not finite in {precision}; try another dtype")
    far = found.difference / (found.largest or 1.0)
    if far > _WRONG or (exact and not found.agrees):
        raise ModelLoadError(
            f'{name!r} is not run right in {precision} by the kernels of this machine; try kernels="torch" '
            f"or another dtype: {found}"
        )
    if far > _FAR:
        log.warning("in %s results are far from those in float32: %s", precision, found)
