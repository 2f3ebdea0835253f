"""Checkpoints: finding out what one is from its own files, and loading it into one description."""

from maxsimd.engine.checkpoint.load import load_model
from maxsimd.engine.checkpoint.model import LoadedModel, RoleRules, Task

__all__ = ["LoadedModel", "RoleRules", "Task", "load_model"]
