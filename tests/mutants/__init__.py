"""The mutation tester: `make mutants`, or `make mutants PART=scheduler` for one part.

`parts.toml` says which tests are meant for which part, `survivors.md` why a mutant may live.
"""
