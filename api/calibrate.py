"""`maxsimd calibrate`: scores judged documents, fits a calibration to them and says how good it is."""

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np

from maxsimd.api.judgements import Judgements, read_judgements, read_texts
from maxsimd.api.options import in_flags
from maxsimd.engine import Engine, EngineConfig, MaxsimdError
from maxsimd.engine.device.stores import digest_of
from maxsimd.engine.scoring.scale import Calibration

# Of one part of the queries the calibration is fitted, and of the other it is judged, in turns.
_FOLDS = 5


@dataclass(slots=True)
class Scored:
    """Normalised scores with their judgements, and to which query each belongs."""

    scores: list[float] = field(default_factory=list)
    relevant: list[bool] = field(default_factory=list)
    queries: list[int] = field(default_factory=list)


def run(config: EngineConfig, queries: str, documents: str, qrels: str, others: int, out: str) -> None:
    """Raises click.ClickException where something cannot be read or fitted."""
    try:
        judged = read_judgements(qrels)
        scored = asyncio.run(score_judged(config, read_texts(queries), read_texts(documents), judged, others))
        calibration = Calibration.fitted(digest_of(config), scored.scores, scored.relevant)
        calibration.write(Path(out))
    except (OSError, ValueError, MaxsimdError) as error:
        raise click.ClickException(in_flags(str(error))) from error
    before, after = errors_of(scored)
    share = sum(scored.relevant) / len(scored.relevant)
    click.echo(
        f"{len(scored.scores)} documents of {len(set(scored.queries))} queries, {share:.1%} relevant\n"
        f"mean squared error of the probability (Brier) on queries that it was not fitted to:\n"
        f"  normalised scores {before:.4f}, calibrated {after:.4f}, "
        f"always {share:.1%} {share * (1 - share):.4f}\n"
        f"wrote {out}; serve with --calibration {out}"
    )


async def score_judged(
    config: EngineConfig, queries: dict[str, str], documents: dict[str, str], judged: Judgements, others: int
) -> Scored:
    """Scores the documents that are judged, and `others` a query. Raises ValueError where there are none."""
    scored, draw, ids = Scored(), random.Random(0), sorted(documents)
    async with Engine(config) as engine:
        for number, (query, judgements) in enumerate(sorted(judged.items())):
            chosen = {each: is_relevant for each, is_relevant in judgements.items() if each in documents}
            if query not in queries or not chosen:
                continue
            for each in draw.sample(ids, min(others, len(ids))):
                chosen.setdefault(each, False)
            texts = [documents[each] for each in chosen]
            result = await engine.score(queries[query], texts, normalize=True)
            scored.scores += result.scores
            scored.relevant += chosen.values()
            scored.queries += [number] * len(chosen)
    if not scored.scores:
        raise ValueError("no judgement names a query and a document of the files; compare their ids")
    return scored


def errors_of(scored: Scored) -> tuple[float, float]:
    """The mean squared error of normalised scores as probabilities, and of calibrated ones, each fitted
    without the queries that it is judged by; NaN where there are too few."""
    scores, relevant = np.array(scored.scores), np.array(scored.relevant)
    folds = np.array(scored.queries) % _FOLDS
    probabilities = np.full(len(scores), np.nan)
    for fold in range(_FOLDS):
        rest = folds != fold
        if len(set(relevant[rest].tolist())) == 2:
            fitted = Calibration.fitted("", scores[rest].tolist(), relevant[rest].tolist())
            probabilities[~rest] = fitted(scores[~rest].astype(np.float32))
    return float(np.mean((scores - relevant) ** 2)), float(np.mean((probabilities - relevant) ** 2))
