"""What exists only while an engine runs: threads, actors, and the supervisor who ends them together."""

from maxsimd.engine.runtime.end import call_in_thread
from maxsimd.engine.runtime.launching import bury, launch, launch_beside
from maxsimd.engine.runtime.running import Running, ValuesArrived

__all__ = ["Running", "ValuesArrived", "bury", "call_in_thread", "launch", "launch_beside"]
