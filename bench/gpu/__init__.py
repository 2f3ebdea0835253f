"""Benchmarks of a GPU: kernels beside plain torch and other packages, and whole servers under load.

Everything runs on a CPU too, small and with interpreted kernels, which is how it is tested without a GPU.
"""
