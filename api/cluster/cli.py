"""`maxsimd cluster`: scoring on many machines, by Ray."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from maxsimd.api.cli.files import (
    INTERRUPTED,
    Progress,
    long_documents_option,
    normalize_option,
    truncation_of,
)
from maxsimd.api.cluster.config import (
    ONE_PROCESS,
    RAYS_OWN,
    AppConfig,
    ClusterConfig,
    kuberay_yaml,
    serve_yaml,
)
from maxsimd.api.cluster.session import Asked, asked, ray_session, require_ray
from maxsimd.api.config import ServerConfig
from maxsimd.api.help import Command, Commands
from maxsimd.api.model_setup import ModelsArgument
from maxsimd.api.options import (
    SERVED,
    config_file_option,
    config_from,
    in_flags,
    keys_of_environment,
    models_in_file,
    options_from,
)
from maxsimd.engine.config import EngineConfig

if TYPE_CHECKING:
    from maxsimd.api.cluster.data import ActorPool
    from maxsimd.api.cluster.score_files import Shard, Work


_COUNT = click.IntRange(min=1)


def _number(name: str, default: int, help: str, type: Any = _COUNT, metavar: str = "N") -> Any:
    return click.option(name, type=type, default=default, show_default=True, metavar=metavar, help=help)


@click.command(cls=Command)
@click.argument("source", metavar="IN", type=click.Path(exists=True, path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.argument("model", required=False, envvar="MAXSIMD_MODEL")
@config_file_option
@click.option("--query", help="Query of all rows without a column query")
@_number("--replicas", 1, "Actors that each load the model")
@_number("--num-cpus", 1, "Cores, and computing threads, of each actor")
@_number("--num-gpus", 0, "GPUs of each actor", click.FloatRange(min=0), "NUMBER")
@click.option("--address", help="Address of a Ray cluster", show_default="a new one on this machine")
@_number("--batch-size", 1000, "Rows to score together and write as one file")
@click.option("--resume", is_flag=True, help="Continue an interrupted run with the same OUT")
@normalize_option
@long_documents_option
@options_from(EngineConfig, exclude=frozenset({"model", "threads"}))
def score(source: Path, out: Path, **values: Any) -> None:
    """Score the rows of IN, a file or folder of Parquet or JSONL, into the folder OUT.

    A row has a query, and documents (a list of texts) or document (one text). OUT gets files of the same
    format with all columns, and scores or score, error and prompt_tokens."""
    config = config_from(EngineConfig, values)
    require_ray()
    from maxsimd.api.cluster.data import ActorPool
    from maxsimd.api.cluster.score_files import Files, RunFolder, Work

    progress = Progress("rows")
    progress.note(f"reading {source}")
    if out.resolve().is_relative_to(source.resolve()):
        raise click.UsageError("OUT must not be inside of IN")
    options = {"normalize": values["normalize"], "truncation": truncation_of(values["long_documents"])}
    try:
        work = Work(config, Files.of(source), values["query"], options, values["batch_size"])
        shards = work.shards()
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{source} cannot be read: {error}") from error
    progress.total = sum(shard.rows for shard in shards)
    pool = ActorPool(values["replicas"], values["num_cpus"], values["num_gpus"])
    with RunFolder(out, work.digest(), work.files.format.ending, values["resume"]) as folder:
        try:
            errors = _run(work, folder.left(shards), pool, values["address"], out, progress)
        finally:
            progress.end()
        missing = sum(shard.rows for shard in folder.left(shards))
    if errors:
        click.echo(f"{errors:,} rows have an error", err=True)
    if missing:
        click.echo(f"interrupted with {missing:,} rows left; continue with --resume", err=True)
        sys.exit(INTERRUPTED)


def _run(
    work: "Work", left: "list[Shard]", pool: "ActorPool", address: str | None, out: Path, progress: Progress
) -> int:
    """Scores what is left until it is interrupted. Returns the number of rows with an error."""
    from maxsimd.api.cluster.score_files import ScoringError, score_shards

    done, errors = progress.total - sum(shard.rows for shard in left), 0
    if not left:
        progress.add(done)
        return 0
    progress.note(f"{progress.total:,} rows; starting {work.config.model or 'the embedded model'} on Ray")
    # Ray has handlers of its own once it runs.
    with suppress(Asked), asked(), ray_session(address, pool.most_cpus), asked():
        progress.add(done)
        try:
            for counts in score_shards(work, left, pool, out):
                errors += counts.errors
                progress.add(counts.rows, counts.prompt_tokens)
        except ScoringError as error:
            raise click.ClickException(in_flags(str(error))) from error
    return errors


@click.group(cls=Commands)
def cluster() -> None:
    """Serve and score on many machines with Ray (extra: ray)."""


def _application(command: Any) -> Any:
    for decorate in (
        options_from(ServerConfig, exclude=RAYS_OWN | ONE_PROCESS | {"grpc_port"}),
        # Refused with a reason.
        click.option("--grpc-port", type=int, envvar="MAXSIMD_GRPC_PORT", hidden=True),
        options_from(EngineConfig, exclude=frozenset({"model"}), defaults=SERVED),
        options_from(ClusterConfig),
        config_file_option,
        click.argument("model", nargs=-1, envvar="MAXSIMD_MODEL", cls=ModelsArgument),
    ):
        command = decorate(command)
    return command


def _config(values: dict[str, Any]) -> AppConfig:
    if len(values["model"]) > 1 or models_in_file(click.get_current_context()) is not None:
        raise click.UsageError("on Ray one model is served; run `maxsimd serve` for several")
    values["model"] = next(iter(values["model"]), None)
    try:
        return AppConfig.of(values)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


@cluster.command(cls=Command, shows_usual=True)
@_application
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of Ray's proxy")
@click.option("--port", type=int, default=8000, show_default=True, help="Port of Ray's proxy")
@click.option("--address", help="Address of a Ray cluster, or auto", show_default="a new one on this machine")
def serve(host: str, port: int, address: str | None, **values: Any) -> None:
    """Serve MODEL on Ray Serve, with fronts that take requests and scorers that load the model."""
    require_ray()
    values["api_key"] += keys_of_environment()
    config = _config(values)
    from maxsimd.api.cluster.session import run

    run(config, host, port, address)


@cluster.command("config", cls=Command, shows_usual=True)
@_application
@click.option("--kuberay", is_flag=True, help="Print a RayService for KubeRay")
@click.option("--image", default="", help="Container image with maxsimd and Ray, for --kuberay")
def show_config(kuberay: bool, image: str, **values: Any) -> None:
    """Print YAML for `serve deploy`, or for kubectl with --kuberay."""
    config = _config(values)
    if config.server.api_key:
        raise click.UsageError("keys are not for files that many read; give --api-key-file instead")
    if kuberay and not image:
        raise click.UsageError("--kuberay needs --image, a container image with maxsimd and Ray")
    click.echo(kuberay_yaml(config, image) if kuberay else serve_yaml(config), nl=False)


cluster.add_command(score)
