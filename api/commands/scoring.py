"""Scores the documents of a file for a query, so that a run may be interrupted and go on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxsimd.api.commands.journal import Journal, digest_of
from maxsimd.api.commands.progress import Progress
from maxsimd.api.commands.records import Record
from maxsimd.api.commands.running import Interrupted, each_part, in_parts, started
from maxsimd.engine import EngineConfig, ScoreResult
from maxsimd.engine.config import ScoreType


@dataclass(frozen=True, slots=True)
class FileScores:
    """Scores by the documents' indexes, why others have none, whether that is all of them, and the numbers by
    which documents are ranked."""

    scores: dict[int, float]
    errors: dict[int, str]
    is_complete: bool
    ranking_scores: dict[int, float]


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be scored for which query, and the options of `Engine.score`."""

    query: str
    records: Sequence[Record]
    options: dict[str, Any]

    def digest(self, config: EngineConfig) -> str:
        parts = [repr(config), self.query, repr(sorted(self.options.items()))]
        return digest_of([*parts, *(each.identity for each in self.records)])


async def score_records(
    config: EngineConfig, work: Work, journal_path: Path | None, resume: bool, progress: Progress
) -> FileScores:
    """Raises click.ClickException for a journal of another run, and MaxsimdError."""
    query, records, options = work.query, work.records, work.options
    journal = Journal(journal_path, work.digest(config), resume)
    if journal.done == len(records):
        return _read(journal, is_complete=True)
    async with started(config, progress) as engine:
        is_listwise = engine.model.score_type is ScoreType.LISTWISE
        left = [i for i in range(len(records)) if i not in journal.scores and i not in journal.errors]
        # A listwise model scores documents by each other.
        parts = iter([list(range(len(records)))]) if is_listwise else in_parts(records, left)
        reported: dict[str, Any] = {} if is_listwise else {"on_error": "report"}
        tokens = 0

        async def ask(part: list[int]) -> ScoreResult:
            documents = [records[i].document for i in part]
            return await engine.score(query, documents, priority="batch", **reported, **options)

        def done(part: list[int], result: ScoreResult) -> None:
            nonlocal tokens
            tokens += result.usage.prompt_tokens
            errors = {part[i]: reason for i, reason in result.errors.items()}
            both = zip(result.scores, result.ranking_scores, strict=True)
            scores = {part[i]: each for i, each in enumerate(both) if i not in result.errors}
            journal.add(scores, errors)
            progress.update(journal.done, tokens, is_last=journal.done == len(records))

        with journal:
            progress.update(journal.done, 0)
            try:
                await each_part(parts, ask, done)
            except Interrupted:
                return _read(journal, is_complete=False)
    return _read(journal, is_complete=True)


def _read(journal: Journal, *, is_complete: bool) -> FileScores:
    return FileScores(journal.scores, journal.errors, is_complete, journal.ranking_scores)
