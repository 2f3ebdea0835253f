"""What exists only while an engine runs: threads, actors, and the supervisor who ends them together."""

from maxsimd.engine.runtime.launching import bury, launch, launch_beside
from maxsimd.engine.runtime.running import Running, ValuesArrived

__all__ = ["Running", "ValuesArrived", "bury", "launch", "launch_beside"]
