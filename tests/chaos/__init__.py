"""Real servers under load, while things go wrong around them. Each program prints tables and exits with
status 1 where a promise is broken; it runs as `python -m tests.chaos NAME [--seconds N] [--requests N]
[--seed N] [--model FOLDER] [--only PART]`. docs/internals/failures.md says what each does.

The servers are maxsimd's own command in a process of its own (`running.py`). Where a step must fail, or the
inside be seen, the process runs `server.py`, which replaces some functions before it starts that command:
the product has no hooks. `make test` runs short versions (`test_chaos.py`).
"""
