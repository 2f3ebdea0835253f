"""Compares a runner with the model's own library on samples, from token ids to items, pooling and head
included; the findings for the log, the model card and `inspect --check`."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from maxsimd.engine.checkpoint import LoadedModel, Task
from maxsimd.engine.checkpoint.model import LABEL_SCORES
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution.devices import dtype_name, one_thread
from maxsimd.engine.execution.runner import ModelRunner
from maxsimd.engine.execution.self_check.samples import Comparison, Sample, compare_items, largest
from maxsimd.pooling.dispatch import DispatchPooler, pooling_method
from maxsimd.pooling.methods import PoolingCursor
from maxsimd.pooling.sparse import WordsHead
from maxsimd.scheduler import Chunk, ImageJob, Step, Tokens, TokenSequence

log = logging.getLogger(__name__)
# The share of the largest hidden state by which float32 rounding moves them. Heads may amplify it.
_ROUNDING = 1e-6


def pooler_for(tasks: Mapping[str, Task]) -> DispatchPooler:
    """The pooling of tasks as in serving, but without merged tokens and limits of entries."""
    methods = {}
    for name, task in tasks.items():
        head = task.head.without_limit() if isinstance(task.head, WordsHead) else task.head
        methods[name] = pooling_method(task.pooling, head)
    return DispatchPooler(methods)


def compare(runner: ModelRunner, pooler: DispatchPooler, samples: Sequence[Sample]) -> Comparison:
    """Runs all samples in one step and compares their items; returns the comparison of the worst task."""
    encode_images(runner, [sample.sequence for sample in samples])
    hidden, cursor = runner.forward(step_of(sample.sequence for sample in samples))
    items, moved = (_items(pooler, rows, cursor) for rows in (hidden, _with_rounding_noise(hidden)))
    comparisons = []
    for task in dict.fromkeys(sample.sequence.payload.task for sample in samples):
        of_task = [sample for sample in samples if sample.sequence.payload.task == task]
        keys = [sample.sequence.sequence_id for sample in of_task]
        rounding = largest(moved[key] - items[key] for key in keys)
        comparisons.append(
            compare_items([items[key] for key in keys], [sample.expected for sample in of_task], rounding)
        )
    worst = max(comparisons, key=lambda one: (not one.agrees, one.difference / (one.tolerance or 1)))
    return replace(worst, sequences=len(samples))


def compare_in_parts(runner: ModelRunner, pooler: DispatchPooler, samples: Sequence[Sample]) -> Comparison:
    """Runs the longest sample in two chunks, and if it is a pair also after its first half as a shared
    prefix; compares its items. Its score may be near 0, so the scale is that of all samples of its task."""
    sample = max(samples, key=lambda sample: len(sample.sequence))
    sequence = sample.sequence
    encode_images(runner, [sequence])
    middle = len(sequence) // 2
    assert isinstance(sequence.tokens, Tokens)
    prefix = TokenSequence.prefix(-1, 0, sequence.tokens.first(middle), num_consumers=1)
    after = replace(sequence, shared_prefix_len=middle, prefix_id=prefix.sequence_id)
    runs = [[Step(0, (Chunk(sequence, 0, middle),)), Step(1, (Chunk(sequence, middle, len(sequence)),))]]
    if sequence.payload.task in ("classify", LABEL_SCORES):
        runs.append([Step(2, (Chunk(prefix, 0, middle), Chunk(after, middle, len(after))))])
    found = []
    for steps in runs:
        items: dict[int, torch.Tensor] = {}
        for step in steps:
            items |= _items(pooler, *runner.forward(step))
        found.append(items[sequence.sequence_id])
        for key in (sequence.sequence_id, prefix.sequence_id):
            runner.free(key)
            pooler.free(key)
    whole = _items(pooler, *runner.forward(step_of([sequence])))[sequence.sequence_id]
    rounding = float((whole - sample.expected).abs().max())
    scale = [each.expected for each in samples if each.sequence.payload.task == sequence.payload.task]
    return compare_items(found, [sample.expected] * len(found), rounding, scale=scale)


def compare_bits(runner: ModelRunner, pooler: DispatchPooler, samples: Sequence[Sample]) -> Comparison:
    """The samples' items from one step against those from a step for each sample on one thread. The
    difference is 0 if an item depends on its sequence alone, to the last bit."""
    sequences = [sample.sequence for sample in samples]
    encode_images(runner, sequences)
    together = _items(pooler, *runner.forward(step_of(sequences)))
    alone: dict[int, torch.Tensor] = {}
    with one_thread():
        for sequence in sequences:
            alone |= _items(pooler, *runner.forward(step_of([sequence])))
    found, expected = ([items[each.sequence_id].float() for each in sequences] for items in (together, alone))
    return compare_items(found, expected, 0.0, share=0.0)


def step_of(sequences: Iterable[TokenSequence]) -> Step:
    """One step of these whole sequences."""
    return Step(0, tuple(Chunk(sequence, 0, len(sequence)) for sequence in sequences))


def encode_images(runner: ModelRunner, sequences: Sequence[TokenSequence]) -> None:
    """Encodes the pictures of sequences together."""
    images = [image for sequence in sequences for image in sequence.tokens.images]
    if images:
        runner.encode([ImageJob(image.image_id, 0, 1, 0, image.inputs) for image in images])


def free_images(runner: ModelRunner, sequences: Sequence[TokenSequence]) -> None:
    for sequence in sequences:
        for image in sequence.tokens.images:
            runner.free(image.image_id)


def _with_rounding_noise(hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states [rows, hidden] with random noise of the size of float32 rounding."""
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(hidden.shape, generator=random, dtype=torch.float32).to(hidden.device, hidden.dtype)
    return hidden + noise * (_ROUNDING * hidden.abs().amax(dim=-1, keepdim=True))


