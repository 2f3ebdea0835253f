"""An application on Ray Serve: `import_path: maxsimd.api.cluster.serve:app_builder`."""

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from maxsimd.api.cluster.config import AppConfig, ClusterConfig
from maxsimd.api.cluster.front import Front
from maxsimd.api.cluster.members import router
from maxsimd.api.cluster.scaling import QueuedTokensPolicy
from maxsimd.api.cluster.scorer import Scorer

# Serve is to refuse nothing: what is too much the engines say, by tokens.
_MOST_REQUESTS = 100_000
# How much longer than its grace a replica may take to end, in seconds.
_MARGIN_SECONDS = 10.0
_HEALTH_SECONDS = 2.0
# How often scorers say what waits, over how long that is averaged, and for how long more of them, or fewer,
# are to be wanted before it is done: each change has documents move from cache to cache.
_LOOK_SECONDS, _LOOK_BACK_SECONDS = 2.0, 6.0
_MORE_AFTER_SECONDS, _FEWER_AFTER_SECONDS = 10.0, 600.0


def app_builder(args: dict[str, Any]) -> Application:
    """The application of these `args`, see `AppConfig.of`: fronts, and scorers of one model. Raises
    ValueError for what does not serve."""
    return application(AppConfig.of(args))


def application(config: AppConfig, scorer: type[Scorer] = Scorer) -> Application:
    """Fronts, and scorers of a class."""
    cluster, server = config.cluster, config.server
    ends = {
        "graceful_shutdown_timeout_s": server.grace_seconds + _MARGIN_SECONDS,
        "health_check_period_s": _HEALTH_SECONDS,
        "max_ongoing_requests": _MOST_REQUESTS,
        "request_router_config": router(),
    }
    number: dict[str, Any] = {"num_replicas": cluster.replicas}
    if cluster.max_replicas is not None:
        number = {"autoscaling_config": _scaling(cluster)}
    scorers = (
        serve.deployment(scorer, name="Scorer")
        .options(
            **number, **ends, ray_actor_options={"num_cpus": cluster.num_cpus, "num_gpus": cluster.num_gpus}
        )
        .bind(config.engine, server)
    )
    fronts = serve.deployment(serve.ingress()(Front)).options(
        **ends, num_replicas=cluster.fronts, ray_actor_options={"num_cpus": min(1.0, cluster.num_cpus)}
    )
    bound: Application = fronts.bind(
        scorers, cluster.max_replicas or cluster.replicas, server, config.engine.cache_by_tenant
    )
    return bound


def _scaling(cluster: ClusterConfig) -> AutoscalingConfig:
    policy = AutoscalingPolicy(
        policy_function=f"{QueuedTokensPolicy.__module__}:{QueuedTokensPolicy.__name__}",
        policy_kwargs={"wanted_seconds": cluster.wanted_seconds},
    )
    return AutoscalingConfig(
        min_replicas=cluster.replicas,
        max_replicas=cluster.max_replicas,
        policy=policy,
        metrics_interval_s=_LOOK_SECONDS,
        look_back_period_s=_LOOK_BACK_SECONDS,
        upscale_delay_s=_MORE_AFTER_SECONDS,
        downscale_delay_s=_FEWER_AFTER_SECONDS,
    )
