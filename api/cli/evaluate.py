"""`maxsimd eval` and `maxsimd calibrate`: judged documents, from files in BEIR's form or TREC's.

Source: BEIR (Thakur et al. 2021, arXiv 2104.08663), https://github.com/beir-cellar/beir."""

import csv
import io
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from numpy.typing import NDArray

from maxsimd.api.cli.files import (
    OutputPath,
    Progress,
    Record,
    combined,
    each_part,
    in_parts,
    model_argument,
    open_output,
    run,
)
from maxsimd.api.help import Command
from maxsimd.api.options import config_file_option, config_from, options_from
from maxsimd.engine.config import EngineConfig, shown_name
from maxsimd.engine.errors import MaxsimdError

if TYPE_CHECKING:
    from maxsimd.engine import Engine, ScoreResult

_FILE = click.Path(exists=True, dir_okay=False)
_MEASURES = ("nDCG@10", "RR", "R@100")
_RESAMPLES = 9_999

# Relevance by query and document; 0 and below is not relevant.
Grades = Mapping[str, Mapping[str, int]]
# Scores by query and document.
Run = dict[str, dict[str, float]]


# The files that `Judged.of` reads.
judged_files = combined(
    click.option(
        "--data",
        type=click.Path(exists=True, file_okay=False),
        help="BEIR folder: corpus.jsonl, queries.jsonl, qrels/test.tsv",
    ),
    click.option("--queries", type=_FILE, help="JSON lines with _id and text, or lines of id and text"),
    click.option("--documents", type=_FILE, help="The same for documents, perhaps with title"),
    click.option("--qrels", type=_FILE, help="Judgments, as in BEIR or TREC; above 0 is relevant"),
)
ranking_options = combined(
    click.option(
        "--candidates",
        type=_FILE,
        help="TREC run with the candidates of each query",
        show_default="all documents",
    ),
    click.option(
        "--depth",
        type=click.IntRange(min=1),
        default=100,
        show_default=True,
        metavar="N",
        help="Most candidates per query",
    ),
    click.option(
        "--measure",
        "measures",
        multiple=True,
        default=_MEASURES,
        show_default=True,
        metavar="NAME",
        help="Measure of ir_measures, such as nDCG@10 or RR (MRR); repeatable",
    ),
)


@dataclass(frozen=True, slots=True)
class Judged:
    """Queries and documents by id, the documents to rank for each query, and grades, if there are any."""

    asked: Mapping[str, str]
    texts: Mapping[str, str]
    work: list[tuple[str, list[str]]]
    grades: Grades

    @classmethod
    def of(cls, values: Mapping[str, Any], needs_grades: bool = True, others: int | None = None) -> "Judged":
        """Reads the files of `judged_files`. With `others`, a query has its judged documents and that many
        random ones. Raises click.UsageError where a file is not named, and OSError and ValueError for those
        that cannot be read."""
        named = {name: values[name] for name in ("documents", "queries", "qrels")}
        if values["data"] is not None:
            of_beir = ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv")
            files = [Path(values["data"]) / file for file in of_beir]
            named = {
                name: given or (str(file) if needs_grades or file.exists() else None)
                for (name, given), file in zip(named.items(), files, strict=True)
            }
        for name, file in named.items():
            if file is None and (needs_grades or name != "qrels"):
                raise click.UsageError(f"give --data, or --{name}")
        texts, asked = read_texts(named["documents"]), read_texts(named["queries"])
        grades = {} if named["qrels"] is None else read_grades(named["qrels"])
        candidates = None if values.get("candidates") is None else read_run(values["candidates"])
        # Each query has the same list: there may be millions of documents.
        draw, ids_of_all, work = random.Random(0), [*texts], []
        queries = [query for query in grades or asked if query in asked]
        if others is not None:
            ids_of_all.sort()
            queries.sort()
        for query in queries:
            ids = ids_of_all
            if others is not None:
                if ids := [id_ for id_ in grades[query] if id_ in texts]:
                    ids += draw.sample(ids_of_all, min(others, len(ids_of_all)))
                ids = [*dict.fromkeys(ids)]
            elif candidates is not None:
                scores = candidates.get(query, {})
                best = sorted(scores, key=lambda id_: (-scores[id_], id_))[: values["depth"]]
                ids = [id_ for id_ in best if id_ in texts]
            if ids:
                work.append((query, ids))
        if not work:
            raise ValueError("no judgment names a query of the file that has documents; compare their ids")
        judged = cls(asked, texts, work, {query: of for query, of in grades.items() if query in asked})
        judged._warn(len(grades) - len(judged.grades))
        return judged

    def refuse_spaces(self) -> None:
        """Raises ValueError for an id with a space, which no TREC run can hold."""
        spaced = {name for name in (*self.asked, *self.texts) if len(name.split()) != 1}
        for query, ids in self.work if spaced else ():
            for name in spaced.intersection((query, *ids)):
                raise ValueError(f"--run cannot hold the id {name!r}, which has a space; rename it")

    def _warn(self, num_unknown: int) -> None:
        relevant = [id_ for of in self.grades.values() for id_, grade in of.items() if grade > 0]
        missing = sum(id_ not in self.texts for id_ in relevant)
        if missing:
            click.echo(
                f"warning: {missing:,} of {len(relevant):,} relevant documents are not among the documents",
                err=True,
            )
        if num_unknown:
            click.echo(f"warning: {num_unknown:,} judged queries are not among the queries", err=True)


