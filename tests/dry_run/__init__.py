"""Whole models on a GPU that is not there: what each step launches, copies and waits for.

`python -m tests.dry_run` prints a table; the tests hold its numbers.
"""
