"""Processors: one module for each kind of request. A processor makes a plan of a request; the plan makes its
result.

They run in the thread pool and know of neither queues nor devices.
"""
