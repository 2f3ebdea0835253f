"""Checkpoints: recognizing what one is from its own files, and loading it into one description."""

from maxsimd.engine.checkpoint.load import load_model
from maxsimd.engine.checkpoint.model import ListwiseRules, LoadedModel, PairRules, RoleRules, Task

__all__ = ["ListwiseRules", "LoadedModel", "PairRules", "RoleRules", "Task", "load_model"]
