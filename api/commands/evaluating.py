"""Ranks the documents of many queries with an engine."""

from collections.abc import Mapping

from maxsimd.api.commands.progress import Progress
from maxsimd.api.commands.records import Record
from maxsimd.api.commands.running import each_part, in_parts, started
from maxsimd.engine import EngineConfig, ScoreResult


async def rank_all(
    config: EngineConfig,
    work: list[tuple[str, list[str]]],
    queries: Mapping[str, str],
    documents: Mapping[str, str],
    progress: Progress,
) -> dict[str, dict[str, float]]:
    """The number by which each document is ranked for each query, by their ids: its score, before an
    activation that may make different scores alike. Raises MaxsimdError, and Interrupted when someone asks
    the command to end."""
    pairs = [(query, id_) for query, ids in work for id_ in ids]
    ranked: dict[str, dict[str, float]] = {query: {} for query, _ in work}
    done_pairs = tokens = 0
    async with started(config, progress) as engine:

        async def ask(part: list[int]) -> ScoreResult:
            query = queries[pairs[part[0]][0]]  # a part is of one query
            return await engine.score(query, [documents[pairs[i][1]] for i in part], priority="batch")

        def done(part: list[int], result: ScoreResult) -> None:
            nonlocal done_pairs, tokens
            done_pairs += len(part)
            tokens += result.usage.prompt_tokens
            for i, score in zip(part, result.ranking_scores, strict=True):
                query, id_ = pairs[i]
                ranked[query][id_] = score
            progress.update(done_pairs, tokens, is_last=done_pairs == len(pairs))

        progress.update(0, 0)
        starts = 0
        parts = []
        for _, ids in work:
            records = [Record(documents[id_]) for id_ in ids]
            # A listwise model scores a query's documents by each other.
            whole = [list(range(len(records)))] if engine.model.listwise is not None else None
            of_query = whole or in_parts(records, range(len(records)))
            parts += [[starts + i for i in part] for part in of_query]
            starts += len(ids)
        await each_part(iter(parts), ask, done)
    return ranked
