"""Requests to sequences: roles, prompts, templates, truncation, windows, query expansion.

Functions of their input, run in the thread pool; nothing here knows of queues or devices.
"""

from maxsimd.engine.processors.prepared import Prepared, nothing_of, usage_of
from maxsimd.engine.processors.preprocessor import Preprocessor
from maxsimd.engine.processors.request_ids import RequestIds
from maxsimd.engine.processors.shortest import check_room

__all__ = ["Prepared", "Preprocessor", "RequestIds", "check_room", "nothing_of", "usage_of"]