@contextmanager
def in_one_line() -> Iterator[None]:
    """Turns errors about files and folders into click's."""
    try:
        yield
    except (OSError, ValueError, MaxsimdError) as error:
        raise click.ClickException(str(error)) from error


@click.command("eval", cls=Command)
@model_argument
@config_file_option
@judged_files
@ranking_options
@click.option("--run", "run_file", type=OutputPath(), help="Also write the ranking as a TREC run")
@click.option("--per-query", type=OutputPath(), help="Also write each query's measures as CSV")
@click.option("--baseline", type=_FILE, help="TREC run to compare with, such as another model's --run")
@click.option("--json", "as_json", is_flag=True, help="Print JSON")
@options_from(EngineConfig, exclude=frozenset({"model"}))
def evaluate(measures: tuple[str, ...], as_json: bool, **values: Any) -> None:
    """Measure how well MODEL ranks judged documents: nDCG@10, MRR and recall."""
    config = config_from(EngineConfig, values)
    measure = measuring(measures)
    with in_one_line():
        judged = Judged.of(values)
        if values["run_file"] is not None:
            judged.refuse_spaces()
        baseline = None if values["baseline"] is None else read_run(values["baseline"])
    # A measure that cannot be computed is told before documents are ranked.
    before = measure(judged.grades, baseline or {query: {ids[0]: 0.0} for query, ids in judged.work})
    ranked = rank(config, judged)
    if values["run_file"] is not None:
        tag = f"{Path(shown_name(config.model)).name}-{ranked.kind}".replace(" ", "-")
        _write(ranked.scores, tag, values["run_file"])
    # Documents that are no candidates count as ranked last.
    found = measure(judged.grades, ranked.scores)
    if values["per_query"] is not None:
        _write_by_query(found, values["per_query"])
    if as_json:
        of_baseline = {
            name: {"value": each.value, "baseline": before[name].value, "p": each.p(before[name])}
            for name, each in found.items()
        }
        plain = {name: each.value for name, each in found.items()}
        click.echo(json.dumps(plain if baseline is None else of_baseline))
        return
    pairs = f"{ranked.num_pairs:,} pairs, {ranked.pairs_per_s:,.0f} a second"
    click.echo(f"{ranked.kind} in {ranked.precision}: {len(ranked.scores)} queries, {pairs}")
    for name, each in found.items():
        line = f"{name:<10} {each.value:.4f}"
        if baseline is not None:
            old = before[name]
            difference = each.value - old.value
            line += f"   baseline {old.value:.4f}   difference {difference:+.4f}   p {shown_p(each.p(old))}"
        click.echo(line)


@dataclass(frozen=True, slots=True)
class Measured:
    """A measure's value of a run (for most the mean), and its values by query."""

    value: float
    by_query: Mapping[str, float]

    def p(self, other: "Measured") -> float:
        """How likely so large a difference of the means is by chance: a paired randomization test, two-sided.

        Source: Smucker, Allan and Carterette 2007, "A comparison of statistical significance tests for
        information retrieval evaluation"."""
        from scipy.stats import permutation_test

        differences = [value - other.by_query[query] for query, value in self.by_query.items()]
        if not any(differences):
            return 1.0
        options: dict[str, Any] = {"vectorized": True, "n_resamples": _RESAMPLES, "random_state": 0}
        return float(permutation_test((differences,), np.mean, permutation_type="samples", **options).pvalue)


