"""`maxsimd cluster score`: scores the rows of files on Ray, and goes on after an interruption."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from maxsimd.api.commands.progress import Progress
from maxsimd.api.options import config_file_option, config_from, in_flags, options_from
from maxsimd.engine.config import EngineConfig

if TYPE_CHECKING:
    from maxsimd.api.cluster.actor_pool import ActorPool
    from maxsimd.api.cluster.score_files import Work
    from maxsimd.api.cluster.shards import Shard

# What a program returns that was ended by Ctrl-C.
_INTERRUPTED = 130
# What the engine calls what is done with long documents.
_TRUNCATION = {"truncate": "cut", "window": "window", "error": "error"}


@click.command()
@click.argument("source", metavar="IN", type=click.Path(exists=True, path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.argument("model", required=False, envvar="MAXSIMD_MODEL")
@config_file_option
@click.option("--query", help="The query of all rows, where they have no column query.")
@click.option(
    "--replicas", type=click.IntRange(min=1), default=1, show_default=True, help="Number of actors."
)
@click.option(
    "--num-cpus",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Cores of each actor, and its threads for computing.",
)
@click.option(
    "--num-gpus", type=click.FloatRange(min=0), default=0, show_default=True, help="GPUs of each actor."
)
@click.option(
    "--address", help="Cluster of Ray to use; without one, Ray is started here and ended afterwards."
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Rows that are scored together and written as one file.",
)
@click.option("--resume", is_flag=True, help="Go on with a run that was interrupted, with the same OUT.")
@click.option("--normalize", is_flag=True, help="Give scores from 0 to 1.")
@click.option(
    "--long-documents",
    type=click.Choice(list(_TRUNCATION)),
    default="truncate",
    show_default=True,
    help="What is done with documents that are longer than the model reads.",
)
@options_from(EngineConfig, exclude=frozenset({"model", "threads"}))
def score(source: Path, out: Path, **values: Any) -> None:
    """Scores the rows of IN, a file or a folder of Parquet or JSONL, into the folder OUT, on Ray.

    A row has a query and documents, a list of texts, or document, one text. OUT has files of the same kind
    with all columns and scores or score, error and prompt_tokens, in the order of the input."""
    config = config_from(EngineConfig, values)
    from maxsimd.api.cluster.ray_session import require_ray

    require_ray()
    from maxsimd.api.cluster.actor_pool import ActorPool
    from maxsimd.api.cluster.run_folder import RunFolder
    from maxsimd.api.cluster.score_files import Files, Work

    progress = Progress(0, "rows")
    progress.note(f"reading {source}")
    if out.resolve().is_relative_to(source.resolve()):
        raise click.UsageError("OUT must not be inside of IN")
    options = {"normalize": values["normalize"], "truncation": _TRUNCATION[values["long_documents"]]}
    try:
        work = Work(config, Files.of(source), values["query"], options, values["batch_size"])
        shards = work.shards()
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{source} cannot be read: {error}") from error
    progress.total = sum(shard.rows for shard in shards)
    pool = ActorPool(values["replicas"], values["num_cpus"], values["num_gpus"])
    with RunFolder(out, work.digest(), work.files.format.ending, values["resume"]) as folder:
        left = folder.left(shards)
        errors = _run(work, left, pool, values["address"], out, progress)
        missing = sum(shard.rows for shard in folder.left(shards))
    progress.end()
    if errors:
        click.echo(f"{errors:,} rows have an error", err=True)
    if missing:
        click.echo(f"interrupted with {missing:,} rows left; --resume goes on", err=True)
        sys.exit(_INTERRUPTED)


def _run(
    work: "Work", left: "list[Shard]", pool: "ActorPool", address: str | None, out: Path, progress: Progress
) -> int:
    """Scores what is left, unless it is interrupted; the number of rows with an error."""
    from maxsimd.api.cluster.ray_session import ray_session
    from maxsimd.api.cluster.score_files import ScoringError, score_shards

    done, tokens, errors = progress.total - sum(shard.rows for shard in left), 0, 0
    if not left:
        progress.update(done, 0, is_last=True)
        return 0
    progress.note(f"{progress.total:,} rows; starting {work.config.model or 'the embedded model'} on Ray")
    # Ray has handlers of its own once it runs.
    with _interruptible(), ray_session(address, pool.most_cpus), _interruptible():
        progress.update(done, 0)
        try:
            for counts in score_shards(work, left, pool, out):
                done += counts.rows
                tokens += counts.prompt_tokens
                errors += counts.errors
                progress.update(done, tokens, is_last=done == progress.total)
        except ScoringError as error:
            raise click.ClickException(in_flags(str(error))) from error
    return errors


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends what is done here as Ctrl-C does: early, without an error."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
