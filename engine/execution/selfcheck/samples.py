"""Samples: sequences like those that a model will be given, with the item that its own library makes of
each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from maxsimd.engine.checkpoint import LoadedModel, Task
from maxsimd.engine.checkpoint.heads import after_reference
from maxsimd.engine.errors import ModelLoadError
from maxsimd.engine.execution.selfcheck.comparison import comparison
from maxsimd.engine.execution.selfcheck.pictures import random_pages
from maxsimd.engine.execution.selfcheck.rules import LONGEST_WINDOW, window_of
from maxsimd.scheduler import ResultSlot, Tokens, TokenSequence

# Tokens of the longest random document where there is no window to reach beyond.
_SHORT = 23


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A sequence and its item [n, dim], float32, from the reference of its task."""

    sequence: TokenSequence
    expected: torch.Tensor


@torch.inference_mode()
def make_samples(model: LoadedModel, probes: Sequence[TokenSequence] = ()) -> tuple[Sample, ...]:
    """Samples for every task of a model in float32: of the `probes`, which preprocessing has made of texts,
    and of random sequences.

    Leaves out sequences on which the model's own library fails. Raises ModelLoadError if it fails on all of a
    task, or gives numbers that are not finite."""
    samples: list[Sample] = []
    for name, task in model.tasks.items():
        failure = "it makes numbers that are not finite"
        before = len(samples)
        for sequence in [*_given(model, name, probes), *random_sequences(model, name, len(probes))]:
            try:
                expected = _expected(task, sequence).clone()
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if bool(expected.isfinite().all()):
                number = len(samples)
                tokens = model.for_classifier(sequence.tokens) if name == "classify" else sequence.tokens
                numbered = TokenSequence.text(number, ResultSlot(0, number), name, tokens)
                samples.append(Sample(numbered, expected))
        if len(samples) == before:
            raise ModelLoadError(f"{model.name!r} cannot be run on any of some random texts: {failure}")
        first = samples[before]
        again = _expected(task, first.sequence)
        if not comparison([again], [first.expected], rounding=0.0).agrees:
            raise ModelLoadError(f"{model.name!r} gives another result for a text that it was given before")
    return tuple(samples)


def _expected(task: Task, sequence: TokenSequence) -> torch.Tensor:
    """The item [n, dim] of a sequence by the task's reference, which makes a row of every token where those
    of some are pooled."""
    assert task.reference is not None
    item = task.reference(sequence)
    pooled = sequence.tokens.pooled_positions
    if pooled is not None and task.pooling == "all":
        item = item[torch.from_numpy(pooled).to(item.device)]
    finished: torch.Tensor = after_reference(task.head)(item)
    return finished


def _given(model: LoadedModel, task: str, probes: Sequence[TokenSequence]) -> Iterator[TokenSequence]:
    """The probes for a task. The tokens that are pooled are named where its reference is told of them."""
    all_pooled = model.document.pool_first and model.document.pool_specials and model.query.pool_specials
    for probe in probes:
        tokens = probe.tokens
        assert isinstance(tokens, Tokens)
        by_prompt = task == "embed" and not model.document.pool_prompt
        if not (all_pooled and (by_prompt or model.tasks[task].pooling == "all")):
            tokens = replace(tokens, pooled_positions=None)
        yield _of_task(task, tokens)


def random_sequences(model: LoadedModel, task: str, num_probes: int = 0) -> list[TokenSequence]:
    """Random sequences for a task: texts or pairs as the tokeniser joins them, or plain token ids where a
    template joins them. Some are longer than the model's window, if it has one. Beside probes fewer are
    needed: behind a template these are long."""
    random = np.random.default_rng(0)
    plain = model.listwise is not None or model.pairs.template is not None
    lengths = [(5, 8), (1, 1), (3, 14), (9, _SHORT)]
    if num_probes:
        lengths = [(1, 1), (2, 3)] if plain else lengths[num_probes:]
    if (beyond := _beyond_window(model.backbone)) is not None:
        lengths[-1] = (9, beyond)
    sequences = []
    for first, second in lengths:
        if plain:
            ids = _random_ids(model, first + second, random)
            sequences.append(_sequence(model, task, ids, _plain_types(model, ids, first)))
        elif model.score_task == "classify":
            sequences.append(_encoded(model, task, _text(model, first, random), _text(model, second, random)))
        else:
            sequences.append(_encoded(model, task, _text(model, second, random)))
    if task == "classify" and not plain and not num_probes:
        sequences.append(_encoded(model, task, _text(model, 6, random)))
    return [*sequences, *_special_readings(model, task, sequences), *random_pages(model, task)]


def _plain_types(model: LoadedModel, ids: NDArray[np.int32], first: int) -> NDArray[np.int32]:
    """The type ids of a pair that a template joins: those of a document, where the template marks it, stand
    behind the first tokens and before the last."""
    types = np.zeros_like(ids)
    template = model.pairs.template
    if template is not None and template.marks_document:
        types[first:-1] = 1
    return types


def _special_readings(
    model: LoadedModel, task: str, sequences: list[TokenSequence]
) -> Iterator[TokenSequence]:
    """Sequences with the special rules of a checkpoint: with tokens at the end that no token attends to
    (query expansion), and with a prompt that takes no part in pooling."""
    expansion = model.query.expansion
    longest = sequences[-1].tokens
    assert isinstance(longest, Tokens)
    if task == "token_embed" and expansion is not None and not expansion.attended:
        for attended in (3, len(longest) - 4):
            # With a window, tokens far behind the attended ones see no token at all.
            yield _of_task(task, replace(longest, attended_len=max(1, attended)))
    if task == "embed" and not model.document.pool_prompt and len(longest) > 4:
        yield _of_task(task, replace(longest, pooled_positions=np.arange(4, len(longest))))


def _beyond_window(backbone: Any) -> int | None:
    """How many tokens reach beyond a model's window; None for a model without one."""
    window = window_of(backbone.config.get_text_config())
    return 2 * window + 3 if window is not None and window <= LONGEST_WINDOW else None


def _random_ids(model: LoadedModel, count: int, random: np.random.Generator) -> NDArray[np.int32]:
    """Token ids from the vocabulary, without special tokens, and without those that no text may have because
    they have no embedding."""
    size = int(model.tokenizer.backend_tokenizer.get_vocab_size())
    size = size if model.token_rows is None else min(size, model.token_rows)
    usable = np.setdiff1d(
        np.arange(size, dtype=np.int32), np.array(model.tokenizer.all_special_ids, dtype=np.int32)
    )
    if len(usable) == 0:
        raise ModelLoadError(f"the tokeniser of {model.name!r} knows no words, only special tokens")
    return random.choice(usable, count)


def _text(model: LoadedModel, tokens: int, random: np.random.Generator) -> str:
    return str(model.tokenizer.decode(_random_ids(model, tokens, random).tolist()))


def _encoded(model: LoadedModel, task: str, *texts: str) -> TokenSequence:
    encoded = model.tokenizer(*texts)
    ids = np.array(encoded["input_ids"], dtype=np.int32)
    types = encoded.get("token_type_ids")
    return _sequence(
        model, task, ids, np.zeros_like(ids) if types is None else np.array(types, dtype=np.int32)
    )


def _sequence(
    model: LoadedModel, task: str, ids: NDArray[np.int32], types: NDArray[np.int32]
) -> TokenSequence:
    most = model.max_tokens
    return _of_task(task, Tokens(ids[:most], types[:most]))


def _of_task(task: str, tokens: Tokens) -> TokenSequence:
    return TokenSequence.text(0, ResultSlot(0, 0), task, tokens)