def shown_p(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else "<0.001"


def measuring(names: tuple[str, ...]) -> Callable[[Grades, Run], dict[str, Measured]]:
    """Returns a function that measures a run. Raises click.ClickException without ir_measures, and for an
    unknown measure; so does the function for one that cannot be computed."""
    try:
        import ir_measures
    except ImportError:
        raise click.ClickException("eval needs ir_measures; pip install '.[eval]' in the checkout") from None
    try:
        measures = [ir_measures.parse_measure(name) for name in names]
    except (ValueError, NameError, SyntaxError) as error:
        raise click.UsageError(f"ir_measures knows no such measure: {error}") from error
    for measure in measures:
        # trec_eval ends the process.
        if measure.params.get("cutoff", 1) < 1:
            raise click.UsageError(f"the cutoff of {measure} must be at least 1")

    def measured(grades: Grades, ranked: Run) -> dict[str, Measured]:
        try:
            found = ir_measures.calc(measures, grades, ranked)
        except Exception as error:  # any package may compute it
            raise click.ClickException(f"ir_measures cannot compute a --measure: {error}") from error
        by_query: dict[str, dict[str, float]] = {str(measure): {} for measure in measures}
        for each in found.per_query:
            by_query[str(each.measure)][each.query_id] = float(each.value)
        return {
            str(measure): Measured(float(found.aggregated[measure]), by_query[str(measure)])
            for measure in measures
        }

    return measured


def _write(ranked: Run, tag: str, path: str) -> None:
    lines = []
    for query, scores in ranked.items():
        best = sorted(scores, key=lambda id_: (-scores[id_], id_))
        lines += [f"{query} Q0 {id_} {rank} {scores[id_]:.9g} {tag}\n" for rank, id_ in enumerate(best, 1)]
    with open_output(Path(path)) as file:
        file.writelines(line.encode() for line in lines)


def _write_by_query(found: Mapping[str, Measured], path: str) -> None:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["query", *found])
    queries = next(iter(found.values())).by_query
    rows.writerows([query, *(each.by_query[query] for each in found.values())] for query in queries)
    with open_output(Path(path)) as file:
        file.write(text.getvalue().encode())


@dataclass(frozen=True, slots=True)
class Ranked:
    """Each document's score, how the model runs, and the `seconds` that it took, without the load. In
    `truncated` pairs the model did not read the whole document."""

    scores: Run
    kind: str
    precision: str
    truncated: int
    seconds: float

    @property
    def num_pairs(self) -> int:
        return sum(map(len, self.scores.values()))

    @property
    def pairs_per_s(self) -> float:
        return self.num_pairs / max(self.seconds, 1e-9)


def rank(config: EngineConfig, judged: Judged, normalize: bool = False) -> Ranked:
    """Ranks each query's documents, by scores before their activation unless they are to `normalize`. Raises
    click.ClickException for the model's errors."""
    num_pairs = sum(len(ids) for _, ids in judged.work)
    ranked = run(
        config, "pairs", num_pairs, lambda engine, progress: _rank(engine, progress, judged, normalize)
    )
    if ranked.truncated:
        said = f"warning: in {ranked.truncated:,} of {num_pairs:,} pairs the document was truncated"
        click.echo(said, err=True)
    return ranked


async def _rank(engine: "Engine", progress: Progress, judged: Judged, normalize: bool) -> Ranked:
    queries, documents = judged.asked, judged.texts
    ranked: Run = {query: {} for query, _ in judged.work}
    truncated = 0

    def parts() -> Iterator[list[tuple[str, str]]]:
        for query, ids in judged.work:
            records = [Record(documents[id_]) for id_ in ids]
            indexes = range(len(ids))
            # A listwise model scores a query's documents by each other.
            is_whole = engine.model.listwise is not None
            for part in [list(indexes)] if is_whole else in_parts(records, indexes):
                yield [(query, ids[i]) for i in part]

    async def ask(part: list[tuple[str, str]]) -> "ScoreResult":
        texts = [documents[id_] for _, id_ in part]
        return await engine.score(queries[part[0][0]], texts, priority="batch", normalize=normalize)

    def done(part: list[tuple[str, str]], result: "ScoreResult") -> None:
        nonlocal truncated
        truncated += result.truncated - result.truncated_queries
        scores = result.scores if normalize else result.ranking_scores
        for (query, id_), score in zip(part, scores, strict=True):
            ranked[query][id_] = score

    progress.add(0)
    begun = time.perf_counter()
    await each_part(progress, parts(), ask, done)
    seconds = time.perf_counter() - begun
    facts = engine.facts
    return Ranked(ranked, facts.score_type.value, facts.precision, truncated, seconds)


