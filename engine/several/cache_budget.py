"""The memory that the caches of several models may take together, in equal parts."""

from collections.abc import Collection
from dataclasses import replace

from maxsimd.engine.config import EngineConfig
from maxsimd.engine.device.stores import MIB, memory_limit
from maxsimd.engine.engine import Engine


class CacheBudget:
    """What one model's cache would take by default, for the caches of all whose size is not configured.

    How much that is, is settled when the first of them comes; each has an equal part, which becomes smaller
    or larger as others come and go."""

    def __init__(self) -> None:
        self._total: int | None = None

    def part(self, sharers: int) -> int:
        """What each of the models that share may take, in MiB; 1 at least, because 0 would be none."""
        if self._total is None:
            self._total = memory_limit(EngineConfig())
        return max(1, self._total // max(1, sharers) // MIB)

    def applied(self, config: EngineConfig, sharers: int) -> EngineConfig:
        """The configuration of a model that is one of the sharers, if it is one."""
        return replace(config, cache_mb=self.part(sharers)) if shares(config) else config

    def divide(self, engines: Collection[Engine], sharers: int) -> None:
        """Gives each of these engines, which are among the sharers, its part."""
        for engine in engines:
            cache = engine.metrics.cache
            if cache is not None:
                cache.resize(self.part(sharers) * MIB)


def shares(config: EngineConfig) -> bool:
    """Whether a model's cache has a part of what is for all."""
    return config.cache_mb is None
