"""Real servers under load, while things go wrong around them. Each program prints a table and exits with
status 1 where a promise is broken; it runs as `python -m tests.chaos NAME [--seconds N] [--requests N]
[--seed N] [--model FOLDER]`, and NAME is

- `faults`: mixed traffic while clients stop and leave, texts break the model, steps fail, the disk is full
  and the cache is damaged. No request may be lost, no answer wrong. `--plot FILE` draws memory,
  descriptors, tasks and latency over time; `make soak` runs it for half an hour.
- `poisoned`: 100,000 sequences of which 1,000 break the model. Exactly these fail.
- `disconnects`: 10,000 clients that leave at random moments. The server is afterwards as it was before.
- `stops`: SIGTERM under load, again and again. All that was accepted is answered, and the server exits
  well.
- `idle`: thousands of idle and slow connections beside normal load, and how long that load takes with and
  without them.
- `fuzz`: malformed and strange requests. None costs a crash, a 5xx, a long wait or much memory.

The servers are maxsimd's own command in a process of its own (`running.py`). Where a step must fail, or the
inside be seen, the process runs `server.py`, which replaces some functions before it starts that command:
the product has no hooks. `make test` runs short versions (`test_chaos.py`).
"""
