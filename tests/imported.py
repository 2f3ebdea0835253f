"""Imports what servers, commands and scripts need, and computes nothing: threads would be lost in the
processes that `tests.forked` makes of the one that has imported this."""

import gc
import os
from importlib import import_module

from maxsimd.api.interpreter import waiting_threads_sleep

# As a command does before it imports torch.
waiting_threads_sleep()
os.environ["HF_HUB_OFFLINE"] = "1"
for name in (
    "maxsimd.api.cli",
    "maxsimd.api.serve",
    "maxsimd.bench.datasets",
    "maxsimd.engine.life",
    "sentence_transformers",
    "transformers.models.bert.modeling_bert",
):
    import_module(name)
gc.collect()
gc.freeze()
