"""`maxsimd cluster`: scoring on many machines, by Ray."""

from typing import Any

import click

from maxsimd.api.cluster.config import ONE_PROCESS, RAYS_OWN, AppConfig, ClusterConfig
from maxsimd.api.cluster.ray_session import require_ray
from maxsimd.api.cluster.score_command import score
from maxsimd.api.config import ServerConfig
from maxsimd.api.model_setup import ModelsArgument
from maxsimd.api.options import SERVED, config_file_option, keys_of_environment, models_in_file, options_from
from maxsimd.engine.config import EngineConfig


@click.group()
def cluster() -> None:
    """Scores on many machines, by Ray; needs `pip install 'maxsimd[ray]'`."""


def _application(command: Any) -> Any:
    """The options of an application."""
    for decorate in (
        options_from(ServerConfig, exclude=RAYS_OWN | ONE_PROCESS),
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


@cluster.command()
@_application
@click.option("--host", default="127.0.0.1", show_default=True, help="Address that Ray's proxy listens on.")
@click.option("--port", type=int, default=8000, show_default=True, help="Port that Ray's proxy listens on.")
@click.option("--address", help="The cluster's address, or auto; by default a new one on this machine.")
def serve(host: str, port: int, address: str | None, **values: Any) -> None:
    """Serves MODEL on Ray Serve: fronts that take requests, scorers that each load the model."""
    require_ray()
    values["api_key"] += keys_of_environment()
    config = _config(values)
    from maxsimd.api.cluster.running import run

    run(config, host, port, address)


@cluster.command("config")
@_application
@click.option("--kuberay", is_flag=True, help="As a RayService for KubeRay.")
@click.option("--image", default="", help="With --kuberay: the container image, with maxsimd[ray] in it.")
def show_config(kuberay: bool, image: str, **values: Any) -> None:
    """Prints YAML for `serve deploy`, or for kubectl with --kuberay."""
    from maxsimd.api.cluster.deploying import kuberay_yaml, serve_yaml

    config = _config(values)
    if config.server.api_key:
        raise click.UsageError("keys are not for files that many read; give --api-key-file instead")
    if kuberay and not image:
        raise click.UsageError("--kuberay needs --image, a container image with maxsimd[ray] in it")
    click.echo(kuberay_yaml(config, image) if kuberay else serve_yaml(config), nl=False)


cluster.add_command(score)
