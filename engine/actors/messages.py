"""The messages between actors. Data only."""

import asyncio
from dataclasses import dataclass

import torch

from maxsimd.engine.requests import Progress, Value
from maxsimd.engine.scoring.documents import Failure, KeptDocument, KnownSequence
from maxsimd.pooling.cursor import PoolingCursor
from maxsimd.pooling.dispatch import Pooled
from maxsimd.scheduler import Sequence, Step


@dataclass(frozen=True, slots=True, eq=False)
class Admit:
    """Engine to scheduler: run these sequences, score the documents that are kept, and resolve `values` with
    `results` values by index. `progress` is told how many of them are there, as they come."""

    request: int
    sequences: list[Sequence]
    kept: list[KeptDocument]
    results: int
    priority: int
    values: asyncio.Future[list[Value]]
    progress: Progress | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Attach:
    """Scheduler to model runner to pooling to scoring: score these as soon as their queries are there."""

    documents: list[KeptDocument]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Engine to scheduler: nobody waits for this request any more."""

    request: int


@dataclass(frozen=True, slots=True)
class Release:
    """Scheduler to model runner: this request has ended, let go of all that it left on the device."""

    request: int


@dataclass(frozen=True, slots=True)
class Free:
    """Model runner to pooling to scoring: the same, with the keys of the sequences that were cut short."""

    request: int
    keys: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class Hidden:
    """Model runner to pooling: the hidden states of a step that was begun at `started` (perf_counter). The
    step's sequences in `known` were not run: their embeddings are kept, or come with the step."""

    step: Step
    known: list[KnownSequence]
    states: torch.Tensor
    cursor: PoolingCursor
    started: float


@dataclass(frozen=True, slots=True, eq=False)
class PooledStep:
    """Pooling to scoring: what a step finished, and its sequences that were not run."""

    step: Step
    known: list[KnownSequence]
    tokens: int
    pooled: list[Pooled]
    started: float


@dataclass(frozen=True, slots=True)
class Result:
    """The value of one sequence or pair of a request."""

    request: int
    index: int
    value: Value


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """The device's actors to the scheduler: what became of some or all chunks of a step."""

    step_id: int
    chunks: int
    tokens: int
    results: list[Result]
    failures: list[Failure]
    seconds: float
    out_of_memory: bool = False


SchedulerMessage = Admit | Cancel | StepReport
RunnerMessage = Step | Release | Attach
PoolingMessage = Hidden | Free | Attach
ScoringMessage = PooledStep | Free | Attach
