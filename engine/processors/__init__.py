"""Processors: one module for each kind of request. A processor makes a plan of a request, and the plan makes
the result.

Functions of their input, run in the thread pool. Nothing here knows of queues or devices.
"""
