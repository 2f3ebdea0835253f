"""The proof, at load, that the engine's way of running a model gives what the model's own library gives: from
token ids to logits or embeddings, pooling and head included.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from maxsimd.engine.checkpoint import Task
from maxsimd.engine.execution.packed_runner import ModelRunner
from maxsimd.engine.execution.selfcheck.comparison import Comparison, comparison, largest
from maxsimd.engine.execution.selfcheck.samples import Sample
from maxsimd.engine.execution.selfcheck.threads import one_thread
from maxsimd.pooling.dispatch import DispatchPooler, pooling_method
from maxsimd.pooling.methods import Head, PoolingCursor
from maxsimd.pooling.sparse import WordsHead
from maxsimd.scheduler import Chunk, ImageJob, Step, Tokens, TokenSequence

# How far float32 rounding moves hidden states, as a share of the largest. Heads that make small numbers of
# large states amplify it.
_ROUNDING = 1e-6


def pooler_for(tasks: Mapping[str, Task]) -> DispatchPooler:
    """The pooling of some tasks, as in serving but without merging of tokens and limits of entries."""
    return DispatchPooler(
        {name: pooling_method(task.pooling, _unlimited(task.head)) for name, task in tasks.items()}
    )


def _unlimited(head: Head) -> Head:
    return head.without_limit() if isinstance(head, WordsHead) else head


def compare(runner: ModelRunner, pooler: DispatchPooler, samples: Sequence[Sample]) -> Comparison:
    """Runs all samples in one step and compares their items: the comparison of the task that differs most."""
    encode_images(runner, [sample.sequence for sample in samples])
    hidden, cursor = runner.forward(step_of(sample.sequence for sample in samples))
    items, moved = (_items(pooler, rows, cursor) for rows in (hidden, _rounded_otherwise(hidden)))
    comparisons = []
    for task in dict.fromkeys(sample.sequence.payload.task for sample in samples):
        of_task = [sample for sample in samples if sample.sequence.payload.task == task]
        keys = [sample.sequence.sequence_id for sample in of_task]
        rounding = largest(moved[key] - items[key] for key in keys)
        comparisons.append(
            comparison([items[key] for key in keys], [sample.expected for sample in of_task], rounding)
        )
    worst = max(comparisons, key=lambda one: (not one.agrees, one.difference / (one.tolerance or 1)))
    return replace(worst, sequences=len(samples))


def compare_in_parts(runner: ModelRunner, pooler: DispatchPooler, sample: Sample) -> Comparison:
    """Runs a sample in two chunks and compares its item; if it is a pair, also behind its first half as a
    shared prefix."""
    sequence = sample.sequence
    encode_images(runner, [sequence])
    middle = len(sequence) // 2
    assert isinstance(sequence.tokens, Tokens)
    prefix = TokenSequence.prefix(-1, 0, sequence.tokens.first(middle), num_consumers=1)
    after = replace(sequence, shared_prefix_len=middle, prefix_id=prefix.sequence_id)
    runs = [
        [Step(0, (Chunk(sequence, 0, middle),)), Step(1, (Chunk(sequence, middle, len(sequence)),))],
    ]
    if sequence.payload.task == "classify":
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
    return comparison(found, [sample.expected] * len(found), rounding)


def compare_bits(runner: ModelRunner, pooler: DispatchPooler, samples: Sequence[Sample]) -> Comparison:
    """The samples' items from one step against those from a step for each sample, on one thread: the
    difference is 0 if a sequence's item depends on that sequence alone, to the last bit."""
    sequences = [sample.sequence for sample in samples]
    encode_images(runner, sequences)
    together = _items(pooler, *runner.forward(step_of(sequences)))
    with one_thread():
        alone = [
            _items(pooler, *runner.forward(step_of([sequence])))[sequence.sequence_id].float()
            for sequence in sequences
        ]
    return comparison(
        [together[sequence.sequence_id].float() for sequence in sequences], alone, 0.0, share=0.0
    )


def step_of(sequences: Iterable[TokenSequence]) -> Step:
    """One step with all of these sequences, whole."""
    return Step(0, tuple(Chunk(sequence, 0, len(sequence)) for sequence in sequences))


def encode_images(runner: ModelRunner, sequences: Sequence[TokenSequence]) -> None:
    """Encodes the pictures of sequences, all together."""
    images = [image for sequence in sequences for image in sequence.tokens.images]
    if images:
        runner.encode([ImageJob(image.image_id, 0, 1, 0, image.inputs) for image in images])


def free_images(runner: ModelRunner, sequences: Sequence[TokenSequence]) -> None:
    """Frees what was encoded."""
    for sequence in sequences:
        for image in sequence.tokens.images:
            runner.free(image.image_id)


def _rounded_otherwise(hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states [rows, hidden] with random noise, as large as what float32 rounding does to each row."""
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(hidden.shape, generator=random).to(hidden.device, hidden.dtype)
    return hidden + noise * (_ROUNDING * hidden.abs().amax(dim=-1, keepdim=True))


@torch.inference_mode()
def _items(pooler: DispatchPooler, hidden: torch.Tensor, cursor: PoolingCursor) -> dict[int, torch.Tensor]:
    """The items [n, dim] of the finished sequences, as they are compared, by sequence id."""
    return {
        sequence.sequence_id: item
        for pooled in pooler.pool(hidden, cursor)
        for sequence, item in pooler.comparable(pooled)
    }
