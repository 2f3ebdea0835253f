"""The first day on a GPU: all that a CPU cannot prove, in stages of at most ten minutes.

`bench/gpu/first_day.sh` runs a stage. Its steps are processes of their own, none of which needs another to
have gone well, and what they find stands beside what was predicted. With `--dry`, everything runs on a CPU,
small and with interpreted kernels, which is how it is tested without a GPU.
"""
