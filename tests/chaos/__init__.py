"""Real servers under load, while things go wrong around them: `python -m tests.chaos NAME`.

Each program prints tables and ends with status 1 where a promise is broken; docs/internals/failures.md
describes them. Servers are the plain command, or `server.py`, whose model can be made to fail."""
