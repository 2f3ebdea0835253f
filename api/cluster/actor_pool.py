"""How a class is run over a data set of Ray Data, in a pool of actors."""

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from maxsimd.engine import EngineConfig

if TYPE_CHECKING:
    from ray.data import Dataset

# Batches that an actor works on: while one is being read or written, the other fills the steps. As many wait.
_BATCHES_AT_A_TIME = 2
# How often a batch is tried again that ends its actor. Ray's default is for ever.
_MAX_RETRIES = 3


@dataclass(frozen=True, slots=True)
class ActorPool:
    """`replicas` is how many actors there are, or the least and the most of them; each has `num_cpus` cores
    and `num_gpus` GPUs."""

    replicas: int | tuple[int, int]
    num_cpus: int
    num_gpus: float

    @property
    def most_cpus(self) -> int:
        """Cores of all actors."""
        return self.num_cpus * (self.replicas[1] if isinstance(self.replicas, tuple) else self.replicas)

    def map_batches(
        self, rows: "Dataset", actor: type, arguments: dict[str, Any], batch_size: int | None
    ) -> "Dataset":
        """The data set that `actor`, made with these arguments, makes of tables of `batch_size` rows, or with
        None of whole blocks. Its calls come from several threads. Actors that die are started again."""
        from ray.data import ActorPoolStrategy

        least, most = self.replicas if isinstance(self.replicas, tuple) else (self.replicas, self.replicas)
        compute = ActorPoolStrategy(
            min_size=least,
            max_size=most,
            max_concurrent_calls_per_actor=_BATCHES_AT_A_TIME,
            max_tasks_in_flight_per_actor=2 * _BATCHES_AT_A_TIME,
            # Else Ray has the second batch wait for the first.
            enable_true_multi_threading=True,
        )
        with warnings.catch_warnings():
            # Ray warns of arguments that have no name of their own, which the number of retries has not got.
            warnings.simplefilter("ignore", DeprecationWarning)
            return rows.map_batches(
                actor,
                compute=compute,
                batch_size=batch_size,
                batch_format="pyarrow",
                fn_constructor_kwargs=arguments,
                num_cpus=self.num_cpus,
                num_gpus=self.num_gpus,
                max_restarts=-1,
                max_task_retries=_MAX_RETRIES,
            )


def with_threads(config: EngineConfig, num_cpus: int | None) -> tuple[EngineConfig, int]:
    """The configuration with as many threads as an actor has cores, and their number: Ray limits OpenMP to
    these. Raises ValueError where both are given and differ."""
    if config.threads is not None and num_cpus is not None and config.threads != num_cpus:
        raise ValueError(f"threads={config.threads}, but num_cpus={num_cpus}; give one of them")
    cpus = num_cpus or config.threads or 1
    return replace(config, threads=cpus), cpus