@click.command(cls=Command)
@model_argument
@config_file_option
@options_from(EngineConfig, exclude=frozenset({"model", "calibration"}))
@judged_files
@click.option(
    "--others",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="Random documents per query that count as not relevant unless judged",
)
@click.option("--out", type=OutputPath(), required=True, help="File to write")
def calibrate(others: int, out: str, **values: Any) -> None:
    """Turn normalized scores of MODEL into probabilities, by judged documents.

    Serve with --model-option calibration=FILE."""
    config = config_from(EngineConfig, values)
    with in_one_line():
        judged = Judged.of(values, others=others)
    found = rank(config, judged, normalize=True).scores
    pairs = [(query, id_) for query, ids in judged.work for id_ in ids]
    scores = np.array([found[query][id_] for query, id_ in pairs])
    relevant = np.array([judged.grades[query].get(id_, 0) > 0 for query, id_ in pairs])
    numbers = {query: number for number, (query, _) in enumerate(judged.work)}
    with in_one_line():
        from maxsimd.engine.device.stores import digest_of
        from maxsimd.engine.scoring.scale import Calibration

        Calibration.fitted(digest_of(config), scores.tolist(), relevant.tolist()).write(Path(out))
    before, after = _errors_of(scores, relevant, np.array([numbers[query] for query, _ in pairs]) % _FOLDS)
    share = relevant.mean()
    click.echo(
        f"{len(pairs)} documents of {len(judged.work)} queries, {share:.1%} relevant\n"
        f"mean squared error of the probability (Brier) on queries that it was not fitted to:\n"
        f"  normalized scores {before:.4f}, calibrated {after:.4f}, "
        f"always {share:.1%} {share * (1 - share):.4f}\n"
        f"wrote {out}; serve with --model-option calibration={out}"
    )


# Parts of the queries for cross-validation.
_FOLDS = 5


def _errors_of(
    scores: NDArray[np.float64], relevant: NDArray[np.bool_], folds: NDArray[np.int64]
) -> tuple[float, float]:
    """The mean squared errors of normalized scores and of calibrated ones, cross-validated by query; NaN for
    too few."""
    from maxsimd.engine.scoring.scale import Calibration

    probabilities = np.full(len(scores), np.nan)
    for fold in range(_FOLDS):
        rest = folds != fold
        if len(set(relevant[rest].tolist())) == 2:
            fitted = Calibration.fitted("", scores[rest].tolist(), relevant[rest].tolist())
            probabilities[~rest] = fitted(scores[~rest].astype(np.float32))
    return float(np.mean((scores - relevant) ** 2)), float(np.mean((probabilities - relevant) ** 2))


def read_texts(path: str) -> dict[str, str]:
    """Texts by id, from JSON objects (a title goes before its text) or from lines of id, tab and text. Raises
    ValueError with the number of a wrong line."""
    texts = {}
    for number, line in _lines(path):
        id_, tab, text = line.partition("\t")
        if tab and not line.lstrip().startswith("{"):
            texts[id_.strip()] = text.strip()
            continue
        try:
            record = json.loads(line)
            parts = (record.get("title") or "", record["text"])
            texts[str(record["_id"])] = " ".join(parts).strip()
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise ValueError(f'{path}, line {number}: this is no {{"_id": ..., "text": ...}}') from None
    return texts


def read_grades(path: str) -> Grades:
    """Grades from lines of query, document and whole number, or TREC's four; the first may be a heading.
    Raises ValueError with the number of a wrong line."""
    judged: dict[str, dict[str, int]] = {}
    for number, line in _lines(path):
        fields = [each.strip() for each in line.strip().split("\t")]
        if len(fields) not in (3, 4):
            fields = line.split()
        try:
            grade = float(fields[-1])
        except ValueError:
            if number == 1:
                continue
            grade = math.nan
        if len(fields) not in (3, 4) or not grade.is_integer():
            raise ValueError(f"{path}, line {number}: this is no query, document and whole number")
        judged.setdefault(fields[0], {})[fields[-2]] = int(grade)
    return judged


def read_run(path: str) -> Run:
    """Scores of a run in TREC's form. Raises ValueError with the number of a wrong line."""
    found: Run = {}
    for number, line in _lines(path):
        try:
            query, _, document, _, score, _ = line.split()
            found.setdefault(query, {})[document] = float(score)
        except ValueError:
            raise ValueError(f"{path}, line {number}: this is no line of a run") from None
    if not found:
        raise ValueError(f"{path} holds no run: it is empty")
    return found


def _lines(path: str) -> list[tuple[int, str]]:
    lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