@torch.inference_mode()
def _items(pooler: DispatchPooler, hidden: torch.Tensor, cursor: PoolingCursor) -> dict[int, torch.Tensor]:
    """The comparable items [n, dim] of the finished sequences by sequence id."""
    return {
        sequence.sequence_id: item
        for pooled in pooler.pool(hidden, cursor)
        for sequence, item in pooler.comparable(pooled)
    }


# The difference of a lower precision from float32, as a share of the largest number: beyond the first limit a
# warning is logged, beyond the second the model is refused.
_FAR, _WRONG = 0.15, 0.5


@dataclass(frozen=True, slots=True)
class Finding:
    """A comparison at load, and its result."""

    subject: str
    result: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.result}"


def findings_of(
    model: LoadedModel,
    mode: str,
    in_float32: Comparison,
    dtype: torch.dtype,
    runner: ModelRunner,
    samples: Sequence[Sample],
    rounded: bool,
) -> tuple[Finding, ...]:
    """The comparison `in_float32`, and those of the model as it runs on the samples; `rounded` says that its
    weights are int8. Raises ModelLoadError if its results are wrong or not finite."""
    precision = dtype_name(dtype) + (" with int8 weights" if rounded else "")
    exact = dtype is torch.float32 and not rounded
    own = f"as the model's own library one by one: {in_float32}"
    findings = [Finding(f"{mode}, in float32", own)]
    pooler = pooler_for(model.tasks)
    whole = compare(runner, pooler, samples)
    _refuse_wrong(model.name, whole, exact, precision)
    findings.append(Finding(f"as it is run, in {precision}", f"beside float32: {whole}"))
    if runner.chunked:
        parts = compare_in_parts(runner, pooler, samples)
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


# The difference of float32 results from the CPU's, as a share of the largest number: far more than another
# order of sums explains, and less than products of rounded numbers do.
_CPU_SHARE = 1e-3


def refuse_unlike_cpu(
    name: str, device: torch.device, found_there: Sequence[Sample], on_cpu: Sequence[Sample]
) -> None:
    """Raises ModelLoadError if a model's own library gives other results on a device than on the CPU."""
    tokens = [
        [(sample.sequence.payload.task, sample.sequence.tokens.ids.tolist()) for sample in samples]
        for samples in (found_there, on_cpu)
    ]
    if tokens[0] != tokens[1]:
        raise ModelLoadError(
            f"{name!r} is not run right on {device}: its own library fails there on some random texts"
        )
    for task in dict.fromkeys(sample.sequence.payload.task for sample in on_cpu):
        found, expected = (
            [sample.expected.cpu() for sample in samples if sample.sequence.payload.task == task]
            for samples in (found_there, on_cpu)
        )
        compared = compare_items(found, expected, rounding=0.0, share=_CPU_SHARE)
        if not compared.agrees:
            raise ModelLoadError(
                f"{name!r} is not run right on {device}: its own library gives other results there than on "
                f"the CPU: {compared}"
            )
