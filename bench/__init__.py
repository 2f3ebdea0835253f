"""Benchmarks: throughput, latency, ranking quality and single methods.

A figure counts only if a command here printed it.
"""
